"""The dtypes in which layers compute."""

import torch
import torch.nn.functional as F
from torch import nn


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


def linear_fp32(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """Return `layer(x)` in at least fp32, also under autocast.

    It computes gates and values, which must not be rounded before their sigmoid.
    """
    dtype = at_least_fp32(x.dtype)
    device = x.device.type
    bias = None if layer.bias is None else layer.bias.to(dtype)
    # entering the context takes longer than the product if a single token is decoded
    if not torch.is_autocast_enabled(device):
        return F.linear(x.to(dtype), layer.weight.to(dtype), bias)
    with torch.autocast(device, enabled=False):
        return F.linear(x.to(dtype), layer.weight.to(dtype), bias)
