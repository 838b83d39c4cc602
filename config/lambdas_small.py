"""Lambdas and value residuals, small (124M). The rest is train.py's default, the paper's recipe.

torchrun --nproc_per_node=4 train.py config/lambdas_small.py
"""

from config.gpt_small import *

model = "Lambdas-gpt-mha-rope"
