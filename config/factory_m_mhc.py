"""mHC with the recipe of config/factory_m_additive.py (published loss 3.1498).

As in the repository of that recipe, the readout is a weighted sum of the streams.

    torchrun --nproc_per_node=1 train.py config/factory_m_mhc.py
"""

from config.factory_m_additive import *

model = "mHC-gpt-mha-rope"
mhc_readout = "sigmoid"
