"""Gated Residual with four streams, the residual stream of Qwen4-exp, small (139M parameters).

The remaining settings are train.py's defaults, the recipe of the Deep Delta Learning paper.

    torchrun --nproc_per_node=4 train.py config/gated_residual_small.py
"""

from config.gpt_small import *

model = "GatedResidual-gpt-mha-rope"

# n = 4, as in Qwen4-exp; its rank is 320, here d / 8 = 96
hc_streams = 4
