"""Cross-entropy of a linear layer's outputs without all of them in memory at once."""

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

# 256 MiB in bfloat16, 2,560 tokens of GPT-2's vocabulary, and 1 GiB, 10,496 tokens: a GPU wants
# few, large products.
LOGITS_AT_ONCE = {"cpu": 2**27, "cuda": 2**29}


def linear_cross_entropy(hidden, weight, targets, scale: float = 1.0, chunk: int | None = None):
    """Mean over targets other than -1 of -log softmax(scale * weight hidden)[target], a scalar in
    at least fp32.

    hidden (N, d) in the compute dtype, weight (V, d), targets int64 (N,). The logits are made and
    used `chunk` tokens at a time (None: `chunk_of`) and not kept: gradients, where they are wanted,
    are made along with the loss. What fits one chunk is left to F.cross_entropy. No target that
    counts: nan, and gradients of zero.
    """
    chunk = chunk or chunk_of(hidden.shape[0], weight)
    if hidden.shape[0] <= chunk:
        logits = scaled(F.linear(hidden, weight.to(hidden.dtype)), scale)
        return F.cross_entropy(logits, targets, ignore_index=-1)
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        return LinearCrossEntropy.apply(hidden, weight, targets, scale, chunk)
    return loss_and_gradients(hidden, weight, targets, scale, chunk, False)[0]


def chunk_of(tokens: int, weight) -> int:
    """As few chunks as LOGITS_AT_ONCE allows on the weight's device, on a GPU all of about one
    size.
    """
    device = weight.device.type
    most = max(LOGITS_AT_ONCE.get(device, 2**27) // weight.shape[0] // 256, 1) * 256
    if device == "cpu":
        return most
    even = -(-tokens // -(-tokens // most))
    return -(-even // 256) * 256


def scaled(logits, scale: float):
    """scale * logits in at least fp32."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits if scale == 1 else logits * scale


class LinearCrossEntropy(torch.autograd.Function):
    """Gradients come with the loss; backward multiplies them by the loss's own, a scalar."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, scale, chunk):
        loss, *gradients = loss_and_gradients(hidden, weight, targets, scale, chunk, True)
        ctx.save_for_backward(*gradients)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        return *((g * gradient).to(g.dtype) for g in ctx.saved_tensors), None, None, None


def loss_and_gradients(hidden, weight, targets, scale: float, chunk: int, gradients: bool):
    """(loss, its gradient by hidden, by weight); None for both without `gradients`.

    With p = softmax(scale z) and n targets that count, dloss/dz = scale (p - onehot) / n where the
    target counts. The products with it are in hidden's dtype, as they would be in a linear layer;
    their sum over chunks in weight's.
    """
    rounded, counts = weight.to(hidden.dtype), targets != -1
    losses, hidden_grads = [], []
    weight_grad = torch.zeros_like(weight) if gradients else None
    for h, t, counting in zip(*(x.split(chunk) for x in (hidden, targets.clamp_min(0), counts))):
        z = scaled(F.linear(h, rounded), scale)  # (chunk, V)
        # A sum over the vocabulary, of one number each: compiled, it is taken in the pass of the
        # other two, where `gather` would wait for the last chunk, and the logits with it.
        is_target = torch.arange(weight.shape[0], device=t.device) == t[:, None]
        own, highest = torch.where(is_target, z, 0).sum(1), z.amax(1, keepdim=True)
        powers = (z - highest).exp_()
        del z  # eager, it would be there to the end
        total = powers.sum(1, keepdim=True)
        losses.append(torch.where(counting, (highest + total.log()).squeeze(1) - own, 0).sum())
        if gradients:
            factor = torch.where(counting, scale / counts.sum().to(total.dtype), 0)
            p = powers.div_(total)
            z_grad = torch.where(is_target, p - 1, p).mul_(factor[:, None]).to(h.dtype)
            hidden_grads.append(z_grad @ rounded)
            weight_grad += z_grad.T @ h
    return sum(losses) / counts.sum(), torch.cat(hidden_grads) if gradients else None, weight_grad
