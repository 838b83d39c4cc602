"""A control for Deep Delta Learning: its width with additive writes, small (124M parameters).

The state has four value channels, which are read as in Deep Delta Learning, but sublayers add to
them instead of rewriting them.

The remaining settings are train.py's defaults, the recipe of the paper.

    torchrun --nproc_per_node=4 train.py config/wide_small.py
"""

from config.gpt_small import *

model = "wide-gpt-mha-rope"

ddl_value_channels = 4
