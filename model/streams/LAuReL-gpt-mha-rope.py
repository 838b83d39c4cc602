"""LAuReL (arXiv 2411.07501): learned weights or a low-rank map in the residual connection.

With laurel_form=rw, X' = a h + b X; with laurel_form=lr, X' = h + X + (X A) B, of low rank. With
laurel_form=zaya, the scaling of ZAYA (arXiv 2605.05365), X' = (X + b_r) * s_r + (h + b_h) * s_h for
each channel, and the embedding is scaled in the same way (`ZayaModel` of transformers).
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from configurator import option

from ..block import Add, Direct, Past, WritingBlock
from ..gpt import GPT, GPTConfig
from ..parameters import FIXED, OUTPUT, Rule, constant, linear, normal
from ..precision import at_least_fp32, linear_fp32


@dataclass
class LAuReLConfig(GPTConfig):
    """Keys of LAuReL."""

    laurel_form: Literal["rw", "lr", "zaya"] = option(
        "lr",
        "rw learns a weight of the sublayer output and a weight of the residual stream "
        "(LAuReL-RW); lr adds a low-rank linear map of the residual stream (LAuReL-LR); zaya learns "
        "a scale and a bias of both for each channel, and of the embedding (ZAYA)",
    )
    laurel_rank: int = option(
        16,
        "rank of the low-rank map of laurel_form=lr",
        low=1,
    )


class Affine(nn.Module):
    """(x + bias) * scale for each channel; on the embedding, it is an expander."""

    def __init__(self, config: LAuReLConfig):
        super().__init__()
        self.bias = nn.Parameter(torch.empty(config.hidden_size))
        self.scale = nn.Parameter(torch.empty(config.hidden_size))
        self.rules = {
            "bias": Rule(constant(0.0)),
            "scale": Rule(constant(1.0)),
        }

    def forward(self, x: torch.Tensor, past: Past | None = None) -> torch.Tensor:
        return ((x.to(at_least_fp32(x.dtype)) + self.bias) * self.scale).to(x.dtype)


def make_expander(config: LAuReLConfig) -> nn.Module:
    return Affine(config) if config.laurel_form == "zaya" else Direct(config)


class LAuReLWrite(Add):
    """X' = a h + b X with (a, b) = 2 softmax(logits), X' = h + X + (X A) B, or ZAYA's scaling."""

    def __init__(self, config: LAuReLConfig):
        super().__init__(config)
        d = config.hidden_size
        self.form = config.laurel_form
        if self.form == "rw":
            self.logits = nn.Parameter(torch.empty(2))
            self.rules = {"logits": Rule(constant(0.0))}
        elif self.form == "zaya":
            self.affine_state = Affine(config)
            self.affine_output = Affine(config)
        else:
            down_rule = Rule(normal(config.hidden_init_std), OUTPUT, decay=True)
            up_rule = Rule(constant(0.0), FIXED, decay=True)
            self.down = linear(d, config.laurel_rank, down_rule)  # A
            self.up = linear(config.laurel_rank, d, up_rule)  # B

    def forward(
        self,
        state: torch.Tensor,
        h: torch.Tensor,
        x_in: torch.Tensor,
        c: torch.Tensor,
        past: Past | None = None,
    ) -> torch.Tensor:
        x = state.to(at_least_fp32(state.dtype))
        if self.form == "rw":
            a, b = 2 * self.logits.softmax(0)
            return (a * h.to(x.dtype) + b * x).to(state.dtype)
        if self.form == "zaya":
            return (self.affine_state(x) + self.affine_output(h.to(x.dtype))).to(state.dtype)
        return (x + h + linear_fp32(self.up, linear_fp32(self.down, x))).to(state.dtype)


class LAuReLBlock(WritingBlock):
    Write = LAuReLWrite


class Model(GPT):
    Config = LAuReLConfig
    Expander = staticmethod(make_expander)
    Block = LAuReLBlock
