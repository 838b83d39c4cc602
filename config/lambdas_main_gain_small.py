"""A control: the additive stream with one learned factor per block, small (124M parameters).

The input of each block is x = a x, with a learned scalar a that starts at 1. The token embedding is
not mixed in, and there is no value residual.

The remaining settings are train.py's defaults, the recipe of the Deep Delta Learning paper.

    torchrun --nproc_per_node=4 train.py config/lambdas_main_gain_small.py
"""

from config.gpt_small import *

model = "Lambdas-gpt-mha-rope"

lambda_gain = True
lambda_input = False
lambda_values = "none"
