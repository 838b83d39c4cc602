"""AttnRes (full) with the recipe of config/factory_s_additive.py (published loss 3.4032).

The keys there are normalized with a weight and an eps of 1e-6, here without a weight and with 1e-5.

    torchrun --nproc_per_node=1 train.py config/factory_s_attn_res.py
"""

from config.factory_s_additive import *

model = "AttnRes-gpt-mha-rope"
attn_res_blocks = None
