"""Deep Delta Learning with one column (paper: DDL, d_v = 1): the state stays as wide as the
baseline's.
"""

from model.gpt import GPT
from model.residual import DeltaBlock, OnlyColumn, Repeat, SingleColumnConfig


class Block(DeltaBlock):
    Compressor = OnlyColumn


class Model(GPT):
    Config, Expander, Block, Readout = SingleColumnConfig, Repeat, Block, OnlyColumn
    forms = ({"ddl_map": "v"},)
