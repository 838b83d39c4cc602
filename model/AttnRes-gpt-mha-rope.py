"""Attention Residuals (arXiv 2603.15031): sublayers attend over earlier sublayer outputs.

The attention replaces the additive residual stream, or is added to it (Delta Attention Residuals,
arXiv 2605.18855). The state is the tuple of sources, each (B, T, d): the embedding, followed by the
outputs of all earlier sublayers (Full AttnRes) or by their sums over runs of consecutive sublayers
(Block AttnRes; the paper calls a run a block). Delta Attention Residuals have the additive stream X
before the sources: a site reads X + g sum_i a_i V_i, and the readout is X.

Slices of the channels may attend separately (MHAR, arXiv 2607.27230), and so may the inputs of
queries, keys and values of an attention sublayer (RD-AttnRes, arXiv 2608.01075, and Inkling 2, whose
values are normalized; transformers 5.24, models/inkling2).
"""

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import nn

from configurator import option

from .block import Add, Block, Copies, First, Past
from .gpt import GPT, GPTConfig
from .layers import AttentionInputs, Positions, RMSNorm
from .parameters import OUTPUT, Rule, constant
from .precision import at_least_fp32


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
    )
    attn_res_heads: int = option(
        1,
        "with attn_res_form=replace, number of contiguous slices of the channels that attend over "
        "the sources separately, as in MHAR",
        low=1,
    )
    attn_res_scale: float = option(
        1.0,
        "factor on the scores of the attention over the sources",
        above=0,
    )
    attn_res_routes: Literal["1", "qk_v", "q_k_v"] = option(
        "1",
        "with attn_res_form=replace, inputs of each attention sublayer that attend over the sources "
        "separately; 1 is a single input; qk_v has one for queries and keys and one for values, as "
        "in RD-AttnRes; q_k_v has one each for queries, keys and values, with norms of their own, as "
        "in Inkling 2",
    )
    attn_res_values: Literal["raw", "normed"] = option(
        "raw",
        "with attn_res_form=replace, what the weights of the attention multiply; raw is the sources; "
        "normed is the normalized sources, as in Inkling 2",
    )
    attn_res_norm_eps: float = option(
        1e-5,
        "epsilon of the RMSNorm of the sources",
        above=0,
    )

    def __post_init__(self):
        super().__post_init__()
        if self.hidden_size % self.attn_res_heads != 0:
            raise ValueError(
                f"attn_res_heads={self.attn_res_heads} does not divide "
                f"hidden_size={self.hidden_size}; give a divisor of it"
            )

    @property
    def run_length(self) -> int:
        """Return the number of sublayers per block; the last block may have fewer."""
        sublayers = 2 * self.num_hidden_layers
        blocks = min(self.attn_res_blocks or sublayers, sublayers)
        return math.ceil(sublayers / blocks)


def first_source(config: AttentionResidualsConfig) -> nn.Module:
    """Return the expander: the embedding is the only source, and also X if there is one."""
    return Copies(2 if config.attn_res_form == "delta" else 1)


class RoutedAttention(nn.Module):
    """The read x_in^h = sum_i a_i^h V_i^h with a^h = softmax_i(scale query^h . RMSNorm(V_i)^h).

    h ranges over slices of the channels (`attn_res_heads`), which are concatenated; the norm is over
    all channels and has no weight. Each route has a query and an x_in of its own. The queries start
    at zero, so that x_in starts as the mean of the sources. With attn_res_values=normed the mean is
    that of RMSNorm(V_i), except at the first site, which reads the embedding itself. Everything is
    computed in at least fp32.

    site: number of sites that have written before
    """

    def __init__(self, config: AttentionResidualsConfig, site: int, num_routes: int = 1):
        super().__init__()
        d = config.hidden_size
        self.query = nn.Parameter(torch.empty(d if num_routes == 1 else (num_routes, d)))
        self.rules = {"query": Rule(constant(0.0), OUTPUT)}
        # of the slices of a source, beside those of a query (routes, heads, d / heads)
        self.slice_shape = (1, config.attn_res_heads, d // config.attn_res_heads)
        self.scale = config.attn_res_scale
        self.eps = config.attn_res_norm_eps
        # the embedding, and the runs that have begun before
        self.num_sources = 1 + math.ceil(site / config.run_length)
        self.has_normed_values = config.attn_res_values == "normed" and self.num_sources > 1

    def forward(
        self, state: tuple[torch.Tensor, ...], past: Past | None = None
    ) -> tuple[torch.Tensor, ...]:
        """Return x_in (B, T, d) of each route, and the weights a (B, T, routes, heads, sources)."""
        sources = [source.to(at_least_fp32(source.dtype)) for source in state]
        weights = self.compute_weights(sources)
        if self.has_normed_values:
            sources = [F.rms_norm(source, source.shape[-1:], eps=self.eps) for source in sources]
        slices = [source.unflatten(-1, self.slice_shape) for source in sources]
        x_ins = weighted_sum(weights, slices).flatten(-2)  # (B, T, routes, d)
        return *x_ins.unbind(2), weights

    def compute_weights(self, sources: list[torch.Tensor]) -> torch.Tensor:
        """Return the weights a (B, T, routes, heads, sources) of sources (B, T, d) in fp32 or more."""
        query = self.scale * self.query.view(-1, *self.slice_shape[1:])
        scores = []
        for source in sources:
            # RMSNorm multiplies each token by a number, which is applied to the score, so that no
            # normalized copy of a source has to be stored.
            inverse_rms = (source.square().mean(-1) + self.eps).rsqrt()
            products = (source.unflatten(-1, self.slice_shape) * query).sum(-1)
            scores.append(products * inverse_rms[..., None, None])
        return torch.stack(scores, dim=-1).softmax(-1)


class DepthAttention(RoutedAttention):
    """The read of one route and one head, whose weights are (B, T, sources)."""

    def forward(
        self, state: tuple[torch.Tensor, ...], past: Past | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return x_in (B, T, d) and the weights a (B, T, sources)."""
        x_in, weights = super().forward(state, past)
        return x_in, weights[:, :, 0, 0]


def weighted_sum(weights: torch.Tensor, sources: list[torch.Tensor]) -> torch.Tensor:
    """Return sum_i a_i V_i (..., d) of weights (..., sources) and sources (..., d)."""
    return sum(weights[..., i, None] * source for i, source in enumerate(sources))


class LastAttention(RoutedAttention):
    """Readout with a query of its own over all sources."""

    def __init__(self, config: AttentionResidualsConfig):
        super().__init__(config, 2 * config.num_hidden_layers)

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
        x_in: torch.Tensor,
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
        x_in: tuple[torch.Tensor, ...],
        c: torch.Tensor,
        written: tuple[torch.Tensor, ...],
    ) -> dict[str, torch.Tensor]:
        """Return, for each token (B, T), the embedding's weight and the effective number of sources.

        The latter is the exponential of the entropy of the weights. Both are means over routes and
        heads.
        """
        weights = x_in[-1]
        weights = weights.reshape(*weights.shape[:2], -1, weights.shape[-1])
        return {
            "embedding_weight": weights[..., 0].mean(-1),
            "effective_sources": torch.special.entr(weights).sum(-1).exp().mean(-1),
        }


class DeltaAttention(DepthAttention):
    """The read x_in = X + g sum_i a_i V_i of the state (X, V_0, ...), with a learned number g."""

    def __init__(self, config: AttentionResidualsConfig, site: int):
        super().__init__(config, site)
        self.gate = nn.Parameter(torch.empty(1))
        self.rules["gate"] = Rule(constant(config.attn_res_gate))

    def forward(
        self, state: tuple[torch.Tensor, ...], past: Past | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, *sources = state
        attended, weights = super().forward(sources, past)
        return x.to(attended.dtype) + self.gate * attended, weights


class AppendAndAdd(Append):
    """The additive write to X, and the write of `Append` to the sources."""

    def __init__(self, config: AttentionResidualsConfig, site: int):
        super().__init__(config, site)
        self.add = Add(config)

    def forward(
        self,
        state: tuple[torch.Tensor, ...],
        h: torch.Tensor,
        x_in: torch.Tensor,
        c: torch.Tensor,
        past: Past | None = None,
    ) -> tuple[torch.Tensor, ...]:
        x, *sources = state
        return self.add(x, h, None, c), *super().forward(sources, h, x_in, c)


class AttentionResidualsBlock(Block):
    """A block in which each site has a query of its own, or an attention site one for each route."""

    def __init__(self, config: AttentionResidualsConfig, layer: int):
        super().__init__(config, layer)
        if config.attn_res_form == "delta":
            Read = DeltaAttention
            Write = AppendAndAdd
        else:
            is_plain = config.attn_res_heads == 1 and config.attn_res_values == "raw"
            Read = DepthAttention if is_plain else RoutedAttention
            Write = Append
        # sites are counted through all blocks
        attn_index = 2 * layer
        mlp_index = 2 * layer + 1
        attn, mlp = self.sites
        if config.attn_res_routes == "1":
            self.depth_attn = Read(config, attn_index)
        elif config.attn_res_routes == "qk_v":
            self.depth_attn = RoutedAttention(config, attn_index, num_routes=2)
            attn = replace(attn, inputs=self.inputs_of_two_routes)
        else:
            self.depth_attn = RoutedAttention(config, attn_index, num_routes=3)
            # ln_1 normalizes the route of the queries
            self.ln_k = RMSNorm(config.hidden_size)
            self.ln_v = RMSNorm(config.hidden_size)
            attn = replace(attn, inputs=self.inputs_of_three_routes)
        self.depth_mlp = Read(config, mlp_index)
        self.sites = (
            replace(attn, read=self.depth_attn, write=Write(config, attn_index)),
            replace(mlp, read=self.depth_mlp, write=Write(config, mlp_index)),
        )

    def inputs_of_two_routes(
        self, c: torch.Tensor, x_in: tuple[torch.Tensor, ...], positions: Positions
    ) -> AttentionInputs:
        """Return c for queries and keys, and the normalized second route for values."""
        return AttentionInputs(query=c, key=c, value=self.ln_1(x_in[1]))

    def inputs_of_three_routes(
        self, c: torch.Tensor, x_in: tuple[torch.Tensor, ...], positions: Positions
    ) -> AttentionInputs:
        """Return the normalized routes; c is that of the queries."""
        return AttentionInputs(query=c, key=self.ln_k(x_in[1]), value=self.ln_v(x_in[2]))


def depth_readout(config: AttentionResidualsConfig) -> nn.Module:
    """Return the readout: X, or attention over all sources."""
    return First() if config.attn_res_form == "delta" else LastAttention(config)


class Model(GPT):
    Config = AttentionResidualsConfig
    Expander = staticmethod(first_source)
    Block = AttentionResidualsBlock
    Readout = staticmethod(depth_readout)
