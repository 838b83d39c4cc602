"""What tests of model and others share."""

from collections import OrderedDict

from model import build
from model.causality import move_parameters

# The published facts: parameters of the small size.
PARAMETER_COUNTS = {
    "gpt-mha-rope": 123_590_400,
    "DDL-vdim1-gpt-mha-rope": 123_627_312,
    "DDL-gpt-mha-rope": 123_842_476,
    "DDL-gpt-mha-rope-EC": 123_854_764,
    "DDL-gpt-mha-rope-CC": 123_722_668,
    "DDL-gpt-mha-rope-CC-EC": 123_734_956,
}
PAPER = list(PARAMETER_COUNTS)  # the paper's stems; test_contract.py has what holds for every stem
DDL = PAPER[1:]
TINY = {
    "vocab_size": 29,
    "block_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "head_dim": 6,
}
TINY |= {"hidden_size": 10}


def build_tiny(stem, **changes):
    return move_parameters(build(stem, **{**TINY, **changes}).double())


# Inputs of direction and gate that the papers describe besides, each with what it is used with.
INPUTS = OrderedDict(
    read={
        "ddl_beta_input": "residual",
        "ddl_v_bias": False,
        "ddl_k_norm": "shifted",
        "ddl_k_eps": 0.5,
    },
    mean={"ddl_map": "v", "ddl_k_hidden_size": 3, "ddl_k_input": "mean", "ddl_beta_input": "mean"}
    | {"ddl_beta_single_linear": False, "ddl_beta_hidden_size": 5},
    flat={"ddl_map": "v", "ddl_k_hidden_size": 3, "ddl_k_input": "flat", "ddl_beta_input": "flat"}
    | {"ddl_v_bias": False},
)
EXPANDED = [stem for stem in DDL if "vdim1" not in stem]
