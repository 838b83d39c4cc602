"""A control for DDL: four columns and its reads, written by addition, small (124M).

The rest is train.py's default, the recipe of the DDL paper.

    torchrun --nproc_per_node=4 train.py config/wide_small.py
"""

from config.gpt_small import *

model = "wide-gpt-mha-rope"

ddl_value_channels = 4
