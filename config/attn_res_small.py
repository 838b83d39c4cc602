"""Attention Residuals by eight blocks (None: in full), small (124M).

The rest is train.py's default, the recipe of the DDL paper.

    torchrun --nproc_per_node=4 train.py config/attn_res_small.py
"""

from config.gpt_small import *

model = "AttnRes-gpt-mha-rope"

attn_res_blocks = 8
