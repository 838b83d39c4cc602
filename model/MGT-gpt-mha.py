"""The Manifold-Geometric Transformer and the four arms it is compared with (mgt_arm)."""

from model.gpt import GPT
from model.mgt import MGTBlock, MGTConfig, final_norm


class Model(GPT):
    Config, Block, FinalNorm = MGTConfig, MGTBlock, staticmethod(final_norm)
    forms = tuple({"mgt_arm": arm} for arm in ("ddl", "mhc", "standard", "additive"))
