"""The first half of the blocks leave their states behind, the second half take them up in the other
order.
"""

from dataclasses import replace

import torch
from torch import nn

from model.block import Block, Direct
from model.gpt import GPT
from model.parameters import Rule, constant


class Start(Direct):
    def forward(self, x, past=None):
        return (x,)


class First(Direct):
    def forward(self, state, past=None):
        return state[0]


class UBlock(Block):
    def __init__(self, config, layer: int):
        super().__init__(config, layer)
        half, at_end = (
            config.num_hidden_layers // 2,
            self.push if layer < config.num_hidden_layers // 2 else self.add,
        )
        if layer >= config.num_hidden_layers - half:
            self.skip, at_end = nn.Parameter(torch.empty(1)), self.pop
            self.rules = {"skip": Rule(constant(0.5))}
        attn, mlp = self.sites
        self.sites = (
            replace(attn, read=First(), write=self.add),
            replace(mlp, read=First(), write=at_end),
        )

    def add(self, state, h, x_in, c, past=None):
        return state[0] + h.to(state[0].dtype), *state[1:]

    def push(self, state, h, x_in, c, past=None):
        return *self.add(state, h, x_in, c), state[0]

    def pop(self, state, h, x_in, c, past=None):
        x, *kept = self.add(state, h, x_in, c)
        return x + (self.skip * kept.pop()).to(x.dtype), *kept


class Model(GPT):
    Expander, Block, Readout = Start, UBlock, First
