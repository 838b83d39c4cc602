"""Frac-Connections with two parts, small (124M parameters).

The remaining settings are train.py's defaults, the recipe of the Deep Delta Learning paper.

    torchrun --nproc_per_node=4 train.py config/frac_small.py
"""

from config.gpt_small import *

model = "Frac-gpt-mha-rope"
frac_parts = 2
