"""MUDDFormer with PrePostDANorm, small (124M parameters).

The remaining settings are train.py's defaults, the recipe of the Deep Delta Learning paper.

    torchrun --nproc_per_node=4 train.py config/mudd_prepost_small.py
"""

from config.mudd_small import *

mudd_norm = "prepost"
