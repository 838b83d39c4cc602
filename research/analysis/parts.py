"""What analyses look at in the parts of streams, by class: edits, details, directions, shares and shortcuts.

A key is a class by its module and name. A class without an entry, a newcomer's for example, has what every stream has:
its statistics, h as the direction of its writes, and h = 0 as its edit. A subclass has its parent's entries as long as
it keeps the parent's forward; else it computes something else.

    EDITS      of a read, write or `post_write`, edits(part) -> {name: function}: functions that take the arguments of
               its forward and compute the same but for one piece
    DETAILS    details(write, state, h, x_in, c, written), of a read details(read, state) -> {name: (B, T, ...)}: more
               numbers, vectors or matrices of each token
    ALONG      along(write, state, h, x_in, c) -> (B, T, d): the direction that a write writes along
    SHARES     shares(write) -> {statistic: {label: (low, high)}}: intervals, ends left out, that tokens are counted in
    SHORTCUTS  shortcut(write, state, h, x_in, c) -> a map of products.py: what becomes of the state,
               gates and directions as they are
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from model.attention_residuals import DeltaAttention, weighted_sum
from model.block import Add, Past
from model.layers import at_least_fp32
from model.residual import DeltaRewrite, delta_rewrite, project_onto_k, read_value_channels
from research.analysis.products import Diagonal, LowRank, Mix, identity


def entry(table: dict, part):
    """What the table says of a part of a site, None: nothing."""
    for parent in type(part).__mro__:
        if getattr(parent, "forward", None) is not getattr(type(part), "forward", None):
            break
        if (found := table.get(f"{parent.__module__}.{parent.__qualname__}")) is not None:
            return found
    return None


def shares_of(write: nn.Module) -> dict[str, dict[str, tuple[float, float]]]:
    """Return the intervals of a write's statistics, {} where it has none."""
    shares = entry(SHARES, write)
    return {} if shares is None else shares(write)


def details_of_value_channels(read, state) -> dict:
    """What a read of the state (B, T, d_v, d) makes of its value channels; nothing of a single one.

    `column_share` (B, T, d_v): the norm of a channel's part of x_in over the sum of those of all. Of the weights
    that read the channels, the same for every token: `kernel_norm` (B, T, d_v), `kernel_cosine` (B, T, d_v, d_v).
    """
    weights = read.weights()  # (K, d_v, d)
    num_channels = weights.shape[1]
    if num_channels == 1:
        return {}
    parts = torch.stack(
        [
            read_value_channels(state[:, :, j, None], weights[:, j, None])
            for j in range(num_channels)
        ],
        dim=2,
    )
    norms = torch.linalg.vector_norm(parts, dim=-1)
    fraction = norms / norms.sum(-1, keepdim=True).clamp_min(torch.finfo(norms.dtype).tiny)
    kernels = weights.transpose(0, 1).flatten(1)  # (d_v, K d)
    tokens = state.shape[:2]
    return {
        "column_share": fraction,
        "kernel_norm": torch.linalg.vector_norm(kernels, dim=-1).expand(*tokens, -1),
        "kernel_cosine": cosines(kernels).expand(*tokens, -1, -1),
    }


def cosines(x):
    """Between the rows of x (..., n, d), (..., n, n); 0 for rows of zeros."""
    unit = F.normalize(x, dim=-1)
    return unit @ unit.mT


def edits_of_laurel(write) -> dict:
    """The additive write."""
    name = "a=b=1" if write.weighted else "no low rank"
    return {name: partial(Add.forward, write)}


def shortcut_of_laurel(write, state, h, x_in, c) -> Diagonal | LowRank:
    if write.weighted:
        return Diagonal((2 * write.logits.softmax(0)[1]).expand(1, 1, write.hidden_size))
    return LowRank(write.up.weight.mT[None, None], write.down.weight[None, None])


def edits_of_connection(read) -> dict:
    def without_mixing(state, past=None):
        output = read(state, past)
        identity = torch.eye(read.num_streams, dtype=output.mix.dtype, device=output.mix.device)
        return output._replace(mix=identity.expand_as(output.mix))

    def with_unit_writes(state, past=None):
        output = read(state, past)
        return output._replace(write=torch.ones_like(output.write))

    edits = {"write=1": with_unit_writes}
    if getattr(read, "kind", None) != "identity":
        return {"mix=I": without_mixing, **edits}
    return edits


def edits_of_gated_read(read: nn.Module) -> dict[str, Callable]:
    """Return the reads with one of the two gates at the value that zero logits give it."""

    def with_uniform_gate(state: torch.Tensor, past: Past | None = None) -> NamedTuple:
        output = read(state, past)
        return output._replace(x_in=read.normalize(state).mean(2) / 2)

    def with_unit_writes(state: torch.Tensor, past: Past | None = None) -> NamedTuple:
        output = read(state, past)
        return output._replace(inject=torch.ones_like(output.inject))

    return {"a=1/2": with_uniform_gate, "g=1": with_unit_writes}


def details_of_gated_read(read: nn.Module, state: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return both gates of each token by stream, (B, T, n); that of the read is a mean over features."""
    output = read(state)
    return {"read_gate_of_stream": output.gate.mean(-1), "inject_of_stream": output.inject}


def edits_of_depth_attention(read) -> dict:
    """None of the first site, which has one source."""
    if read.num_sources == 1:
        return {}

    def with_weights(change, state, past=None):
        """The read with its weights a (B, T, sources) changed."""
        _, weights = read(state, past)
        changed = change(weights)
        tensors = [tensor.to(changed.dtype) for tensor in state]
        if isinstance(read, DeltaAttention):
            x, *sources = tensors
            return x + read.gate * weighted_sum(changed, sources), changed
        return weighted_sum(changed, tensors), changed

    def uniform(weights):
        return torch.full_like(weights, 1 / weights.shape[-1])

    def last(weights):
        changed = torch.zeros_like(weights)
        changed[..., -1] = 1
        return changed

    return {
        "uniform weights": partial(with_weights, uniform),
        "last source alone": partial(with_weights, last),
    }


def details_of_depth_attention(part, state) -> dict:
    """Of each token (B, T, sources): the weights a."""
    _, weights = part(state)
    return {"source_weight": weights}


def shortcut_of_add(write, state, h, x_in, c) -> Diagonal:
    return identity(state)


def details_of_connection(part, state) -> dict:
    """Of each token: read and write (B, T, n), and mix (B, T, n, n)."""
    streams = state.to(at_least_fp32(state.dtype))
    found = zip(("read", "write", "mix"), part.weights(streams))
    shapes = {"read": (-1,), "write": (-1,), "mix": (-1, -1)}
    return {name: weights.expand(*state.shape[:2], *shapes[name]) for name, weights in found}


def shortcut_of_mix_and_add(write, state, h, taken, c) -> Mix:
    """mix^T, which is one for all tokens where it is learned numbers."""
    mix = taken[2]
    return Mix(mix.mT[(None,) * (4 - mix.ndim)])


def edits_of_mgt(write) -> dict:
    def with_values(state, h, x_in, c, past=None, gate=None, beta=None, alpha=None):
        """The write with numbers in place of its gate, beta or alpha."""
        x = state.to(at_least_fp32(state.dtype))
        gate = write.compute_gate(state) if gate is None else gate
        update = gate * h.to(x.dtype)
        if write.config.has_beta:
            beta = write.compute_beta(state) if beta is None else beta
            alpha = write.alpha if alpha is None else alpha
            update = beta * (update - alpha * x)
        return (x + update).to(state.dtype)

    edits = {}
    if write.config.has_gate:
        edits["gate=1"] = partial(with_values, gate=1.0)
    if write.config.has_beta:
        edits["beta=1"] = partial(with_values, beta=1.0)
        edits["alpha=0"] = partial(with_values, alpha=0.0)
    return edits


def details_of_mgt(part, state, h, x_in, c, written) -> dict:
    """Of each token (B, T, d): beta."""
    return {"beta_of_feature": part.compute_beta(state)} if part.config.has_beta else {}


def shortcut_of_mgt(write, state, h, x_in, c) -> Diagonal:
    """1 - beta alpha of every feature."""
    return (
        Diagonal(1 - write.compute_beta(state) * write.alpha)
        if write.config.has_beta
        else identity(state)
    )


def edits_of_delta_rewrite(write) -> dict:
    config = write.config
    has_own_gate = config.ddl_erase_gate == "own"

    def rewrite(
        state, h, x_in, c, past=None, beta=None, erase=config.erases, value=None, shared=False
    ):
        """Write with a number in place of the gates, without the erase, with another value, or with one gate."""
        write_gate = write.compute_beta(state, x_in, c)
        erase_gate = write_gate if shared else write.compute_beta_erase(state, x_in, c)
        if beta is not None:
            write_gate = torch.full_like(write_gate, beta)
            erase_gate = write_gate
        written_value = write.compute_v(h, x_in, c)
        if value is not None:
            written_value = torch.full_like(written_value, value)
        return delta_rewrite(
            state,
            write.compute_k_hat(state, h, x_in, c),
            config.branch_mult * write_gate,
            written_value,
            erase=erase,
            beta_erase=config.branch_mult * erase_gate if has_own_gate else None,
        )

    edits = {f"beta={beta}": partial(rewrite, beta=float(beta)) for beta in range(3)}
    if config.ddl_update == "delta":
        edits["no erase"] = partial(rewrite, erase=False)
    if has_own_gate:
        edits["no write"] = partial(rewrite, value=0.0)
        edits["beta_erase=beta"] = partial(rewrite, shared=True)
    return edits


def edits_of_scaled_add(write) -> dict:
    def with_scale(scale, state, h, x_in, c, past=None):
        return (state + scale * h).to(state.dtype)

    return {"a=0": partial(with_scale, 0.0), "a=1": partial(with_scale, 1.0)}


def edits_of_depth_average(average) -> dict:
    """X as the block has it."""
    return {"A=I": lambda outputs: (*outputs, outputs[-1])}


def edits_of_wide_add(write) -> dict:
    def with_unit_weights(state, h, x_in, c, past=None):
        return (state + h.unsqueeze(2)).to(state.dtype)

    return {"w=1": with_unit_weights}


def details_of_delta_rewrite(part, state, h, x_in, c, written) -> dict:
    """Of each token: the norms of what is erased, beta k k^T X, and written, beta k v^T, over that of X (B, T); the
    discrepancy's ratio, after to before, and |1 - beta|, which it should be with one gate (B, T); the value v
    (B, T, d_v). The erase alone has no value, and nothing written."""
    config = part.config
    khat, value = part.compute_k_hat(state, h, x_in, c), part.compute_v(h, x_in, c)
    said, norm = (
        part.statistics(state, h, x_in, c, written),
        partial(torch.linalg.vector_norm, dim=-1),
    )
    beta = config.branch_mult * said["beta"]
    beta_erase = config.branch_mult * said.get("beta_erase", said["beta"])
    length = norm(khat) / math.sqrt(khat.shape[-1]) / norm(state.flatten(2).to(khat.dtype))
    found = {}
    if config.ddl_update != "erase_only":
        found["written"] = beta * length * norm(value)
        found["value"] = value
    if config.erases:
        found["erased"] = beta_erase * length * norm(project_onto_k(state, khat))
        tiny = torch.finfo(khat.dtype).tiny
        found["contraction"] = said["discrepancy_after"] / said["discrepancy_before"].clamp_min(
            tiny
        )
    if config.erases and config.ddl_erase_gate == "shared":
        found["contraction_expected"] = (1 - beta).abs()
    return found


def shares_of_delta_rewrite(write: DeltaRewrite) -> dict[str, dict[str, tuple[float, float]]]:
    """Return the intervals in which k^T X is kept, overwritten by v or reflected about it.

    The eigenvalue of A = I - beta k k^T along k is 1 - beta.

    With a gate of the erase's own, the eigenvalue is that gate's.
    """
    if write.config.ddl_erase_gate == "own":
        return {
            "beta": {
                "skip": (0, 0.5),
                "match": (0.5, 1.5),
                "over-relaxed": (1.5, 2),
                "skipped write": (0, 0.05),
            },
            "beta_erase": {
                "skip": (0, 0.5),
                "match": (0.5, 1.5),
                "over-relaxed": (1.5, 2),
                "negative eigenvalue": (1, 2),
                "skipped erase": (0, 0.05),
            },
        }
    return {
        "beta": {
            "skip": (0, 0.5),
            "match": (0.5, 1.5),
            "over-relaxed": (1.5, 2),
            "negative eigenvalue": (1, 2),
            "skipped write": (0, 0.05),
        }
    }


def shortcut_of_delta_rewrite(write, state, h, x_in, c) -> LowRank | Diagonal:
    """A = I - beta k k^T of every value channel, with the gate of the erase; the identity without erase."""
    if not write.config.erases:
        return identity(state)
    k = write.compute_k_hat(state, h, x_in, c) / math.sqrt(state.shape[-1])
    beta = write.config.branch_mult * write.compute_beta_erase(state, x_in, c)
    return LowRank((-beta * k).unsqueeze(2), k.unsqueeze(2))


EDITS = {
    "model.residual.DeltaRewrite": edits_of_delta_rewrite,
    "model.hyper_connections.Connection": edits_of_connection,
    "model.attention_residuals.DepthAttention": edits_of_depth_attention,
    "model.GatedResidual-gpt-mha-rope.GatedRead": edits_of_gated_read,
    "model.mgt.MGTWrite": edits_of_mgt,
    "model.ReZero-gpt-mha-rope.ScaledAdd": edits_of_scaled_add,
    "model.DenseFormer-gpt-mha-rope.DepthAverage": edits_of_depth_average,
    "model.LAuReL-gpt-mha-rope.LAuReLWrite": edits_of_laurel,
    "model.wide-gpt-mha-rope.WideAdd": edits_of_wide_add,
}
DETAILS = {
    "model.residual.DeltaRewrite": details_of_delta_rewrite,
    "model.residual.TokenConvRead": details_of_value_channels,
    "model.residual.ChannelConvRead": details_of_value_channels,
    "model.hyper_connections.Connection": details_of_connection,
    "model.attention_residuals.DepthAttention": details_of_depth_attention,
    "model.GatedResidual-gpt-mha-rope.GatedRead": details_of_gated_read,
    "model.mgt.MGTWrite": details_of_mgt,
}
ALONG = {"model.residual.DeltaRewrite": lambda write, *given: write.compute_k_hat(*given)}
SHARES = {"model.residual.DeltaRewrite": shares_of_delta_rewrite}
ADDS = (
    "model.block.Add",
    "model.wide-gpt-mha-rope.WideAdd",
    "model.ReZero-gpt-mha-rope.ScaledAdd",
    "model.GatedResidual-gpt-mha-rope.Inject",
)
SHORTCUTS = {
    **dict.fromkeys(ADDS, shortcut_of_add),
    "model.residual.DeltaRewrite": shortcut_of_delta_rewrite,
    "model.hyper_connections.MixAndAdd": shortcut_of_mix_and_add,
    "model.mgt.MGTWrite": shortcut_of_mgt,
    "model.LAuReL-gpt-mha-rope.LAuReLWrite": shortcut_of_laurel,
}
