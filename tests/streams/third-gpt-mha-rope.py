"""A third site between attention and MLP, whose sublayer reads the previous token."""

from torch import nn

from .block import Add, Block, Direct, Site, delay, get_past
from .gpt import GPT
from .layers import RMSNorm, sublayer_matrix
from .precision import for_product


class PreviousToken(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_proj = sublayer_matrix(config, config.hidden_size, config.hidden_size, last=True)

    def forward(self, c, positions, cache=None):
        return self.c_proj(for_product(delay(c, 1, get_past(cache, "before")), self.c_proj.weight))


class ThreeSites(Block):
    def __init__(self, config, layer: int):
        super().__init__(config, layer)
        self.before = PreviousToken(config)
        self.ln_3 = RMSNorm(config.hidden_size)
        attn, mlp = self.sites
        self.sites = (
            attn,
            Site("before", layer, self.before, self.ln_3, read=Direct(), write=Add(config)),
            mlp,
        )


class Model(GPT):
    Block = ThreeSites
