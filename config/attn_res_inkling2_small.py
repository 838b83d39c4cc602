"""Attention Residuals as in Inkling 2, small (124M parameters).

All attention sublayers have three routes; those of Inkling 2 with a sliding window have one. The
remaining settings are train.py's defaults, the recipe of the Deep Delta Learning paper.

    torchrun --nproc_per_node=4 train.py config/attn_res_inkling2_small.py
"""

from config.gpt_small import *

model = "AttnRes-gpt-mha-rope"

# blocks of 6 layers, with 12 sublayers
attn_res_blocks = 2
attn_res_routes = "q_k_v"
attn_res_values = "normed"
attn_res_scale = 768**-0.5  # hidden_size^(-1/2)
attn_res_norm_eps = 1e-6
