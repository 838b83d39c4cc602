"""Rotation (RoPE) and RMSNorm of queries and keys in one pass over the joined product (Triton).

Queries, keys and values come from one matrix product. Per token and head, with the halves x1 and x2
of its features and the norm's weight g,

    y1 = x1 cos - x2 sin    y2 = x1 sin + x2 cos    rho = 1 / sqrt(mean(x^2) + eps)    q = rho y g

where x gives the norm because the rotation changes no length. Backward, with yhat = rho y, the
gradient gq of q, and p = gq g,

    gy = rho (p - mean(p yhat) yhat)        gg = sum gq yhat

and gx is gy rotated back by the same angle. Everything is computed in fp32 and rounded once. The
backward pass recomputes y from x, so that only the product is kept. It also copies the gradient of
the values, so that the gradient of the product needs no other pass.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..config import GPTConfig
from ..layers import CausalSelfAttention, Positions, RMSNorm
from ..products import JoinedAttention, apply_side_by_side
from .launch import count_processors
from .tiles import check_dtype, contiguous

# A row is one head of one token, and a tile is TILE_ROWS rows.
TILE_ROWS = 32
NUM_WARPS = 4
# of the backward kernel
NUM_STAGES = 2
# programs of a multiprocessor, in the backward kernel, for each of queries, keys and values
PROGRAMS = 1


@triton.jit
def product_offsets(
    row: tl.tensor, which: tl.tensor, H: tl.constexpr, HALF: tl.constexpr
) -> tl.tensor:
    """Return the offsets of rows in the product (tokens, 3, H, 2 * HALF).

    which: 0 for queries, 1 for keys, 2 for values
    """
    return ((row // H) * 3 + which).to(tl.int64) * (2 * H * HALF) + (row % H) * (2 * HALF)


@triton.jit
def load_halves(
    ptr: tl.tensor, offsets: tl.tensor, features: tl.tensor, mask: tl.tensor, HALF: tl.constexpr
) -> tl.tuple:
    """Return the two halves of the heads at some offsets, (rows, BLOCK) each in fp32."""
    first_ptr = ptr + offsets[:, None] + features[None, :]
    first = tl.load(first_ptr, mask, other=0.0).to(tl.float32)
    second = tl.load(first_ptr + HALF, mask, other=0.0).to(tl.float32)
    return first, second


@triton.jit
def store_halves(
    ptr: tl.tensor,
    offsets: tl.tensor,
    features: tl.tensor,
    mask: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    HALF: tl.constexpr,
) -> None:
    """Store the two halves of the heads at some offsets, in ptr's dtype."""
    first_ptr = ptr + offsets[:, None] + features[None, :]
    tl.store(first_ptr, first.to(ptr.dtype.element_ty), mask)
    tl.store(first_ptr + HALF, second.to(ptr.dtype.element_ty), mask)


@triton.jit
def load_angles(
    cos: tl.tensor,
    sin: tl.tensor,
    row: tl.tensor,
    sequence_length: tl.tensor,
    table_stride: tl.tensor,
    features: tl.tensor,
    mask: tl.tensor,
    H: tl.constexpr,
    HALF: tl.constexpr,
) -> tl.tuple:
    """Return cos and sin of the token of each row, (rows, BLOCK) each in fp32.

    table_stride: from the table of a sequence to the next; 0 if all sequences share one
    """
    token = row // H
    offsets = (token // sequence_length) * table_stride + (token % sequence_length) * HALF
    positions = offsets[:, None] + features[None, :]
    c = tl.load(cos + positions, mask, other=0.0).to(tl.float32)
    s = tl.load(sin + positions, mask, other=0.0).to(tl.float32)
    return c, s


# H is the number of heads, HALF half of the features of a head, and BLOCK the power of two that
# HALF is padded to.
@triton.jit(do_not_specialize=["num_rows", "sequence_length", "table_stride"])
def forward_kernel(
    qkv: tl.tensor,  # (tokens, 3, H, 2 * HALF)
    cos: tl.tensor,
    sin: tl.tensor,
    q_norm: tl.tensor,
    k_norm: tl.tensor,
    qk: tl.tensor,  # (2, tokens, H, 2 * HALF)
    num_rows: tl.tensor,
    sequence_length: tl.tensor,
    table_stride: tl.tensor,
    eps: tl.tensor,
    H: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    which = tl.program_id(1)  # 0: queries, 1: keys
    features = tl.arange(0, BLOCK)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = (row < num_rows)[:, None] & (features < HALF)[None, :]
    norm_weight = q_norm
    if which == 1:
        norm_weight = k_norm
    g1 = tl.load(norm_weight + features, features < HALF, other=0.0).to(tl.float32)
    g2 = tl.load(norm_weight + HALF + features, features < HALF, other=0.0).to(tl.float32)
    offsets = product_offsets(row, which, H, HALF)
    x1, x2 = load_halves(qkv, offsets, features, mask, HALF)
    c, s = load_angles(cos, sin, row, sequence_length, table_stride, features, mask, H, HALF)
    # q = rho y g
    rho = tl.rsqrt(tl.sum(x1 * x1 + x2 * x2, 1) / (2 * HALF) + eps)[:, None]
    q1 = (x1 * c - x2 * s) * rho * g1[None, :]
    q2 = (x1 * s + x2 * c) * rho * g2[None, :]
    offsets = (which * num_rows + row).to(tl.int64) * (2 * HALF)
    store_halves(qk, offsets, features, mask, q1, q2, HALF)


@triton.jit(do_not_specialize=["num_rows", "chunk_size", "sequence_length", "table_stride"])
def backward_kernel(
    grad_q: tl.tensor,
    grad_k: tl.tensor,
    grad_v: tl.tensor,
    qkv: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    q_norm: tl.tensor,
    k_norm: tl.tensor,
    grad_qkv: tl.tensor,
    # (2, programs, 2 * HALF) fp32: gradients of both norms, summed over a program's rows
    sums: tl.tensor,
    num_rows: tl.tensor,
    chunk_size: tl.tensor,  # rows of a program
    sequence_length: tl.tensor,
    table_stride: tl.tensor,
    eps: tl.tensor,
    H: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    which = tl.program_id(1)  # 0: queries, 1: keys, 2: values
    features = tl.arange(0, BLOCK)
    norm_weight = q_norm
    gradient = grad_q
    if which == 1:
        norm_weight = k_norm
        gradient = grad_k
    g1 = tl.load(norm_weight + features, features < HALF, other=0.0).to(tl.float32)[None, :]
    g2 = tl.load(norm_weight + HALF + features, features < HALF, other=0.0).to(tl.float32)[None, :]
    sum1 = tl.zeros((ROWS, BLOCK), tl.float32)
    sum2 = tl.zeros((ROWS, BLOCK), tl.float32)
    first = tl.program_id(0) * chunk_size
    last = tl.minimum(first + chunk_size, num_rows)
    if which == 2:
        # the values are part of the product, so their gradient is copied
        for start in tl.range(first, last, ROWS):
            row = start + tl.arange(0, ROWS)
            mask = (row < last)[:, None] & (features < HALF)[None, :]
            v1, v2 = load_halves(grad_v, row.to(tl.int64) * (2 * HALF), features, mask, HALF)
            offsets = product_offsets(row, 2, H, HALF)
            store_halves(grad_qkv, offsets, features, mask, v1, v2, HALF)
    else:
        for start in tl.range(first, last, ROWS, num_stages=STAGES):
            row = start + tl.arange(0, ROWS)
            mask = (row < last)[:, None] & (features < HALF)[None, :]
            offsets = product_offsets(row, which, H, HALF)
            x1, x2 = load_halves(qkv, offsets, features, mask, HALF)
            d1, d2 = load_halves(gradient, row.to(tl.int64) * (2 * HALF), features, mask, HALF)
            c, s = load_angles(
                cos, sin, row, sequence_length, table_stride, features, mask, H, HALF
            )
            # yhat = rho y
            rho = tl.rsqrt(tl.sum(x1 * x1 + x2 * x2, 1) / (2 * HALF) + eps)[:, None]
            y1 = (x1 * c - x2 * s) * rho
            y2 = (x1 * s + x2 * c) * rho
            # gg = sum gq yhat
            sum1 += d1 * y1
            sum2 += d2 * y2
            # gy = rho (p - mean(p yhat) yhat), with p = gq g
            p1 = d1 * g1
            p2 = d2 * g2
            mean = (tl.sum(p1 * y1 + p2 * y2, 1) / (2 * HALF))[:, None]
            gy1 = rho * (p1 - mean * y1)
            gy2 = rho * (p2 - mean * y2)
            # rotated back
            gx1 = gy1 * c + gy2 * s
            gx2 = gy2 * c - gy1 * s
            store_halves(grad_qkv, offsets, features, mask, gx1, gx2, HALF)
        target = sums + (which * tl.num_programs(0) + tl.program_id(0)) * (2 * HALF) + features
        tl.store(target, tl.sum(sum1, 0), features < HALF)
        tl.store(target + HALF, tl.sum(sum2, 0), features < HALF)


def kernel_arguments(qkv: torch.Tensor, cos: torch.Tensor) -> dict[str, Any]:
    """Return the sizes and constants that both kernels take, for qkv (B, T, 3, H, D)."""
    batch_size, sequence_length, _, num_heads, head_dim = qkv.shape
    return {
        "num_rows": batch_size * sequence_length * num_heads,
        "sequence_length": sequence_length,
        # sequences of different positions have tables of their own
        "table_stride": cos[0].numel() if cos.ndim == 3 else 0,
        "H": num_heads,
        "HALF": head_dim // 2,
        "BLOCK": triton.next_power_of_2(head_dim // 2),
        "ROWS": TILE_ROWS,
        "num_warps": NUM_WARPS,
    }


@torch.library.custom_op("ddl::rope_norm", mutates_args=())
def rope_norm(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_norm: torch.Tensor,
    k_norm: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """Return the rotated and normalized queries and keys, (2, B, T, H, D) in the dtype of qkv.

    Args:
        qkv: (B, T, 3, H, D)
        cos, sin: ([B,] T, D / 2)
        q_norm, k_norm: weights of the norms (D,)
    """
    qkv = contiguous(qkv)
    cos = contiguous(cos)
    queries_and_keys = allocate_queries_and_keys(qkv)
    arguments = kernel_arguments(qkv, cos)
    num_tiles = triton.cdiv(arguments["num_rows"], TILE_ROWS)
    forward_kernel[num_tiles, 2](
        qkv=qkv,
        cos=cos,
        sin=contiguous(sin),
        q_norm=contiguous(q_norm),
        k_norm=contiguous(k_norm),
        qk=queries_and_keys,
        eps=eps,
        **arguments,
    )
    return queries_and_keys


def allocate_queries_and_keys(qkv: torch.Tensor) -> torch.Tensor:
    batch_size, sequence_length, _, num_heads, head_dim = qkv.shape
    return qkv.new_empty((2, batch_size, sequence_length, num_heads, head_dim))


@rope_norm.register_fake
def _(qkv, cos, sin, q_norm, k_norm, eps):
    return allocate_queries_and_keys(qkv)


class RopeNormGradients(NamedTuple):
    """The results of `rope_norm_backward`: gradients of the arguments of `rope_norm`."""

    qkv: torch.Tensor
    norms: torch.Tensor  # of the weights of both norms, (2, D) fp32


@torch.library.custom_op("ddl::rope_norm_backward", mutates_args=())
def rope_norm_backward(
    grad_q: torch.Tensor,
    grad_k: torch.Tensor,
    grad_v: torch.Tensor,
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_norm: torch.Tensor,
    k_norm: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of `rope_norm`: the fields of `RopeNormGradients`.

    grad_q, grad_k, grad_v: gradients of queries, keys and values, (B, T, H, D) each
    """
    qkv = contiguous(qkv)
    cos = contiguous(cos)
    arguments = kernel_arguments(qkv, cos)
    # Chunks are whole tiles, because a program would compute the rest of a tile from rows of the
    # next program.
    num_tiles = triton.cdiv(arguments["num_rows"], TILE_ROWS)
    max_programs = min(PROGRAMS * count_processors(qkv.device), num_tiles)
    chunk_size = triton.cdiv(num_tiles, max_programs) * TILE_ROWS
    num_programs = triton.cdiv(arguments["num_rows"], chunk_size)
    grad_qkv = torch.empty_like(qkv)
    sums = qkv.new_empty((2, num_programs, qkv.shape[-1]), dtype=torch.float32)
    backward_kernel[num_programs, 3](
        grad_q=contiguous(grad_q),
        grad_k=contiguous(grad_k),
        grad_v=contiguous(grad_v),
        qkv=qkv,
        cos=cos,
        sin=contiguous(sin),
        q_norm=contiguous(q_norm),
        k_norm=contiguous(k_norm),
        grad_qkv=grad_qkv,
        sums=sums,
        chunk_size=chunk_size,
        eps=eps,
        STAGES=NUM_STAGES,
        **arguments,
    )
    return grad_qkv, sums.sum(1)


@rope_norm_backward.register_fake
def _(grad_q, grad_k, grad_v, qkv, cos, sin, q_norm, k_norm, eps):
    return qkv.new_empty(qkv.shape), qkv.new_empty((2, qkv.shape[-1]), dtype=torch.float32)


class RotatedHeads(torch.autograd.Function):
    """Split qkv (B, T, 3, H, D) into queries, keys and values (B, T, H, D).

    Queries and keys are rotated and normalized; the values are a view of qkv. This is a function
    around the operators instead of their registered derivative, because it takes the gradients of
    all three at once.
    """

    @staticmethod
    def forward(
        ctx: Any,
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        q_norm: torch.Tensor,
        k_norm: torch.Tensor,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(qkv, cos, sin, q_norm, k_norm)
        ctx.eps = eps
        queries_and_keys = rope_norm(
            qkv=qkv, cos=cos, sin=sin, q_norm=q_norm, k_norm=k_norm, eps=eps
        )
        values = qkv.select(2, 2)
        return queries_and_keys[0], queries_and_keys[1], values

    @staticmethod
    def backward(
        ctx: Any, grad_q: torch.Tensor, grad_k: torch.Tensor, grad_v: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        qkv, cos, sin, q_norm, k_norm = ctx.saved_tensors
        gradients = RopeNormGradients(
            *rope_norm_backward(
                grad_q=grad_q,
                grad_k=grad_k,
                grad_v=grad_v,
                qkv=qkv,
                cos=cos,
                sin=sin,
                q_norm=q_norm,
                k_norm=k_norm,
                eps=ctx.eps,
            )
        )
        grad_q_norm = gradients.norms[0].to(q_norm.dtype)
        grad_k_norm = gradients.norms[1].to(k_norm.dtype)
        # in the order of the arguments: qkv, cos, sin, q_norm, k_norm, eps
        return gradients.qkv, None, None, grad_q_norm, grad_k_norm, None


def fused_heads(
    attention: JoinedAttention, x: torch.Tensor, positions: Positions
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries, keys and values (B, T, H, D) for x (B, T, d): one product and one kernel."""
    qkv = apply_side_by_side(x, attention.c_q, attention.c_k, attention.c_v)
    check_dtype(qkv)
    qkv = qkv.unflatten(-1, (3, attention.num_heads, attention.head_dim))
    return RotatedHeads.apply(
        qkv,
        positions.cos,
        positions.sin,
        attention.q_rms.weight,
        attention.k_rms.weight,
        attention.q_rms.eps,
    )


def serves(attention: CausalSelfAttention, config: GPTConfig) -> bool:
    """Return whether the kernel computes the heads of an attention layer of a model."""
    # exact classes: a subclass may compute something else
    if type(attention) is not JoinedAttention:
        return False
    if type(attention.q_rms) is not RMSNorm or type(attention.k_rms) is not RMSNorm:
        return False
    if attention.q_rms.eps != attention.k_rms.eps:
        return False
    # the kernel rotates all features of a head, in pairs
    return config.head_dim % 2 == 0 and int(config.head_dim * config.rope_ratio) == config.head_dim
