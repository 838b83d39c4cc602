"""mHC without weight decay on its mixing parameters, small (125M parameters).

This control isolates the effect of weight decay on reads, writes and mixing. All other settings are
those of mhc_small.py.

    torchrun --nproc_per_node=4 train.py config/mhc_no_mixing_decay_small.py
"""

from config.mhc_small import *

mixing_decay = False
