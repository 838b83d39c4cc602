"""The state is a tuple: the stream and a momentum of its updates, X' = X + M', M' = m M + h."""

from dataclasses import replace

from torch import nn

from .block import Block, Direct
from .gpt import GPT


class Start(nn.Module):
    def __init__(self, config):
        super().__init__()

    def forward(self, x, past=None):
        return x, x * 0


class First(Direct):
    def forward(self, state, past=None):
        return state[0]


class MomentumWrite(nn.Module):
    def forward(self, state, h, x_in, c, past=None):
        x, momentum = state
        momentum = 0.5 * momentum + h.to(x.dtype)
        return x + momentum, momentum


class MomentumBlock(Block):
    def __init__(self, config, layer: int):
        super().__init__(config, layer)
        self.sites = tuple(
            replace(site, read=First(), write=MomentumWrite()) for site in self.sites
        )


class Model(GPT):
    Expander = Start
    Block = MomentumBlock
    Readout = First
