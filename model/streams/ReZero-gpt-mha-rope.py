"""ReZero (arXiv 2003.04887): X' = X + a h, with a learned scalar a that starts at 0.

There is one scalar per sublayer (equation 1).
"""

import torch
from torch import nn

from ..block import Add, Past, WritingBlock
from ..gpt import GPT, GPTConfig
from ..parameters import Rule, constant


class ScaledAdd(Add):
    """The write X' = X + scale * h."""

    def __init__(self, config: GPTConfig):
        super().__init__(config)
        self.scale = nn.Parameter(torch.empty(1))
        self.rules = {"scale": Rule(constant(0.0))}

    def forward(
        self,
        state: torch.Tensor,
        h: torch.Tensor,
        x_in: torch.Tensor,
        c: torch.Tensor,
        past: Past | None = None,
    ) -> torch.Tensor:
        return (state + self.scale * h).to(state.dtype)


class ReZeroBlock(WritingBlock):
    Write = ScaledAdd


class Model(GPT):
    Block = ReZeroBlock
