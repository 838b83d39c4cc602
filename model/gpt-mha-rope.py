"""The additive baseline: X' = X + F(norm(X)), state (B, T, d)."""

from model.gpt import GPT


class Model(GPT):
    forms = ({"residual_branch_mult": 0.5},)
