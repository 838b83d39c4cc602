"""The recipe of config/factory_m_additive.py with DDL of one column."""

from config.factory_m_additive import *

model = "DDL-vdim1-gpt-mha-rope"
