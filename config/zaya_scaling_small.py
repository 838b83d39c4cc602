"""The residual scaling of ZAYA, small (124M parameters).

The remaining settings are train.py's defaults, the recipe of the Deep Delta Learning paper.

    torchrun --nproc_per_node=4 train.py config/zaya_scaling_small.py
"""

from config.gpt_small import *

model = "LAuReL-gpt-mha-rope"
laurel_form = "zaya"
