"""Folders of the authors' releases: recognized by names and shapes, converted, and refused if they
need an option that this code lacks.
"""

import json
from dataclasses import asdict
from pathlib import Path

import naive
import pytest
import torch
import torch.nn.functional as F
from export_helpers import released_weights
from models import PAPER, TINY
from safetensors.torch import save_file

from huggingface import released
from model import build
from model.gpt import GPT
from model.residual import fold_channel_conv

TRANSFORMERS_KEYS = {
    "architectures": ["X"],
    "model_type": "x",
    "transformers_version": "4.40",
    "torch_dtype": "float32",
}


def write_release(folder: Path, weights: dict[str, torch.Tensor], **config) -> Path:
    """Write a released model with these weights and keys, and the keys of TINY; return its folder.

    config: keys of config.json
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**TRANSFORMERS_KEYS, **TINY, **config}))
    copies = {name: value.clone().contiguous() for name, value in weights.items()}
    save_file(copies, folder / "model.safetensors")
    return folder


def build_noisy(model_name: str, **keys) -> GPT:
    """Return a model of the size TINY whose weights are not those of its initialization."""
    model = build(model_name, **TINY, **keys)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


@pytest.mark.parametrize("model_name", PAPER)
def test_the_older_release_has_our_names(model_name, tmp_path):
    model = build_noisy(model_name)
    weights = model.state_dict()
    assert any(name.endswith("attn.c_proj.weight") for name in weights)
    folder = write_release(
        tmp_path / "r",
        weights,
        ddl_v_dim1_constant=False,
        use_k_shift=False,
        dropout=0.0,
        intermediate_size=26,
    )
    loaded_model = released.load(folder)
    assert type(loaded_model).__module__ == f"model.{model_name}"
    ids = torch.randint(0, 29, (2, 9))
    torch.testing.assert_close(loaded_model(ids)[0], model(ids)[0], rtol=0, atol=0)


@pytest.mark.parametrize("v", [2, 3, 4])
def test_a_pair_computes_its_convolution(v, tmp_path):
    """x_in of the loaded model against conv1d over columns and the read vector."""
    weights = released_weights(build_noisy("DDL-gpt-mha-rope-CC", ddl_value_channels=v))
    for name in list(weights):
        if name.endswith(("compress.read", "readout.read", "compress.weight", "readout.weight")):
            weights[name] = torch.randn_like(weights[name])
    folder = write_release(
        tmp_path / "r", weights, ddl_value_channels=v, ddl_state_shortconv_kernel_size=v
    )
    model = released.load(folder)
    state = torch.randn(7, 10, v)  # (tokens, d, v)
    kernel, read = (weights[f"transformer.h.1.compress.{name}"] for name in ("weight", "read"))
    padded = F.pad(state, ((v - 1) // 2, v - 1 - (v - 1) // 2))
    expected = F.conv1d(padded, kernel[:, None], groups=10) @ read
    torch.testing.assert_close(model.transformer.h[1].compress(state.mT[None])[0], expected)


def test_constant_value_is_renamed(tmp_path):
    weights = released_weights(build_noisy("DDL-vdim1-gpt-mha-rope"))
    folder = write_release(
        tmp_path / "r", weights, ddl_v_dim1_constant=True, ddl_v_dim1_constant_value=3.0
    )
    config = released.load(folder).config
    assert config.ddl_v_constant is True
    assert config.ddl_v_constant_value == 3.0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"use_k_shift": True}, "use_k_shift=True in the released config: only False"),
        ({"intermediate_size": 40}, "intermediate_size=40"),
        ({"rms_norm_eps": 1e-6}, "rms_norm_eps=1e-06"),
        ({"hidden_sizes": 10}, "key hidden_sizes in the released config, did you mean hidden_size"),
        ({"ddl_beta_intt": 0.3}, "unknown key ddl_beta_intt .*, did you mean ddl_beta_init"),
        ({"num_hidden_layers": 3}, "does not fit DDL-gpt-mha-rope-CC: transformer.h.2"),
    ],
)
def test_what_this_code_lacks_is_refused(tmp_path, config, message):
    folder = write_release(
        tmp_path / "r", released_weights(build_noisy("DDL-gpt-mha-rope-CC")), **config
    )
    with pytest.raises(ValueError, match=message):
        released.load(folder)


def test_bfloat16_pairs_fold_in_fp32(tmp_path):
    weights = released_weights(build_noisy("DDL-gpt-mha-rope-CC", ddl_cc_read="folded"))
    weights["readout.read"] = torch.rand(4)
    rounded = {name: value.bfloat16() for name, value in weights.items()}
    loaded_model = released.load(write_release(tmp_path / "r", rounded, ddl_cc_read="folded"))
    assert loaded_model.readout.weight.dtype == torch.float32
    exact = fold_channel_conv(rounded["readout.weight"].double(), rounded["readout.read"].double())
    torch.testing.assert_close(loaded_model.readout.weight.double(), exact, rtol=1e-6, atol=1e-7)


def test_missing_files_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"holds no config\.json"):
        released.load(tmp_path)


# ---- the current release ----

V = 3  # number of columns
KERNEL = 2  # number of taps over tokens
INNER = 26  # width of the MLP with hidden_size=10
EXPANDED = [model_name for model_name in PAPER if model_name.startswith("DDL-gpt")]


def weights_of_the_release(model_name: str, taps: int = V) -> tuple[dict, dict]:
    """Return random weights as the current release names and shapes them, and as `naive` does."""
    theirs = {}
    ours = {}

    def add(name: str, *shape: int, as_ours: str | None = None, flat: tuple | None = None):
        theirs[name] = 0.4 * torch.randn(shape)
        ours[as_ours or name] = theirs[name].reshape(flat or shape)

    def add_read(owner: str):
        add(f"{owner}.read", V)
        if "-CC" in model_name:
            add(f"{owner}.weight", 10, taps)
        else:
            as_ours = f"{owner}.shortconv.weight"
            add(f"{owner}.weight", 10, V, KERNEL, as_ours=as_ours, flat=(10 * V, KERNEL))

    add("transformer.wte.weight", 29, 10)
    add("ln_f.weight", 10)
    if model_name.endswith("EC"):
        add("input_embed.weight", 10, V, 4, as_ours="input_embed.conv.weight", flat=(10 * V, 1, 4))
    for block in (f"transformer.h.{layer}" for layer in range(2)):
        for name in ("c_q", "c_k", "c_v"):
            add(f"{block}.attn.{name}.weight", 12, 10)
        for name in ("attn.q_rms", "attn.k_rms"):
            add(f"{block}.{name}.weight", 6)
        add(f"{block}.attn.o_proj.weight", 10, 12, as_ours=f"{block}.attn.c_proj.weight")
        add(f"{block}.mlp.c_fc1.weight", INNER, 10)
        add(f"{block}.mlp.c_fc2.weight", INNER, 10)
        add(f"{block}.mlp.o_proj.weight", 10, INNER, as_ours=f"{block}.mlp.c_proj.weight")
        for name in ("attn", "mlp"):
            add(f"{block}.ln_{1 if name == 'attn' else 2}.weight", 10)
            if model_name != "gpt-mha-rope":
                columns = V if model_name in EXPANDED else 1
                add(f"{block}.ddl_{name}.beta.weight", 1, 10)
                add(f"{block}.ddl_{name}.beta.bias", 1)
                add(f"{block}.ddl_{name}.v_proj.weight", columns, 10)
                add(f"{block}.ddl_{name}.v_proj.bias", columns)
        if model_name in EXPANDED:
            add_read(f"{block}.compress")
    if model_name in EXPANDED:
        add_read("readout")
    ours["lm_head.weight"] = ours["transformer.wte.weight"]
    return theirs, {name: value.double() for name, value in ours.items()}


def keys_of_the_release(model_name: str) -> dict:
    """Return the keys that the authors' code writes into config.json and that affect loading."""
    keys = {
        "ddl_sequence_reduction_version": 1,
        "attention_dtype": "auto",
        "rope_ratio": 0.5,
        "scale_attn_by_inverse_layer_idx": False,
        "q_activation": None,
        "using_groupnorm": False,
        "hidden_init_std_factor": 0.5,
    }
    if model_name in EXPANDED:
        # with CC the key has its default, 4, whatever the weights have
        keys["ddl_state_shortconv_kernel_size"] = 4 if "-CC" in model_name else KERNEL
        keys["ddl_value_channels"] = V
        keys["ddl_v_sigmoid"] = False
    return keys


FORMS = [
    *((model_name, V, False) for model_name in PAPER),
    *(
        (model_name, taps, causal)
        for model_name in PAPER
        if "-CC" in model_name
        for taps, causal in [(2, False), (2, True), (3, True)]
    ),
]


@pytest.mark.parametrize(("model_name", "taps", "causal"), FORMS)
def test_the_current_release_computes_its_equations(model_name, taps, causal, tmp_path):
    theirs, weights = weights_of_the_release(model_name, taps)
    keys = {
        **keys_of_the_release(model_name),
        "parameterization": "completeP",
        "hidden_size_base": 5,
        "num_hidden_layers_base": 1,
    }
    if "-CC" in model_name:
        keys["ddl_state_dv_shortconv_causal"] = causal
    loaded_model = released.load(write_release(tmp_path / "r", theirs, **keys))
    assert type(loaded_model).__module__ == f"model.{model_name}"
    assert loaded_model.config.init == "spectral"
    assert loaded_model.config.mup is True
    assert loaded_model.config.branch_mult == 0.5
    if "-CC" in model_name:
        kernel_size = None if taps == V else taps
        assert loaded_model.config.ddl_cc_read == "pair"
        assert loaded_model.config.ddl_state_shortconv_kernel_size == kernel_size
    ids = torch.randint(0, 29, (7,))
    expected = naive.logits(model_name, weights, asdict(loaded_model.config), ids.tolist())
    torch.testing.assert_close(loaded_model.double()(ids[None])[0][0], expected, **naive.EXACT)
    for name, value in loaded_model.state_dict().items():
        assert torch.equal(value, weights[name]), name


@pytest.mark.parametrize("file", released.VARIANT_OF_FILE)
def test_a_config_may_name_a_file_of_the_release(file, tmp_path):
    model_name = released.VARIANT_OF_FILE[file]
    theirs, _ = weights_of_the_release(model_name)
    keys = keys_of_the_release(model_name)
    names = ({"stem": file}, {"model_type": f"{file}-accelerated"}, {"architectures": [file]})
    for number, name in enumerate(names):
        loaded_model = released.load(write_release(tmp_path / str(number), theirs, **keys, **name))
        assert type(loaded_model).__module__ == f"model.{model_name}"


BASE = "num_hidden_layers_base"


@pytest.mark.parametrize(
    ("name", "keys", "mup", "num_hidden_layers_base", "branch_mult"),
    [
        (None, {BASE: 1}, False, None, 1.0),
        ("widthmuP", {BASE: 1}, True, None, 1.0),
        ("widthmup", {"residual_branch_mult": 3}, True, None, 3.0),
        ("spectralP", {}, True, None, 1.0),
        ("completep", {BASE: 4, "mup": True}, True, 4, 2.0),
        ("SpectralP", {BASE: 4, "residual_branch_mult": 0.3}, True, 4, 0.3),
    ],
)
def test_parameterization_is_mapped(name, keys, mup, num_hidden_layers_base, branch_mult, tmp_path):
    theirs, _ = weights_of_the_release("gpt-mha-rope")
    config = released.load(
        write_release(tmp_path / "r", theirs, parameterization=name, **keys)
    ).config
    assert config.mup == mup
    assert config.num_hidden_layers_base == num_hidden_layers_base
    assert config.branch_mult == branch_mult


CAUSAL = "ddl_state_dv_shortconv_causal"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"parameterization": "x"}, "='x' in the released config: only None, 'widthmuP'"),
        ({"parameterization": "muP"}, "parameterization='muP'"),
        ({"parameterization": []}, r"parameterization=\[\]"),
        ({"parameterization": "widthmuP", "mup": False}, "mup=False in .* config contradicts"),
        ({BASE: 6}, f"{BASE}=6 .* with parameterization=completeP"),
        ({"residual_branch_mult": 0}, "residual_branch_mult=0.0: give"),
        ({"ddl_sequence_reduction_version": 2}, "_version=2 .*: only 1 is supported"),
        ({"intermediate_size": 7}, "intermediate_size=7 .*: only None or [0-9]+ is supported"),
        ({"attention_dtype": "fp8"}, "attention_dtype='fp8' .*: only 'auto' is supported"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
        ({"ddl_cc_read": "folded", CAUSAL: True}, f"{CAUSAL}=True"),
        ({"stem": "DDL-gpt-mha-rope-TC"}, "does not fit DDL-gpt-mha-rope: "),
    ],
)
def test_keys_that_cannot_be_are_refused(keys, message, tmp_path):
    model_name = "DDL-gpt-mha-rope-CC"
    folder = write_release(
        tmp_path / "r",
        weights_of_the_release(model_name)[0],
        **{**keys_of_the_release(model_name), **keys},
    )
    with pytest.raises(ValueError, match=message) as error:
        released.load(folder)
    assert str(folder) in str(error.value)
    assert "\n" not in str(error.value)


READOUT, EXPANDER = "readout.weight", "input_embed.weight"
BLOCK = "transformer.h.1.mlp"


@pytest.mark.parametrize(
    ("model_name", "name", "change", "message"),
    [
        ("-EC", READOUT, lambda x: x[None], r"readout.weight has the shape \(1, 10, 3, 2\)"),
        ("-EC", READOUT, lambda x: x[0, 0], r"readout.weight has the shape \(2,\)"),
        ("-EC", READOUT, lambda x: x[0], "over columns .CC., but .* over tokens"),
        (
            "-EC",
            READOUT,
            lambda x: x.transpose(0, 1),
            r"the shape \(3, 10, 2\), expected \(d, v, K\)",
        ),
        (
            "-EC",
            EXPANDER,
            lambda x: x.transpose(0, 1),
            r"embed.weight has the shape \(3, 10, 4\), expected",
        ),
        ("-EC", EXPANDER, lambda x: x.flatten(0, 1), r"input_embed.weight has the shape \(30, 4\)"),
        ("-EC", "readout.read", None, "readout.read is missing"),
        ("-CC", "readout.read", None, "readout.read is missing"),
        ("-CC", READOUT, lambda x: torch.ones(10, 4), "do not form a pair|kernel_size=4"),
        ("-CC", "transformer.h.0.compress.weight", lambda x: x[:, :2], "expected .10, 3."),
        ("-CC", "transformer.wte.weight", lambda x: x[:, 0], "transformer.wte.weight"),
    ],
)
def test_weights_that_cannot_be_are_refused(model_name, name, change, message, tmp_path):
    model_name = f"DDL-gpt-mha-rope{model_name}"
    theirs, _ = weights_of_the_release(model_name)
    tensor = theirs.pop(name)
    if change:
        theirs[name] = change(tensor)
    folder = write_release(tmp_path / "r", theirs, **keys_of_the_release(model_name))
    with pytest.raises(ValueError, match=message) as error:
        released.load(folder)
    assert str(folder) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("model_name", "current", "older", "shape"),
    [
        ("", f"{BLOCK}.o_proj.weight", f"{BLOCK}.c_proj.weight", (10, INNER)),
        ("", READOUT, "readout.shortconv.weight", (10 * V, KERNEL)),
        ("-CC-EC", EXPANDER, "input_embed.conv.weight", (10 * V, 1, 4)),
    ],
)
def test_weights_of_both_releases_are_refused(model_name, current, older, shape, tmp_path):
    model_name = f"DDL-gpt-mha-rope{model_name}"
    theirs, _ = weights_of_the_release(model_name)
    theirs[older] = theirs.pop(current).reshape(shape)
    folder = write_release(tmp_path / "r", theirs, **keys_of_the_release(model_name))
    message = f"{folder}.* is a weight of the authors' current release, and {older} of"
    with pytest.raises(ValueError, match=message):
        released.load(folder)
