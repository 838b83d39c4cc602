"""Single-Pass mHC, as in DeepSeek-V4.1 (arXiv 2609.19969, section 2.4.1): mHC whose reads lag by a site.

The state is the n streams H (B, T, n, d) of mHC, and the weights p (B, T, n) with which the next site
reads them. A site computes read, write and mix from H as in mHC, but reads with the p of the site
before it:

    x_in = sum_i p_i H_i
    H'_j = sum_i mix_ij H_i + write_j h
    p' = read

The first site reads stream 0, and the readout reads with the weights of the last site, so that no
head is learned. The paper does not publish the initial values; here they are those of mHC.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import nn

from .block import Past
from .ddl import Repeat
from .gpt import GPT
from .hyper_connections import (
    ConnectedBlock,
    ManifoldConfig,
    ManifoldConnection,
    MixAndAdd,
    weighted_sum,
)
from .precision import at_least_fp32


@dataclass
class SinglePassConfig(ManifoldConfig):
    """Keys of mHC, except those of its readout."""

    mhc_readout: ClassVar[str] = "sum"
    mhc_readout_bias_init: ClassVar[str] = "zeros"


class StreamsAndRead(Repeat):
    """Expander: n copies of the embedding, and weights that read the first."""

    def forward(self, x: torch.Tensor, past: Past | None = None) -> tuple[torch.Tensor, ...]:
        read = x.new_zeros(*x.shape[:2], self.num_copies, dtype=at_least_fp32(x.dtype))
        read[..., 0] = 1
        return super().forward(x, past), read


class SinglePassOutput(NamedTuple):
    """What the read of a site returns: as in mHC, and the weights (B, T, n) of the next read."""

    x_in: torch.Tensor
    write: torch.Tensor
    mix: torch.Tensor
    next_read: torch.Tensor


class SinglePassConnection(ManifoldConnection):
    """The connection of mHC, which reads with the weights that the site before has computed."""

    def forward(
        self, state: tuple[torch.Tensor, torch.Tensor], past: Past | None = None
    ) -> SinglePassOutput:
        streams = state[0].to(at_least_fp32(state[0].dtype))
        x_in = weighted_sum(state[1], streams)
        weights = self.weights(streams)
        return SinglePassOutput(
            x_in=x_in.to(state[0].dtype) if self.rounded else x_in,
            write=weights.write,
            mix=weights.mix,
            next_read=weights.read,
        )


class SinglePassWrite(MixAndAdd):
    """The write of mHC, which passes the weights of the next read on."""

    def forward(
        self,
        state: tuple[torch.Tensor, torch.Tensor],
        h: torch.Tensor,
        read_output: SinglePassOutput,
        c: torch.Tensor,
        past: Past | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        streams, _ = state
        *connection, next_read = read_output
        return super().forward(streams, h, connection, c, past), next_read


class ReadOfLastSite(nn.Module):
    """Readout: sum_i p_i H_i with the weights of the last site."""

    def __init__(self, config: SinglePassConfig):
        super().__init__()
        self.rounded = config.mhc_read_dtype == "state"

    def forward(
        self, state: tuple[torch.Tensor, torch.Tensor], past: Past | None = None
    ) -> torch.Tensor:
        streams, read = state
        x = weighted_sum(read, streams.to(read.dtype))
        return x.to(streams.dtype) if self.rounded else x


def single_pass_write(config: SinglePassConfig) -> SinglePassWrite:
    """Return the write, rounded as mhc_write_dtype says."""
    return SinglePassWrite(config, rounded=config.mhc_write_dtype == "state")


class SinglePassBlock(ConnectedBlock):
    Connection = SinglePassConnection
    Write = staticmethod(single_pass_write)


class Model(GPT):
    Config = SinglePassConfig
    Expander = StreamsAndRead
    Block = SinglePassBlock
    Readout = ReadOfLastSite
