"""Manifold-constrained Hyper-Connections with four streams, small (125M).

The rest is train.py's default, the recipe of the DDL paper.

    torchrun --nproc_per_node=4 train.py config/mhc_small.py
"""

from config.gpt_small import *

model = "mHC-gpt-mha-rope"

hc_streams = 4
