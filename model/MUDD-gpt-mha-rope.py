"""MUDDFormer (arXiv 2502.12170): input-dependent dense connections to all earlier blocks.

Let h_0 be the embedding, h_1, ..., h_(l+1) the outputs of blocks 0 to l, and x the last of them.
After block l, w = W2 gelu(W1 rms_norm(x)) + b, and input c of the next block is sum_j w_cj h_j. The
inputs, which the paper calls ways, are those of queries, keys, values and the residual stream, or
the residual stream alone; the readout has that one as well. With W2 = 0, and b = 1 for x and 0 for
the others, the model starts as the additive one. The state is the tuple of the ways, followed by
h_0, h_1, ...

With PrePostDANorm (section 2.5 of the paper, as in the authors' code), s_j = RMSNorm_j(h_j) takes the
place of h_j in the sums and in the state, the sum is added to x, and for the residual stream it is
normalized before. It starts as the additive model with W2 = 0 and b = 0.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from configurator import option

from .block import Add, Block, Copies, First, Past
from .gpt import GPT, GPTConfig
from .layers import AttentionInputs, Positions, RMSNorm
from .parameters import FIXED, OUTPUT, Rule, constant, linear, normal, one_hot
from .precision import at_least_fp32, linear_fp32


@dataclass
class MUDDConfig(GPTConfig):
    """Keys of MUDDFormer."""

    mudd_ways: Literal["qkvr", "r"] = option(
        "qkvr",
        "inputs of each block that have dense connections of their own; qkvr stands for queries, "
        "keys, values and the residual stream, r for the residual stream only",
    )
    mudd_norm: Literal["none", "prepost"] = option(
        "none",
        "norms of the dense connections; prepost normalizes the block outputs before they are "
        "summed, and their sum for the residual stream (PrePostDANorm)",
    )


# With a sum of 0 the gradient of the norm after it is its weight / sqrt(eps) = 1.
NORM_EPS = 1e-6
POST_NORM_WEIGHT = 1e-3


class AddToLastWay(Add):
    """The additive write to the last way, the residual stream; it drops the other ways."""

    def __init__(self, config: MUDDConfig, num_ways: int):
        super().__init__(config)
        self.num_ways = num_ways

    def forward(
        self,
        state: tuple[torch.Tensor, ...],
        h: torch.Tensor,
        x_in: torch.Tensor,
        c: torch.Tensor,
        past: Past | None = None,
    ) -> tuple[torch.Tensor, ...]:
        residual = state[self.num_ways - 1]
        outputs = state[self.num_ways :]
        return super().forward(residual, h, x_in, c, past), *outputs


class DenseConnection(nn.Module):
    """Maps (x, h_0, ..., h_l) to (the ways, h_0, ..., h_l, x).

    With mudd_norm=prepost it maps (x, s_0, ..., s_l) to (the ways, s_0, ..., s_l, RMSNorm(x)).
    """

    def __init__(self, config: MUDDConfig, layer: int):
        super().__init__()
        is_last_block = layer == config.num_hidden_layers - 1
        num_ways = 1 if is_last_block else len(config.mudd_ways)
        d = config.hidden_size
        self.static = nn.Parameter(torch.empty(num_ways, layer + 2))  # b
        self.has_norms = config.mudd_norm == "prepost"
        if self.has_norms:
            self.pre_norm = RMSNorm(d, NORM_EPS)
            self.post_norm = RMSNorm(d, NORM_EPS)
            self.post_norm.rules = {"weight": Rule(constant(POST_NORM_WEIGHT))}
        static_start = constant(0.0) if self.has_norms else partial(one_hot, index=-1)
        self.rules = {"static": Rule(static_start)}
        size = self.static.numel()
        first_std = d**-0.5 if self.has_norms else config.hidden_init_std
        first_rule = Rule(normal(first_std), OUTPUT, decay=True)
        second_rule = Rule(constant(0.0), FIXED, decay=True)
        self.first = linear(d, size, first_rule)  # W1
        self.second = linear(size, size, second_rule)  # W2

    def forward(self, state: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        x, *earlier_outputs = state
        x_fp32 = x.to(at_least_fp32(x.dtype))
        if self.has_norms:
            last_fp32 = self.pre_norm(x_fp32)
            outputs = (*earlier_outputs, last_fp32.to(x.dtype))
        else:
            last_fp32 = x_fp32
            outputs = (*earlier_outputs, x)
        outputs_fp32 = [*(output.to(x_fp32.dtype) for output in earlier_outputs), last_fp32]
        normed = F.rms_norm(x_fp32, x.shape[-1:], eps=NORM_EPS)
        dynamic = linear_fp32(self.second, F.gelu(linear_fp32(self.first, normed)))
        # w_cj: the weight of output j in way c
        weights = dynamic.unflatten(-1, self.static.shape) + self.static  # (B, T, ways, outputs)
        weights = weights.unsqueeze(-1)
        # One output after the other, so that each is read once for all ways.
        sums = [torch.zeros_like(outputs_fp32[0]) for _ in self.static]
        for j, output in enumerate(outputs_fp32):
            sums = [
                torch.addcmul(way_sum, weights[:, :, way, j], output)
                for way, way_sum in enumerate(sums)
            ]
        if self.has_norms:
            *qkv_sums, residual_sum = sums
            sums = [x_fp32 + way_sum for way_sum in (*qkv_sums, self.post_norm(residual_sum))]
        return *(way_sum.to(x.dtype) for way_sum in sums), *outputs


def read_qkv(state: tuple[torch.Tensor, ...], past: Past | None = None) -> tuple[torch.Tensor, ...]:
    """Return the ways of queries, keys and values."""
    return state[:3]


class MUDDBlock(Block):
    def __init__(self, config: MUDDConfig, layer: int):
        super().__init__(config, layer)
        self.dense = DenseConnection(config, layer)
        attn, mlp = self.sites
        attn = replace(attn, read=First(), write=AddToLastWay(config, len(config.mudd_ways)))
        if config.mudd_ways == "qkvr":
            # ln_1 normalizes the way of the queries
            self.ln_k = RMSNorm(config.hidden_size)
            self.ln_v = RMSNorm(config.hidden_size)
            attn = replace(attn, read=read_qkv, inputs=self.attention_inputs)
        mlp = replace(mlp, read=First(), write=AddToLastWay(config, 1), post_write=self.dense)
        self.sites = (attn, mlp)

    def attention_inputs(
        self, c: torch.Tensor, qkv: tuple[torch.Tensor, ...], positions: Positions
    ) -> AttentionInputs:
        """Return the normalized ways; c is that of the queries."""
        return AttentionInputs(query=c, key=self.ln_k(qkv[1]), value=self.ln_v(qkv[2]))


class NormedCopies(Copies):
    """Expander of mudd_norm=prepost: the ways are the embedding, and s_0 is its RMSNorm."""

    def __init__(self, config: MUDDConfig):
        super().__init__(len(config.mudd_ways))
        self.pre_norm = RMSNorm(config.hidden_size, NORM_EPS)

    def forward(self, x: torch.Tensor, past: Past | None = None) -> tuple[torch.Tensor, ...]:
        return *super().forward(x), self.pre_norm(x)


def first_state(config: MUDDConfig) -> nn.Module:
    """Return the expander: the ways and h_0 are all the embedding."""
    if config.mudd_norm == "prepost":
        return NormedCopies(config)
    return Copies(len(config.mudd_ways) + 1)


class Model(GPT):
    Config = MUDDConfig
    Expander = staticmethod(first_state)
    Block = MUDDBlock
    Readout = First
