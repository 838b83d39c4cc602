"""The recipe of config/factory_m_additive.py with mHC (published 3.1498).

Its readout is weighted there as well.
"""

from config.factory_m_additive import *

model = "mHC-gpt-mha-rope"
mhc_readout = "sigmoid"
