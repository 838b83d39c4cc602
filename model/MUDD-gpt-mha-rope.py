"""MUDDFormer (arXiv 2502.12170): input-dependent dense connections to all earlier blocks.

After block l, with h_0 the embedding, h_1 .. h_(l+1) the outputs of the blocks and x the last of
them, w = W2 gelu(W1 rms_norm(x)) + b, and way c of the next block is sum_j w_cj h_j. The ways are
queries, keys, values and the residual stream, or the residual stream alone, which is also that of
the readout. The model starts as plain pre-norm, with W2 = 0, and b = 1 for x and 0 for the others.
The state is the ways, followed by h_0, h_1, ...
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from model.block import Add, Block, Copies, First
from model.gpt import GPT, GPTConfig
from model.layers import AttentionInputs, RMSNorm, at_least_fp32, linear_fp32
from model.options import option
from model.parameters import FIXED, OUTPUT, Rule, constant, linear, normal


@dataclass
class MUDDConfig(GPTConfig):
    """Keys of MUDDFormer."""

    mudd_ways: Literal["qkvr", "r"] = option(
        "qkvr",
        "inputs of each block that have dense connections of their own; qkvr are queries, keys, "
        "values and the residual stream, r is the residual stream alone",
    )


class WriteLastWay(Add):
    takes_branch_mult = True

    def __init__(self, config: MUDDConfig, ways: int):
        super().__init__(config)
        self.ways = ways

    def forward(self, state, h, x_in, c, past=None):
        return super().forward(state[self.ways - 1], h, x_in, c, past), *state[self.ways :]


class DenseConnection(nn.Module):
    """(x, h_0, .., h_l) -> (the ways, h_0, .., h_l, x)."""

    def __init__(self, config: MUDDConfig, layer: int):
        super().__init__()
        ways = 1 if layer == config.num_hidden_layers - 1 else len(config.mudd_ways)
        self.static, d = nn.Parameter(torch.empty(ways, layer + 2)), config.hidden_size
        self.rules = {"static": Rule(lambda b: nn.init.zeros_(b)[:, -1].fill_(1.0))}
        size = self.static.numel()
        self.first = linear(d, size, Rule(normal(config.hidden_init_std), OUTPUT, decay=True))
        self.second = linear(size, size, Rule(constant(0.0), FIXED, decay=True))

    def elementwise_flops(self) -> int:
        return 2 * self.static.numel() * self.first.in_features

    def forward(self, state):
        x, states = state[0], (*state[1:], state[0])
        wide = [each.to(at_least_fp32(x.dtype)) for each in states]
        normed = F.rms_norm(wide[-1], x.shape[-1:], eps=1e-6)
        w = linear_fp32(self.second, F.gelu(linear_fp32(self.first, normed)))
        w = (w.unflatten(-1, self.static.shape) + self.static).unsqueeze(-1)
        ways = [torch.zeros_like(wide[0]) for _ in self.static]
        for j, each in enumerate(wide):
            ways = [torch.addcmul(way, w[:, :, c, j], each) for c, way in enumerate(ways)]
        return *(way.to(x.dtype) for way in ways), *states


class MUDDBlock(Block):
    def __init__(self, config: MUDDConfig, layer: int):
        super().__init__(config, layer)
        self.dense, (attn, mlp) = DenseConnection(config, layer), self.sites
        mlp = replace(mlp, read=First(), write=WriteLastWay(config, 1), post_write=self.dense)
        attn = replace(attn, read=First(), write=WriteLastWay(config, len(config.mudd_ways)))
        if config.mudd_ways == "qkvr":  # ln_1 is the queries'
            self.ln_k, self.ln_v = RMSNorm(config.hidden_size), RMSNorm(config.hidden_size)
            attn = replace(attn, read=lambda state, past=None: state[:3], inputs=self.inputs)
        self.sites = attn, mlp

    def inputs(self, c, ways, positions):
        return AttentionInputs(c, self.ln_k(ways[1]), self.ln_v(ways[2]))


class Model(GPT):
    Config, Block, Readout = MUDDConfig, MUDDBlock, First
    Expander = staticmethod(lambda config: Copies(len(config.mudd_ways) + 1))
    forms = ({"mudd_ways": "r"},)

    @torch.no_grad()
    def from_additive(self) -> None:
        for block in self.transformer.h if self.config.mudd_ways == "qkvr" else ():
            block.ln_k.weight.copy_(block.ln_1.weight)
            block.ln_v.weight.copy_(block.ln_1.weight)
