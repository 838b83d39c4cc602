"""What a sublayer adds has a gate that falls with the token's place in its sequence."""

from dataclasses import replace

import torch
from torch import nn

from model.block import Block
from model.gpt import GPT
from model.parameters import Rule, constant


class Placed(nn.Module):
    def __init__(self):
        super().__init__()
        self.slope = nn.Parameter(torch.empty(1))
        self.rules = {"slope": Rule(constant(0.1))}

    def forward(self, state, past=None, positions=None):
        return state, torch.exp(-self.slope * positions.in_sequence).unsqueeze(-1)


def gated(state, h, taken, c, past=None):
    return state + (taken[1] * h).to(state.dtype)


class PlacedBlock(Block):
    def __init__(self, config, layer: int):
        super().__init__(config, layer)
        self.read_attn, self.read_mlp = Placed(), Placed()
        attn, mlp = (replace(site, write=gated, read_positions=True) for site in self.sites)
        self.sites = replace(attn, read=self.read_attn), replace(mlp, read=self.read_mlp)


class Model(GPT):
    Block = PlacedBlock
