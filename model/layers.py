"""The layers of every variant: RMSNorm, attention with RoPE, and the SwiGLU MLP.

Notation in shapes: B batch, T tokens, d hidden_size, H heads.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from model.decoding import NO_TOKEN, get_or_create_buffer
from model.parameters import HIDDEN, Rule, constant, linear


def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    """What statistics, gates and dot products are computed in: float32, of float64 float64."""
    return torch.promote_types(dtype, torch.float32)


def compute_dtype(weight) -> torch.dtype:
    """What products with the weight are computed in: autocast's dtype, if on, or the weight's."""
    device = weight.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype


def for_product(x, weight):
    """x in the dtype of the weight that it meets; as it is under autocast, which rounds both."""
    return x if torch.is_autocast_enabled(x.device.type) else x.to(weight.dtype)


class RMSNorm(nn.Module):
    """y = weight * x / sqrt(mean(x^2) + eps) over the last axis, computed in at least fp32."""

    fused = "rms_norm"

    def __init__(self, size: int, eps: float = 1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.rules = {"weight": Rule(constant(1.0))}
        self.eps = eps

    def forward(self, x):
        y = F.rms_norm(x.to(at_least_fp32(x.dtype)), self.weight.shape, eps=self.eps)
        return (y * self.weight).to(x.dtype)


class LayerNorm(nn.Module):
    """y = weight * (x - mean) / sqrt(var + eps) + bias over the last axis, in at least fp32."""

    def __init__(self, size: int, eps: float = 1e-5):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(size)), nn.Parameter(torch.empty(size))
        self.rules = {"weight": Rule(constant(1.0)), "bias": Rule(constant(0.0))}
        self.eps = eps

    def forward(self, x):
        dtype = at_least_fp32(x.dtype)
        weight, bias = self.weight.to(dtype), self.bias.to(dtype)
        return F.layer_norm(x.to(dtype), weight.shape, weight, bias, self.eps).to(x.dtype)


# TF32, which training allows on a GPU, keeps 10 bits of what is multiplied. torch has one setting
# for all products, and the compiler takes it at the time that it compiles: this one is an operation
# of its own, which asks for more.
@torch.library.custom_op("ddl::exact_linear", mutates_args=())
def exact_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """F.linear, rounded by neither autocast nor TF32; so are its derivatives, of any order."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x, weight, bias)
    finally:
        torch.set_float32_matmul_precision(before)


@exact_linear.register_fake
def _(x, weight, bias):
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def keep_factors(ctx, inputs, output) -> None:
    x, weight, bias = inputs
    ctx.save_for_backward(x, weight)
    ctx.has_bias = bias is not None


def gradients_of_linear(ctx, gradient):
    x, weight = ctx.saved_tensors
    of_x, of_weight, of_bias = ctx.needs_input_grad
    rows = gradient.flatten(0, -2)
    return (
        exact_linear(gradient, weight.mT, None) if of_x else None,
        exact_linear(rows.mT, x.flatten(0, -2).mT, None) if of_weight else None,
        rows.sum(0) if of_bias and ctx.has_bias else None,
    )


exact_linear.register_autograd(gradients_of_linear, setup_context=keep_factors)


def linear_fp32(layer: nn.Linear, x):
    """`layer(x)` in at least fp32, also under autocast."""
    # For gates and values, which must not be rounded before their sigmoid.
    dtype, product = at_least_fp32(x.dtype), exact_linear if x.device.type == "cuda" else F.linear
    with torch.autocast(x.device.type, enabled=False):
        bias = None if layer.bias is None else layer.bias.to(dtype)
        return product(x.to(dtype), layer.weight.to(dtype), bias)


def rope_tables(config, device, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of position times inverse frequency, each (block_size, rotary_dim / 2)."""
    rotary_dim = int(config.head_dim * config.rope_ratio) // 2 * 2
    pair = torch.arange(0, rotary_dim, 2, device=device, dtype=torch.float64)
    position = torch.arange(config.block_size, device=device, dtype=torch.float64)
    angle = torch.outer(position, config.rope_base ** -(pair / max(rotary_dim, 1)))
    return angle.cos().to(dtype), angle.sin().to(dtype)


def apply_rope(x, cos, sin):
    """x (B, T, H, head_dim), rotated in half-split pairs; cos, sin ([B,] T, rotary_dim / 2)."""
    half = cos.shape[-1]
    x = x.to(cos.dtype)
    x1, x2, rest = x.split((half, half, x.shape[-1] - 2 * half), dim=-1)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)  # broadcast over heads
    return torch.cat((x1 * cos - x2 * sin, x1 * sin + x2 * cos, rest), dim=-1)


class Positions(NamedTuple):
    """The T tokens of a call and where they are: rows of the RoPE tables; with a cache, the rest.

    ids (B, T) int64: NO_TOKEN, -1, left of a shorter prompt. place (1 or B, T) int64: counted from
    a sequence's first. index (T,) int64: their positions among the cache's `length`. mask (B, 1, T,
    seen) bool: which of the cache's first positions each attends over; None: all of the call's own
    up to itself.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    ids: torch.Tensor
    place: torch.Tensor
    index: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    length: int = 0

    def embed(self, table: nn.Embedding):
        """The table's rows of the tokens (B, T, features), zeros where there is none."""
        if self.index is None:
            return table(self.ids)
        # From no token to the readout, every step of a stream maps zero to zero: a convolution over
        # tokens sees before a shorter sequence what it sees before a first token.
        return table(self.ids.clamp_min(0)) * (self.ids != NO_TOKEN).unsqueeze(-1)


class AttentionInputs(NamedTuple):
    """What attention may be given for c (`Site.inputs`): inputs apart, or other values.

    query, key, value (B, T, d): what each is made from. change(v) -> v' (B, T, H, head_dim): what
    attention sums, and the cache keeps, in the values' place; None: these.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    change: Callable | None = None


# On a GPU, layers that share their input are one product from so many tokens on: below, copying
# their weights side by side would cost more than it saves. On a CPU it was measured, and is not
# faster (results/step_choices.md).
TOKENS_FOR_ONE_PRODUCT = 1024
# GEMMs on a GPU want widths that are a multiple of this: others are filled up with zeros.
WIDTH_MULTIPLE = 64


def as_one_product(x) -> bool:
    """Whether layers that share their input x (..., d) are computed as one."""
    return x.device.type == "cuda" and x.shape[:-1].numel() >= TOKENS_FOR_ONE_PRODUCT


def joined_product(x, *layers: nn.Linear):
    """The layers' outputs for x, side by side in one tensor."""
    if as_one_product(x):
        return F.linear(x, torch.cat([layer.weight for layer in layers]))
    return torch.cat([layer(x) for layer in layers], dim=-1)


class Heads:
    """How attention makes its heads: every step by itself.

    `model/kernels` has one that fuses them.
    """

    def __call__(self, attention, x, positions: Positions):
        """x (B, T, d) in the weights' dtype, or AttentionInputs -> q, k, v (B, T, H, head_dim)."""
        layers = attention.c_q, attention.c_k, attention.c_v
        apart = isinstance(x, AttentionInputs)
        if apart:
            parts = [layer(for_product(each, layer.weight)) for layer, each in zip(layers, x)]
        elif as_one_product(x):
            parts = joined_product(x, *layers).chunk(3, dim=-1)
        else:
            parts = [layer(x) for layer in layers]
        q, k, v = (part.unflatten(-1, (attention.num_heads, attention.head_dim)) for part in parts)
        if apart and x.change is not None:
            v = x.change(v).to(v.dtype)
        # One rounding to the compute dtype, after rotation and norm.
        q = attention.q_rms(apply_rope(q, positions.cos, positions.sin)).to(v.dtype)
        k = attention.k_rms(apply_rope(k, positions.cos, positions.sin)).to(v.dtype)
        return q, k, v


def sublayer_matrix(config, inputs: int, outputs: int, last: bool = False) -> nn.Linear:
    """A matrix of attention or MLP; the last one starts smaller, as they add up over the layers."""
    rule = Rule(config.matrix_start(last), HIDDEN, decay=True, muon=True, rounded=True)
    return linear(inputs, outputs, rule)


class CausalSelfAttention(nn.Module):
    """Attention with RoPE, then RMSNorm on q and k; x (B, T, d) or AttentionInputs -> (B, T, d)."""

    fused = "heads"
    heads = Heads()

    def __init__(self, config):
        super().__init__()
        self.num_heads, self.head_dim = config.num_attention_heads, config.head_dim
        inner = self.num_heads * self.head_dim
        self.c_q = sublayer_matrix(config, config.hidden_size, inner)
        self.c_k = sublayer_matrix(config, config.hidden_size, inner)
        self.c_v = sublayer_matrix(config, config.hidden_size, inner)
        self.c_proj = sublayer_matrix(config, inner, config.hidden_size, last=True)
        self.q_rms = RMSNorm(self.head_dim) if config.use_qk_rmsnorm else nn.Identity()
        self.k_rms = RMSNorm(self.head_dim) if config.use_qk_rmsnorm else nn.Identity()

    def forward(self, x, positions: Positions, cache: dict | None = None):
        if torch.is_tensor(x):
            x = for_product(x, self.c_q.weight)
        return self.attend(self.heads(self, x, positions), positions, cache)

    def attend(self, heads, positions: Positions, cache: dict | None):
        """q, k, v (B, T, H, head_dim) -> (B, T, d)."""
        q, k, v = (z.transpose(1, 2) for z in heads)  # (B, H, T, head_dim)
        if cache is not None:
            shape = (*k.shape[:2], positions.length, k.shape[3])
            keys = get_or_create_buffer(cache, "k", shape, k).index_copy_(2, positions.index, k)
            values = get_or_create_buffer(cache, "v", shape, v).index_copy_(2, positions.index, v)
            if positions.mask is not None:
                k, v = (z[:, :, : positions.mask.shape[-1]] for z in (keys, values))
        mask = positions.mask
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.c_proj(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU: c_proj(silu(c_fc1 x) * c_fc2 x), inner width floor(8/3 d)."""

    def __init__(self, config):
        super().__init__()
        inner = 8 * config.hidden_size // 3
        self.c_fc1 = sublayer_matrix(config, config.hidden_size, inner)
        self.c_fc2 = sublayer_matrix(config, config.hidden_size, inner)
        self.c_proj = sublayer_matrix(config, inner, config.hidden_size, last=True)

    def forward(self, x, positions: Positions | None = None, cache: dict | None = None):
        x = for_product(x, self.c_fc1.weight)
        if not as_one_product(x):
            return self.c_proj(F.silu(self.c_fc1(x)) * self.c_fc2(x))
        # The same function: what is filled up is silu(0) * 0 = 0, and meets weights of zero.
        gap = -self.c_fc1.out_features % WIDTH_MULTIPLE
        layers = self.c_fc1, self.c_fc2
        both = torch.cat([F.pad(layer.weight, (0, 0, 0, gap)) for layer in layers])
        gate, value = F.linear(x, both).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * value, F.pad(self.c_proj.weight, (0, gap)))
