"""A control for DDL: additive, with the reads' convolution over tokens, small (124M).

The rest is train.py's default, the recipe of the DDL paper.

    torchrun --nproc_per_node=4 train.py config/conv_small.py
"""

from config.gpt_small import *

model = "conv-gpt-mha-rope"
