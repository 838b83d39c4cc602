"""Deep Delta Learning (arXiv 2601.00417), d_v = 4: TC and embedding convolution (EC).

The paper's name is DDL-EC, or DDL-TC in its July 2026 text.
"""

from .ddl import DeltaBlock, EmbeddingConv, TokenConvRead
from .ddl_config import EmbeddingConvConfig
from .gpt import GPT


class Block(DeltaBlock):
    Compressor = TokenConvRead


class Model(GPT):
    Config = EmbeddingConvConfig
    Expander = EmbeddingConv
    Block = Block
    Readout = TokenConvRead
