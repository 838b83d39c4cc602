"""Compute keys from the embedding, and values from the state of the previous block.

Queries are computed from the current state as usual. The state is a tuple of the stream, the
embedding and the stream of the previous block.
"""

from dataclasses import replace

from .block import Block, Direct
from .gpt import GPT
from .layers import AttentionInputs, RMSNorm


class Start(Direct):
    def forward(self, x, past=None):
        return x, x, x


class First(Direct):
    def forward(self, state, past=None):
        return state[0]


class EarlierBlock(Block):
    def __init__(self, config, layer: int):
        super().__init__(config, layer)
        self.ln_k = RMSNorm(config.hidden_size)
        self.ln_v = RMSNorm(config.hidden_size)
        attn, mlp = self.sites
        self.sites = (
            replace(attn, read=Direct(), write=self.write_attn, inputs=self.inputs),
            replace(mlp, read=First(), write=self.write_mlp),
        )

    def inputs(self, c, state, positions):
        return AttentionInputs(c, self.ln_k(state[1]), self.ln_v(state[2]))

    def write_attn(self, state, h, x_in, c, past=None):
        return state[0] + h.to(state[0].dtype), state[1], state[0]

    def write_mlp(self, state, h, x_in, c, past=None):
        return state[0] + h.to(state[0].dtype), state[1], state[2]


class Model(GPT):
    Expander = Start
    Block = EarlierBlock
    Readout = First
