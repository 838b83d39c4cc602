"""Deep Delta Learning (d_v = 4) with a read over value channels, small (124M parameters).

Sublayers read the state through a convolution over value channels (CC).

The remaining settings are train.py's defaults, the recipe of the paper.

    torchrun --nproc_per_node=4 train.py config/ddl_dv4_cc_small.py
"""

from config.gpt_small import *

model = "DDL-gpt-mha-rope-CC"

# To sweep d_v, change only this key: the kernel size of the convolution follows it.
ddl_value_channels = 4
