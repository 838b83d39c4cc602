"""mHC (arXiv 2512.24880): Hyper-Connections with doubly stochastic mixing of the streams.

mHC stands for Manifold-Constrained Hyper-Connections.
"""

import torch

from .ddl import Repeat
from .gpt import GPT
from .hyper_connections import ManifoldBlock, ManifoldConfig, manifold_readout


class Model(GPT):
    Config = ManifoldConfig
    Expander = Repeat
    Block = ManifoldBlock
    Readout = staticmethod(manifold_readout)

    @torch.no_grad()
    def from_additive(self) -> None:
        # With reads of 1/n, writes of 1 and weights into each stream that sum to 1, the n streams
        # stay equal to each other.
        for site in self.sites:
            site.read.start_additive()
        if self.config.mhc_readout == "sigmoid":
            self.readout.start_additive()
