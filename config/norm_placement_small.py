"""Control: the additive stream with sandwich norms (Peri-LN), small (124M parameters).

Add --norm_placement=lns, keel, post or deepnorm for the other placements. The remaining settings are
train.py's defaults, the recipe of the Deep Delta Learning paper.

    torchrun --nproc_per_node=4 train.py config/norm_placement_small.py
"""

from config.gpt_small import *

model = "NormPlacement-gpt-mha-rope"
norm_placement = "sandwich"
