"""Block Attention Residuals with eight blocks, small (124M parameters).

The remaining settings are train.py's defaults, the recipe of the Deep Delta Learning paper.

    torchrun --nproc_per_node=4 train.py config/attn_res_small.py
"""

from config.gpt_small import *

model = "AttnRes-gpt-mha-rope"

# With None, reads attend over all sublayer outputs (Full Attention Residuals).
attn_res_blocks = 8
