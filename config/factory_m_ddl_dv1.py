"""DDL with one value channel (d_v = 1), with the recipe of config/factory_m_additive.py.

All other settings are those of that file.

    torchrun --nproc_per_node=1 train.py config/factory_m_ddl_dv1.py
"""

from config.factory_m_additive import *

model = "DDL-vdim1-gpt-mha-rope"
