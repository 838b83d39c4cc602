"""The dtypes in which layers compute, and linear layers that are not rounded to lower ones."""

import re
from typing import Any

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
