"""DenseFormer (arXiv 2402.02622): weighted averages over the outputs of all earlier blocks.

After block l, X = sum_(i <= l) A_li Y_i, where Y_0 is the embedding and Y_i the output of block i.
A starts as the identity, X = Y_l, which is the additive stream. The state is the tuple
(Y_0, Y_1, ..., X).
"""

from dataclasses import replace
from functools import partial

import torch
from torch import nn

from ..block import Add, Block, Direct, Past
from ..gpt import GPT, GPTConfig
from ..parameters import Rule, one_hot
from ..precision import at_least_fp32


class Start(Direct):
    """Expander: the embedding is Y_0, and X."""

    def forward(self, x: torch.Tensor, past: Past | None = None) -> tuple[torch.Tensor, ...]:
        return x, x


class Current(Direct):
    """Read and readout: X, the last tensor of the state."""

    def forward(self, state: tuple[torch.Tensor, ...], past: Past | None = None) -> torch.Tensor:
        return state[-1]


class AddToCurrent(Add):
    """The additive write to X; the outputs of earlier blocks stay."""

    def forward(
        self,
        state: tuple[torch.Tensor, ...],
        h: torch.Tensor,
        x_in: torch.Tensor,
        c: torch.Tensor,
        past: Past | None = None,
    ) -> tuple[torch.Tensor, ...]:
        *outputs, x = state
        return *outputs, super().forward(x, h, x_in, c, past)


class DepthAverage(nn.Module):
    """Maps (Y_0, ..., Y_l) to (Y_0, ..., Y_l, X) with X = sum_i A_li Y_i."""

    def __init__(self, config: GPTConfig, layer: int):
        super().__init__()
        self.weights = nn.Parameter(torch.empty(layer + 2))
        self.rules = {"weights": Rule(partial(one_hot, index=-1))}

    def forward(self, outputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        dtype = at_least_fp32(outputs[0].dtype)
        average = sum(weight * output.to(dtype) for weight, output in zip(self.weights, outputs))
        return *outputs, average.to(outputs[0].dtype)


class DenseBlock(Block):
    def __init__(self, config: GPTConfig, layer: int):
        super().__init__(config, layer)
        self.average = DepthAverage(config, layer)
        attn, mlp = self.sites
        self.sites = (
            replace(attn, read=Current(), write=AddToCurrent(config)),
            replace(mlp, read=Current(), write=AddToCurrent(config), post_write=self.average),
        )


class Model(GPT):
    Expander = Start
    Block = DenseBlock
    Readout = Current
