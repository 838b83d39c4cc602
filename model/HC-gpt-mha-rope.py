"""Hyper-Connections (arXiv 2409.19606): several residual streams with learned connections.

The weights with which a sublayer reads, mixes and writes the streams may depend on the token.
"""

import torch

from model.gpt import GPT
from model.hyper_connections import HyperBlock, HyperConfig, SumOfStreams
from model.residual import Repeat


class Model(GPT):
    Config, Expander, Block, Readout = HyperConfig, Repeat, HyperBlock, SumOfStreams
    forms = ({"hc_dynamic": False},)

    @torch.no_grad()
    def from_additive(self) -> None:
        """It starts as one, n times: the last write divides by n, as ln_f has an eps."""
        last = self.transformer.h[-1].sites[-1].read
        last.mix.div_(self.config.hc_streams)
        last.write.div_(self.config.hc_streams)
