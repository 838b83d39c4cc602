"""Control for DDL: additive, with convolutional reads or Canon layers (arXiv 2512.17351).

Does the convolution alone explain the gain of DDL? The literature calls such convolutions Canon
layers: x + conv4(x), causal and depthwise. They have four positions: A on the input of attention,
B on queries, keys and values, C on the input of the MLP, D on the hidden features of the MLP.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import nn

from model.block import Block, Direct, delay, past
from model.gpt import GPT, GPTConfig
from model.layers import MLP, CausalSelfAttention, apply_rope, at_least_fp32, for_product
from model.options import option
from model.parameters import constant, normal
from model.residual import Taps, TokenConvRead


@dataclass
class ConvConfig(GPTConfig):
    """Keys of the convolution control."""

    conv_init: Literal["normal", "identity"] = option(
        "normal",
        "initialization of the convolutions; normal draws from "
        "N(0, hidden_init_std_factor / sqrt(hidden_size)); identity makes the model start as the "
        "additive one",
        initial=True,
    )
    canon: str = option(
        "",
        "Canon layers in place of the convolutions in the reads, as a string of the letters A "
        "(attention input), B (queries, keys and values), C (MLP input) and D (hidden features of "
        "the MLP), such as ABCD; empty for the convolutions in the reads",
    )

    # `TokenConvRead` reads these from the config.
    ddl_value_channels: ClassVar[int] = 1
    ddl_state_shortconv_kernel_size: ClassVar[int] = 4
    read_start: ClassVar[float] = 1.0

    def __post_init__(self):
        super().__post_init__()
        letters_in_order = "".join(letter for letter in "ABCD" if letter in self.canon)
        if self.canon != letters_in_order:
            raise ValueError(
                f"canon={self.canon!r} is not a string of the letters A, B, C and D in this order; "
                "give for example --canon=AC"
            )

    @property
    def conv_start(self) -> str:
        """Return how the convolutions are initialized."""
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
