"""Sinkhorn-Knopp of mHC in one kernel launch, forward and backward: those of liger-kernel, as one
operation each.

Of liger-kernel's mHC these two alone are used: the others sum gradients by atomic additions, in
another order each time, and a run that goes on must give the bits that it would have given. What
they compute, torch.compile fuses too.
"""

import torch
from liger_kernel.ops.mhc import mhc_sinkhorn_bwd, mhc_split_sinkhorn_fwd

from model.hyper_connections import keep_logits
from model.kernels.stream import check_dtype


@torch.library.custom_op("ddl::fused_sinkhorn_knopp", mutates_args=())
def fused_sinkhorn_knopp(logits: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
    """What `model.hyper_connections.sinkhorn_knopp` computes, in fp32."""
    maps, bias, one = as_maps(logits)
    settings = {"tmax": iterations, "pre_eps": 0.0, "sinkhorn_eps": eps, "post_mult": 2.0}
    return mhc_split_sinkhorn_fwd(maps, bias, one, one, one, **settings)[2].view(logits.shape)


def as_maps(logits):
    """logits (..., n, n) as the last of the maps (tokens, 2 n + n^2) that the kernel takes; its
    bias and its scale.

    ValueError: they are float64.
    """
    check_dtype(logits)
    n = logits.shape[-1]
    maps = torch.nn.functional.pad(logits.float().reshape(-1, n * n), (2 * n, 0))
    return maps, maps.new_zeros(maps.shape[1]), maps.new_ones(1)


@fused_sinkhorn_knopp.register_fake
def _(logits, iterations, eps):
    return torch.empty_like(logits, dtype=torch.float32, memory_format=torch.contiguous_format)


@torch.library.custom_op("ddl::fused_sinkhorn_knopp_backward", mutates_args=())
def fused_sinkhorn_knopp_backward(
    gradient: torch.Tensor, logits: torch.Tensor, iterations: int, eps: float
) -> torch.Tensor:
    gradient = gradient.float().reshape(-1, *logits.shape[-2:]).contiguous()
    maps, bias, one = as_maps(logits)
    return mhc_sinkhorn_bwd(maps, bias, one, gradient, tmax=iterations, sinkhorn_eps=eps).view(
        logits.shape
    )


@fused_sinkhorn_knopp_backward.register_fake
def _(gradient, logits, iterations, eps):
    return torch.empty_like(logits, dtype=torch.float32, memory_format=torch.contiguous_format)


def gradient_by_logits(ctx, gradient):
    return fused_sinkhorn_knopp_backward(gradient, *ctx.saved_tensors, *ctx.settings), None, None


fused_sinkhorn_knopp.register_autograd(gradient_by_logits, setup_context=keep_logits)
