"""Hyper-Connections: several streams, mixed and read by learned weights that may depend on the
token.
"""

from model.gpt import GPT
from model.hyper_connections import HyperBlock, HyperConfig, SumOfStreams
from model.residual import Repeat


class Model(GPT):
    Config, Expander, Block, Readout = HyperConfig, Repeat, HyperBlock, SumOfStreams
    forms = ({"hc_dynamic": False},)
