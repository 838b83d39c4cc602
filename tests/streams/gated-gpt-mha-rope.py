from dataclasses import dataclass

import torch
from torch import nn

from .block import WritingBlock
from .gpt import GPT, GPTConfig
from .parameters import Rule, constant


@dataclass
class Config(GPTConfig):
    gate_init: float = 1.0


class GatedWrite(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.gate = nn.Parameter(torch.empty(config.hidden_size))
        self.rules = {"gate": Rule(constant(config.gate_init))}

    def forward(self, state, h, x_in, c, past=None):
        return state + (self.gate * h).to(state.dtype)


class GatedBlock(WritingBlock):
    Write = GatedWrite


class Model(GPT):
    Config = Config
    Block = GatedBlock
