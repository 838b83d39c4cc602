"""DDL with d_v = 4 and TC, with the recipe of config/factory_s_additive.py.

Sublayers read the state through a convolution over tokens (TC).

    torchrun --nproc_per_node=1 train.py config/factory_s_ddl_tc.py
"""

from config.factory_s_additive import *

model = "DDL-gpt-mha-rope"
