"""Deep Delta Learning (arXiv 2601.00417), d_v = 4: CC and embedding convolution (EC).

The paper's name is DDL-CC-EC, or DDL-CC in its July 2026 text.
"""

from .ddl import ChannelConvRead, DeltaBlock, EmbeddingConv
from .ddl_config import EmbeddingChannelConvConfig
from .gpt import GPT


class Block(DeltaBlock):
    Compressor = ChannelConvRead


class Model(GPT):
    Config = EmbeddingChannelConvConfig
    Expander = EmbeddingConv
    Block = Block
    Readout = ChannelConvRead
