"""X' = (1 - g) X + g h, with a gate g for every feature from the sublayer's input."""

import torch
from torch import nn

from .block import WritingBlock
from .gpt import GPT
from .parameters import HIDDEN, Rule, constant, linear
from .precision import linear_fp32


class HighwayWrite(nn.Module):
    def __init__(self, config):
        super().__init__()
        weight = Rule(config.matrix_start(), HIDDEN, decay=True)
        self.gate = linear(config.hidden_size, config.hidden_size, weight, Rule(constant(-2.0)))

    def forward(self, state, h, x_in, c, past=None):
        gate = linear_fp32(self.gate, c).sigmoid()
        return torch.lerp(state.to(gate.dtype), h.to(gate.dtype), gate).to(state.dtype)

    def statistics(self, state, h, x_in, c, written):
        return {"gate": linear_fp32(self.gate, c).sigmoid().mean(-1)}


class HighwayBlock(WritingBlock):
    Write = HighwayWrite


class Model(GPT):
    Block = HighwayBlock
