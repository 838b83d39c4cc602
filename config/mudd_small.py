"""MUDDFormer, small (124M). The rest is train.py's default, the paper's recipe.

torchrun --nproc_per_node=4 train.py config/mudd_small.py
"""

from config.gpt_small import *

model = "MUDD-gpt-mha-rope"
