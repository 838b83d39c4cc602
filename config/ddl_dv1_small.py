"""Deep Delta Learning with one value channel (d_v = 1), small (124M parameters).

The remaining settings are train.py's defaults, the recipe of the paper.

    torchrun --nproc_per_node=4 train.py config/ddl_dv1_small.py
"""

from config.gpt_small import *

model = "DDL-vdim1-gpt-mha-rope"
