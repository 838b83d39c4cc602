"""The additive stream's step in one pass (Triton): X' = X + h, and the RMSNorm of X'.

It exists so that Delta streams are compared with a baseline that is fused as well as they are. With
rho = 1 / sqrt(mean(X'^2) + eps) and chat = rho X', the context is c = g chat. Backward, with
q = gc g and the gradients G' of X' and gc of c,

    gX = gh = G' + rho (q - mean(q chat) chat)        gg = sum gc chat

X may be float32 while h and c are bfloat16.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from .launch import KernelLaunch, choose_launch, launch_options, split_into_chunks
from .tiles import (
    add_scaled,
    contiguous,
    dot_blocks,
    load_numbers,
    load_vector,
    multiply,
    multiply_add,
    prefetch,
    round_to,
    scale,
    store_vectors,
    sum_blocks,
    zero_vectors,
)


@triton.jit(do_not_specialize=["num_rows", "chunk_size"])
def forward_kernel(
    x: tl.tensor,
    h: "tl.tensor | None",
    norm_weight: tl.tensor,
    new_x: tl.tensor,
    context: tl.tensor,
    inverse_rms: tl.tensor,
    num_rows: tl.tensor,
    chunk_size: tl.tensor,
    eps: tl.tensor,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    PREFETCH: tl.constexpr,
) -> None:
    g = load_vector(norm_weight, None, D, BLOCK)
    first = tl.program_id(0) * chunk_size
    last = tl.minimum(first + chunk_size, num_rows)
    for t in tl.range(first, last, num_stages=STAGES):
        # the sum with zero is a tensor under the interpreter too, where t is a Python number
        row = (tl.program_id(0) * 0 + t).to(tl.int64)
        if PREFETCH > 0:
            prefetch(x + (row + PREFETCH) * D, t + PREFETCH < last, D)
            if h is not None:
                prefetch(h + (row + PREFETCH) * D, t + PREFETCH < last, D)
        # X' = X + h
        state = load_vector(x + row * D, None, D, BLOCK)
        if h is not None:
            state = add_rounded(state, load_vector(h + row * D, None, D, BLOCK), x)
            store_vectors(new_x + row * D, state, None, D, BLOCK)
        # c = g rho X'
        rho = tl.rsqrt(sum_blocks(dot_blocks(state, state))[0] * (1 / D) + eps)
        tl.store(inverse_rms + row, rho)
        store_vectors(context + row * D, multiply(scale(state, rho), g), None, D, BLOCK)


@triton.jit
def add_rounded(a: tl.tuple, b: tl.tuple, ptr: tl.tensor) -> tl.tuple:
    """Return a + b, rounded to the dtype of what ptr points to."""
    pieces = ()
    for i in tl.static_range(len(a)):
        pieces = pieces + (round_to(a[i] + b[i], ptr.dtype.element_ty),)
    return pieces


@triton.jit(do_not_specialize=["num_rows", "chunk_size"])
def backward_kernel(
    # gradients of the results; grad_new_x is None for zeros
    grad_new_x: "tl.tensor | None",
    grad_context: tl.tensor,
    # X', which the forward pass made, and rho
    x: tl.tensor,
    inverse_rms: tl.tensor,
    norm_weight: tl.tensor,
    # results: grad_h is None where its dtype is that of grad_x; grad_norm is (programs, D) fp32
    grad_x: tl.tensor,
    grad_h: "tl.tensor | None",
    grad_norm: tl.tensor,
    num_rows: tl.tensor,
    chunk_size: tl.tensor,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    PREFETCH: tl.constexpr,
) -> None:
    g = load_vector(norm_weight, None, D, BLOCK)
    sum_g = zero_vectors(1, D, BLOCK)
    first = tl.program_id(0) * chunk_size
    last = tl.minimum(first + chunk_size, num_rows)
    for t in tl.range(first, last, num_stages=STAGES):
        row = (tl.program_id(0) * 0 + t).to(tl.int64)
        if PREFETCH > 0:
            prefetch(x + (row + PREFETCH) * D, t + PREFETCH < last, D)
            prefetch(grad_context + (row + PREFETCH) * D, t + PREFETCH < last, D)
            if grad_new_x is not None:
                prefetch(grad_new_x + (row + PREFETCH) * D, t + PREFETCH < last, D)
        rho = load_numbers(inverse_rms + row, 1)[0]
        chat = scale(load_vector(x + row * D, None, D, BLOCK), rho)
        gc = load_vector(grad_context + row * D, None, D, BLOCK)
        sum_g = multiply_add(sum_g, gc, chat)
        # gX = G' + rho (q - mean(q chat) chat)
        q = multiply(gc, g)
        mean = sum_blocks(dot_blocks(q, chat))[0] * (1 / D)
        total = scale(add_scaled(q, -mean, chat), rho)
        if grad_new_x is not None:
            total = add_scaled(total, 1.0, load_vector(grad_new_x + row * D, None, D, BLOCK))
        store_vectors(grad_x + row * D, total, None, D, BLOCK)
        if grad_h is not None:
            store_vectors(grad_h + row * D, total, None, D, BLOCK)
    store_vectors(grad_norm + tl.program_id(0) * D, sum_g, None, D, BLOCK)


def plan_launch(kernel: str, x: torch.Tensor) -> KernelLaunch:
    """Return the launch of a kernel over the vectors of x (..., d)."""
    width = x.shape[-1]
    num_rows = x.numel() // width
    launch = choose_launch(kernel, width)
    chunks = split_into_chunks(
        x.device, launch, num_sequences=1, num_tokens=num_rows, kernel_size=1
    )
    return KernelLaunch(
        grid=(chunks.num_chunks,),
        arguments={
            "num_rows": num_rows,
            "chunk_size": chunks.chunk_size,
            "D": width,
            **launch_options(launch, x),
        },
    )


class AddNormOutput(NamedTuple):
    """The results of `add_norm`."""

    new_x: torch.Tensor  # X + h (B, T, d) in the dtype of X; empty without h
    context: torch.Tensor  # its RMSNorm (B, T, d)
    inverse_rms: torch.Tensor  # rho (B, T) fp32, without a gradient


@torch.library.custom_op("ddl::add_norm", mutates_args=())
def add_norm(
    x: torch.Tensor,
    h: torch.Tensor | None,
    norm_weight: torch.Tensor,
    eps: float,
    context_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Add h (B, T, d) to the state x (B, T, d), and normalize the sum.

    Args:
        h: None if there is nothing to add; the new state is then x itself
        norm_weight: g (d,)
        context_dtype: dtype of the normalized context

    Returns:
        The fields of `AddNormOutput`.
    """
    output = allocate_output(x, h, context_dtype)
    launch = plan_launch("add_norm forward", x)
    forward_kernel[launch.grid](
        x=contiguous(x),
        h=contiguous(h),
        norm_weight=contiguous(norm_weight),
        **output._asdict(),
        eps=eps,
        **launch.arguments,
    )
    return tuple(output)


def allocate_output(
    x: torch.Tensor, h: torch.Tensor | None, context_dtype: torch.dtype
) -> AddNormOutput:
    return AddNormOutput(
        new_x=x.new_empty((0,) if h is None else x.shape),
        context=x.new_empty(x.shape, dtype=context_dtype),
        inverse_rms=x.new_empty(x.shape[:-1], dtype=torch.float32),
    )


@add_norm.register_fake
def _(x, h, norm_weight, eps, context_dtype):
    return tuple(allocate_output(x, h, context_dtype))


class AddNormGradients(NamedTuple):
    """The results of `add_norm_backward`: gradients of the arguments of `add_norm`."""

    x: torch.Tensor
    h: torch.Tensor  # the same in the dtype of h; empty where that is the dtype of x
    norm_weight: torch.Tensor  # fp32


@torch.library.custom_op("ddl::add_norm_backward", mutates_args=())
def add_norm_backward(
    grad_new_x: torch.Tensor | None,
    grad_context: torch.Tensor,
    x: torch.Tensor,
    inverse_rms: torch.Tensor,
    norm_weight: torch.Tensor,
    h_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of `add_norm`.

    Args:
        grad_new_x: gradient of X + h; None for zeros
        x: the state after the addition
        h_dtype: None for the dtype of x

    Returns:
        The fields of `AddNormGradients`.
    """
    grad_x, grad_h = allocate_state_gradients(x, h_dtype)
    launch = plan_launch("add_norm backward", x)
    # one sum for each program
    grad_norm = x.new_empty((*launch.grid, x.shape[-1]), dtype=torch.float32)
    backward_kernel[launch.grid](
        grad_new_x=contiguous(grad_new_x),
        grad_context=contiguous(grad_context),
        x=contiguous(x),
        inverse_rms=contiguous(inverse_rms),
        norm_weight=contiguous(norm_weight),
        grad_x=grad_x,
        grad_h=grad_h if grad_h.numel() else None,
        grad_norm=grad_norm,
        **launch.arguments,
    )
    return grad_x, grad_h, grad_norm.sum(0)


def allocate_state_gradients(
    x: torch.Tensor, h_dtype: torch.dtype | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate the gradients of x and h."""
    is_same = h_dtype is None or h_dtype == x.dtype
    return x.new_empty(x.shape), x.new_empty((0,) if is_same else x.shape, dtype=h_dtype)


@add_norm_backward.register_fake
def _(grad_new_x, grad_context, x, inverse_rms, norm_weight, h_dtype=None):
    grad_norm = x.new_empty(x.shape[-1:], dtype=torch.float32)
    return *allocate_state_gradients(x, h_dtype), grad_norm


def setup_context(ctx: Any, inputs: tuple, output: tuple[torch.Tensor, ...]) -> None:
    x, h, norm_weight, _eps, context_dtype = inputs
    output = AddNormOutput(*output)
    # a gradient of zeros would be read from memory, and None costs nothing
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output.inverse_rms)
    ctx.has_h = h is not None
    ctx.h_dtype = x.dtype if h is None else h.dtype
    ctx.context_dtype = context_dtype
    new_x = x if h is None else output.new_x
    ctx.save_for_backward(new_x, output.inverse_rms, norm_weight)


def backward(
    ctx: Any,
    grad_new_x: torch.Tensor | None,
    grad_context: torch.Tensor | None,
    _grad_inverse_rms: None,
) -> tuple[torch.Tensor | None, ...]:
    x, inverse_rms, norm_weight = ctx.saved_tensors
    if grad_context is None:
        grad_context = torch.zeros_like(x, dtype=ctx.context_dtype)
    gradients = AddNormGradients(
        *add_norm_backward(
            # without h, new_x is an empty tensor, whose gradient means nothing
            grad_new_x=grad_new_x if ctx.has_h else None,
            grad_context=grad_context,
            x=x,
            inverse_rms=inverse_rms,
            norm_weight=norm_weight,
            h_dtype=ctx.h_dtype,
        )
    )
    grad_h = None
    if ctx.has_h:
        grad_h = gradients.h if gradients.h.numel() else gradients.x
    # in the order of the arguments: x, h, norm_weight, eps, context_dtype
    return gradients.x, grad_h, gradients.norm_weight.to(norm_weight.dtype), None, None


add_norm.register_autograd(backward, setup_context=setup_context)
