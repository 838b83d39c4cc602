"""The additive stream's step between two sublayers in one pass: X' = X + h, then RMSNorm of X' (Triton).

It is there so that Delta streams are compared with a baseline that is fused as well as they are. Backward, with
chat = rho X' and q = gc g: gX = gh = G' + rho (q - mean(q chat) chat).
"""

import torch
import triton
import triton.language as tl

from model.kernels.launch import KERNELS, share
from model.kernels.tiles import dense, load_vector, store_vector


@triton.jit
def forward_kernel(
    x, h, norm, new_x, context, rho, rows, chunk, eps, D: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr
):
    features = tl.arange(0, BLOCK)
    inside = features < D
    g = load_vector(norm, features, inside)
    first = tl.program_id(0) * chunk
    for t in tl.range(first, tl.minimum(first + chunk, rows), num_stages=STAGES):
        place = (tl.program_id(0) * 0 + t).to(tl.int64) * D
        state = load_vector(x + place, features, inside)
        if h is not None:
            state = (state + load_vector(h + place, features, inside)).to(x.dtype.element_ty).to(tl.float32)
            store_vector(new_x + place, features, inside, state)
        rho_t = 1 / tl.sqrt(tl.sum(state * state, 0) / D + eps)
        tl.store(rho + t, rho_t)
        store_vector(context + place, features, inside, state * rho_t * g)


@triton.jit
def backward_kernel(
    grad_x, grad_context, x, rho, norm, new_grad_x, grad_norm, rows, chunk,
    D: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    features = tl.arange(0, BLOCK)
    inside = features < D
    g, sum_g = load_vector(norm, features, inside), tl.zeros((BLOCK,), tl.float32)
    first = tl.program_id(0) * chunk
    for t in tl.range(first, tl.minimum(first + chunk, rows), num_stages=STAGES):
        place = (tl.program_id(0) * 0 + t).to(tl.int64) * D
        rho_t = tl.load(rho + t)
        chat = load_vector(x + place, features, inside) * rho_t
        gc = load_vector(grad_context + place, features, inside)
        sum_g += gc * chat
        total = rho_t * (gc * g - tl.sum(gc * g * chat, 0) / D * chat)
        if grad_x is not None:
            total += load_vector(grad_x + place, features, inside)
        store_vector(new_grad_x + place, features, inside, total)
    store_vector(grad_norm + tl.program_id(0) * D, features, inside, sum_g)


def runs(kernel: str, x) -> tuple[tuple[int], tuple[int, int], dict]:
    """(grid, (rows, rows of a program), constants)."""
    launch, d = KERNELS[kernel], x.shape[-1]
    rows, chunk, programs = share(x.device, launch, 1, x.numel() // d, 1)
    return (programs,), (rows, chunk), {"D": d, "BLOCK": triton.next_power_of_2(d), **launch.options()}


@torch.library.custom_op("ddl::add_norm", mutates_args=())
def add_norm(
    x: torch.Tensor, h: torch.Tensor | None, norm: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, h (B, T, d); norm (d,) -> (x + h in x's dtype, its RMSNorm times norm in x's dtype, rho (B, T) fp32).

    Without h the first result is empty: the state is still x.
    """
    results = results_of(x, h)
    grid, sizes, constants = runs("add_norm forward", x)
    forward_kernel[grid](*dense(x, h, norm), *results, *sizes, eps, **constants)
    return results


def results_of(x, h):
    new_x = x.new_empty((0,) if h is None else x.shape)
    return new_x, x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=torch.float32)


@add_norm.register_fake
def _(x, h, norm, eps):
    return results_of(x, h)


@torch.library.custom_op("ddl::add_norm_backward", mutates_args=())
def add_norm_backward(
    grad_x: torch.Tensor | None, grad_context: torch.Tensor, x: torch.Tensor, rho: torch.Tensor, norm: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """x: the state after the addition. Gradients of it (and so of both addends) and, in fp32, of norm."""
    new_grad_x = x.new_empty(x.shape)
    grid, sizes, constants = runs("add_norm backward", x)
    grad_norm = x.new_empty((*grid, x.shape[-1]), dtype=torch.float32)
    backward_kernel[grid](*dense(grad_x, grad_context, x, rho, norm), new_grad_x, grad_norm, *sizes, **constants)
    return new_grad_x, grad_norm.sum(0)


@add_norm_backward.register_fake
def _(grad_x, grad_context, x, rho, norm):
    return x.new_empty(x.shape), x.new_empty(x.shape[-1:], dtype=torch.float32)


def setup_context(ctx, inputs, output):
    x, h, norm, _ = inputs
    new_x, _, rho = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(rho)
    ctx.added = h is not None
    ctx.save_for_backward(new_x if ctx.added else x, rho, norm)


def backward(ctx, grad_x, grad_context, _):
    x, rho, norm = ctx.saved_tensors
    grad_x = grad_x if ctx.added else None
    grad_context = torch.zeros_like(x) if grad_context is None else grad_context
    gradient, grad_norm = add_norm_backward(grad_x, grad_context, x, rho, norm)
    return gradient, gradient if ctx.added else None, grad_norm.to(norm.dtype), None


add_norm.register_autograd(backward, setup_context=setup_context)
