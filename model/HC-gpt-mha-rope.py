"""Hyper-Connections (arXiv 2409.19606): several residual streams with learned connections.

The weights with which a sublayer reads, mixes and writes the streams may depend on the token.
"""

import torch

from .ddl import Repeat
from .gpt import GPT
from .hyper_connections import HyperBlock, HyperConfig, SumOfStreams


class Model(GPT):
    Config = HyperConfig
    Expander = Repeat
    Block = HyperBlock
    Readout = SumOfStreams

    @torch.no_grad()
    def from_additive(self) -> None:
        # The model starts as n equal additive streams, which the readout adds up. The last write
        # divides them by n, because the eps of ln_f makes its output depend on the scale.
        last_connection = self.sites[-1].read
        last_connection.mix.div_(self.config.hc_streams)
        last_connection.write.div_(self.config.hc_streams)
