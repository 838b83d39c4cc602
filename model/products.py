"""Attention and the MLP of `layers.py` in a form that is faster for many tokens.

With many tokens it pays to copy weights before a product: on a GPU, layers with the same input are
one product of their concatenated weights, which saves 4% of a step (results/gpu/README.md), and the
inner width of the MLP is padded with zeros. The parameters are those of the plain layers, and the
results are the same up to rounding. model/kernels puts fused kernels into both layers.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from .layers import MLP, AttentionInputs, CausalSelfAttention, Positions
from .precision import for_product

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

    On a CPU this was measured not to be faster (results/step_choices.md of commit 5a3b22a5).
    """
    return x.device.type == "cuda" and should_copy_weights(x)


def apply_side_by_side(x: torch.Tensor, *layers: nn.Linear) -> torch.Tensor:
    """Return layer(x) of each layer as one tensor (..., sum of their out_features)."""
    if should_join_products(x):
        return F.linear(x, torch.cat([layer.weight for layer in layers]))
    return torch.cat([layer(x) for layer in layers], dim=-1)


def count_padding(x: torch.Tensor, inner_size: int) -> int:
    """Return by how many features the inner width of an MLP is padded for an input x (..., d)."""
    multiple = WIDTH_MULTIPLE.get(x.device.type, 1)
    return -inner_size % multiple if should_copy_weights(x) else 0


def swiglu(joined: torch.Tensor) -> torch.Tensor:
    """Return silu(gates) * values (..., n) of gates and values side by side (..., 2 n)."""
    gates, values = joined.chunk(2, dim=-1)
    return F.silu(gates) * values


class JoinedAttention(CausalSelfAttention):
    """Attention whose queries, keys and values are one product where that is faster."""

    # fused_heads(attention, x, positions): a kernel in place of `heads`, for x (B, T, d)
    fused_heads: Callable | None = None

    def heads(
        self, x: torch.Tensor | AttentionInputs, positions: Positions
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        # queries, keys and values with inputs of their own are not one product
        if self.fused_heads is None or not isinstance(x, torch.Tensor):
            return super().heads(x, positions)
        return self.fused_heads(self, x, positions)

    def project(
        self, x: torch.Tensor | AttentionInputs
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if not isinstance(x, torch.Tensor) or not should_join_products(x):
            return super().project(x)
        qkv = apply_side_by_side(x, self.c_q, self.c_k, self.c_v)
        return qkv.unflatten(-1, (3, self.num_heads, self.head_dim)).unbind(-3)


class JoinedMLP(MLP):
    """SwiGLU of one product, and of a padded inner width, where that is faster."""

    # what computes silu(gates) * values of a joined product: `swiglu`, or a kernel
    swiglu: Callable = staticmethod(swiglu)

    def forward(
        self,
        x: torch.Tensor,
        positions: Positions | None = None,
        cache: dict | None = None,
    ) -> torch.Tensor:
        x = for_product(x, self.c_fc1.weight)
        padding = count_padding(x, self.c_fc1.out_features)
        if not should_join_products(x) and padding == 0:
            return super().forward(x)
        # Padded features are silu(0) * 0 = 0 and meet weights of 0, so the function is the same.
        gate_weight = F.pad(self.c_fc1.weight, (0, 0, 0, padding))
        value_weight = F.pad(self.c_fc2.weight, (0, 0, 0, padding))
        if should_join_products(x):
            h = self.swiglu(F.linear(x, torch.cat([gate_weight, value_weight])))
        else:
            h = F.silu(F.linear(x, gate_weight)) * F.linear(x, value_weight)
        return F.linear(h, F.pad(self.c_proj.weight, (0, padding)))
