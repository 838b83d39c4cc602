"""Deep Delta Learning (arXiv 2601.00417), d_v = 4: compressor over value channels (CC).

The paper's name is DDL-CC, or DDL-CC w/o EC in its July 2026 text.
"""

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
