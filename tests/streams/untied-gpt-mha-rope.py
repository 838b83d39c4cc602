"""The output layer has a weight of its own, as a class makes one; `tie_embeddings=False` is the
same as a key.
"""

from model.gpt import GPT
from model.parameters import Rule, linear, normal


class Model(GPT):
    def __init__(self, config):
        super().__init__(config)
        self.lm_head = linear(
            config.hidden_size, config.vocab_size, Rule(normal(0.02), decay=True, rounded=True)
        )
        self.init_weights()
