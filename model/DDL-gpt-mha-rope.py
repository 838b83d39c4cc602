"""Deep Delta Learning (arXiv 2601.00417), d_v = 4: compressor over tokens (TC).

The paper's name is DDL (d_v = 4), or DDL-TC w/o EC in its July 2026 text.
"""

from .ddl import DeltaBlock, Repeat, TokenConvRead
from .ddl_config import ExpandedConfig
from .gpt import GPT


class Block(DeltaBlock):
    Compressor = TokenConvRead


class Model(GPT):
    Config = ExpandedConfig
    Expander = Repeat
    Block = Block
    Readout = TokenConvRead
