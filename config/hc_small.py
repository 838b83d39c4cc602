"""Hyper-Connections with four streams, dynamic, small (124M).

The rest is train.py's default, the recipe of the DDL paper.

    torchrun --nproc_per_node=4 train.py config/hc_small.py
"""

from config.gpt_small import *

model = "HC-gpt-mha-rope"

hc_streams = 4
