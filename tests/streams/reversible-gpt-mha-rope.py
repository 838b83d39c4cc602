"""The state has two halves, as in a reversible network.

Attention reads the second half and writes to the first; the MLP reads the first and writes to the
second.
"""

from dataclasses import replace

from .block import Block, Direct
from .gpt import GPT


class Twice(Direct):
    def forward(self, x, past=None):
        return x, x


class Half(Direct):
    def __init__(self, index: int):
        super().__init__()
        self.index = index

    def forward(self, state, past=None):
        return state[self.index]


class Mean(Direct):
    def forward(self, state, past=None):
        return (state[0] + state[1]) / 2


def to_first(state, h, x_in, c, past=None):
    return state[0] + h.to(state[0].dtype), state[1]


def to_second(state, h, x_in, c, past=None):
    return state[0], state[1] + h.to(state[1].dtype)


class ReversibleBlock(Block):
    def __init__(self, config, layer: int):
        super().__init__(config, layer)
        attn, mlp = self.sites
        self.sites = (
            replace(attn, read=Half(1), write=to_first),
            replace(mlp, read=Half(0), write=to_second),
        )


class Model(GPT):
    Expander = Twice
    Block = ReversibleBlock
    Readout = Mean
