"""MUDDFormer with the recipe of config/factory_m_additive.py (published loss 3.1295).

The MLPs that compute the weights are narrower than those of that repository, and the last one is
not wider than the others.

    torchrun --nproc_per_node=1 train.py config/factory_m_mudd.py
"""

from config.factory_m_additive import *

model = "MUDD-gpt-mha-rope"
