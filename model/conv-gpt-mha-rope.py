"""Controls for DDL: additive, with its reads' convolution over tokens, or with Canon layers.

Does the convolution alone explain the gain? Canon layers (arXiv 2512.17351) are the literature's
name for it: x + conv4(x), causal and feature by feature, A on attention's input, B on queries, keys
and values, C on the MLP's input, D on its inner features.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import nn

from model.block import Block, Direct, delay, past
from model.gpt import GPT, GPTConfig
from model.keys import Key
from model.layers import MLP, CausalSelfAttention, apply_rope, at_least_fp32, for_product
from model.parameters import constant, normal
from model.residual import Taps, TokenConvRead


@dataclass
class ConvConfig(GPTConfig):
    """Keys of the additive model that reads by a convolution; the others are what `TokenConvRead`
    asks for.
    """

    conv_init: Annotated[
        Literal["normal", "identity"], "start of the convolutions", Key(initial=True)
    ] = "normal"
    canon: Annotated[
        str, "places of Canon layers, of ABCD, in place of the reads' convolution; empty: this one"
    ] = ""

    ddl_value_channels: ClassVar[int] = 1
    ddl_state_shortconv_kernel_size: ClassVar[int] = 4
    read_start: ClassVar[float] = 1.0

    def __post_init__(self):
        super().__post_init__()
        if self.canon != "".join(place for place in "ABCD" if place in self.canon):
            raise ValueError(f"canon={self.canon!r}: give letters of ABCD in this order, as in AC")

    @property
    def conv_start(self) -> str:
        return self.conv_init


class ConvRead(TokenConvRead):
    def forward(self, state, past=None):
        return super().forward(state.unsqueeze(2), past)


class Canon(Taps):
    """x + conv4(x); x (B, T, channels)."""

    def __init__(self, config: ConvConfig, channels: int):
        normally = config.conv_init == "normal"
        start = normal(config.hidden_init_std) if normally else constant(0.0)
        super().__init__(channels, 4, start=start)

    def elementwise_flops(self) -> int:
        return 2 * self.weight.numel()

    def forward(self, x, past=None):
        wide = x.to(at_least_fp32(x.dtype))
        taps = self.weight.to(wide.dtype).flip(1).unbind(1)
        return (wide + sum(tap * delay(wide, s, past) for s, tap in enumerate(taps))).to(x.dtype)


class CanonRead(Canon):
    """Of what the norm, its block's, makes of the state."""

    def __init__(self, config: ConvConfig, norm: nn.Module):
        super().__init__(config, config.hidden_size)
        self.norm = (norm,)  # not a part of this one

    def forward(self, state, past=None):
        return super().forward(self.norm[0](state), past)


class CanonAttention(CausalSelfAttention):
    def __init__(self, config: ConvConfig):
        super().__init__(config)
        self.canon = Canon(config, 3 * self.num_heads * self.head_dim)

    def forward(self, x, positions, cache=None):
        x = for_product(x, self.c_q.weight)
        parts = torch.cat([layer(x) for layer in (self.c_q, self.c_k, self.c_v)], dim=-1)
        parts = self.canon(parts, past(cache, "attn.canon"))
        q, k, v = parts.unflatten(-1, (3, self.num_heads, self.head_dim)).unbind(-3)
        rotated = partial(apply_rope, cos=positions.cos, sin=positions.sin)
        q, k = self.q_rms(rotated(q)).to(v.dtype), self.k_rms(rotated(k)).to(v.dtype)
        return self.attend((q, k, v), positions, cache)


class CanonMLP(MLP):
    def __init__(self, config: ConvConfig):
        super().__init__(config)
        self.canon = Canon(config, 2 * self.c_proj.in_features)

    def forward(self, x, positions=None, cache=None):
        x = for_product(x, self.c_fc1.weight)
        both = torch.cat((self.c_fc1(x), self.c_fc2(x)), dim=-1)
        gate, value = self.canon(both, past(cache, "mlp.canon")).chunk(2, dim=-1)
        return self.c_proj(F.silu(gate) * value)


class ConvBlock(Block):
    def __init__(self, config: ConvConfig, layer: int):
        super().__init__(config, layer)
        if not config.canon:
            self.compress = ConvRead(config)
            self.sites = tuple(replace(site, read=self.compress) for site in self.sites)
            return
        self.attn = CanonAttention(config) if "B" in config.canon else self.attn
        self.mlp = CanonMLP(config) if "D" in config.canon else self.mlp
        attn, mlp = (replace(s, sublayer=f) for s, f in zip(self.sites, (self.attn, self.mlp)))
        if "A" in config.canon:
            self.canon_attn = CanonRead(config, self.ln_1)
            attn = replace(attn, read=self.canon_attn, norm=None)
        if "C" in config.canon:
            self.canon_mlp = CanonRead(config, self.ln_2)
            mlp = replace(mlp, read=self.canon_mlp, norm=None)
        self.sites = attn, mlp


def readout(config: ConvConfig) -> nn.Module:
    return Direct() if config.canon else ConvRead(config)


class Model(GPT):
    Config, Block, Readout = ConvConfig, ConvBlock, staticmethod(readout)
    forms = ({"canon": "ABCD"},)

    @torch.no_grad()
    def from_additive(self) -> None:
        for module in self.modules():
            if isinstance(module, Canon):
                nn.init.zeros_(module.weight)
            elif isinstance(module, ConvRead):
                nn.init.zeros_(module.shortconv.weight)[..., -1] = 1.0
