"""Deep Delta Learning, read by a convolution over columns (paper: CC)."""

from model.gpt import GPT
from model.residual import ColumnConvRead, DeltaBlock, ExpandedConfig, Repeat


class Block(DeltaBlock):
    Compressor = ColumnConvRead


class Model(GPT):
    Config, Expander, Block, Readout = ExpandedConfig, Repeat, Block, ColumnConvRead
