"""Norms, attention with RoPE and the SwiGLU MLP; `products.py` has forms for many tokens.

Notation in shapes: B batch, T tokens, d hidden_size, H heads.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from .cache import NO_TOKEN, get_or_create_buffer
from .config import GPTConfig
from .parameters import HIDDEN, Rule, constant, linear
from .precision import at_least_fp32, for_product


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


def rope_tables(
    config: GPTConfig, device: torch.device, dtype: torch.dtype
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


def sublayer_matrix(
    config: GPTConfig, in_features: int, out_features: int, last: bool = False
) -> nn.Linear:
    """Return a matrix of attention or MLP.

    last: whether it is the output matrix, which starts smaller because the outputs of all sublayers
        add up in the residual stream
    """
    rule = Rule(config.matrix_start(last), HIDDEN, decay=True, muon=True)
    return linear(in_features, out_features, rule)


class CausalSelfAttention(nn.Module):
    """Multi-head causal attention with RoPE, and then RMSNorm, on queries and keys.

    q, k, v = c_q x, c_k x, c_v x
    q, k = q_rms(rope(q)), k_rms(rope(k))
    h = c_proj softmax(q k^T / sqrt(head_dim)) v
    """

    def __init__(self, config: GPTConfig):
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
        q, k, v = self.heads(x, positions)
        return self.attend(q, k, v, positions, cache)

    def heads(
        self, x: torch.Tensor | AttentionInputs, positions: Positions
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return q and k, rotated and normalized, and v, each (B, T, H, head_dim)."""
        q, k, v = self.project(x)
        # q and k are rounded to the compute dtype once, after the rotation and the norm.
        q = self.q_rms(apply_rope(q, positions.cos, positions.sin)).to(v.dtype)
        k = self.k_rms(apply_rope(k, positions.cos, positions.sin)).to(v.dtype)
        return q, k, v

    def project(
        self, x: torch.Tensor | AttentionInputs
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the projections of x to queries, keys and values, each (B, T, H, head_dim)."""
        head_shape = (self.num_heads, self.head_dim)
        if isinstance(x, torch.Tensor):
            q = self.c_q(x).unflatten(-1, head_shape)
            k = self.c_k(x).unflatten(-1, head_shape)
            v = self.c_v(x).unflatten(-1, head_shape)
            return q, k, v
        q = self.c_q(for_product(x.query, self.c_q.weight)).unflatten(-1, head_shape)
        k = self.c_k(for_product(x.key, self.c_k.weight)).unflatten(-1, head_shape)
        v = self.c_v(for_product(x.value, self.c_v.weight)).unflatten(-1, head_shape)
        return q, k, v

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
    """SwiGLU: c_proj(silu(c_fc1 x) * c_fc2 x), with inner width intermediate_size."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        inner_size = config.intermediate_size or 8 * config.hidden_size // 3
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
        return self.c_proj(F.silu(self.c_fc1(x)) * self.c_fc2(x))
