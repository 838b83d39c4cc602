"""The embedding's expansion by a causal depthwise convolution (EC) in one pass (Triton).

For every feature, X[t, j] = sum_s w[s, j] x[t - s]. Backward, with the gradient G of X,

    gx[t] = sum_s sum_j w[s, j] G[t + s, j]        gw[s, j] = sum_t G[t, j] x[t - s]

Nothing is summed over features, so programs share the features as well as the tokens: each takes
one piece of BLOCK features, and `D` of the functions in `tiles.py` is BLOCK.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from .launch import KernelLaunch, choose_launch, split_into_chunks
from .tiles import (
    add_scaled,
    contiguous,
    contract_columns,
    load_vector,
    load_vectors,
    multiply_add_columns,
    store_vectors,
    zero_vectors,
)

# features of a program
BLOCK_SIZE = 256


@triton.jit(do_not_specialize=["num_tokens", "chunk_size", "num_chunks"])
def forward_kernel(
    x: tl.tensor,
    weights: tl.tensor,
    state: tl.tensor,
    num_tokens: tl.tensor,
    chunk_size: tl.tensor,
    num_chunks: tl.tensor,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    V: tl.constexpr,
    K: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    start = tl.program_id(1) * BLOCK
    mask = start + tl.arange(0, BLOCK) < D
    sequence = tl.program_id(0) // num_chunks
    first = tl.program_id(0) % num_chunks * chunk_size
    w = load_vectors(weights + start, D, mask, K * V, BLOCK, BLOCK)
    for t in tl.range(first, tl.minimum(first + chunk_size, num_tokens), num_stages=STAGES):
        row = (sequence * num_tokens + t).to(tl.int64)
        # X[t, j] = sum_s w[s, j] x[t - s]
        columns = zero_vectors(V, BLOCK, BLOCK)
        for s in tl.static_range(K):
            earlier_x = load_vector(x + (row - s) * D + start, mask & (t >= s), BLOCK, BLOCK)
            columns = multiply_add_columns(columns, w[s * V : (s + 1) * V], earlier_x)
        for j in tl.static_range(V):
            target = state + (row * V + j) * D + start
            store_vectors(target, columns[j : j + 1], mask, BLOCK, BLOCK)


@triton.jit(do_not_specialize=["num_tokens", "chunk_size", "num_chunks"])
def backward_kernel(
    grad_state: tl.tensor,
    x: tl.tensor,
    weights: tl.tensor,
    grad_x: tl.tensor,
    grad_weights: tl.tensor,  # (programs, K, V, D) fp32
    num_tokens: tl.tensor,
    chunk_size: tl.tensor,
    num_chunks: tl.tensor,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    V: tl.constexpr,
    K: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    start = tl.program_id(1) * BLOCK
    mask = start + tl.arange(0, BLOCK) < D
    sequence = tl.program_id(0) // num_chunks
    first = tl.program_id(0) % num_chunks * chunk_size
    last = tl.minimum(first + chunk_size, num_tokens)
    w = load_vectors(weights + start, D, mask, K * V, BLOCK, BLOCK)
    sums = zero_vectors(K * V, BLOCK, BLOCK)
    for t in tl.range(first, last, num_stages=STAGES):
        row = (sequence * num_tokens + t).to(tl.int64)
        G = load_vectors(grad_state + row * V * D + start, D, mask, V, BLOCK, BLOCK)
        # gx[t] = sum_s sum_j w[s, j] G[t + s, j]
        total = contract_columns(G, w[:V], 1)
        new_sums = ()
        for s in tl.static_range(K):
            # gw[s, j] = sum_t G[t, j] x[t - s]
            earlier_x = load_vector(x + (row - s) * D + start, mask & (t >= s), BLOCK, BLOCK)
            new_sums = new_sums + multiply_add_columns(sums[s * V : (s + 1) * V], G, earlier_x)
            if s > 0:
                in_sequence = mask & (t + s < num_tokens)
                later_G = load_vectors(
                    grad_state + (row + s) * V * D + start, D, in_sequence, V, BLOCK, BLOCK
                )
                total = add_scaled(total, 1.0, contract_columns(later_G, w[s * V : (s + 1) * V], 1))
        sums = new_sums
        store_vectors(grad_x + row * D + start, total, mask, BLOCK, BLOCK)
    for i in tl.static_range(K * V):
        target = grad_weights + (tl.program_id(0) * K * V + i) * D + start
        store_vectors(target, sums[i : i + 1], mask, BLOCK, BLOCK)


def plan_launch(kernel: str, x: torch.Tensor, weights: torch.Tensor) -> KernelLaunch:
    """Return the launch of a kernel for x (B, T, d) and weights (K, d_v, d)."""
    batch_size, num_tokens, width = x.shape
    kernel_size, num_value_channels, _ = weights.shape
    launch = choose_launch(kernel, width, num_value_channels, kernel_size)
    num_pieces = triton.cdiv(width, BLOCK_SIZE)
    chunks = split_into_chunks(
        x.device,
        launch,
        num_sequences=batch_size * num_pieces,
        num_tokens=num_tokens,
        kernel_size=kernel_size,
    )
    return KernelLaunch(
        grid=(batch_size * chunks.num_chunks, num_pieces),
        arguments={
            "num_tokens": num_tokens,
            **chunks._asdict(),
            "D": width,
            "BLOCK": BLOCK_SIZE,
            "V": num_value_channels,
            "K": kernel_size,
            "STAGES": launch.stages,
            "num_warps": launch.num_warps,
        },
    )


@torch.library.custom_op("ddl::expand", mutates_args=())
def expand(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the state (B, T, d_v, d), in the dtype of x, that an embedding is expanded to.

    Args:
        x: (B, T, d)
        weights: (K, d_v, d); the first entry is for the current token
    """
    state = allocate_state(x, weights)
    launch = plan_launch("expand forward", x, weights)
    forward_kernel[launch.grid](
        x=contiguous(x), weights=contiguous(weights), state=state, **launch.arguments
    )
    return state


def allocate_state(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return x.new_empty((*x.shape[:2], *weights.shape[1:]))


@expand.register_fake
def _(x, weights):
    return allocate_state(x, weights)


class ExpandGradients(NamedTuple):
    """The results of `expand_backward`: gradients of the arguments of `expand`."""

    x: torch.Tensor
    weights: torch.Tensor  # fp32


@torch.library.custom_op("ddl::expand_backward", mutates_args=())
def expand_backward(
    grad_state: torch.Tensor, x: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of `expand`: the fields of `ExpandGradients`.

    grad_state: gradient (B, T, d_v, d) of its result
    """
    grad_x = x.new_empty(x.shape)
    launch = plan_launch("expand backward", x, weights)
    # one sum for each program
    num_programs, _ = launch.grid
    grad_weights = x.new_empty((num_programs, *weights.shape), dtype=torch.float32)
    backward_kernel[launch.grid](
        grad_state=contiguous(grad_state),
        x=contiguous(x),
        weights=contiguous(weights),
        grad_x=grad_x,
        grad_weights=grad_weights,
        **launch.arguments,
    )
    return grad_x, grad_weights.sum(0)


@expand_backward.register_fake
def _(grad_state, x, weights):
    return x.new_empty(x.shape), x.new_empty(weights.shape, dtype=torch.float32)


def setup_context(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
    x, weights = inputs
    ctx.save_for_backward(x, weights)


def backward(ctx: Any, grad_state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x, weights = ctx.saved_tensors
    gradients = ExpandGradients(*expand_backward(grad_state=grad_state, x=x, weights=weights))
    return gradients.x, gradients.weights.to(weights.dtype)


expand.register_autograd(backward, setup_context=setup_context)
