"""Attention Residuals (arXiv 2603.15031): sublayers attend over earlier sublayer outputs.

The attention replaces the additive residual stream. The state is the tuple of sources, each
(B, T, d): the embedding, followed by the outputs of all earlier sublayers (Full AttnRes) or by their
sums over runs of consecutive sublayers (Block AttnRes; the paper calls a run a block).
"""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import nn

from configurator import option

from ..block import Block, Copies, Past
from ..gpt import GPT, GPTConfig
from ..parameters import OUTPUT, Rule, constant
from ..precision import at_least_fp32

NORM_EPS = 1e-5


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

    @property
    def run_length(self) -> int:
        """Return the number of sublayers per block; the last block may have fewer."""
        sublayers = 2 * self.num_hidden_layers
        blocks = min(self.attn_res_blocks or sublayers, sublayers)
        return math.ceil(sublayers / blocks)


def first_source(config: AttentionResidualsConfig) -> nn.Module:
    """Return the expander: the embedding is the only source."""
    return Copies(1)


class DepthAttention(nn.Module):
    """The read x_in = sum_i a_i V_i with a = softmax_i(query . RMSNorm(V_i)).

    The norm has no weight. The query starts at zero, so that x_in starts as the mean of the sources.
    Everything is computed in at least fp32.
    """

    def __init__(self, config: AttentionResidualsConfig):
        super().__init__()
        self.query = nn.Parameter(torch.empty(config.hidden_size))
        self.rules = {"query": Rule(constant(0.0), OUTPUT)}

    def forward(
        self, state: tuple[torch.Tensor, ...], past: Past | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return x_in (B, T, d) and the weights a (B, T, sources)."""
        sources = [source.to(at_least_fp32(source.dtype)) for source in state]
        weights = self.compute_weights(sources)
        return sum_sources(weights, sources), weights

    def compute_weights(self, sources: list[torch.Tensor]) -> torch.Tensor:
        """Return the weights a (B, T, sources) of sources (B, T, d) in fp32 or more."""
        scores = []
        for source in sources:
            # RMSNorm multiplies each token by a number, which is applied to the score, so that no
            # normalized copy of a source has to be stored.
            inverse_rms = (source.square().mean(-1) + NORM_EPS).rsqrt()
            scores.append((source * self.query).sum(-1) * inverse_rms)
        return torch.stack(scores, dim=-1).softmax(-1)


def sum_sources(weights: torch.Tensor, sources: list[torch.Tensor]) -> torch.Tensor:
    """Return sum_i a_i V_i (B, T, d) of weights (B, T, sources) and sources (B, T, d)."""
    return sum(weights[..., i, None] * source for i, source in enumerate(sources))


class LastAttention(DepthAttention):
    """Readout with a query of its own over all sources."""

    def forward(self, state: tuple[torch.Tensor, ...], past: Past | None = None) -> torch.Tensor:
        x_in, _ = super().forward(state, past)
        return x_in


class Append(nn.Module):
    """The write: h becomes a new source, or is added to the source of its run.

    site: number of sites that have written before
    """

    ranges: ClassVar = {"embedding_weight": (0.0, 1.0)}

    def __init__(self, config: AttentionResidualsConfig, site: int):
        super().__init__()
        self.begins_run = site % config.run_length == 0

    def forward(
        self,
        state: tuple[torch.Tensor, ...],
        h: torch.Tensor,
        read_output: tuple[torch.Tensor, torch.Tensor],
        c: torch.Tensor,
        past: Past | None = None,
    ) -> tuple[torch.Tensor, ...]:
        h = h.to(state[0].dtype)
        # With runs of one site (Full AttnRes), each output is a source of its own.
        if self.begins_run:
            return *state, h
        return *state[:-1], state[-1] + h

    def statistics(
        self,
        state: tuple[torch.Tensor, ...],
        h: torch.Tensor,
        read_output: tuple[torch.Tensor, torch.Tensor],
        c: torch.Tensor,
        written: tuple[torch.Tensor, ...],
    ) -> dict[str, torch.Tensor]:
        """Return, for each token (B, T), the embedding's weight and the effective number of sources.

        The latter is the exponential of the entropy of the weights.
        """
        _, weights = read_output
        return {
            "embedding_weight": weights[..., 0],
            "effective_sources": torch.special.entr(weights).sum(-1).exp(),
        }


class AttentionResidualsBlock(Block):
    """A block in which each site has a query of its own."""

    def __init__(self, config: AttentionResidualsConfig, layer: int):
        super().__init__(config, layer)
        self.depth_attn = DepthAttention(config)
        self.depth_mlp = DepthAttention(config)
        # sites are counted through all blocks
        attn, mlp = self.sites
        self.sites = (
            replace(attn, read=self.depth_attn, write=Append(config, 2 * layer)),
            replace(mlp, read=self.depth_mlp, write=Append(config, 2 * layer + 1)),
        )


class Model(GPT):
    Config = AttentionResidualsConfig
    Expander = staticmethod(first_source)
    Block = AttentionResidualsBlock
    Readout = LastAttention
