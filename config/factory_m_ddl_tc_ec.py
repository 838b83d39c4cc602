"""DDL with d_v = 4, TC and EC, with the recipe of config/factory_m_additive.py.

Sublayers read the state through a convolution over tokens (TC). The embedding convolution (EC)
expands the token embedding to the value channels.

    torchrun --nproc_per_node=1 train.py config/factory_m_ddl_tc_ec.py
"""

from config.factory_m_additive import *

model = "DDL-gpt-mha-rope-EC"
