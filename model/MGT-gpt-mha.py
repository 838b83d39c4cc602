"""Manifold-Geometric Transformer (MGT), and the seven arms that it is compared with.

The key mgt_arm selects the arm.
"""

from .gpt import GPT
from .mgt import MGTBlock, MGTConfig, final_norm


class Model(GPT):
    Config = MGTConfig
    Block = MGTBlock
    FinalNorm = staticmethod(final_norm)
