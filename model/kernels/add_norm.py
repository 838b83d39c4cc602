"""The additive stream's step between two sublayers in one pass: X' = X + h, then RMSNorm of X'
(Triton).

It is there so that Delta streams are compared with a baseline that is fused as well as they are.
Backward, with chat = rho X' and q = gc g: gX = gh = G' + rho (q - mean(q chat) chat). X may be
float32 beside h and the normed context in bfloat16.
"""

import torch
import triton
import triton.language as tl

from model.kernels.launch import launch_of, options_of, share
from model.kernels.tiles import (
    dense,
    fma,
    load,
    load_numbers,
    plus,
    prefetch,
    products,
    rounded,
    scaled,
    store,
    times,
    totals,
    zeros,
)  # fmt: skip


@triton.jit(do_not_specialize=["rows", "chunk"])
def forward_kernel(
    x, h, norm, new_x, context, rho, rows, chunk, eps, D: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    PREFETCH: tl.constexpr,
):  # fmt: skip
    g, first = load(norm, None, D, BLOCK), tl.program_id(0) * chunk
    last = tl.minimum(first + chunk, rows)
    for t in tl.range(first, last, num_stages=STAGES):
        row = (tl.program_id(0) * 0 + t).to(tl.int64)
        if PREFETCH > 0:
            prefetch(x + (row + PREFETCH) * D, t + PREFETCH < last, D)
            if h is not None:
                prefetch(h + (row + PREFETCH) * D, t + PREFETCH < last, D)
        state = load(x + row * D, None, D, BLOCK)
        if h is not None:
            state = added(state, load(h + row * D, None, D, BLOCK), x)
            store(new_x + row * D, state, None, D, BLOCK)
        rho_t = tl.rsqrt(totals(products(state, state))[0] * (1 / D) + eps)
        tl.store(rho + row, rho_t)
        store(context + row * D, times(scaled(state, rho_t), g), None, D, BLOCK)


@triton.jit
def added(a, b, like):
    """Their sum, rounded to the dtype of what `like` points to."""
    pieces = ()
    for i in tl.static_range(len(a)):
        pieces = pieces + (rounded(a[i] + b[i], like.dtype.element_ty),)
    return pieces


@triton.jit(do_not_specialize=["rows", "chunk"])
def backward_kernel(
    grad_x, grad_context, x, rho, norm, new_grad_x, grad_h, grad_norm, rows, chunk,
    D: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    g, sum_g, first = load(norm, None, D, BLOCK), zeros(1, D, BLOCK), tl.program_id(0) * chunk
    last = tl.minimum(first + chunk, rows)
    for t in tl.range(first, last, num_stages=STAGES):
        row = (tl.program_id(0) * 0 + t).to(tl.int64)
        if PREFETCH > 0:
            prefetch(x + (row + PREFETCH) * D, t + PREFETCH < last, D)
            prefetch(grad_context + (row + PREFETCH) * D, t + PREFETCH < last, D)
            if grad_x is not None:
                prefetch(grad_x + (row + PREFETCH) * D, t + PREFETCH < last, D)
        rho_t = load_numbers(rho + row, 1)[0]
        chat, gc = (
            scaled(load(x + row * D, None, D, BLOCK), rho_t),
            load(grad_context + row * D, None, D, BLOCK),
        )
        sum_g, q = fma(sum_g, gc, chat), times(gc, g)
        mean = totals(products(q, chat))[0] * (1 / D)
        total = scaled(plus(q, -mean, chat), rho_t)
        if grad_x is not None:
            total = plus(total, 1.0, load(grad_x + row * D, None, D, BLOCK))
        store(new_grad_x + row * D, total, None, D, BLOCK)
        if grad_h is not None:
            store(grad_h + row * D, total, None, D, BLOCK)
    store(grad_norm + tl.program_id(0) * D, sum_g, None, D, BLOCK)


def runs(kernel: str, x) -> tuple[tuple[int], tuple[int, int], dict]:
    """(grid, (rows, rows of a program), constants)."""
    launch, d = launch_of(kernel, x.shape[-1]), x.shape[-1]
    rows, chunk, programs = share(x.device, launch, 1, x.numel() // d, 1)
    return (programs,), (rows, chunk), {"D": d, **options_of(launch, x)}


@torch.library.custom_op("ddl::add_norm", mutates_args=())
def add_norm(
    x: torch.Tensor,
    h: torch.Tensor | None,
    norm: torch.Tensor,
    eps: float,
    context_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, h (B, T, d); norm (d,) -> (x + h in x's dtype, its RMSNorm times norm in context_dtype,
    rho (B, T) fp32).

    Without h the first result is empty: the state is still x.
    """
    results = results_of(x, h, context_dtype)
    grid, sizes, constants = runs("add_norm forward", x)
    forward_kernel[grid](*dense(x, h, norm), *results, *sizes, eps, **constants)
    return results


def results_of(x, h, context_dtype):
    new_x = x.new_empty((0,) if h is None else x.shape)
    return (
        new_x,
        x.new_empty(x.shape, dtype=context_dtype),
        x.new_empty(x.shape[:-1], dtype=torch.float32),
    )


@add_norm.register_fake
def _(x, h, norm, eps, context_dtype):
    return results_of(x, h, context_dtype)


@torch.library.custom_op("ddl::add_norm_backward", mutates_args=())
def add_norm_backward(
    grad_x: torch.Tensor | None,
    grad_context: torch.Tensor,
    x: torch.Tensor,
    rho: torch.Tensor,
    norm: torch.Tensor,
    h_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x: the state after the addition.

    Gradients of it, the same in h_dtype (empty where that is x's), norm.
    """
    new_grad_x, grad_h = gradients_of(x, h_dtype)
    grid, sizes, constants = runs("add_norm backward", x)
    grad_norm = x.new_empty((*grid, x.shape[-1]), dtype=torch.float32)
    backward_kernel[grid](
        *dense(grad_x, grad_context, x, rho, norm), new_grad_x, grad_h if grad_h.numel() else None, grad_norm, *sizes,
        **constants,
    )  # fmt: skip
    return new_grad_x, grad_h, grad_norm.sum(0)


def gradients_of(x, h_dtype):
    same = h_dtype in (None, x.dtype)
    return x.new_empty(x.shape), x.new_empty((0,) if same else x.shape, dtype=h_dtype)


@add_norm_backward.register_fake
def _(grad_x, grad_context, x, rho, norm, h_dtype=None):
    return *gradients_of(x, h_dtype), x.new_empty(x.shape[-1:], dtype=torch.float32)


def setup_context(ctx, inputs, output):
    x, h, norm, _, ctx.context_dtype = inputs
    new_x, _, rho = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(rho)
    ctx.added, ctx.h_dtype = h is not None, (x if h is None else h).dtype
    ctx.save_for_backward(new_x if ctx.added else x, rho, norm)


def backward(ctx, grad_x, grad_context, _):
    x, rho, norm = ctx.saved_tensors
    grad_x = grad_x if ctx.added else None
    grad_context = (
        torch.zeros_like(x, dtype=ctx.context_dtype) if grad_context is None else grad_context
    )
    gradient, grad_h, grad_norm = add_norm_backward(grad_x, grad_context, x, rho, norm, ctx.h_dtype)
    grad_h = grad_h if grad_h.numel() else gradient
    return gradient, grad_h if ctx.added else None, grad_norm.to(norm.dtype), None, None


add_norm.register_autograd(backward, setup_context=setup_context)
