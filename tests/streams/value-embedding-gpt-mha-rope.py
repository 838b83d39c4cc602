"""Each block adds to its values an embedding of the tokens themselves."""

from dataclasses import replace

from torch import nn

from model.block import Block
from model.gpt import GPT
from model.layers import AttentionInputs
from model.parameters import Rule, normal


class EmbeddingBlock(Block):
    def __init__(self, config, layer: int):
        super().__init__(config, layer)
        self.values = nn.Embedding(config.vocab_size, config.num_attention_heads * config.head_dim)
        self.values.rules = {"weight": Rule(normal(0.02), decay=True, rounded=True)}
        attn, mlp = self.sites
        self.sites = replace(attn, inputs=self.inputs), mlp

    def inputs(self, c, x_in, positions):
        own = positions.embed(self.values)
        return AttentionInputs(c, c, c, lambda v: v + own.view_as(v).to(v.dtype))


class Model(GPT):
    Block = EmbeddingBlock
