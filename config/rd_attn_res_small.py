"""RD-AttnRes, small (124M parameters).

Attention sublayers read their values from the sources by a query of their own. The remaining
settings are train.py's defaults, the recipe of the Deep Delta Learning paper.

    torchrun --nproc_per_node=4 train.py config/rd_attn_res_small.py
"""

from config.attn_res_small import *

attn_res_routes = "qk_v"
