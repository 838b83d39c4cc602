"""The embedding's expansion by a causal depthwise convolution over tokens (EC) in one pass (Triton).

For every feature, X[t, j] = sum_s w[s, j] x[t - s]; backward, gx[t] = sum_s sum_j w[s, j] G[t + s, j] and
gw[s, j] = sum_t G[t, j] x[t - s].
Nothing is summed over features, so programs share them as well as the tokens.
"""

import torch
import triton
import triton.language as tl

from model.kernels.launch import KERNELS, share
from model.kernels.tiles import dense, load_columns, load_vector, store_columns, store_vector

BLOCK = 256


@triton.jit
def forward_kernel(
    x, weights, state, tokens, chunk, chunks,
    D: tl.constexpr, BLOCK: tl.constexpr, V: tl.constexpr, K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    features = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = features < D
    sequence, first = tl.program_id(0) // chunks, tl.program_id(0) % chunks * chunk
    w = ()
    for s in tl.static_range(K):
        w = w + (load_columns(weights + s * V * D, D, features, inside, V),)
    for t in tl.range(first, tl.minimum(first + chunk, tokens), num_stages=STAGES):
        row = (sequence * tokens + t).to(tl.int64)
        tile = load_vector(x + row * D, features, inside)[:, None] * w[0]
        for s in tl.static_range(1, K):
            tile += load_vector(x + (row - s) * D, features, inside & (t >= s))[:, None] * w[s]
        store_columns(state + row * V * D, D, features, inside, tile, V)


@triton.jit
def backward_kernel(
    grad_state, x, weights, grad_x, grad_weights, tokens, chunk, chunks,
    D: tl.constexpr, BLOCK: tl.constexpr, V: tl.constexpr, K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    features = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = features < D
    sequence, first = tl.program_id(0) // chunks, tl.program_id(0) % chunks * chunk
    w, sums = (), ()
    for s in tl.static_range(K):
        w = w + (load_columns(weights + s * V * D, D, features, inside, V),)
        sums = sums + (tl.zeros((BLOCK, V), tl.float32),)
    for t in tl.range(first, tl.minimum(first + chunk, tokens), num_stages=STAGES):
        row = (sequence * tokens + t).to(tl.int64)
        gradient = load_columns(grad_state + row * V * D, D, features, inside, V)
        total = tl.sum(gradient * w[0], 1)
        added = (sums[0] + gradient * load_vector(x + row * D, features, inside)[:, None],)
        for s in tl.static_range(1, K):
            before = load_vector(x + (row - s) * D, features, inside & (t >= s))
            added = added + (sums[s] + gradient * before[:, None],)
            after = load_columns(grad_state + (row + s) * V * D, D, features, inside & (t + s < tokens), V)
            total += tl.sum(after * w[s], 1)
        sums = added
        store_vector(grad_x + row * D, features, inside, total)
    for s in tl.static_range(K):
        store_columns(grad_weights + (tl.program_id(0) * K + s) * V * D, D, features, inside, sums[s], V)


def runs(kernel: str, x, weights) -> tuple[tuple[int, int], tuple[int, int, int], dict]:
    """(grid, how the programs share the tokens, constants)."""
    (B, T, d), (K, v, _) = x.shape, weights.shape
    blocks, launch = -(-d // BLOCK), KERNELS[kernel]
    sizes = share(x.device, launch, B * blocks, T, K)
    return (B * sizes[2], blocks), sizes, {"D": d, "BLOCK": BLOCK, "V": v, "K": K, **launch.options()}


@torch.library.custom_op("ddl::expand", mutates_args=())
def expand(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """x (B, T, d) contiguous, weights (K, v, d), the current token's first -> state (B, T, v, d) in x's dtype."""
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
