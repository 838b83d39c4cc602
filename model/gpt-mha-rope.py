"""The additive baseline, a pre-norm Transformer: X' = X + F(norm(X)).

The state X is (B, T, d).
"""

from .gpt import GPT


class Model(GPT):
    pass
