"""Attention and MLP read the same state, as in a parallel block.

The output of attention is kept beside the stream until the MLP writes.
"""

from dataclasses import replace

from .block import Block, Direct
from .gpt import GPT


class Start(Direct):
    def forward(self, x, past=None):
        return x, x * 0


class First(Direct):
    def forward(self, state, past=None):
        return state[0]


def keep_beside(state, h, x_in, c, past=None):
    return state[0], h.to(state[0].dtype)


def add_both(state, h, x_in, c, past=None):
    x, attn_output = state
    return x + attn_output + h.to(x.dtype), x * 0


class ParallelBlock(Block):
    def __init__(self, config, layer: int):
        super().__init__(config, layer)
        attn, mlp = self.sites
        self.sites = (
            replace(attn, read=First(), write=keep_beside),
            replace(mlp, read=First(), write=add_both),
        )


class Model(GPT):
    Expander = Start
    Block = ParallelBlock
    Readout = First
