"""The output of a sublayer has a gate that decreases with the token's position in its sequence."""

from dataclasses import replace

import torch
from torch import nn

from .block import Block
from .gpt import GPT
from .parameters import Rule, constant


class PositionGate(nn.Module):
    def __init__(self):
        super().__init__()
        self.slope = nn.Parameter(torch.empty(1))
        self.rules = {"slope": Rule(constant(0.1))}

    def forward(self, state, past=None, positions=None):
        return state, torch.exp(-self.slope * positions.in_sequence).unsqueeze(-1)


def write_gated(state, h, read_output, c, past=None):
    _, gate = read_output
    return state + (gate * h).to(state.dtype)


class PositionGatedBlock(Block):
    def __init__(self, config, layer: int):
        super().__init__(config, layer)
        self.read_attn = PositionGate()
        self.read_mlp = PositionGate()
        attn, mlp = self.sites
        self.sites = (
            replace(attn, read=self.read_attn, write=write_gated, read_positions=True),
            replace(mlp, read=self.read_mlp, write=write_gated, read_positions=True),
        )


class Model(GPT):
    Block = PositionGatedBlock
