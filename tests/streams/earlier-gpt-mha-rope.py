"""Keys are made from the embedding and values from the state a block before; queries as usual."""

from dataclasses import replace

from model.block import Block, Direct
from model.gpt import GPT
from model.layers import AttentionInputs, RMSNorm


class Start(Direct):
    def forward(self, x, past=None):
        return x, x, x


class First(Direct):
    def forward(self, state, past=None):
        return state[0]


class EarlierBlock(Block):
    def __init__(self, config, layer: int):
        super().__init__(config, layer)
        self.ln_k, self.ln_v = RMSNorm(config.hidden_size), RMSNorm(config.hidden_size)
        attn, mlp = self.sites
        attn = replace(attn, read=Direct(), write=self.write_attn, inputs=self.inputs)
        self.sites = attn, replace(mlp, read=First(), write=self.write_mlp)

    def inputs(self, c, state, positions):
        return AttentionInputs(c, self.ln_k(state[1]), self.ln_v(state[2]))

    def write_attn(self, state, h, x_in, c, past=None):
        return state[0] + h.to(state[0].dtype), state[1], state[0]

    def write_mlp(self, state, h, x_in, c, past=None):
        return state[0] + h.to(state[0].dtype), state[1], state[2]


class Model(GPT):
    Expander, Block, Readout = Start, EarlierBlock, First
