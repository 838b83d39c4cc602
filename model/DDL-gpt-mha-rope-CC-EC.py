"""Deep Delta Learning (arXiv 2601.00417), d_v = 4: CC and embedding convolution (EC).

The paper's name is DDL-CC-EC, or DDL-CC in its July 2026 text.
"""

from model.gpt import GPT
from model.residual import ColumnConvRead, DeltaBlock, EmbeddingColumnConvConfig, EmbeddingConv


class Block(DeltaBlock):
    Compressor = ColumnConvRead


class Model(GPT):
    Config, Expander, Block, Readout = (
        EmbeddingColumnConvConfig,
        EmbeddingConv,
        Block,
        ColumnConvRead,
    )
    forms = ({"ddl_state_dv_shortconv_causal": True, "ddl_state_shortconv_kernel_size": 3},)
