"""mHC with the recipe of config/factory_m_additive.py (published loss 3.1498).

As in that repository, the readout is a weighted sum of the streams, the maps start as N(0, 0.02)
and the biases at 0.

    torchrun --nproc_per_node=1 train.py config/factory_m_mhc.py
"""

from config.factory_m_additive import *

model = "mHC-gpt-mha-rope"
mhc_readout = "sigmoid"
mhc_read_eps = 1e-6
mhc_maps_init_std = 0.02
mhc_bias_init = "zeros"
