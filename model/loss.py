"""The cross-entropy of a linear layer, computed without all of its logits in memory at once."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

# Largest number of logits per chunk, by device. On a CPU it is 256 MiB in bfloat16, which is 2,560
# tokens of GPT-2's vocabulary; on a GPU, which wants few and large products, 1 GiB, 10,496 tokens.
MAX_LOGITS = {"cpu": 2**27, "cuda": 2**29}

# The loss scale of float16 reaches only the backward pass, and the gradients that are computed in the
# forward pass need one too: over 2^14 tokens, p / 2^14 is 0 in float16 if p < 5e-4. This one cannot
# overflow if all hidden values are below 32.
FLOAT16_GRAD_SCALE = 2.0**10

LOG2_E = math.log2(math.e)


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    scale: float = 1.0,
    chunk_size: int | None = None,
) -> torch.Tensor:
    """Return the mean of -log softmax(scale * weight hidden)[target] over targets other than -1.

    The logits are computed and used chunk by chunk and are not stored: if gradients are needed,
    they are computed together with the loss. A single chunk is left to F.cross_entropy.

    Args:
        hidden: (N, d) in the compute dtype
        weight: (V, d)
        targets: (N,) int64
        scale: positive
        chunk_size: number of tokens per chunk (default: see `default_chunk_size`)

    Returns:
        A scalar in at least fp32; NaN, with gradients of zero, if all targets are -1.
    """
    if chunk_size is None:
        chunk_size = default_chunk_size(hidden.shape[0], weight)
    if hidden.shape[0] <= chunk_size:
        logits = scale_logits(F.linear(hidden, weight.to(hidden.dtype)), scale)
        return F.cross_entropy(logits, targets, ignore_index=-1)
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        return LinearCrossEntropy.apply(hidden, weight, targets, scale, chunk_size)
    loss, _, _ = loss_and_gradients(
        hidden, weight, targets, scale, chunk_size, with_gradients=False
    )
    return loss


def default_chunk_size(num_tokens: int, weight: torch.Tensor) -> int:
    """Return the number of tokens per chunk, a multiple of 256.

    There are as few chunks as MAX_LOGITS allows; on a GPU all have about the same size.
    """
    device = weight.device.type
    max_logits = MAX_LOGITS.get(device, MAX_LOGITS["cpu"])
    max_chunk_size = max(max_logits // weight.shape[0] // 256, 1) * 256
    if device == "cpu":
        return max_chunk_size
    num_chunks = -(-num_tokens // max_chunk_size)
    even_size = -(-num_tokens // num_chunks)
    return -(-even_size // 256) * 256


def scale_logits(logits: torch.Tensor, scale: float) -> torch.Tensor:
    """Return scale * logits in at least fp32."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits if scale == 1 else logits * scale


class LinearCrossEntropy(torch.autograd.Function):
    """Computes the gradients in the forward pass; backward multiplies them by that of the loss."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        scale: float,
        chunk_size: int,
    ) -> torch.Tensor:
        loss, hidden_grad, weight_grad = loss_and_gradients(
            hidden, weight, targets, scale, chunk_size, with_gradients=True
        )
        ctx.grad_scale = FLOAT16_GRAD_SCALE if hidden.dtype == torch.float16 else 1.0
        ctx.save_for_backward(hidden_grad, weight_grad)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, loss_grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_grad, weight_grad = ctx.saved_tensors
        loss_grad = loss_grad / ctx.grad_scale
        return (
            (hidden_grad * loss_grad).to(hidden_grad.dtype),
            (weight_grad * loss_grad).to(weight_grad.dtype),
            None,
            None,
            None,
        )


def loss_and_gradients(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    scale: float,
    chunk_size: int,
    with_gradients: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return the loss and its gradients with respect to hidden and weight, or None for both.

    With p = softmax(scale * z) and n targets other than -1, dloss/dz = scale * (p - onehot) / n for
    the tokens of these targets. The products with it are computed in the dtype of hidden, as in a
    linear layer, and summed over chunks in that of weight. In float16 the gradients are multiplied by
    FLOAT16_GRAD_SCALE.

    The softmax is in base 2, p = 2^(y - log2 sum 2^y) with y = scale * log2(e) * z, and the factor of
    the gradient goes into the exponent. torch.compile makes 24 instructions per logit of it for a
    GPU, and 63 of the same with exp, which then limit the speed.
    """
    rounded_weight = weight.to(hidden.dtype)
    is_counted = targets != -1
    losses = []
    hidden_grads = []
    weight_grad = torch.zeros_like(weight) if with_gradients else None
    chunks = zip(
        hidden.split(chunk_size),
        targets.clamp_min(0).split(chunk_size),
        is_counted.split(chunk_size),
    )
    for h, target, counted in chunks:
        y = scale_logits(F.linear(h, rounded_weight), scale * LOG2_E)  # (chunk, V)
        # The logit of the target is computed again from its two rows. A `gather` from y would wait
        # for the last chunk, and would keep all logits until then.
        target_logit = (h.to(y.dtype) * rounded_weight[target].to(y.dtype)).sum(1) * scale
        max_logit = y.amax(1, keepdim=True)
        exp_sum = (y - max_logit).exp2_().sum(1, keepdim=True)
        log2_sum_exp = max_logit + exp_sum.log2()  # (chunk, 1)
        log_sum_exp = log2_sum_exp.squeeze(1) / LOG2_E
        losses.append(torch.where(counted, log_sum_exp - target_logit, 0).sum())
        if with_gradients:
            grad_scale = FLOAT16_GRAD_SCALE if h.dtype == torch.float16 else 1.0
            num_counted = is_counted.sum().to(y.dtype)
            factor = torch.where(counted, scale * grad_scale / num_counted, 0)[:, None]
            # a factor of 0 makes the exponent -inf, and p 0
            scaled_p = (y - (log2_sum_exp - factor.log2())).exp2_()
            del y  # frees the memory in eager mode
            is_target = torch.arange(weight.shape[0], device=target.device) == target[:, None]
            z_grad = torch.where(is_target, scaled_p - factor, scaled_p).to(h.dtype)
            hidden_grads.append(z_grad @ rounded_weight)
            weight_grad += z_grad.T @ h
    hidden_grad = torch.cat(hidden_grads) if with_gradients else None
    return sum(losses) / is_counted.sum(), hidden_grad, weight_grad
