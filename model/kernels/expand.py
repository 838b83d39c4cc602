"""The embedding's expansion by a causal depthwise convolution over tokens (EC) in one pass
(Triton).

For every feature, X[t, j] = sum_s w[s, j] x[t - s]; backward, gx[t] = sum_s sum_j w[s, j] G[t + s,
j] and gw[s, j] = sum_t G[t, j] x[t - s]. Nothing is summed over features, so programs share them as
well as the tokens.
"""

import torch
import triton
import triton.language as tl

from model.kernels.launch import launch_of, share
from model.kernels.tiles import combined, dense, load, load_columns, outer, plus, store, zeros

BLOCK = 256


@triton.jit(do_not_specialize=["tokens", "chunk", "chunks"])
def forward_kernel(
    x, weights, state, tokens, chunk, chunks,
    D: tl.constexpr, BLOCK: tl.constexpr, V: tl.constexpr, K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(1) * BLOCK
    inside = start + tl.arange(0, BLOCK) < D
    sequence, first = tl.program_id(0) // chunks, tl.program_id(0) % chunks * chunk
    w = load_columns(weights + start, D, inside, K * V, BLOCK, BLOCK)
    for t in tl.range(first, tl.minimum(first + chunk, tokens), num_stages=STAGES):
        row = (sequence * tokens + t).to(tl.int64)
        columns = zeros(V, BLOCK, BLOCK)
        for s in tl.static_range(K):
            columns = outer(
                columns,
                w[s * V : (s + 1) * V],
                load(x + (row - s) * D + start, inside & (t >= s), BLOCK, BLOCK),
            )
        for j in tl.static_range(V):
            store(state + (row * V + j) * D + start, columns[j : j + 1], inside, BLOCK, BLOCK)


@triton.jit(do_not_specialize=["tokens", "chunk", "chunks"])
def backward_kernel(
    grad_state, x, weights, grad_x, grad_weights, tokens, chunk, chunks,
    D: tl.constexpr, BLOCK: tl.constexpr, V: tl.constexpr, K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(1) * BLOCK
    inside = start + tl.arange(0, BLOCK) < D
    sequence, first = tl.program_id(0) // chunks, tl.program_id(0) % chunks * chunk
    last = tl.minimum(first + chunk, tokens)
    w, sums = (
        load_columns(weights + start, D, inside, K * V, BLOCK, BLOCK),
        zeros(K * V, BLOCK, BLOCK),
    )
    for t in tl.range(first, last, num_stages=STAGES):
        row = (sequence * tokens + t).to(tl.int64)
        gradient = load_columns(grad_state + row * V * D + start, D, inside, V, BLOCK, BLOCK)
        total, added = combined(gradient, w[:V], 1), ()
        for s in tl.static_range(K):
            before = load(x + (row - s) * D + start, inside & (t >= s), BLOCK, BLOCK)
            added = added + outer(sums[s * V : (s + 1) * V], gradient, before)
            if s > 0:
                there = inside & (t + s < tokens)
                after = load_columns(
                    grad_state + (row + s) * V * D + start, D, there, V, BLOCK, BLOCK
                )
                total = plus(total, 1.0, combined(after, w[s * V : (s + 1) * V], 1))
        sums = added
        store(grad_x + row * D + start, total, inside, BLOCK, BLOCK)
    for i in tl.static_range(K * V):
        store(
            grad_weights + (tl.program_id(0) * K * V + i) * D + start,
            sums[i : i + 1],
            inside,
            BLOCK,
            BLOCK,
        )


def runs(kernel: str, x, weights) -> tuple[tuple[int, int], tuple[int, int, int], dict]:
    """(grid, how the programs share the tokens, constants)."""
    (B, T, d), (K, v, _) = x.shape, weights.shape
    launch = launch_of(kernel, d, v, K)
    blocks, sizes = -(-d // BLOCK), share(x.device, launch, B * -(-d // BLOCK), T, K)
    constants = {
        "D": d,
        "BLOCK": BLOCK,
        "V": v,
        "K": K,
        "STAGES": launch.stages,
        "num_warps": launch.num_warps,
    }
    return (B * sizes[2], blocks), sizes, constants


@torch.library.custom_op("ddl::expand", mutates_args=())
def expand(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """x (B, T, d) contiguous, weights (K, v, d), the current token's first -> state (B, T, v, d) in
    x's dtype.
    """
    state = x.new_empty((*x.shape[:2], *weights.shape[1:]))
    grid, sizes, constants = runs("expand forward", x, weights)
    forward_kernel[grid](*dense(x, weights), state, *sizes, **constants)
    return state


@expand.register_fake
def _(x, weights):
    return x.new_empty((*x.shape[:2], *weights.shape[1:]))


@torch.library.custom_op("ddl::expand_backward", mutates_args=())
def expand_backward(
    grad_state: torch.Tensor, x: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of x, in its dtype, and of weights, in fp32."""
    grad_x = x.new_empty(x.shape)
    grid, sizes, constants = runs("expand backward", x, weights)
    grad_weights = x.new_empty((grid[0], *weights.shape), dtype=torch.float32)
    backward_kernel[grid](*dense(grad_state, x, weights), grad_x, grad_weights, *sizes, **constants)
    return grad_x, grad_weights.sum(0)


@expand_backward.register_fake
def _(grad_state, x, weights):
    return x.new_empty(x.shape), x.new_empty(weights.shape, dtype=torch.float32)


def setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def backward(ctx, grad_state):
    x, weights = ctx.saved_tensors
    grad_x, grad_weights = expand_backward(grad_state, x, weights)
    return grad_x, grad_weights.to(weights.dtype)


expand.register_autograd(backward, setup_context=setup_context)
