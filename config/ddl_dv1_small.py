"""Deep Delta Learning with one column (d_v = 1), small (124M).

The rest is train.py's default, the paper's recipe.

torchrun --nproc_per_node=4 train.py config/ddl_dv1_small.py
"""

from config.gpt_small import *

model = "DDL-vdim1-gpt-mha-rope"
