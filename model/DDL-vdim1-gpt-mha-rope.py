"""Deep Delta Learning (arXiv 2601.00417), d_v = 1: the state is as wide as the baseline's."""

from model.gpt import GPT
from model.residual import DeltaBlock, OnlyColumn, Repeat, SingleColumnConfig


class Block(DeltaBlock):
    Compressor = OnlyColumn


class Model(GPT):
    Config, Expander, Block, Readout = SingleColumnConfig, Repeat, Block, OnlyColumn
    forms = ({"ddl_map": "v"},)
