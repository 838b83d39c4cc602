"""Deep Delta Learning with four columns, column and embedding convolutions (CC-EC), small (124M).

The rest is train.py's default, the paper's recipe.

    torchrun --nproc_per_node=4 train.py config/ddl_dv4_cc_ec_small.py
"""

from config.gpt_small import *

model = "DDL-gpt-mha-rope-CC-EC"

# the kernel size follows by itself: a sweep over d_v changes this line alone
ddl_value_channels = 4
