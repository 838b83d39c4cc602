"""No attention: a causal convolution over tokens takes the place of attention."""

from dataclasses import replace

import torch
from torch import nn

from .block import Block, delay, get_past
from .gpt import GPT
from .parameters import Rule, normal


class Mixer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.taps = nn.Parameter(torch.empty(4, config.hidden_size))
        self.rules = {"taps": Rule(normal(0.5), decay=True)}

    def forward(self, c, positions, cache=None):
        return sum(
            tap * delay(c, back, get_past(cache, "mixer"))
            for back, tap in enumerate(self.taps.to(c.dtype))
        )


class MixerBlock(Block):
    def __init__(self, config, layer: int):
        super().__init__(config, layer)
        del self.attn
        self.mixer = Mixer(config)
        attn, mlp = self.sites
        self.sites = replace(attn, sublayer=self.mixer), mlp


class Model(GPT):
    Block = MixerBlock
