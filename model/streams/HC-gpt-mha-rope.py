"""Hyper-Connections (arXiv 2409.19606): several residual streams with learned connections.

The weights with which a sublayer reads, mixes and writes the streams may depend on the token.
"""

from ..ddl import Repeat
from ..gpt import GPT
from .hyper_connections import HyperBlock, HyperConfig, SumOfStreams


class Model(GPT):
    Config = HyperConfig
    Expander = Repeat
    Block = HyperBlock
    Readout = SumOfStreams
