"""A control for Deep Delta Learning: its convolution without its stream, small (124M parameters).

Sublayers read the additive stream through Deep Delta Learning's convolution over tokens.

The remaining settings are train.py's defaults, the recipe of the paper.

    torchrun --nproc_per_node=4 train.py config/conv_small.py
"""

from config.gpt_small import *

model = "conv-gpt-mha-rope"
