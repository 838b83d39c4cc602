"""The recipe of config/factory_m_additive.py with DDL, read over columns, embedding convolution (CC-EC)."""

from config.factory_m_additive import *

model = "DDL-gpt-mha-rope-CC-EC"
