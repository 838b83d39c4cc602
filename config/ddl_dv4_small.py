"""Deep Delta Learning with four value channels (d_v = 4), small (124M parameters).

Sublayers read the state through a convolution over tokens (TC).

The remaining settings are train.py's defaults, the recipe of the paper.

    torchrun --nproc_per_node=4 train.py config/ddl_dv4_small.py
"""

from config.gpt_small import *

model = "DDL-gpt-mha-rope"

# To sweep d_v, change only this key: no other key depends on it.
ddl_value_channels = 4
