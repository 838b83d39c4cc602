"""MHAR (multi-head attention residuals) with four heads, small (124M parameters).

The remaining settings are train.py's defaults, the recipe of the Deep Delta Learning paper.

    torchrun --nproc_per_node=4 train.py config/mhar_small.py
"""

from config.gpt_small import *

model = "AttnRes-gpt-mha-rope"

# each sublayer output is a source
attn_res_blocks = None

# A control for whether it is the heads that help: one head, and attn_res_scale = 4**-0.5.
attn_res_heads = 4
