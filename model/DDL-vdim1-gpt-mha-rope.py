"""Deep Delta Learning (arXiv 2601.00417), d_v = 1: the state is as wide as the baseline's."""

from .gpt import GPT
from .residual import DeltaBlock, Repeat, SingleChannelConfig, SingleChannelRead


class Block(DeltaBlock):
    Compressor = SingleChannelRead


class Model(GPT):
    Config = SingleChannelConfig
    Expander = Repeat
    Block = Block
    Readout = SingleChannelRead
