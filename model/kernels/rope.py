"""Rotation (RoPE) and RMSNorm of queries and keys in one pass, from the one product that holds them
(Triton).

Per token and head, with the halves x1, x2 of the projection and the norm's weight g:

    y1 = x1 cos - x2 sin    y2 = x1 sin + x2 cos    rho = 1 / sqrt(mean(x^2) + eps)    q = rho y g

(the rotation changes no length). Backward, with yhat = rho y and p = gq g: gy = rho (p - mean(p
yhat) yhat), turned back by the same angle, and gg = sum gq yhat. Everything in fp32, rounded once;
backward makes it again from x, so that only the product is kept. The gradient of the values is
copied along, so that the product's gradient is whole without another pass.
"""

import torch
import triton
import triton.language as tl

from model.gpt import GPTConfig
from model.kernels.launch import processors
from model.kernels.tiles import dense
from model.layers import CausalSelfAttention, Heads, RMSNorm, joined_product

ROWS = 32  # pairs of a token and a head in a tile
# programs of a multiprocessor for each of queries, keys and values, backward
WARPS, STAGES, PROGRAMS = 4, 2, 1


@triton.jit
def halves(ptr, place, features, inside, HALF: tl.constexpr):
    """Both halves of the heads at `place`, (rows, BLOCK) each in fp32."""
    at = ptr + place[:, None] + features[None, :]
    return tl.load(at, inside, other=0.0).to(tl.float32), tl.load(at + HALF, inside, other=0.0).to(
        tl.float32
    )


@triton.jit
def store_halves(ptr, place, features, inside, first, second, HALF: tl.constexpr):
    at = ptr + place[:, None] + features[None, :]
    tl.store(at, first.to(ptr.dtype.element_ty), inside)
    tl.store(at + HALF, second.to(ptr.dtype.element_ty), inside)


@triton.jit
def angles(
    cos, sin, row, tokens, table_stride, features, inside, H: tl.constexpr, HALF: tl.constexpr
):
    """cos and sin of each row's token, (rows, BLOCK).

    Sequences have own tables, table_stride apart, or share one.
    """
    token = row // H
    place = (token // tokens) * table_stride + (token % tokens) * HALF
    at = place[:, None] + features[None, :]
    return tl.load(cos + at, inside, other=0.0).to(tl.float32), tl.load(
        sin + at, inside, other=0.0
    ).to(tl.float32)


@triton.jit(do_not_specialize=["rows", "tokens", "table_stride"])
def forward_kernel(
    qkv, cos, sin, q_norm, k_norm, qk, rows, tokens, table_stride, eps,
    H: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    which = tl.program_id(1)  # 0: queries, 1: keys
    features = tl.arange(0, BLOCK)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = (row < rows)[:, None] & (features < HALF)[None, :]
    norm = q_norm
    if which == 1:
        norm = k_norm
    g1 = tl.load(norm + features, features < HALF, other=0.0).to(tl.float32)
    g2 = tl.load(norm + HALF + features, features < HALF, other=0.0).to(tl.float32)
    place = ((row // H) * 3 + which).to(tl.int64) * (2 * H * HALF) + (row % H) * (2 * HALF)
    x1, x2 = halves(qkv, place, features, inside, HALF)
    c, s = angles(cos, sin, row, tokens, table_stride, features, inside, H, HALF)
    rho = tl.rsqrt(tl.sum(x1 * x1 + x2 * x2, 1) / (2 * HALF) + eps)[:, None]
    y1, y2 = (x1 * c - x2 * s) * rho * g1[None, :], (x1 * s + x2 * c) * rho * g2[None, :]
    place = (which * rows + row).to(tl.int64) * (2 * HALF)
    store_halves(qk, place, features, inside, y1, y2, HALF)


@triton.jit(do_not_specialize=["rows", "chunk", "tokens", "table_stride"])
def backward_kernel(
    grad_q, grad_k, grad_v, qkv, cos, sin, q_norm, k_norm, grad_qkv, sums, rows, chunk, tokens, table_stride, eps,
    H: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    which = tl.program_id(1)  # 0: queries, 1: keys, 2: values
    features = tl.arange(0, BLOCK)
    norm, gradient = q_norm, grad_q
    if which == 1:
        norm, gradient = k_norm, grad_k
    g1 = tl.load(norm + features, features < HALF, other=0.0).to(tl.float32)[None, :]
    g2 = tl.load(norm + HALF + features, features < HALF, other=0.0).to(tl.float32)[None, :]
    sum1, sum2 = tl.zeros((ROWS, BLOCK), tl.float32), tl.zeros((ROWS, BLOCK), tl.float32)
    first = tl.program_id(0) * chunk
    last = tl.minimum(first + chunk, rows)
    if which == 2:
        for start in tl.range(first, last, ROWS):
            row = start + tl.arange(0, ROWS)
            inside = (row < last)[:, None] & (features < HALF)[None, :]
            v1, v2 = halves(grad_v, row.to(tl.int64) * (2 * HALF), features, inside, HALF)
            place = ((row // H) * 3 + 2).to(tl.int64) * (2 * H * HALF) + (row % H) * (2 * HALF)
            store_halves(grad_qkv, place, features, inside, v1, v2, HALF)
    else:
        for start in tl.range(first, last, ROWS, num_stages=STAGES):
            row = start + tl.arange(0, ROWS)
            inside = (row < last)[:, None] & (features < HALF)[None, :]
            place = ((row // H) * 3 + which).to(tl.int64) * (2 * H * HALF) + (row % H) * (2 * HALF)
            x1, x2 = halves(qkv, place, features, inside, HALF)
            d1, d2 = halves(gradient, row.to(tl.int64) * (2 * HALF), features, inside, HALF)
            c, s = angles(cos, sin, row, tokens, table_stride, features, inside, H, HALF)
            rho = tl.rsqrt(tl.sum(x1 * x1 + x2 * x2, 1) / (2 * HALF) + eps)[:, None]
            y1, y2 = (x1 * c - x2 * s) * rho, (x1 * s + x2 * c) * rho
            sum1 += d1 * y1
            sum2 += d2 * y2
            d1, d2 = d1 * g1, d2 * g2
            along = (tl.sum(d1 * y1 + d2 * y2, 1) / (2 * HALF))[:, None]
            d1, d2 = rho * (d1 - along * y1), rho * (d2 - along * y2)
            store_halves(grad_qkv, place, features, inside, d1 * c + d2 * s, d2 * c - d1 * s, HALF)
        at = sums + (which * tl.num_programs(0) + tl.program_id(0)) * (2 * HALF) + features
        tl.store(at, tl.sum(sum1, 0), features < HALF)
        tl.store(at + HALF, tl.sum(sum2, 0), features < HALF)


def sizes_of(qkv, cos) -> tuple[int, tuple[int, int], dict]:
    """(rows, (tokens of a sequence, how far apart the tables of two sequences are), constants)."""
    B, T, _, H, D = qkv.shape
    constants = {
        "H": H,
        "HALF": D // 2,
        "BLOCK": triton.next_power_of_2(D // 2),
        "ROWS": ROWS,
        "num_warps": WARPS,
    }
    return B * T * H, (T, cos[0].numel() if cos.ndim == 3 else 0), constants


@torch.library.custom_op("ddl::rope_norm", mutates_args=())
def rope_norm(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_norm: torch.Tensor,
    k_norm: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """qkv (B, T, 3, H, D), cos, sin ([B,] T, D / 2), norms (D,) -> queries and keys (2, B, T, H, D)
    in qkv's dtype.
    """
    qkv, cos, sin, q_norm, k_norm = dense(qkv, cos, sin, q_norm, k_norm)
    result = results_of(qkv)
    rows, sizes, constants = sizes_of(qkv, cos)
    forward_kernel[triton.cdiv(rows, ROWS), 2](
        qkv, cos, sin, q_norm, k_norm, result, rows, *sizes, eps, **constants
    )  # fmt: skip
    return result


def results_of(qkv):
    B, T, _, H, D = qkv.shape
    return qkv.new_empty((2, B, T, H, D))


@rope_norm.register_fake
def _(qkv, cos, sin, q_norm, k_norm, eps):
    return results_of(qkv)


@torch.library.custom_op("ddl::rope_norm_backward", mutates_args=())
def rope_norm_backward(
    grad_q: torch.Tensor, grad_k: torch.Tensor, grad_v: torch.Tensor,
    qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, q_norm: torch.Tensor, k_norm: torch.Tensor, eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """grad_q, grad_k, grad_v (B, T, H, D): gradients of qkv and, in fp32, of both norms (2, D)."""
    qkv, cos, sin, *others = dense(qkv, cos, sin, q_norm, k_norm)
    rows, sizes, constants = sizes_of(qkv, cos)
    # Whole tiles: what a program reads past its rows would be another's.
    programs = min(PROGRAMS * processors(qkv.device), triton.cdiv(rows, ROWS))
    chunk = triton.cdiv(triton.cdiv(rows, ROWS), programs) * ROWS
    programs = triton.cdiv(rows, chunk)
    gradient = torch.empty_like(qkv)
    sums = qkv.new_empty((2, programs, qkv.shape[-1]), dtype=torch.float32)
    backward_kernel[programs, 3](
        *dense(grad_q, grad_k, grad_v), qkv, cos, sin, *others, gradient, sums, rows, chunk, *sizes, eps,
        **constants, STAGES=STAGES,
    )  # fmt: skip
    return gradient, sums.sum(1)


@rope_norm_backward.register_fake
def _(grad_q, grad_k, grad_v, qkv, cos, sin, q_norm, k_norm, eps):
    return qkv.new_empty(qkv.shape), qkv.new_empty((2, qkv.shape[-1]), dtype=torch.float32)


class RotatedHeads(torch.autograd.Function):
    """qkv (B, T, 3, H, D) -> queries, keys, values (B, T, H, D); the values are a part of qkv
    itself.

    A function around the operators, not the operators' own derivative: it takes the gradients of
    all three at once.
    """

    @staticmethod
    def forward(ctx, qkv, cos, sin, q_norm, k_norm, eps: float):
        ctx.save_for_backward(qkv, cos, sin, q_norm, k_norm)
        ctx.eps = eps
        qk = rope_norm(qkv, cos, sin, q_norm, k_norm, eps)
        return qk[0], qk[1], qkv.select(2, 2)

    @staticmethod
    def backward(ctx, grad_q, grad_k, grad_v):
        qkv, cos, sin, q_norm, k_norm = ctx.saved_tensors
        gradient, norms = rope_norm_backward(
            grad_q, grad_k, grad_v, qkv, cos, sin, q_norm, k_norm, ctx.eps
        )
        return gradient, None, None, norms[0].to(q_norm.dtype), norms[1].to(k_norm.dtype), None


class FusedHeads(Heads):
    """Queries, keys and values by one product, and rotation and norm by one kernel."""

    def __call__(self, attention, x, positions):
        if not torch.is_tensor(x):
            return super().__call__(attention, x, positions)
        qkv = joined_product(x, attention.c_q, attention.c_k, attention.c_v)
        qkv = qkv.unflatten(-1, (3, attention.num_heads, attention.head_dim))
        norms = attention.q_rms.weight, attention.k_rms.weight
        return RotatedHeads.apply(qkv, positions.cos, positions.sin, *norms, attention.q_rms.eps)


def serves(attention: CausalSelfAttention, config: GPTConfig) -> bool:
    """Return whether the kernel computes the heads of an attention layer of a model."""
    # exact classes: a subclass may compute something else
    if type(attention) is not CausalSelfAttention:
        return False
    if type(attention.q_rms) is not RMSNorm or type(attention.k_rms) is not RMSNorm:
        return False
    if attention.q_rms.eps != attention.k_rms.eps:
        return False
    # the kernel rotates all features of a head, in pairs
    return config.head_dim % 2 == 0 and int(config.head_dim * config.rope_ratio) == config.head_dim
