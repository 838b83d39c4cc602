"""The recipe of config/factory_m_additive.py with MUDDFormer (published 3.1295)."""

from config.factory_m_additive import *

model = "MUDD-gpt-mha-rope"
