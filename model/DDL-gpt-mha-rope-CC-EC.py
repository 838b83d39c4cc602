"""Deep Delta Learning, read by a convolution over columns, embedding expanded by one over tokens (paper: CC-EC)."""

from model.gpt import GPT
from model.residual import ColumnConvRead, DeltaBlock, EmbeddingConv, EmbeddingConvConfig


class Block(DeltaBlock):
    Compressor = ColumnConvRead


class Model(GPT):
    Config, Expander, Block, Readout = EmbeddingConvConfig, EmbeddingConv, Block, ColumnConvRead
