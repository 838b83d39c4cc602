"""mHC (arXiv 2512.24880): Hyper-Connections with doubly stochastic mixing of the streams.

mHC stands for Manifold-Constrained Hyper-Connections.
"""

from ..ddl import Repeat
from ..gpt import GPT
from .hyper_connections import ManifoldBlock, ManifoldConfig, manifold_readout


class Model(GPT):
    Config = ManifoldConfig
    Expander = Repeat
    Block = ManifoldBlock
    Readout = staticmethod(manifold_readout)
