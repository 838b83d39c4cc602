"""Attention's values are mixed with those of block 0, which the state carries beside the stream."""

from dataclasses import replace

import torch
from torch import nn

from model.block import Block, Direct
from model.gpt import GPT
from model.layers import AttentionInputs, for_product
from model.parameters import Rule, constant


class Start(Direct):
    def forward(self, x, past=None):
        return (x,)


class First(Direct):
    def forward(self, state, past=None):
        return state[0]


class ValueBlock(Block):
    def __init__(self, config, layer: int):
        super().__init__(config, layer)
        attn, mlp = (replace(site, read=Direct(), write=self.write) for site in self.sites)
        if layer:
            self.mix = nn.Parameter(torch.empty(1))
            self.rules = {"mix": Rule(constant(0.5))}
            attn = replace(attn, inputs=self.inputs)
        self.sites = attn, mlp

    def inputs(self, c, state, positions):
        return AttentionInputs(
            c, c, c, lambda v: torch.lerp(v, state[1].view_as(v).to(v.dtype), self.mix.to(v.dtype))
        )

    def write(self, state, h, x_in, c, past=None):
        x, *values = state
        if not values:
            values = (self.attn.c_v(for_product(c, self.attn.c_v.weight)).to(x.dtype),)
        return x + h.to(x.dtype), *values


class Model(GPT):
    Expander, Block, Readout = Start, ValueBlock, First
