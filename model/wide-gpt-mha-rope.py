"""Control for DDL: its value channels and reads with an additive write, X' = X + h w^T.

Does the width of the state alone explain the gain of DDL?
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import nn

from model.block import WritingBlock
from model.gpt import GPT
from model.options import option
from model.parameters import Rule
from model.residual import ColumnConvRead, ColumnsConfig, Repeat, TokenConvRead


@dataclass
class WideConfig(ColumnsConfig):
    """Keys of the wide additive control."""

    wide_read: Literal["tc", "cc"] = option(
        "tc",
        "compressor, which maps X to x_in; tc is a convolution over tokens, cc is one over value "
        "channels",
    )

    # `ColumnConvRead` reads these from the config.
    ddl_cc_read: ClassVar[str] = "folded"
    ddl_state_dv_shortconv_causal: ClassVar[bool] = False


def read(config: WideConfig):
    return (TokenConvRead if config.wide_read == "tc" else ColumnConvRead)(config)


class WideAdd(nn.Module):
    def __init__(self, config: WideConfig):
        super().__init__()
        self.weights = nn.Parameter(torch.empty(config.ddl_value_channels))
        self.rules = {"weights": Rule(lambda weights: nn.init.normal_(weights, mean=1.0, std=0.5))}
        self.size = config.hidden_size * config.ddl_value_channels

    def elementwise_flops(self) -> int:
        return 2 * self.size

    def forward(self, state, h, x_in, c, past=None, alike: bool = False):
        weights = torch.ones_like(self.weights) if alike else self.weights
        return (state + h.unsqueeze(2) * weights[:, None]).to(state.dtype)


class WideBlock(WritingBlock):
    Write = WideAdd

    def __init__(self, config: WideConfig, layer: int):
        super().__init__(config, layer)
        self.compress = read(config)
        self.sites = tuple(replace(site, read=self.compress) for site in self.sites)


class Model(GPT):
    Config, Expander, Block, Readout = WideConfig, Repeat, WideBlock, staticmethod(read)
    forms = ({"wide_read": "cc"},)
