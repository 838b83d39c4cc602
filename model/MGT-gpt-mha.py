"""MGT (Su and You, "Geometric and Dynamic Scaling in Deep Transformers") and its ablations.

MGT stands for Manifold-Geometric Transformer. The key mgt_arm selects the model, or one of the seven
arms that it is compared with.
"""

from .gpt import GPT
from .mgt import MGTBlock, MGTConfig, final_norm


class Model(GPT):
    Config = MGTConfig
    Block = MGTBlock
    FinalNorm = staticmethod(final_norm)
