"""What tests of gates and others share."""

from helpers import SMALL

from model import build
from model.causality import move_parameters

KINDS = {
    "DDL-gpt-mha-rope": "token",
    "DDL-gpt-mha-rope-CC": "channel",
    "DDL-gpt-mha-rope-EC": "token",
    "DDL-vdim1-gpt-mha-rope": "column",
}


def moved(stem, **keys):
    """A model of float64 whose parameters are nowhere at their start."""
    return move_parameters(build(stem, **{**SMALL, "block_size": 10, **keys}).double()).eval()
