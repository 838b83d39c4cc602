"""Matrix products of attention and the MLP in a form that is faster for many tokens.

With many tokens it pays to copy weights before a product: on a GPU, layers with the same input are
one product of their concatenated weights, which saves 4% of a step (results/gpu/README.md), and the
inner width of the MLP is padded with zeros. The parameters stay those of the plain layers, and the
results are the same up to rounding.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

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


def apply_each(x: torch.Tensor, *layers: nn.Linear) -> tuple[torch.Tensor, ...]:
    """Return layer(x) of each layer, which have no bias, for x (..., d)."""
    if not should_join_products(x):
        return tuple(layer(x) for layer in layers)
    sizes = [layer.out_features for layer in layers]
    return apply_side_by_side(x, *layers).split(sizes, dim=-1)


def apply_side_by_side(x: torch.Tensor, *layers: nn.Linear) -> torch.Tensor:
    """Return layer(x) of each layer as one tensor (..., sum of their out_features)."""
    if should_join_products(x):
        return F.linear(x, torch.cat([layer.weight for layer in layers]))
    return torch.cat([layer(x) for layer in layers], dim=-1)


def count_padding(x: torch.Tensor, inner_size: int) -> int:
    """Return by how many features the inner width of an MLP is padded for an input x (..., d)."""
    multiple = WIDTH_MULTIPLE.get(x.device.type, 1)
    return -inner_size % multiple if should_copy_weights(x) else 0


def should_copy_swiglu_weights(x: torch.Tensor, gate: nn.Linear) -> bool:
    """Return whether `swiglu_of_copied_weights` is faster than plain layers for x (..., d)."""
    return should_join_products(x) or count_padding(x, gate.out_features) > 0


def swiglu(joined: torch.Tensor) -> torch.Tensor:
    """Return silu(gates) * values (..., n) of gates and values side by side (..., 2 n)."""
    gates, values = joined.chunk(2, dim=-1)
    return F.silu(gates) * values


def swiglu_of_copied_weights(
    x: torch.Tensor,
    gate: nn.Linear,
    value: nn.Linear,
    output: nn.Linear,
    swiglu: Callable[[torch.Tensor], torch.Tensor] = swiglu,
) -> torch.Tensor:
    """Return output(silu(gate(x)) * value(x)) for x (..., d) and layers without biases.

    swiglu: what computes `swiglu` of gates and values that are one product
    """
    padding = count_padding(x, gate.out_features)
    # Padded features are silu(0) * 0 = 0 and meet weights of 0, so the function is the same.
    gate_weight = F.pad(gate.weight, (0, 0, 0, padding))
    value_weight = F.pad(value.weight, (0, 0, 0, padding))
    if should_join_products(x):
        h = swiglu(F.linear(x, torch.cat([gate_weight, value_weight])))
    else:
        h = F.silu(F.linear(x, gate_weight)) * F.linear(x, value_weight)
    return F.linear(h, F.pad(output.weight, (0, padding)))
