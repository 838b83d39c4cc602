"""A control for DDL: additive, with the reads' convolution over tokens.

Does the convolution alone explain the gain?
"""

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import torch
from torch import nn

from model.block import Block
from model.gpt import GPT, GPTConfig
from model.keys import Key
from model.residual import TokenConvRead


@dataclass
class ConvConfig(GPTConfig):
    """Keys of the additive model that reads by a convolution; the others are what `TokenConvRead`
    asks for.
    """

    conv_init: Annotated[
        Literal["normal", "identity"], "start of the read convolution", Key(initial=True)
    ] = "normal"

    ddl_value_channels: ClassVar[int] = 1
    ddl_state_shortconv_kernel_size: ClassVar[int] = 4
    read_start: ClassVar[float] = 1.0

    @property
    def conv_start(self) -> str:
        return self.conv_init


class ConvRead(TokenConvRead):
    def forward(self, state, past=None):
        return super().forward(state.unsqueeze(2), past)


class ConvBlock(Block):
    def __init__(self, config: ConvConfig, layer: int):
        super().__init__(config, layer)
        self.compress = ConvRead(config)
        self.sites = tuple(replace(site, read=self.compress) for site in self.sites)


class Model(GPT):
    Config, Block, Readout = ConvConfig, ConvBlock, ConvRead

    @torch.no_grad()
    def from_additive(self) -> None:
        for read in (*(block.compress for block in self.transformer.h), self.readout):
            nn.init.zeros_(read.shortconv.weight)[..., -1] = 1.0
