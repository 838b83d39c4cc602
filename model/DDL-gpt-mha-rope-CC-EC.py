"""Deep Delta Learning, read by a convolution over columns, embedding expanded by one over tokens
(paper: CC-EC).
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
