"""Learned residual lambdas and value residuals, small (124M parameters).

The remaining settings are train.py's defaults, the recipe of the Deep Delta Learning paper.

    torchrun --nproc_per_node=4 train.py config/lambdas_small.py
"""

from config.gpt_small import *

model = "Lambdas-gpt-mha-rope"
