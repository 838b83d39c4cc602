"""Hyper-Connections: several streams, mixed and read by learned weights that may depend on the
token.
"""

from model.gpt import GPT
from model.hyper_connections import HyperBlock, HyperConfig, SumOfStreams
from model.residual import Repeat


class Model(GPT):
    Config, Expander, Block, Readout = HyperConfig, Repeat, HyperBlock, SumOfStreams
    forms = ({"hc_dynamic": False},)

    def from_additive(self) -> None:
        """It starts as one: reads of one stream, of equal ones, mixes I, writes 1."""
