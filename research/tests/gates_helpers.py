"""What the tests of gates and of edits share."""

from helpers import SMALL

from model import build
from model.causality import move_parameters
from model.gpt import GPT

# model name -> how its compressor reads, as naive.read takes it
READ_KINDS = {
    "DDL-gpt-mha-rope": "token",
    "DDL-gpt-mha-rope-CC": "channel",
    "DDL-gpt-mha-rope-EC": "token",
    "DDL-vdim1-gpt-mha-rope": "column",
}


def build_moved(model_name: str, **keys) -> GPT:
    """Return a small model in float64 whose parameters are all off their initial values."""
    model = build(model_name, **{**SMALL, "block_size": 10, **keys}).double()
    return move_parameters(model).eval()
