"""Dynamic HC with the recipe of config/factory_s_additive.py (published loss 3.3740).

All other settings are those of that file.

    torchrun --nproc_per_node=1 train.py config/factory_s_hc.py
"""

from config.factory_s_additive import *

model = "HC-gpt-mha-rope"
hc_streams = 4
