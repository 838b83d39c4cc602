"""Deep Delta Learning with v columns, read by a convolution over tokens (paper: DDL, d_v = 4)."""

from model.gpt import GPT
from model.residual import DeltaBlock, ExpandedConfig, Repeat, TokenConvRead


class Block(DeltaBlock):
    Compressor = TokenConvRead


class Model(GPT):
    Config, Expander, Block, Readout = ExpandedConfig, Repeat, Block, TokenConvRead
    forms = ({"ddl_map": "v"},)
