"""Control for DDL: additive, with convolutional reads or Canon layers (arXiv 2512.17351).

Does the convolution alone explain the gain of DDL? The literature calls such convolutions Canon
layers: x + conv4(x), causal and depthwise. They have four positions: A on the input of attention,
B on queries, keys and values, C on the input of the MLP, D on the hidden features of the MLP.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import nn

from configurator import option

from .block import Block, Direct, Past, delay, get_past
from .ddl import Taps, TokenConvRead
from .gpt import GPT, GPTConfig
from .layers import MLP, CausalSelfAttention, Positions, apply_rope
from .parameters import constant, normal
from .precision import at_least_fp32, for_product


@dataclass
class ConvConfig(GPTConfig):
    """Keys of the convolution control."""

    conv_init: Literal["normal", "identity"] = option(
        "normal",
        "initialization of the convolutions; normal draws from N(0, hidden_init_std_factor / "
        "sqrt(hidden_size)); with identity, the model starts as the additive one",
    )
    canon: str = option(
        "",
        "Canon layers in place of the convolutions in the reads, as a string of the letters A "
        "(attention input), B (queries, keys and values), C (MLP input) and D (hidden features of "
        "the MLP), such as ABCD; an empty string uses the convolutions in the reads",
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
    """Read: a causal convolution of the state (B, T, d) over tokens."""

    def forward(self, state: torch.Tensor, past: Past | None = None) -> torch.Tensor:
        return super().forward(state.unsqueeze(2), past)


class Canon(Taps):
    """A Canon layer, x + conv4(x), for x (B, T, features)."""

    def __init__(self, config: ConvConfig, num_features: int):
        start = constant(0.0)
        if config.conv_init == "normal":
            start = normal(config.hidden_init_std)
        # a convolution of the sublayer's input: the state itself is read as it is
        super().__init__(num_features, 4, start=start)

    def forward(self, x: torch.Tensor, past: Past | None = None) -> torch.Tensor:
        x_fp32 = x.to(at_least_fp32(x.dtype))
        taps = self.weight.to(x_fp32.dtype).flip(1).unbind(1)  # the current token's first
        conv = sum(tap * delay(x_fp32, tokens, past) for tokens, tap in enumerate(taps))
        return (x_fp32 + conv).to(x.dtype)


class CanonRead(Canon):
    """Read: a Canon layer of the normalized state."""

    def __init__(self, config: ConvConfig, norm: nn.Module):
        super().__init__(config, config.hidden_size)
        # in a tuple, because the norm is already a submodule of the block
        self.norm = (norm,)

    def forward(self, state: torch.Tensor, past: Past | None = None) -> torch.Tensor:
        return super().forward(self.norm[0](state), past)


class CanonAttention(CausalSelfAttention):
    """Attention with a Canon layer on queries, keys and values."""

    def __init__(self, config: ConvConfig):
        super().__init__(config)
        self.canon = Canon(config, 3 * self.num_heads * self.head_dim)

    def forward(
        self, x: torch.Tensor, positions: Positions, cache: dict | None = None
    ) -> torch.Tensor:
        x = for_product(x, self.c_q.weight)
        qkv = torch.cat([self.c_q(x), self.c_k(x), self.c_v(x)], dim=-1)
        qkv = self.canon(qkv, get_past(cache, "attn.canon"))
        q, k, v = qkv.unflatten(-1, (3, self.num_heads, self.head_dim)).unbind(-3)
        q = self.q_rms(apply_rope(q, positions.cos, positions.sin)).to(v.dtype)
        k = self.k_rms(apply_rope(k, positions.cos, positions.sin)).to(v.dtype)
        return self.attend(q, k, v, positions, cache)


class CanonMLP(MLP):
    """SwiGLU with a Canon layer on its hidden features."""

    def __init__(self, config: ConvConfig):
        super().__init__(config)
        self.canon = Canon(config, 2 * self.c_proj.in_features)

    def forward(
        self,
        x: torch.Tensor,
        positions: Positions | None = None,
        cache: dict | None = None,
    ) -> torch.Tensor:
        x = for_product(x, self.c_fc1.weight)
        features = torch.cat((self.c_fc1(x), self.c_fc2(x)), dim=-1)
        gate, value = self.canon(features, get_past(cache, "mlp.canon")).chunk(2, dim=-1)
        return self.c_proj(F.silu(gate) * value)


class ConvBlock(Block):
    def __init__(self, config: ConvConfig, layer: int):
        super().__init__(config, layer)
        attn, mlp = self.sites
        # without Canon layers, both sites share one convolutional read, as DDL's do
        if not config.canon:
            self.compress = ConvRead(config)
            self.sites = (
                replace(attn, read=self.compress),
                replace(mlp, read=self.compress),
            )
            return
        if "A" in config.canon:
            self.canon_attn = CanonRead(config, self.ln_1)
            attn = replace(attn, read=self.canon_attn, norm=None)
        if "B" in config.canon:
            self.attn = CanonAttention(config)
            attn = replace(attn, sublayer=self.attn)
        if "C" in config.canon:
            self.canon_mlp = CanonRead(config, self.ln_2)
            mlp = replace(mlp, read=self.canon_mlp, norm=None)
        if "D" in config.canon:
            self.mlp = CanonMLP(config)
            mlp = replace(mlp, sublayer=self.mlp)
        self.sites = (attn, mlp)


def make_readout(config: ConvConfig) -> nn.Module:
    return Direct() if config.canon else ConvRead(config)


class Model(GPT):
    Config = ConvConfig
    Block = ConvBlock
    Readout = staticmethod(make_readout)
