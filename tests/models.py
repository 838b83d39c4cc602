"""The paper's models by name, a tiny configuration, and models with random parameters."""

from model import build
from model.causality import move_parameters
from model.gpt import GPT

# the form of DDL in the authors' code, as in config/authors.py
AUTHORS = {"ddl_v_sigmoid": True, "ddl_v_sigmoid_scale": 4.0, "ddl_v_bias": True}
AUTHORS_CC = {**AUTHORS, "ddl_cc_read": "pair", "ddl_state_conv_init": "mean"}

# numbers of parameters of the small size: in the form of the paper's text, and, as published, in that
# of the authors' code
PARAMETER_COUNTS = {
    "gpt-mha-rope": (123_590_400, 123_590_400),
    "DDL-vdim1-gpt-mha-rope": (123_627_288, 123_627_312),
    "DDL-gpt-mha-rope": (123_842_380, 123_842_476),
    "DDL-gpt-mha-rope-EC": (123_854_668, 123_854_764),
    "DDL-gpt-mha-rope-CC": (123_722_520, 123_722_668),
    "DDL-gpt-mha-rope-CC-EC": (123_734_808, 123_734_956),
}

# names of the paper's models; test_contract.py checks what holds for every model
PAPER = list(PARAMETER_COUNTS)
DDL = PAPER[1:]

# the DDL models with several value channels
EXPANDED = [model_name for model_name in DDL if "vdim1" not in model_name]

TINY = {
    "vocab_size": 29,
    "block_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "head_dim": 6,
    "hidden_size": 10,
}

# inputs of direction and gate that the papers describe besides the defaults, each with the keys
# that it is used with
INPUTS = {
    "read": {
        "ddl_beta_input": "residual",
        "ddl_v_bias": False,
        "ddl_k_norm": "shifted",
        "ddl_k_eps": 0.5,
    },
    "mean": {
        "ddl_map": "v",
        "ddl_k_hidden_size": 3,
        "ddl_k_input": "mean",
        "ddl_beta_input": "mean",
        "ddl_beta_single_linear": False,
        "ddl_beta_hidden_size": 5,
    },
    "flat": {
        "ddl_map": "v",
        "ddl_k_hidden_size": 3,
        "ddl_k_input": "flat",
        "ddl_beta_input": "flat",
        "ddl_v_bias": False,
    },
}


def authors_form(model_name: str) -> dict[str, object]:
    """Return the keys that give one of the paper's models the form of the authors' code."""
    if not model_name.startswith("DDL-"):
        return {}
    if "vdim1" in model_name:
        return AUTHORS
    return AUTHORS_CC if "-CC" in model_name else {**AUTHORS, "ddl_state_conv_init": "mean"}


def build_tiny(model_name: str, **changes) -> GPT:
    """Build a tiny model in float64 with every parameter off its initial value."""
    return move_parameters(build(model_name, **{**TINY, **changes}).double())
