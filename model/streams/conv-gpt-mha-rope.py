"""Control for DDL: the additive stream with DDL's convolutional reads.

Does the convolution alone explain the gain of DDL?
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch

from configurator import option

from ..block import Block, Past
from ..ddl import TokenConvRead
from ..gpt import GPT, GPTConfig


@dataclass
class ConvConfig(GPTConfig):
    """Keys of the convolution control."""

    conv_init: Literal["normal", "identity"] = option(
        "normal",
        "initialization of the convolutions; normal draws from N(0, hidden_init_std_factor / "
        "sqrt(hidden_size)); with identity, the model starts as the additive one",
    )

    # `TokenConvRead` reads these from the config.
    ddl_value_channels: ClassVar[int] = 1
    ddl_state_shortconv_kernel_size: ClassVar[int] = 4
    read_start: ClassVar[float] = 1.0

    @property
    def conv_start(self) -> str:
        """Return how the convolutions are initialized."""
        return self.conv_init


class ConvRead(TokenConvRead):
    """Read: a causal convolution of the state (B, T, d) over tokens."""

    def forward(self, state: torch.Tensor, past: Past | None = None) -> torch.Tensor:
        return super().forward(state.unsqueeze(2), past)


class ConvBlock(Block):
    def __init__(self, config: ConvConfig, layer: int):
        super().__init__(config, layer)
        # both sites share one read, as DDL's do
        self.compress = ConvRead(config)
        self.sites = tuple(replace(site, read=self.compress) for site in self.sites)


class Model(GPT):
    Config = ConvConfig
    Block = ConvBlock
    Readout = ConvRead
