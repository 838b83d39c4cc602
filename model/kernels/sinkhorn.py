"""Sinkhorn-Knopp of mHC in one kernel launch, forward and backward, by the kernels of liger-kernel.

Only these two of liger-kernel's mHC kernels are used. The others add gradients atomically, in
another order each time, and a resumed run must continue with the bits of an uninterrupted one.
torch.compile fuses what they compute.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
from liger_kernel.ops.mhc import mhc_sinkhorn_bwd, mhc_split_sinkhorn_fwd

from .tiles import check_dtype


@torch.library.custom_op("ddl::fused_sinkhorn_knopp", mutates_args=())
def fused_sinkhorn_knopp(logits: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
    """Compute `model.hyper_connections.sinkhorn_knopp` of logits (..., n, n), in fp32."""
    padded = pad_logits(logits)
    # the results are read, write and mix
    _, _, mix = mhc_split_sinkhorn_fwd(
        padded.maps,
        padded.bias,
        padded.scale,
        padded.scale,
        padded.scale,
        tmax=iterations,
        pre_eps=0.0,
        sinkhorn_eps=eps,
        post_mult=2.0,
    )
    return mix[: count_matrices(logits)].view(logits.shape)


class PaddedLogits(NamedTuple):
    """Logits as liger-kernel takes them, whose kernel also computes mHC's reads and writes."""

    maps: torch.Tensor  # (rows, 2 n + n^2): zeros, which are not used, then the logits
    bias: torch.Tensor  # (2 n + n^2,) zeros
    scale: torch.Tensor  # (1,) one


def pad_logits(logits: torch.Tensor) -> PaddedLogits:
    """Return logits (..., n, n) as liger-kernel takes them.

    liger-kernel compiles a kernel for every number of rows. So that an evaluation of texts of many
    lengths compiles few, the number is rounded up to a multiple of an eighth of a power of two.

    Raises:
        ValueError: the logits are float64
    """
    check_dtype(logits)
    n = logits.shape[-1]
    num_rows = count_matrices(logits)
    multiple = max(1, triton.next_power_of_2(num_rows) // 8)
    num_extra_rows = -num_rows % multiple
    maps = F.pad(logits.float().reshape(-1, n * n), (2 * n, 0, 0, num_extra_rows))
    return PaddedLogits(maps=maps, bias=maps.new_zeros(maps.shape[1]), scale=maps.new_ones(1))


def count_matrices(logits: torch.Tensor) -> int:
    """Return the number of matrices (n, n) in logits (..., n, n)."""
    return logits.shape[:-2].numel()


@fused_sinkhorn_knopp.register_fake
def _(logits, iterations, eps):
    return torch.empty_like(logits, dtype=torch.float32, memory_format=torch.contiguous_format)


@torch.library.custom_op("ddl::fused_sinkhorn_knopp_backward", mutates_args=())
def fused_sinkhorn_knopp_backward(
    gradient: torch.Tensor, logits: torch.Tensor, iterations: int, eps: float
) -> torch.Tensor:
    """Return the gradient of the logits for the gradient of the result, (..., n, n) each."""
    padded = pad_logits(logits)
    gradient = gradient.float().reshape(-1, *logits.shape[-2:])
    num_extra_rows = len(padded.maps) - len(gradient)
    gradient = F.pad(gradient, (0, 0, 0, 0, 0, num_extra_rows)).contiguous()
    grad_logits = mhc_sinkhorn_bwd(
        padded.maps,
        padded.bias,
        padded.scale,
        gradient,
        tmax=iterations,
        sinkhorn_eps=eps,
    )
    return grad_logits[: count_matrices(logits)].view(logits.shape)


@fused_sinkhorn_knopp_backward.register_fake
def _(gradient, logits, iterations, eps):
    return torch.empty_like(logits, dtype=torch.float32, memory_format=torch.contiguous_format)


def setup_context(ctx: Any, inputs: tuple, output: torch.Tensor) -> None:
    logits, iterations, eps = inputs
    ctx.save_for_backward(logits)
    ctx.iterations = iterations
    ctx.eps = eps


def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
    (logits,) = ctx.saved_tensors
    grad_logits = fused_sinkhorn_knopp_backward(
        gradient=gradient, logits=logits, iterations=ctx.iterations, eps=ctx.eps
    )
    return grad_logits, None, None


fused_sinkhorn_knopp.register_autograd(backward, setup_context=setup_context)
