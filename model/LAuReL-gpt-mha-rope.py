"""LAuReL (arXiv 2411.07501): learned weights or a low-rank map in the residual connection.

With laurel_form=rw, X' = a h + b X; with laurel_form=lr, X' = h + X + (X A) B, of low rank.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from configurator import option

from .block import Add, Past, WritingBlock
from .gpt import GPT, GPTConfig
from .parameters import FIXED, OUTPUT, Rule, constant, linear, normal
from .precision import at_least_fp32, linear_fp32


@dataclass
class LAuReLConfig(GPTConfig):
    """Keys of LAuReL."""

    laurel_form: Literal["rw", "lr"] = option(
        "lr",
        "rw learns a weight of the sublayer output and a weight of the residual stream "
        "(LAuReL-RW); lr adds a low-rank linear map of the residual stream (LAuReL-LR)",
    )
    laurel_rank: int = option(
        16,
        "rank of the low-rank map of laurel_form=lr",
        low=1,
        counts_with=("laurel_form", "lr"),
    )


class LAuReLWrite(Add):
    """X' = a h + b X with (a, b) = 2 softmax(logits), or X' = h + X + (X A) B."""

    def __init__(self, config: LAuReLConfig):
        super().__init__(config)
        d = config.hidden_size
        self.weighted = config.laurel_form == "rw"
        if self.weighted:
            self.logits = nn.Parameter(torch.empty(2))
            self.rules = {"logits": Rule(constant(0.0), mixing=True)}
        else:
            down_rule = Rule(normal(config.hidden_init_std), OUTPUT, decay=True, mixing=True)
            up_rule = Rule(constant(0.0), FIXED, decay=True, mixing=True)
            self.down = linear(d, config.laurel_rank, down_rule)  # A
            self.up = linear(config.laurel_rank, d, up_rule)  # B

    def elementwise_flops(self) -> int:
        return (3 if self.weighted else 2) * self.hidden_size

    def forward(
        self,
        state: torch.Tensor,
        h: torch.Tensor,
        x_in: torch.Tensor,
        c: torch.Tensor,
        past: Past | None = None,
    ) -> torch.Tensor:
        x = state.to(at_least_fp32(state.dtype))
        if self.weighted:
            a, b = 2 * self.logits.softmax(0)
            return (a * h.to(x.dtype) + b * x).to(state.dtype)
        return (x + h + linear_fp32(self.up, linear_fp32(self.down, x))).to(state.dtype)


class LAuReLBlock(WritingBlock):
    Write = LAuReLWrite


class Model(GPT):
    Config = LAuReLConfig
    Block = LAuReLBlock
