"""The layers of every variant: RMSNorm, attention with RoPE, and the SwiGLU MLP.

Notation in shapes: B batch, T tokens, d hidden_size, H heads.
"""

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from .decoding import NO_TOKEN, get_or_create_buffer
from .parameters import HIDDEN, Rule, constant, linear

if TYPE_CHECKING:
    from .gpt import GPTConfig


def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of statistics, gates and dot products: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def compute_dtype(weight: torch.Tensor) -> torch.dtype:
    """Return the dtype of products with the weight: that of autocast if it is on, or the weight's."""
    device = weight.device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return weight.dtype


def for_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return x in the dtype of the weight, or as it is under autocast, which casts both."""
    return x if torch.is_autocast_enabled(x.device.type) else x.to(weight.dtype)


class RMSNorm(nn.Module):
    """y = weight * x / sqrt(mean(x^2) + eps) over the last axis, computed in at least fp32."""

    def __init__(self, size: int, eps: float = 1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.rules = {"weight": Rule(constant(1.0))}
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.rms_norm(x.to(at_least_fp32(x.dtype)), self.weight.shape, eps=self.eps)
        return (y * self.weight).to(x.dtype)


class LayerNorm(nn.Module):
    """y = weight * (x - mean) / sqrt(var + eps) + bias over the last axis, in at least fp32."""

    def __init__(self, size: int, eps: float = 1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.bias = nn.Parameter(torch.empty(size))
        self.rules = {
            "weight": Rule(constant(1.0)),
            "bias": Rule(constant(0.0)),
        }
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dtype = at_least_fp32(x.dtype)
        y = F.layer_norm(
            x.to(dtype),
            self.weight.shape,
            self.weight.to(dtype),
            self.bias.to(dtype),
            self.eps,
        )
        return y.to(x.dtype)


def name_operator(name: str) -> str:
    """Return the full name of a custom operator of these modules.

    An exported folder has a copy of them, which transformers may execute in the same process. Each
    copy has names of its own, because registering an operator frees an earlier one of the same name,
    which may be in use.
    """
    if __package__ == "model":
        return f"ddl::{name}"
    return f"ddl::{name}_{re.sub(r'[^0-9A-Za-z]', '_', __package__)}"


# TF32, which training allows on a GPU, keeps 10 bits of the factors. torch has one precision for all
# products, and the compiler reads it when it compiles; a custom operator can set its own.
@torch.library.custom_op(name_operator("exact_linear"), mutates_args=())
def exact_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Compute F.linear without autocast and without TF32, and so its derivatives of any order."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x, weight, bias)
    finally:
        torch.set_float32_matmul_precision(precision)


@exact_linear.register_fake
def _(x, weight, bias):
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def save_factors(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
    x, weight, bias = inputs
    ctx.save_for_backward(x, weight)
    ctx.has_bias = bias is not None


def linear_backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of x, weight and bias; None where they are not needed."""
    x, weight = ctx.saved_tensors
    needs_x, needs_weight, needs_bias = ctx.needs_input_grad
    grad_rows = grad_output.flatten(0, -2)
    grad_x = None
    grad_weight = None
    grad_bias = None
    if needs_x:
        grad_x = exact_linear(grad_output, weight.mT, None)
    if needs_weight:
        grad_weight = exact_linear(grad_rows.mT, x.flatten(0, -2).mT, None)
    if needs_bias and ctx.has_bias:
        grad_bias = grad_rows.sum(0)
    return grad_x, grad_weight, grad_bias


exact_linear.register_autograd(linear_backward, setup_context=save_factors)


def linear_fp32(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """Return `layer(x)` in at least fp32, also under autocast.

    It computes gates and values, which must not be rounded before their sigmoid.
    """
    dtype = at_least_fp32(x.dtype)
    device = x.device.type
    product = exact_linear if device == "cuda" else F.linear
    bias = None if layer.bias is None else layer.bias.to(dtype)
    # entering the context takes longer than the product if a single token is decoded
    if not torch.is_autocast_enabled(device):
        return product(x.to(dtype), layer.weight.to(dtype), bias)
    with torch.autocast(device, enabled=False):
        return product(x.to(dtype), layer.weight.to(dtype), bias)


def rope_tables(
    config: "GPTConfig", device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin of position * inverse frequency, each (block_size, rotary_dim / 2)."""
    rotary_dim = int(config.head_dim * config.rope_ratio) // 2 * 2
    pair = torch.arange(0, rotary_dim, 2, device=device, dtype=torch.float64)
    position = torch.arange(config.block_size, device=device, dtype=torch.float64)
    angle = torch.outer(position, config.rope_base ** -(pair / max(rotary_dim, 1)))
    return angle.cos().to(dtype), angle.sin().to(dtype)


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x (B, T, H, head_dim) in half-split pairs.

    cos, sin: (T, rotary_dim / 2) or (B, T, rotary_dim / 2); the features of each head beyond
        rotary_dim stay as they are
    """
    half = cos.shape[-1]
    x = x.to(cos.dtype)
    x1, x2, rest = x.split((half, half, x.shape[-1] - 2 * half), dim=-1)
    cos = cos.unsqueeze(-2)  # broadcast over heads
    sin = sin.unsqueeze(-2)
    return torch.cat((x1 * cos - x2 * sin, x1 * sin + x2 * cos, rest), dim=-1)


class Positions(NamedTuple):
    """The T tokens of a call and their positions; the last three fields are set with a cache."""

    # rows of the RoPE tables, (T, rotary_dim / 2), or (B, T, rotary_dim / 2) with a cache
    cos: torch.Tensor
    sin: torch.Tensor

    # token ids (B, T), int64; NO_TOKEN, which is -1, stands to the left of a shorter prompt
    ids: torch.Tensor

    # positions counted from the first token of each sequence, (1, T) or (B, T), int64
    in_sequence: torch.Tensor

    # positions in the cache (T,), int64
    in_cache: torch.Tensor | None = None

    # (B, 1, T, positions of the cache) bool: the positions that each token attends to; None for
    # causal attention over the tokens of the call
    mask: torch.Tensor | None = None

    # number of positions of the cache
    cache_length: int = 0

    def embed(self, table: nn.Embedding) -> torch.Tensor:
        """Return the rows of the table for the tokens, (B, T, features), or 0 for NO_TOKEN."""
        if self.in_cache is None:
            return table(self.ids)
        # From here to the readout, every step of a stream maps zero to zero, so that a convolution
        # over tokens gets the same to the left of a shorter prompt as before a first token.
        return table(self.ids.clamp_min(0)) * (self.ids != NO_TOKEN).unsqueeze(-1)


class AttentionInputs(NamedTuple):
    """Inputs of attention that a site may give in place of c (see `Site.inputs`)."""

    # (B, T, d): what queries, keys and values are computed from
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor

    # change_values(v) -> (B, T, H, head_dim): what attention uses, and the cache stores, in place
    # of the values v (B, T, H, head_dim); None for v itself
    change_values: Callable[[torch.Tensor], torch.Tensor] | None = None


# From this number of tokens on, weights are concatenated or padded where that makes products faster;
# with fewer tokens, copying the weights would cost more than it saves.
MIN_TOKENS_FOR_COPIED_WEIGHTS = 1024
# Products are fastest at widths that are a multiple of this; other widths are padded with zeros.
WIDTH_MULTIPLE = {"cuda": 64, "cpu": 16}


def should_copy_weights(x: torch.Tensor) -> bool:
    """Return whether an input x (..., d) has so many tokens that copying weights pays."""
    return x.shape[:-1].numel() >= MIN_TOKENS_FOR_COPIED_WEIGHTS


def should_join_products(x: torch.Tensor) -> bool:
    """Return whether layers that share their input x (..., d) are computed as one product.

    On a CPU this was measured not to be faster (results/step_choices.md).
    """
    return x.device.type == "cuda" and should_copy_weights(x)


class Heads:
    """How attention computes its heads: one operation at a time (model/kernels fuses them)."""

    def __call__(
        self,
        attention: "CausalSelfAttention",
        x: torch.Tensor | AttentionInputs,
        positions: Positions,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return q, k and v, each (B, T, H, head_dim).

        x: (B, T, d) in the dtype of the weights, or AttentionInputs
        """
        if isinstance(x, AttentionInputs):
            q = attention.c_q(for_product(x.query, attention.c_q.weight))
            k = attention.c_k(for_product(x.key, attention.c_k.weight))
            v = attention.c_v(for_product(x.value, attention.c_v.weight))
        elif should_join_products(x):
            q, k, v = project_qkv(attention, x).chunk(3, dim=-1)
        else:
            q = attention.c_q(x)
            k = attention.c_k(x)
            v = attention.c_v(x)
        head_shape = (attention.num_heads, attention.head_dim)
        q = q.unflatten(-1, head_shape)
        k = k.unflatten(-1, head_shape)
        v = v.unflatten(-1, head_shape)
        if isinstance(x, AttentionInputs) and x.change_values is not None:
            v = x.change_values(v).to(v.dtype)
        # q and k are rounded to the compute dtype once, after the rotation and the norm.
        q = attention.q_rms(apply_rope(q, positions.cos, positions.sin)).to(v.dtype)
        k = attention.k_rms(apply_rope(k, positions.cos, positions.sin)).to(v.dtype)
        return q, k, v


def project_qkv(attention: "CausalSelfAttention", x: torch.Tensor) -> torch.Tensor:
    """Return queries, keys and values of x (B, T, d) side by side, (B, T, 3 * H * head_dim)."""
    layers = (attention.c_q, attention.c_k, attention.c_v)
    if should_join_products(x):
        return F.linear(x, torch.cat([layer.weight for layer in layers]))
    return torch.cat([layer(x) for layer in layers], dim=-1)


def sublayer_matrix(
    config: "GPTConfig", in_features: int, out_features: int, last: bool = False
) -> nn.Linear:
    """Return a matrix of attention or MLP.

    last: whether it is the output matrix, which starts smaller because the outputs of all sublayers
        add up in the residual stream
    """
    rule = Rule(config.matrix_start(last), HIDDEN, decay=True, muon=True, rounded=True)
    return linear(in_features, out_features, rule)


class CausalSelfAttention(nn.Module):
    """Multi-head causal attention with RoPE, and then RMSNorm, on queries and keys."""

    heads = Heads()

    def __init__(self, config: "GPTConfig"):
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.head_dim = config.head_dim
        inner_size = self.num_heads * self.head_dim
        self.c_q = sublayer_matrix(config, config.hidden_size, inner_size)
        self.c_k = sublayer_matrix(config, config.hidden_size, inner_size)
        self.c_v = sublayer_matrix(config, config.hidden_size, inner_size)
        self.c_proj = sublayer_matrix(config, inner_size, config.hidden_size, last=True)
        self.q_rms = RMSNorm(self.head_dim) if config.use_qk_rmsnorm else nn.Identity()
        self.k_rms = RMSNorm(self.head_dim) if config.use_qk_rmsnorm else nn.Identity()

    def forward(
        self,
        x: torch.Tensor | AttentionInputs,
        positions: Positions,
        cache: dict | None = None,
    ) -> torch.Tensor:
        """Return (B, T, d) of x (B, T, d) or AttentionInputs."""
        if isinstance(x, torch.Tensor):
            x = for_product(x, self.c_q.weight)
        q, k, v = self.heads(self, x, positions)
        return self.attend(q, k, v, positions, cache)

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        positions: Positions,
        cache: dict | None,
    ) -> torch.Tensor:
        """Return the output (B, T, d) of queries, keys and values (B, T, H, head_dim)."""
        q = q.transpose(1, 2)  # (B, H, T, head_dim)
        k = k.transpose(1, 2)
        v = v.transpose(1, 2)
        mask = positions.mask
        if cache is not None:
            shape = (*k.shape[:2], positions.cache_length, self.head_dim)
            all_keys = get_or_create_buffer(cache, "k", shape, k)
            all_values = get_or_create_buffer(cache, "v", shape, v)
            all_keys.index_copy_(2, positions.in_cache, k)
            all_values.index_copy_(2, positions.in_cache, v)
            if mask is not None:
                k = all_keys[:, :, : mask.shape[-1]]
                v = all_values[:, :, : mask.shape[-1]]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.c_proj(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU: c_proj(silu(c_fc1 x) * c_fc2 x), with inner width floor(8/3 d)."""

    def __init__(self, config: "GPTConfig"):
        super().__init__()
        inner_size = 8 * config.hidden_size // 3
        self.c_fc1 = sublayer_matrix(config, config.hidden_size, inner_size)
        self.c_fc2 = sublayer_matrix(config, config.hidden_size, inner_size)
        self.c_proj = sublayer_matrix(config, inner_size, config.hidden_size, last=True)

    def forward(
        self,
        x: torch.Tensor,
        positions: Positions | None = None,
        cache: dict | None = None,
    ) -> torch.Tensor:
        """Return (B, T, d) of x (B, T, d); positions and cache are not used."""
        x = for_product(x, self.c_fc1.weight)
        padding = self.count_padding(x)
        if padding == 0 and not should_join_products(x):
            return self.c_proj(F.silu(self.c_fc1(x)) * self.c_fc2(x))
        # Padded features are silu(0) * 0 = 0 and meet weights of 0, so the function is the same.
        gate_weight = F.pad(self.c_fc1.weight, (0, 0, 0, padding))
        value_weight = F.pad(self.c_fc2.weight, (0, 0, 0, padding))
        if should_join_products(x):
            gate, value = F.linear(x, torch.cat([gate_weight, value_weight])).chunk(2, dim=-1)
        else:
            gate = F.linear(x, gate_weight)
            value = F.linear(x, value_weight)
        return F.linear(F.silu(gate) * value, F.pad(self.c_proj.weight, (0, padding)))

    def count_padding(self, x: torch.Tensor) -> int:
        """Return by how many features the inner width is padded for an input x (B, T, d)."""
        multiple = WIDTH_MULTIPLE.get(x.device.type, 1)
        return -self.c_fc1.out_features % multiple if should_copy_weights(x) else 0
