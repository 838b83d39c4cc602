"""Attention Residuals (arXiv 2603.15031): every read attends over what the depth before it has
written.

The state is the tuple of sources, each (B, T, d): the embedding, then the sublayers' outputs, or,
by blocks, the sums of the outputs of each finished run of sites and of the present one. Delta
Attention Residuals (arXiv 2605.18855) keep the additive stream X before them: a site reads
X + g sum_i a_i V_i, and the readout is X.
"""

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import nn

from model.block import Add, Block, Copies, First, Past
from model.gpt import GPTConfig
from model.layers import at_least_fp32
from model.options import option
from model.parameters import OUTPUT, Rule, constant


@dataclass
class AttentionResidualsConfig(GPTConfig):
    """Keys of Attention Residuals (AttnRes)."""

    attn_res_blocks: int | None = option(
        8,
        "maximum number of blocks of consecutive sublayers; the outputs in a block are summed to "
        "one source, as in Block AttnRes; with None each sublayer output is a source, as in Full "
        "AttnRes",
        low=1,
    )
    attn_res_form: Literal["replace", "delta"] = option(
        "replace",
        "replace gives each sublayer the attention over the sources as input (Attention "
        "Residuals); delta adds the attention to an additive residual stream (Delta Attention "
        "Residuals)",
    )
    attn_res_gate: float = option(
        1.0,
        "initial value of the learned factor on the attention of attn_res_form=delta; with 0 the "
        "model starts as the additive one",
        initial=True,
        counts_with=("attn_res_form", "delta"),
    )

    @property
    def run_length(self) -> int:
        """Return the number of sublayers per block; the last block may have fewer."""
        sublayers = 2 * self.num_hidden_layers
        blocks = min(self.attn_res_blocks or sublayers, sublayers)
        return math.ceil(sublayers / blocks)


def first_source(config: AttentionResidualsConfig) -> nn.Module:
    """Expander: the embedding is the only source, and X where there is one."""
    return Copies(2 if config.attn_res_form == "delta" else 1)


class DepthAttention(nn.Module):
    """x_in = sum_i a_i V_i with a = softmax_i(query . RMSNorm(V_i)), in at least fp32; the norm has
    no weight.

    The query starts at zero, so that x_in starts as the mean of the sources. `site` sites have
    written before.
    """

    EPS = 1e-5

    def __init__(self, config: AttentionResidualsConfig, site: int):
        super().__init__()
        self.query = nn.Parameter(torch.empty(config.hidden_size))
        self.rules = {"query": Rule(constant(0.0), OUTPUT)}
        self.sources = 1 + -(-site // config.run_length)

    def elementwise_flops(self) -> int:
        return 4 * self.sources * self.query.numel()  # a score and a share of x_in each

    def forward(
        self, state, past: Past | None = None, force: Literal["uniform", "last"] | None = None
    ):
        """state, a tuple of (B, T, d) -> x_in (B, T, d) and the weights a (B, T, sources).

        force, for analyses: weights in the place of the learned ones, 1/sources each, or of the
        last source alone.
        """
        sources = [each.to(at_least_fp32(each.dtype)) for each in state]
        # The norm is a number for each token, and is taken out of the product: no normed copy of a
        # source is kept.
        norms = [(each.square().mean(-1) + self.EPS).rsqrt() for each in sources]
        scores = [(each * self.query).sum(-1) * norm for each, norm in zip(sources, norms)]
        weights = torch.stack(scores, dim=-1).softmax(-1)
        if force == "uniform":
            weights = torch.full_like(weights, 1 / len(sources))
        elif force == "last":
            weights = (
                (torch.arange(len(sources)) == len(sources) - 1).to(weights).expand_as(weights)
            )
        return sum(weights[..., i, None] * each for i, each in enumerate(sources)), weights


class LastAttention(DepthAttention):
    """Readout: a query of its own over all sources."""

    def __init__(self, config: AttentionResidualsConfig):
        super().__init__(config, 2 * config.num_hidden_layers)

    def forward(self, state, past: Past | None = None):
        return super().forward(state, past)[0]


class Append(nn.Module):
    """The write of the site-th site of all: its output is a new source, or added to its run's."""

    def __init__(self, config: AttentionResidualsConfig, site: int):
        super().__init__()
        self.begins, self.hidden_size = site % config.run_length == 0, config.hidden_size

    def elementwise_flops(self) -> int:
        return 0 if self.begins else self.hidden_size

    def forward(self, state, h, taken, c, past: Past | None = None):
        h = h.to(state[0].dtype)
        return (*state, h) if self.begins else (*state[:-1], state[-1] + h)

    ranges: ClassVar = {"embedding_weight": (0.0, 1.0)}

    def statistics(self, state, h, taken, c, written) -> dict:
        """Of each token (B, T): the embedding's weight, and how many sources count: exp(entropy)."""
        weights = taken[1]
        count = torch.special.entr(weights).sum(-1).exp()
        return {"embedding_weight": weights[..., 0], "effective_sources": count}


class DeltaAttention(DepthAttention):
    """x_in = X + g sum_i a_i V_i of the state (X, V_0, ...); g, a number, starts at attn_res_gate."""

    def __init__(self, config: AttentionResidualsConfig, site: int):
        super().__init__(config, site)
        self.gate = nn.Parameter(torch.empty(1))
        self.rules |= {"gate": Rule(constant(config.attn_res_gate))}

    def elementwise_flops(self) -> int:
        return super().elementwise_flops() + 2 * self.query.numel()

    def forward(self, state, past: Past | None = None, force=None):
        routed, weights = super().forward(state[1:], past, force)
        return state[0].to(routed.dtype) + self.gate * routed, weights


class AppendAndAdd(Append):
    """The write of the additive stream, and of the sources beside it."""

    def __init__(self, config: AttentionResidualsConfig, site: int):
        super().__init__(config, site)
        self.add = Add(config)

    def elementwise_flops(self) -> int:
        return super().elementwise_flops() + self.hidden_size

    def forward(self, state, h, taken, c, past: Past | None = None):
        return self.add(state[0], h, None, c), *super().forward(state[1:], h, taken, c)


class AttentionResidualsBlock(Block):
    """A query for each site; sites are counted through all blocks."""

    def __init__(self, config: AttentionResidualsConfig, layer: int):
        super().__init__(config, layer)
        delta = config.attn_res_form == "delta"
        read, write = (DeltaAttention, AppendAndAdd) if delta else (DepthAttention, Append)
        self.depth_attn, self.depth_mlp = read(config, 2 * layer), read(config, 2 * layer + 1)
        attn, mlp = self.sites
        attn = replace(attn, read=self.depth_attn, write=write(config, 2 * layer))
        self.sites = attn, replace(mlp, read=self.depth_mlp, write=write(config, 2 * layer + 1))


def depth_readout(config: AttentionResidualsConfig) -> nn.Module:
    return First() if config.attn_res_form == "delta" else LastAttention(config)
