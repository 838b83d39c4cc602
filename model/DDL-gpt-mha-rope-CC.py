"""Deep Delta Learning (arXiv 2601.00417), d_v = 4: compressor over value channels (CC).

The paper's name is DDL-CC, or DDL-CC w/o EC in its July 2026 text.
"""

from .ddl import ChannelConvRead, DeltaBlock, Repeat
from .ddl_config import ChannelConvConfig
from .gpt import GPT


class Block(DeltaBlock):
    Compressor = ChannelConvRead


class Model(GPT):
    Config = ChannelConvConfig
    Expander = Repeat
    Block = Block
    Readout = ChannelConvRead
