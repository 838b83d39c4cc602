"""Deep Delta Learning, read by a convolution over tokens, embedding expanded by one (paper: EC)."""

from model.gpt import GPT
from model.residual import DeltaBlock, EmbeddingConv, EmbeddingConvConfig, TokenConvRead


class Block(DeltaBlock):
    Compressor = TokenConvRead


class Model(GPT):
    Config, Expander, Block, Readout = EmbeddingConvConfig, EmbeddingConv, Block, TokenConvRead
