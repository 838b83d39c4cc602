"""Orthogonal Hyper-Connections (oHC) with four streams, small (125M parameters).

The remaining settings are train.py's defaults, the recipe of the Deep Delta Learning paper.

    torchrun --nproc_per_node=4 train.py config/ohc_small.py
"""

from config.gpt_small import *

model = "mHC-gpt-mha-rope"
hc_streams = 4
mhc_mix = "orthogonal"
