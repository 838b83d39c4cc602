"""Deep Delta Learning (arXiv 2601.00417), d_v = 1: the state is as wide as the baseline's."""

from .ddl import DeltaBlock, Repeat, SingleChannelRead
from .ddl_config import SingleChannelConfig
from .gpt import GPT


class Block(DeltaBlock):
    Compressor = SingleChannelRead


class Model(GPT):
    Config = SingleChannelConfig
    Expander = Repeat
    Block = Block
    Readout = SingleChannelRead
