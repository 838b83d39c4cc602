"""Even and odd blocks differ.

Even blocks normalize before the sublayer. Odd ones normalize after the write, and read the mean
over two tokens.
"""

from dataclasses import replace

from torch import nn

from .block import Block, delay
from .gpt import GPT


class MeanRead(nn.Module):
    def forward(self, state, past=None):
        return (state + delay(state, 1, past)) / 2


class AlternatingBlock(Block):
    def __init__(self, config, layer: int):
        super().__init__(config, layer)
        if layer % 2:
            self.sites = tuple(
                replace(site, norm=None, read=MeanRead(), post_write=site.norm)
                for site in self.sites
            )


class Model(GPT):
    Block = AlternatingBlock
