"""The residual connection of nGPT, without the other parts of nGPT, small (124M parameters).

The remaining settings are train.py's defaults, the recipe of the Deep Delta Learning paper.

    torchrun --nproc_per_node=4 train.py config/ngpt_small.py
"""

from config.gpt_small import *

model = "nGPT-gpt-mha-rope"
