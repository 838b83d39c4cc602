"""The output layer has a weight of its own.

`tie_embeddings=False` does the same without a class.
"""

from .gpt import GPT
from .parameters import Rule, linear, normal


class Model(GPT):
    def __init__(self, config):
        super().__init__(config)
        self.lm_head = linear(config.hidden_size, config.vocab_size, Rule(normal(0.02), decay=True))
        self.init_weights()
