"""The additive baseline: X' = X + F(norm(X)), state (B, T, d)."""

from model.gpt import GPT


class Model(GPT):
    pass  # the backbone's own stream
