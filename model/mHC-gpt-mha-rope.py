"""mHC (arXiv 2512.24880): Hyper-Connections with doubly stochastic mixing of the streams.

mHC stands for Manifold-Constrained Hyper-Connections.
"""

import math

import torch

from model.gpt import GPT
from model.hyper_connections import ManifoldBlock, ManifoldConfig, manifold_readout
from model.residual import Repeat


class Model(GPT):
    Config, Expander, Block = ManifoldConfig, Repeat, ManifoldBlock
    Readout = staticmethod(manifold_readout)
    forms = (
        {"mhc_mix": "identity", "mhc_readout": "sigmoid"},
        {"mhc_mix": "permutations"},
        {"mhc_mix": "kronecker"},
    )

    @torch.no_grad()
    def from_additive(self) -> None:
        """Streams stay equal: read 1/n, write 1 and mixes whose columns sum to one."""
        for connection in (site.read for block in self.transformer.h for site in block.sites):
            connection.scales.zero_()
        if self.config.mhc_readout == "sigmoid":
            self.readout.scale.zero_()
            self.readout.bias.fill_(-math.log(self.config.hc_streams - 1))
