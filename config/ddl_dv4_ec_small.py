"""Deep Delta Learning (d_v = 4) with the embedding convolution, small (124M parameters).

Sublayers read the state through a convolution over tokens (TC). The embedding convolution (EC)
expands the token embedding to the value channels.

The remaining settings are train.py's defaults, the recipe of the paper.

    torchrun --nproc_per_node=4 train.py config/ddl_dv4_ec_small.py
"""

from config.gpt_small import *

model = "DDL-gpt-mha-rope-EC"

# To sweep d_v, change only this key: no other key depends on it.
ddl_value_channels = 4
