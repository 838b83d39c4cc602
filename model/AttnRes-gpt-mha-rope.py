"""Attention Residuals: every read attends over the outputs of the sublayers before it, in full or
by blocks.
"""

from model.attention_residuals import (
    AttentionResidualsBlock,
    AttentionResidualsConfig,
    FirstSource,
    LastAttention,
)
from model.gpt import GPT


class Model(GPT):
    Config, Expander, Block, Readout = (
        AttentionResidualsConfig,
        FirstSource,
        AttentionResidualsBlock,
        LastAttention,
    )
    forms = ({"attn_res_blocks": 2},)
