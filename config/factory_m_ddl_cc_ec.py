"""DDL with d_v = 4, CC and EC, with the recipe of config/factory_m_additive.py.

Sublayers read the state through a convolution over value channels (CC). The embedding
convolution (EC) expands the token embedding to the value channels.

    torchrun --nproc_per_node=1 train.py config/factory_m_ddl_cc_ec.py
"""

from config.factory_m_additive import *

model = "DDL-gpt-mha-rope-CC-EC"
