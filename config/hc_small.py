"""Dynamic Hyper-Connections with four streams, small (124M parameters).

The remaining settings are train.py's defaults, the recipe of the Deep Delta Learning paper.

    torchrun --nproc_per_node=4 train.py config/hc_small.py
"""

from config.gpt_small import *

model = "HC-gpt-mha-rope"

# n = 4, as in both papers' language models
hc_streams = 4
