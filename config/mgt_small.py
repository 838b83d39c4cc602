"""The Manifold-Geometric Transformer; mgt_arm chooses what it is compared with, small (152M).

The rest is train.py's default, the recipe of the DDL paper.

    torchrun --nproc_per_node=4 train.py config/mgt_small.py
"""

from config.gpt_small import *

model = "MGT-gpt-mha"

mgt_arm = "full"
