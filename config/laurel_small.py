"""LAuReL in its low-rank form, small (124M).

The rest is train.py's default, the recipe of the DDL paper.

    torchrun --nproc_per_node=4 train.py config/laurel_small.py
"""

from config.gpt_small import *

model = "LAuReL-gpt-mha-rope"

laurel_form = "lr"
laurel_rank = 16
