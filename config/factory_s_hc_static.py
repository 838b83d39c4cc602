"""Static HC with the recipe of config/factory_s_additive.py (published loss 3.4085).

All other settings are those of that file.

    torchrun --nproc_per_node=1 train.py config/factory_s_hc_static.py
"""

from config.factory_s_additive import *

model = "HC-gpt-mha-rope"
hc_streams = 4
hc_dynamic = False
