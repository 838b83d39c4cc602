"""Frac-Connections (arXiv 2503.14125): Hyper-Connections between parts of the state.

The state (B, T, d) of a token is m parts H_i of width d/m. A site mixes them into the parts of its
input, and into those that its write keeps:

    x_in = concat_j sum_i A_ij H_i               j = 1..m
    H'_j = sum_i A_i(m+j) H_i + b_j h_j

A (m, 2m) and b (m,) are learned numbers plus, times a scale, the tanh of a linear map of LN(H_i), as
in Hyper-Connections. They start as [I|I] and 1 with maps of 0, which is the additive stream. The
`num_fracs` of the package hyper-connections is another design: its write mixes h by an m x m matrix.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from configurator import option

from .block import Past
from .gpt import GPT, GPTConfig
from .hyper_connections import ConnectedBlock
from .layers import LayerNorm
from .parameters import OUTPUT, Rule, constant, linear
from .precision import at_least_fp32, linear_fp32


@dataclass
class FracConfig(GPTConfig):
    """Keys of Frac-Connections."""

    frac_parts: int = option(
        2,
        "number m of parts of width hidden_size / m into which the residual state is cut",
        low=1,
    )

    def __post_init__(self):
        super().__post_init__()
        if self.hidden_size % self.frac_parts:
            raise ValueError(
                f"frac_parts={self.frac_parts} does not divide hidden_size={self.hidden_size}; "
                "give a divisor"
            )


class FracOutput(NamedTuple):
    """What the read of a site returns, in at least fp32."""

    # (B, T, d)
    x_in: torch.Tensor

    # the parts that the write keeps, (B, T, m, d/m)
    kept: torch.Tensor

    # the weights b of the write, (B, T, m)
    write: torch.Tensor


def two_identities(parameter: torch.Tensor) -> None:
    """Set a matrix (m, 2m) to [I|I]."""
    parameter.copy_(torch.eye(len(parameter)).repeat(1, 2))


class FracConnection(nn.Module):
    """The read of a site, which also mixes the parts that its write keeps."""

    def __init__(self, config: FracConfig, site: int):
        super().__init__()
        m = config.frac_parts
        part_size = config.hidden_size // m
        self.num_parts = m
        self.norm = LayerNorm(part_size)
        # rows of the maps: those of A, then that of b
        self.maps = linear(part_size, 2 * m + 1, Rule(constant(0.0), OUTPUT, decay=True))
        self.mix = nn.Parameter(torch.empty(m, 2 * m))  # A
        self.write = nn.Parameter(torch.empty(m))  # b
        self.scale = nn.Parameter(torch.empty(1))  # of A
        self.write_scale = nn.Parameter(torch.empty(1))
        self.rules = {
            "mix": Rule(two_identities),
            "write": Rule(constant(1.0)),
            "scale": Rule(constant(0.01)),
            "write_scale": Rule(constant(0.01)),
        }

    def forward(self, state: torch.Tensor, past: Past | None = None) -> FracOutput:
        m = self.num_parts
        parts = state.to(at_least_fp32(state.dtype)).unflatten(-1, (m, -1))
        maps = linear_fp32(self.maps, self.norm(parts)).tanh()  # (B, T, m, 2m + 1)
        mix = self.mix + self.scale * maps[..., : 2 * m]
        mixed = sum(mix[..., i, :, None] * parts[:, :, i, None] for i in range(m))
        return FracOutput(
            x_in=mixed[:, :, :m].flatten(2),
            kept=mixed[:, :, m:],
            write=self.write + self.write_scale * maps[..., 2 * m],
        )


class FracWrite(nn.Module):
    """The write H'_j = sum_i A_i(m+j) H_i + b_j h_j."""

    def __init__(self, config: FracConfig):
        super().__init__()

    def forward(
        self,
        state: torch.Tensor,
        h: torch.Tensor,
        read_output: FracOutput,
        c: torch.Tensor,
        past: Past | None = None,
    ) -> torch.Tensor:
        _, kept, write = read_output
        return (kept + write.unsqueeze(-1) * h.view_as(kept)).flatten(2).to(state.dtype)


class FracBlock(ConnectedBlock):
    Connection = FracConnection
    Write = FracWrite


class Model(GPT):
    Config = FracConfig
    Block = FracBlock
