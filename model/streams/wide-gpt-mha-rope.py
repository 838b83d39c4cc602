"""Control for DDL: its value channels and reads with an additive write, X' = X + h w^T.

Does the width of the state alone explain the gain of DDL?
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import nn

from configurator import option

from ..block import Past, WritingBlock
from ..ddl import ChannelConvRead, Repeat, TokenConvRead
from ..ddl_config import ValueChannelsConfig
from ..gpt import GPT
from ..parameters import Rule


@dataclass
class WideConfig(ValueChannelsConfig):
    """Keys of the wide additive control."""

    wide_read: Literal["tc", "cc"] = option(
        "tc",
        "compressor, which maps X to x_in; tc is a convolution over tokens, cc is one over value "
        "channels",
    )

    # `ChannelConvRead` reads these from the config.
    ddl_cc_read: ClassVar[str] = "folded"
    ddl_state_dv_shortconv_causal: ClassVar[bool] = False


def make_read(config: WideConfig) -> nn.Module:
    """Return the compressor, or the readout."""
    if config.wide_read == "tc":
        return TokenConvRead(config)
    return ChannelConvRead(config)


class WideAdd(nn.Module):
    """The write X' = X + h w^T, with a learned weight w_j for each value channel."""

    def __init__(self, config: WideConfig):
        super().__init__()
        self.weights = nn.Parameter(torch.empty(config.ddl_value_channels))
        # the spread makes the value channels differ
        self.rules = {"weights": Rule(partial(nn.init.normal_, mean=1.0, std=0.5))}

    def forward(
        self,
        state: torch.Tensor,
        h: torch.Tensor,
        x_in: torch.Tensor,
        c: torch.Tensor,
        past: Past | None = None,
    ) -> torch.Tensor:
        return (state + h.unsqueeze(2) * self.weights[:, None]).to(state.dtype)


class WideBlock(WritingBlock):
    Write = WideAdd

    def __init__(self, config: WideConfig, layer: int):
        super().__init__(config, layer)
        self.compress = make_read(config)
        self.sites = tuple(replace(site, read=self.compress) for site in self.sites)


class Model(GPT):
    Config = WideConfig
    Expander = Repeat
    Block = WideBlock
    Readout = staticmethod(make_read)
