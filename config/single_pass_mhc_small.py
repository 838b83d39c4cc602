"""Single-Pass mHC as in DeepSeek-V4.1, small (125M parameters).

The settings of the stream are those of DeepSeek-V4.1's config. The remaining settings are train.py's
defaults, the recipe of the Deep Delta Learning paper.

    torchrun --nproc_per_node=4 train.py config/single_pass_mhc_small.py
"""

from config.gpt_small import *

model = "SinglePassMHC-gpt-mha-rope"
hc_streams = 4
mhc_iterations = 20
mhc_read_eps = 1e-6
mhc_norm_eps = 1e-20
