"""Deep Delta Learning, read by a convolution over columns (paper: CC)."""

from model.gpt import GPT
from model.residual import ColumnConvConfig, ColumnConvRead, DeltaBlock, Repeat


class Block(DeltaBlock):
    Compressor = ColumnConvRead


class Model(GPT):
    Config, Expander, Block, Readout = ColumnConvConfig, Repeat, Block, ColumnConvRead
    forms = (
        {"ddl_cc_read": "folded", "ddl_beta_single_linear": False},
        {"ddl_map": "v", "ddl_k_branch": "attention"},
        {"ddl_map": "v", "ddl_k_norm": "shifted", "ddl_k_input": "mean", "ddl_beta_input": "mean"}
        | {"ddl_cc_read": "folded"},
        {"ddl_map": "v", "ddl_k_input": "flat", "ddl_beta_input": "flat", "ddl_cc_read": "folded"},
    )
