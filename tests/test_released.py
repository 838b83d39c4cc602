"""Folders of the authors' two releases have the logits of the weights that they hold; what differs
from them is refused in one line.
"""

import json
from pathlib import Path

import naive
import pytest
import torch
from export_helpers import released_weights
from helpers import configure
from models import PAPER, TINY, authors_form, build_tiny
from safetensors.torch import save_file

from huggingface import released
from model.gpt import GPT
from model.weights import read_model

CC = "DDL-gpt-mha-rope-CC"
BASE = "num_hidden_layers_base"
CAUSAL = "ddl_state_dv_shortconv_causal"
# Keys that the authors' code and transformers write into config.json. With CC, the kernel size has
# this default, whatever the weights have.
RELEASED_KEYS = {
    "architectures": ["GPT"],
    "model_type": "nanogptpro",
    "transformers_version": "4.40",
    "torch_dtype": "float32",
    "ddl_sequence_reduction_version": 1,
    "attention_dtype": "auto",
    "use_k_shift": False,
    "dropout": 0.0,
    "intermediate_size": 26,
    "ddl_state_shortconv_kernel_size": 4,
}


def build_released(model_name: str, **keys) -> GPT:
    """Build a tiny model in the form of the authors' code."""
    return build_tiny(model_name, **authors_form(model_name), **keys)


def write_folder(folder: Path, weights: dict[str, torch.Tensor], **config) -> Path:
    """Write weights, and a config.json with these keys besides those that every folder has."""
    (folder / "config.json").write_text(json.dumps({**TINY, **RELEASED_KEYS, **config}))
    copies = {name: weight.float().clone().contiguous() for name, weight in weights.items()}
    save_file(copies, folder / "model.safetensors")
    return folder


def load(folder: Path) -> GPT:
    """Return the model of a folder, which has no tokenizer."""
    variant, settings = released.describe(folder)
    return read_model(folder, variant, settings, released.convert_weights)


def read_refusal(folder: Path) -> str:
    """Check that the folder cannot be loaded, and return the error."""
    with pytest.raises(ValueError, match=r".+") as error:
        load(folder)
    assert str(folder) in str(error.value)
    assert "\n" not in str(error.value)
    return str(error.value)


def naive_logits(model: GPT, model_name: str, ids: list[int]) -> torch.Tensor:
    """Return logits by the paper's equations, of the model's weights in float32."""
    weights = {name: weight.float().double() for name, weight in model.state_dict().items()}
    return naive.logits(model_name, weights, vars(model.config), ids)


FORMS = [
    *((model_name, {}, {}) for model_name in PAPER),
    ("DDL-gpt-mha-rope-EC", {}, {"ddl_value_channels": 3}),
    (CC, {"ddl_state_shortconv_kernel_size": 2}, {"ddl_value_channels": 3}),
    (CC, {"ddl_state_shortconv_kernel_size": 2}, {"ddl_value_channels": 3, CAUSAL: True}),
    (f"{CC}-EC", {}, {"ddl_value_channels": 3, CAUSAL: True}),
]


@pytest.mark.parametrize("name_weights", [GPT.state_dict, released_weights])
@pytest.mark.parametrize(("model_name", "shape_keys", "keys"), FORMS)
def test_both_releases_have_the_logits_of_their_weights(
    name_weights, model_name, shape_keys, keys, tmp_path
):
    """shape_keys: keys that the weights show, and config.json does not"""
    model = build_released(model_name, **shape_keys, **keys)
    loaded_model = load(write_folder(tmp_path, name_weights(model), **keys))
    assert type(loaded_model) is type(model)
    ids = torch.randint(0, 29, (7,))
    expected = naive_logits(model, model_name, ids.tolist())
    torch.testing.assert_close(loaded_model.double()(ids[None])[0][0], expected, **naive.EXACT)


def test_a_folder_that_says_nothing_has_the_form_of_the_authors_code(tmp_path):
    """The write value is 4 sigmoid(W x + b), a read of CC a pair, and the state float32."""
    stated = vars(load(write_folder(tmp_path, released_weights(build_released(CC)))).config)
    expected = vars(configure(["config/ddl_dv4_cc_small.py", "config/authors.py"])[1])
    for key in ("ddl_v_sigmoid", "ddl_v_sigmoid_scale", "ddl_v_bias", "ddl_cc_read", "state_dtype"):
        assert stated[key] == expected[key], key


@pytest.mark.parametrize("kernel_size", [2, 3])
def test_a_pair_is_folded_if_config_json_says_so(kernel_size, tmp_path):
    model = build_released(CC, ddl_value_channels=3, ddl_state_shortconv_kernel_size=kernel_size)
    keys = {"ddl_value_channels": 3, "ddl_cc_read": "folded"}
    loaded_model = load(write_folder(tmp_path, released_weights(model), **keys))
    assert "readout.read" not in loaded_model.state_dict()
    ids = torch.randint(0, 29, (7,))
    expected = naive_logits(model, CC, ids.tolist())
    # the folded weights are rounded to float32
    torch.testing.assert_close(loaded_model.double()(ids[None])[0][0], expected, rtol=0, atol=1e-5)


def test_constant_value_is_renamed(tmp_path):
    weights = build_released("DDL-vdim1-gpt-mha-rope").state_dict()
    keys = {"ddl_v_dim1_constant": True, "ddl_v_dim1_constant_value": 3.0}
    config = load(write_folder(tmp_path, weights, **keys)).config
    assert config.ddl_v_constant is True
    assert config.ddl_v_constant_value == 3.0


@pytest.mark.parametrize(
    ("keys", "mup", "branch_mult"),
    [
        ({BASE: 1}, False, 1.0),
        ({"mup": True}, True, 1.0),
        ({"parameterization": "widthmuP", BASE: 1}, True, 1.0),
        ({"parameterization": "completep", BASE: 4}, True, 2.0),
        ({"parameterization": "SpectralP", BASE: 4, "residual_branch_mult": 3}, True, 3.0),
    ],
)
def test_parameterization_is_mapped(keys, mup, branch_mult, tmp_path):
    weights = released_weights(build_released("gpt-mha-rope"))
    config = load(write_folder(tmp_path, weights, **keys)).config
    assert config.mup == mup
    assert config.branch_mult == branch_mult


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"use_k_shift": True}, "use_k_shift=True in the released config: only False"),
        ({"intermediate_size": 40}, f"does not fit {CC}: transformer.h.0.mlp.c_fc1.weight"),
        ({"parameterization": "muP"}, "='muP' in the released config: only None, 'widthmuP'"),
    ],
)
def test_keys_that_this_code_lacks_are_refused(keys, message, tmp_path):
    folder = write_folder(tmp_path, released_weights(build_released(CC)), **keys)
    assert message in read_refusal(folder)


READOUT = "readout.weight"
EC = "DDL-gpt-mha-rope-EC"


@pytest.mark.parametrize(
    ("model_name", "name", "change", "message"),
    [
        (EC, READOUT, lambda x: x[0], "does not fit DDL-gpt-mha-rope-CC-EC: "),
        (EC, READOUT, lambda x: x.transpose(0, 1), "has the shape (4, 10, 4), expected (40, 4)"),
        (CC, READOUT, lambda x: torch.ones(10, 5), "kernel_size=5"),
        (CC, "transformer.h.0.compress.weight", lambda x: x[:, :2], "expected (10, 4)"),
        (CC, "readout.read", lambda x: x[:3], "readout.read has the shape (3,), expected (4,)"),
    ],
)
def test_weights_of_another_shape_are_refused(model_name, name, change, message, tmp_path):
    weights = released_weights(build_released(model_name))
    weights[name] = change(weights[name])
    assert message in read_refusal(write_folder(tmp_path, weights))


def test_weights_that_are_missing_or_too_many_are_named(tmp_path):
    model = build_released(CC)
    weights = released_weights(model)
    del weights["readout.read"]
    assert "readout.read" in read_refusal(write_folder(tmp_path, weights))
    # of both releases
    folder = write_folder(tmp_path, {**model.state_dict(), **released_weights(model)})
    assert "o_proj.weight is not one of its weights" in read_refusal(folder)
