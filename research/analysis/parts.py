"""What the analyses look at in the parts of streams: edits, details, directions and intervals.

A part is a read, a write or a `post_write` of a site. The tables below have an entry for a class by its module and
name. A class without an entry, such as that of a new stream, is analyzed as every stream is: by its statistics, with h
as the direction of its writes, and with h = 0 as its edit. A subclass has the entries of its parent as long as it keeps
the parent's forward; otherwise it computes something else.

    EDITS       edits(part) -> {name: function}
                functions that take the arguments of the part's forward, and compute the same except for one piece
    DETAILS     of a write: details(write, state, h, x_in, c, written) -> {name: (B, T, ...)}
                of a read: details(read, state) -> {name: (B, T, ...)}
                further numbers, vectors or matrices of each token
    DIRECTIONS  direction(write, state, h, x_in, c) -> (B, T, d)
                the direction that a write writes along
    INTERVALS   intervals(write) -> {statistic: {label: (low, high)}}
                open intervals; the fraction of tokens in each is reported
"""

import copy
import importlib
import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from model.block import Add, Past
from model.ddl import DeltaRewrite, project_onto_k, read_value_channels
from model.precision import at_least_fp32
from model.streams.hyper_connections import ConnectionOutput

# an import statement cannot name a file with hyphens in its name
attention_residuals = importlib.import_module("model.streams.AttnRes-gpt-mha-rope")

Edits = dict[str, Callable]
Details = dict[str, torch.Tensor]
Intervals = dict[str, dict[str, tuple[float, float]]]


def find_entry(table: dict[str, Callable], part: object) -> Callable | None:
    """Return the entry of a table for the class of a part, or None."""
    cls = type(part)
    for parent in cls.__mro__:
        if getattr(parent, "forward", None) is not getattr(cls, "forward", None):
            return None
        entry = table.get(f"{parent.__module__}.{parent.__qualname__}")
        if entry is not None:
            return entry
    return None


def get_intervals(write: nn.Module) -> Intervals:
    """Return the intervals of a write's statistics, {} if it has none."""
    intervals = find_entry(INTERVALS, write)
    return {} if intervals is None else intervals(write)


def make_edit(write: nn.Module, **attributes: object) -> Callable:
    """Return the forward of a write with other attributes: methods, parameters or its config.

    The write itself stays as it is, because the forward is that of a shallow copy.
    """
    edited = copy.copy(write)
    # before `nn.Module.__getattr__`, which finds parameters, Python looks here
    vars(edited).update(attributes)
    return edited.forward


def get_erase_scale(write: nn.Module) -> float:
    """Return the factor m on the gate of the erase; 0 without an erase.

    A delta rewrite maps the state by A = I - m beta k k^T, whose eigenvalue along k is 1 - m beta,
    and MGT each feature by 1 - m beta alpha.
    """
    config = write.config
    erases = config.erases if isinstance(write, DeltaRewrite) else config.has_beta
    return config.branch_mult if erases else 0.0


def compute_cosines(x: torch.Tensor) -> torch.Tensor:
    """Return the cosines (..., n, n) between the rows of x (..., n, d); 0 for rows of zeros."""
    unit = F.normalize(x, dim=-1)
    return unit @ unit.mT


# ---- additive writes ----


def make_scaled_add_edits(write: nn.Module) -> Edits:
    """Replace the scale of ReZero by 0 or 1."""
    return {"a=0": make_edit(write, scale=0.0), "a=1": make_edit(write, scale=1.0)}


def make_wide_add_edits(write: nn.Module) -> Edits:
    """Replace the weights of the value channels by 1."""
    return {"w=1": make_edit(write, weights=torch.ones_like(write.weights))}


def make_laurel_edits(write: nn.Module) -> Edits:
    """Replace the write by the additive one."""
    name = {"rw": "a=b=1", "lr": "no low rank", "zaya": "no scaling"}[write.form]
    return {name: partial(Add.forward, write)}


# ---- delta rewrites ----


def make_delta_rewrite_edits(write: DeltaRewrite) -> Edits:
    """Fix beta at 0, 1 or 2, or leave out a part of the update."""

    def write_beta(number: float) -> Callable:
        """Return the write with a number in place of the gate."""

        def gate(state: torch.Tensor, x_in: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
            return torch.full_like(write.gate(state, x_in, c), number)

        return make_edit(write, gate=gate)

    edits = {f"beta={number}": write_beta(float(number)) for number in range(3)}
    if write.config.ddl_update == "delta":
        config = copy.copy(write.config)
        config.ddl_update = "write_only"
        edits["no erase"] = make_edit(write, config=config)
    return edits


def measure_delta_rewrite_details(
    write: DeltaRewrite,
    state: torch.Tensor,
    h: torch.Tensor,
    x_in: torch.Tensor,
    c: torch.Tensor,
    written: torch.Tensor,
) -> Details:
    """Return what a rewrite erases and writes of each token.

    Returns:
        `written` and `erased` (B, T), the norms of m beta k v^T and m beta k k^T X over that of X,
        where m is residual_branch_mult; `value` (B, T, d_v), the write value v; `contraction`
        (B, T), the discrepancy after the write over that before; `contraction_expected` (B, T),
        |1 - m beta|, which the contraction is. An update without an erase, or without
        a write, lacks what it does not do.
    """
    config = write.config
    k_hat = write.direction(state, h, x_in, c)
    value = write.value(h, x_in, c)
    statistics = write.statistics(state, h, x_in, c, written)
    beta = config.branch_mult * statistics["beta"]
    beta_erase = get_erase_scale(write) * statistics["beta"]
    k_norm = torch.linalg.vector_norm(k_hat, dim=-1) / math.sqrt(k_hat.shape[-1])
    state_norm = torch.linalg.vector_norm(state.flatten(2).to(k_hat.dtype), dim=-1)
    relative_k_norm = k_norm / state_norm
    details = {}
    if config.ddl_update != "erase_only":
        details["written"] = beta * relative_k_norm * torch.linalg.vector_norm(value, dim=-1)
        details["value"] = value
    if config.erases:
        projection_norm = torch.linalg.vector_norm(project_onto_k(state, k_hat), dim=-1)
        details["erased"] = beta_erase * relative_k_norm * projection_norm
        tiny = torch.finfo(k_hat.dtype).tiny
        discrepancy_before = statistics["discrepancy_before"].clamp_min(tiny)
        details["contraction"] = statistics["discrepancy_after"] / discrepancy_before
        details["contraction_expected"] = (1 - beta_erase).abs()
    return details


def get_delta_rewrite_direction(
    write: DeltaRewrite,
    state: torch.Tensor,
    h: torch.Tensor,
    x_in: torch.Tensor,
    c: torch.Tensor,
) -> torch.Tensor:
    return write.direction(state, h, x_in, c)


def get_delta_rewrite_intervals(write: DeltaRewrite) -> Intervals:
    """Return the intervals of the gates in which k^T X is kept, overwritten by v or reflected about it.

    In another one, the eigenvalue 1 - m beta of A = I - m beta k k^T along k is negative.
    """
    intervals = {"skip": (0, 0.5), "match": (0.5, 1.5), "over-relaxed": (1.5, 2)}
    erase_scale = get_erase_scale(write)
    if 2 * erase_scale > 1:
        intervals["negative eigenvalue"] = (1 / erase_scale, 2)
    intervals["skipped write"] = (0, 0.05)
    return {"beta": intervals}


def measure_value_channel_details(read: nn.Module, state: torch.Tensor) -> Details:
    """Return what a read makes of each value channel of the state (B, T, d_v, d).

    Returns:
        `column_share` (B, T, d_v), the norm of a channel's part of x_in over the sum of all these
        norms. The weights that read the channels are the same for every token: their norms,
        `kernel_norm` (B, T, d_v), and the cosines between them, `kernel_cosine`
        (B, T, d_v, d_v). {} if there is only one channel.
    """
    weights = read.weights()  # (K, d_v, d)
    num_channels = weights.shape[1]
    if num_channels == 1:
        return {}
    parts = torch.stack(
        [
            read_value_channels(state[:, :, channel, None], weights[:, channel, None])
            for channel in range(num_channels)
        ],
        dim=2,
    )
    norms = torch.linalg.vector_norm(parts, dim=-1)
    fractions = norms / norms.sum(-1, keepdim=True).clamp_min(torch.finfo(norms.dtype).tiny)
    kernels = weights.transpose(0, 1).flatten(1)  # (d_v, K d)
    tokens = state.shape[:2]
    return {
        "column_share": fractions,
        "kernel_norm": torch.linalg.vector_norm(kernels, dim=-1).expand(*tokens, -1),
        "kernel_cosine": compute_cosines(kernels).expand(*tokens, -1, -1),
    }


# ---- hyper-connections ----


def make_connection_edits(read: nn.Module) -> Edits:
    """Leave the streams unmixed, or write with weight 1 to each of them."""

    def read_without_mixing(state: torch.Tensor, past: Past | None = None) -> ConnectionOutput:
        output = read(state, past)
        eye = torch.eye(read.num_streams, dtype=output.mix.dtype, device=output.mix.device)
        return output._replace(mix=eye.expand_as(output.mix))

    def read_with_unit_writes(state: torch.Tensor, past: Past | None = None) -> ConnectionOutput:
        output = read(state, past)
        return output._replace(write=torch.ones_like(output.write))

    if getattr(read, "kind", None) == "identity":
        return {"write=1": read_with_unit_writes}
    return {"mix=I": read_without_mixing, "write=1": read_with_unit_writes}


def measure_connection_details(read: nn.Module, state: torch.Tensor) -> Details:
    """Return the weights of each token: `read` and `write` (B, T, n), and `mix` (B, T, n, n)."""
    read_weights, write_weights, mix = read.weights(state.to(at_least_fp32(state.dtype)))
    tokens = state.shape[:2]
    return {
        "read": read_weights.expand(*tokens, -1),
        "write": write_weights.expand(*tokens, -1),
        "mix": mix.expand(*tokens, -1, -1),
    }


def make_gated_read_edits(read: nn.Module) -> Edits:
    """Replace one of the two gates by the value that it has with zero logits."""

    def read_with_uniform_gate(state: torch.Tensor, past: Past | None = None) -> NamedTuple:
        output = read(state, past)
        return output._replace(x_in=read.normalize(state).mean(2) / 2)

    def read_with_unit_writes(state: torch.Tensor, past: Past | None = None) -> NamedTuple:
        output = read(state, past)
        return output._replace(inject=torch.ones_like(output.inject))

    return {"a=1/2": read_with_uniform_gate, "g=1": read_with_unit_writes}


def measure_gated_read_details(read: nn.Module, state: torch.Tensor) -> Details:
    """Return both gates of each token by stream, (B, T, n); that of the read is a mean over features."""
    output = read(state)
    return {"read_gate_of_stream": output.gate.mean(-1), "inject_of_stream": output.inject}


# ---- attention and averages over depth ----


def make_depth_attention_edits(read: nn.Module) -> Edits:
    """Replace the weights of the sources; {} at the first site, which has one source."""
    if read.num_sources == 1:
        return {}

    def read_with_weights(
        replace_weights: Callable[[torch.Tensor], torch.Tensor],
        state: tuple[torch.Tensor, ...],
        past: Past | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Read with replace_weights(weights), weights (B, T, sources)."""
        _, weights = read(state, past)
        new_weights = replace_weights(weights)
        sources = [source.to(new_weights.dtype) for source in state]
        return attention_residuals.sum_sources(new_weights, sources), new_weights

    def make_uniform(weights: torch.Tensor) -> torch.Tensor:
        return torch.full_like(weights, 1 / weights.shape[-1])

    def select_last(weights: torch.Tensor) -> torch.Tensor:
        selected = torch.zeros_like(weights)
        selected[..., -1] = 1
        return selected

    return {
        "uniform weights": partial(read_with_weights, make_uniform),
        "last source alone": partial(read_with_weights, select_last),
    }


def measure_depth_attention_details(read: nn.Module, state: tuple) -> Details:
    """Return the weights of the sources (B, T, sources)."""
    _, weights = read(state)
    return {"source_weight": weights}


def make_depth_average_edits(average: nn.Module) -> Edits:
    """Replace the average over depth by the state that the block returns."""
    return {"A=I": lambda outputs: (*outputs, outputs[-1])}


# ---- MGT ----


def make_mgt_edits(write: nn.Module) -> Edits:
    """Replace the gate, beta or alpha by a number."""

    def get_one(state: torch.Tensor) -> float:
        return 1.0

    edits = {}
    if write.config.has_gate:
        edits["gate=1"] = make_edit(write, compute_gate=get_one)
    if write.config.has_beta:
        edits["beta=1"] = make_edit(write, compute_beta=get_one)
        edits["alpha=0"] = make_edit(write, alpha=0.0)
    return edits


def measure_mgt_details(
    write: nn.Module,
    state: torch.Tensor,
    h: torch.Tensor,
    x_in: torch.Tensor,
    c: torch.Tensor,
    written: torch.Tensor,
) -> Details:
    """Return beta of each feature (B, T, d); {} without beta."""
    if not write.config.has_beta:
        return {}
    return {"beta_of_feature": write.compute_beta(state)}


# ---- the tables ----

EDITS: dict[str, Callable[[nn.Module], Edits]] = {
    "model.ddl.DeltaRewrite": make_delta_rewrite_edits,
    "model.streams.hyper_connections.Connection": make_connection_edits,
    "model.streams.AttnRes-gpt-mha-rope.DepthAttention": make_depth_attention_edits,
    "model.streams.GatedResidual-gpt-mha-rope.GatedRead": make_gated_read_edits,
    "model.MGT-gpt-mha.MGTWrite": make_mgt_edits,
    "model.streams.ReZero-gpt-mha-rope.ScaledAdd": make_scaled_add_edits,
    "model.streams.DenseFormer-gpt-mha-rope.DepthAverage": make_depth_average_edits,
    "model.streams.LAuReL-gpt-mha-rope.LAuReLWrite": make_laurel_edits,
    "model.streams.wide-gpt-mha-rope.WideAdd": make_wide_add_edits,
}
DETAILS: dict[str, Callable[..., Details]] = {
    "model.ddl.DeltaRewrite": measure_delta_rewrite_details,
    "model.ddl.TokenConvRead": measure_value_channel_details,
    "model.ddl.ChannelConvRead": measure_value_channel_details,
    "model.streams.hyper_connections.Connection": measure_connection_details,
    "model.streams.AttnRes-gpt-mha-rope.DepthAttention": measure_depth_attention_details,
    "model.streams.GatedResidual-gpt-mha-rope.GatedRead": measure_gated_read_details,
    "model.MGT-gpt-mha.MGTWrite": measure_mgt_details,
}
DIRECTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "model.ddl.DeltaRewrite": get_delta_rewrite_direction,
}
INTERVALS: dict[str, Callable[[nn.Module], Intervals]] = {
    "model.ddl.DeltaRewrite": get_delta_rewrite_intervals,
}
