"""Frac-Connections with the recipe of config/factory_s_additive.py (published loss 3.4194).

All other settings are those of that file.

    torchrun --nproc_per_node=1 train.py config/factory_s_frac.py
"""

from config.factory_s_additive import *

model = "Frac-gpt-mha-rope"
frac_parts = 2
