"""Gated Residual (arXiv 2608.30320): several residual streams that are read through a gate.

The state is n streams of width d, X (B, T, n, d), each of which starts as the embedding. A site
normalizes them, gates every feature of every stream by a low-rank function of all of them, and
passes their mean to the sublayer. Its output h is added to each stream with a gate of its own:

    u_i = RMSNorm(X_i)                             with a weight for every stream and feature
    a = sigmoid(W_up silu(W_down vec(u) / n))      (n, d)
    x_in = 1/n sum_i a_i * u_i                     the sublayer's input, without another norm
    g = 2 sigmoid(W_inject vec(u) / n)             (n,)
    X'_i = X_i + g_i h

The streams are not mixed. The readout is the same read without g, and the output layer takes it
without another norm. All this is `Qwen4ExpTextGatedResidual` of transformers.
"""

import math
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from configurator import option

from ..block import Block, Past
from ..ddl import Repeat
from ..gpt import GPT
from ..parameters import FIXED, HIDDEN, OUTPUT, Rule, constant, linear, normal
from ..precision import at_least_fp32, for_product, linear_fp32
from .hyper_connections import StreamsConfig


@dataclass
class GatedResidualConfig(StreamsConfig):
    """Keys of Gated Residual."""

    gated_residual_rank: int | None = option(
        None,
        "rank r of the gate that reads the streams, the number of rows of W_down; Qwen4-exp has 320 "
        "(default: hidden_size / 8, rounded down, and at least 1)",
        low=1,
    )
    gated_residual_eps: float = option(
        1e-6,
        "epsilon of each stream's RMSNorm, 1e-6 as in Qwen4-exp; with 1e-5, the value in the other "
        "models, init_from an additive model reproduces its outputs up to rounding",
        above=0,
    )

    @property
    def rank(self) -> int:
        """Return the rank r of the gate."""
        return self.gated_residual_rank or max(1, self.hidden_size // 8)

    @property
    def gate_std(self) -> float:
        """Return the initial standard deviation of matrices whose inner size grows with d.

        It is initializer_range in Qwen's code, which says nothing of other widths. Under muP it is
        the value at hidden_size_base, and falls as 1 / sqrt(d).
        """
        return 0.02 * math.sqrt(self.mup_scale)


class GatedMean(nn.Module):
    """The readout x_in = 1/n sum_i a_i * u_i of streams (B, T, n, d), in at least fp32."""

    def __init__(self, config: GatedResidualConfig):
        super().__init__()
        self.num_streams = config.hc_streams
        self.hidden_size = config.hidden_size
        self.eps = config.gated_residual_eps
        state_size = self.num_streams * self.hidden_size
        self.norm_weight = nn.Parameter(torch.empty(self.num_streams, self.hidden_size))
        self.rules = {"norm_weight": Rule(constant(1.0))}
        down_rule = Rule(normal(config.gate_std), HIDDEN, decay=True)
        self.down = linear(state_size, config.rank, down_rule)
        # with a rank of its own, W_up maps a number of features that does not grow with d
        if config.gated_residual_rank is None:
            up_rule = down_rule
        else:
            up_rule = Rule(normal(0.02), FIXED, decay=True)
        self.up = linear(config.rank, state_size, up_rule)

    def normalize(self, state: torch.Tensor) -> torch.Tensor:
        """Return u (B, T, n, d) of a state (B, T, n, d), in at least fp32."""
        streams = state.to(at_least_fp32(state.dtype))
        return F.rms_norm(streams, (self.hidden_size,), eps=self.eps) * self.norm_weight

    def gate(self, u: torch.Tensor) -> torch.Tensor:
        """Return the gate a (B, T, n, d) of u (B, T, n, d), in at least fp32."""
        flat = for_product(u.flatten(2), self.down.weight)
        hidden = F.silu(self.down(flat) / self.num_streams)  # (B, T, r)
        return self.up(hidden).to(u.dtype).sigmoid().view_as(u)

    def forward(self, state: torch.Tensor, past: Past | None = None) -> torch.Tensor:
        u = self.normalize(state)
        return (self.gate(u) * u).mean(2)


class GatedOutput(NamedTuple):
    """What the read of a site returns, in at least fp32."""

    # (B, T, d)
    x_in: torch.Tensor

    # the gate g of the write (B, T, n)
    inject: torch.Tensor

    # the gate a of the read (B, T, n, d), for statistics; the backward pass needs it as well
    gate: torch.Tensor


class GatedRead(GatedMean):
    """The read of a site, which also computes the gate g of its write."""

    def __init__(self, config: GatedResidualConfig):
        super().__init__(config)
        inject_rule = Rule(normal(config.gate_std), OUTPUT, decay=True)
        self.inject = linear(self.num_streams * self.hidden_size, self.num_streams, inject_rule)

    def forward(self, state: torch.Tensor, past: Past | None = None) -> GatedOutput:
        u = self.normalize(state)
        gate = self.gate(u)
        inject_logits = linear_fp32(self.inject, u.flatten(2)) / self.num_streams
        return GatedOutput(
            x_in=(gate * u).mean(2),
            inject=2 * inject_logits.sigmoid(),
            gate=gate,
        )


class Inject(nn.Module):
    """The write X'_i = X_i + g_i h."""

    ranges: ClassVar = {"read_gate": (0.0, 1.0), "inject": (0.0, 2.0), "inject_spread": (0.0, 2.0)}

    def __init__(self, config: GatedResidualConfig):
        super().__init__()
        self.branch_mult = config.branch_mult

    def forward(
        self,
        state: torch.Tensor,
        h: torch.Tensor,
        read_output: GatedOutput,
        c: torch.Tensor,
        past: Past | None = None,
    ) -> torch.Tensor:
        scale = self.branch_mult * read_output.inject  # (B, T, n)
        streams = state.to(scale.dtype)
        return (streams + scale.unsqueeze(-1) * h.unsqueeze(2)).to(state.dtype)

    def statistics(
        self,
        state: torch.Tensor,
        h: torch.Tensor,
        read_output: GatedOutput,
        c: torch.Tensor,
        written: torch.Tensor,
    ) -> dict[str, torch.Tensor]:
        """Return, for each token (B, T), means of both gates over streams and features.

        `inject_spread` is the largest g_i minus the smallest.
        """
        inject = read_output.inject
        return {
            "read_gate": read_output.gate.mean((2, 3)),
            "inject": inject.mean(-1),
            "inject_spread": inject.amax(-1) - inject.amin(-1),
        }


class GatedBlock(Block):
    """A block whose reads contain the norms, so that it has no others."""

    def __init__(self, config: GatedResidualConfig, layer: int):
        super().__init__(config, layer)
        del self.ln_1, self.ln_2
        self.gated_attn = GatedRead(config)
        self.gated_mlp = GatedRead(config)
        write = Inject(config)  # without parameters
        attn, mlp = self.sites
        self.sites = (
            replace(attn, norm=None, read=self.gated_attn, write=write),
            replace(mlp, norm=None, read=self.gated_mlp, write=write),
        )


def make_no_norm(config: GatedResidualConfig) -> nn.Module:
    """Return the norm before the output layer: none, as the readout contains one."""
    return nn.Identity()


class Model(GPT):
    Config = GatedResidualConfig
    Expander = Repeat
    Block = GatedBlock
    Readout = GatedMean
    FinalNorm = staticmethod(make_no_norm)
