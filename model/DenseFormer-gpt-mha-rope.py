"""DenseFormer (arXiv 2402.02622): weighted averages over the outputs of all earlier blocks.

After block l, X = sum_(i <= l) A_li Y_i, where Y_0 is the embedding and Y_i the output of block i.
A starts as the identity, X = Y_l, which is the additive stream. The state is the tuple
(Y_0, Y_1, ..., X).
"""

from dataclasses import replace

import torch
from torch import nn

from model.block import Add, Block, Direct
from model.gpt import GPT
from model.layers import at_least_fp32
from model.parameters import Rule


class Start(Direct):
    def forward(self, x, past=None):
        return x, x


class Current(Direct):
    def forward(self, state, past=None):
        return state[-1]


class AddToCurrent(Add):
    def forward(self, state, h, x_in, c, past=None):
        return *state[:-1], super().forward(state[-1], h, x_in, c, past)


class DepthAverage(nn.Module):
    def __init__(self, config, layer: int):
        super().__init__()
        self.weights, self.hidden_size = nn.Parameter(torch.empty(layer + 2)), config.hidden_size
        self.rules = {"weights": Rule(lambda weights: nn.init.zeros_(weights)[-1].fill_(1.0))}

    def elementwise_flops(self) -> int:
        return 2 * self.weights.numel() * self.hidden_size

    def forward(self, outputs, averages: bool = True):
        if not averages:
            return *outputs, outputs[-1]
        dtype = at_least_fp32(outputs[0].dtype)
        average = sum(weight * each.to(dtype) for weight, each in zip(self.weights, outputs))
        return *outputs, average.to(outputs[0].dtype)


class DenseBlock(Block):
    def __init__(self, config, layer: int):
        super().__init__(config, layer)
        self.average = DepthAverage(config, layer)
        attn, mlp = (
            replace(site, read=Current(), write=AddToCurrent(config)) for site in self.sites
        )
        self.sites = attn, replace(mlp, post_write=self.average)


class Model(GPT):
    Expander, Block, Readout = Start, DenseBlock, Current

    def from_additive(self) -> None:
        """It starts as one."""
