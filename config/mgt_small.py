"""The Manifold-Geometric Transformer (MGT), small (152M parameters).

The remaining settings are train.py's defaults, the recipe of the Deep Delta Learning paper.

    torchrun --nproc_per_node=4 train.py config/mgt_small.py
"""

from config.gpt_small import *

model = "MGT-gpt-mha"

# The other values are the models that its paper compares MGT with.
mgt_arm = "full"
