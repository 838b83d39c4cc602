"""Manifold-constrained Hyper-Connections: several streams, mixed by doubly stochastic matrices."""

from model.gpt import GPT
from model.hyper_connections import ManifoldBlock, ManifoldConfig, SumOfStreams
from model.residual import Repeat


class Model(GPT):
    Config, Expander, Block, Readout = ManifoldConfig, Repeat, ManifoldBlock, SumOfStreams
