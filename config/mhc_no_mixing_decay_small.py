"""mHC without weight decay on its mixing parameters, small (125M parameters).

A control for what weight decay alone does to reads, writes and mixing. All else is mhc_small.py's.

    torchrun --nproc_per_node=4 train.py config/mhc_no_mixing_decay_small.py
"""

from config.mhc_small import *

mixing_decay = False
