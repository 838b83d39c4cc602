"""The recipe of config/factory_m_additive.py with DDL, read over tokens, embedding convolution (TC-EC)."""

from config.factory_m_additive import *

model = "DDL-gpt-mha-rope-EC"
