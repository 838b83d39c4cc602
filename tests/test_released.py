"""Folders of the authors' releases: by name and shape, there and back, refused where this code
lacks the option.
"""

import json
from dataclasses import asdict

import naive
import pytest
import torch
import torch.nn.functional as F
from models import PAPER
from safetensors.torch import save_file

from model import build, released
from model.residual import fold_column_conv

TINY = {
    "vocab_size": 29,
    "block_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "head_dim": 6,
}
TINY |= {"hidden_size": 10}
LIBRARY = {
    "architectures": ["X"],
    "model_type": "x",
    "transformers_version": "4.40",
    "torch_dtype": "float32",
}


def write(folder, weights, **config):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**LIBRARY, **TINY, **config}))
    save_file(
        {name: value.clone().contiguous() for name, value in weights.items()},
        folder / "model.safetensors",
    )
    return folder


def noisy(stem, **keys):
    model = build(stem, **TINY, **keys)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


@pytest.mark.parametrize("stem", PAPER)
def test_round_trip_through_the_older_names(stem, tmp_path):
    model = noisy(stem)
    written = released.state_dict(model, older=True)
    assert any(name.endswith("compress.read") for name in written) == (
        "vdim1" not in stem and stem != "gpt-mha-rope"
    )
    assert any(name.endswith("attn.c_proj.weight") for name in written)
    extra = {
        "ddl_v_dim1_constant": False,
        "use_k_shift": False,
        "dropout": 0.0,
        "intermediate_size": 26,
    }
    loaded = released.load(write(tmp_path / "r", written, **extra))
    assert type(loaded).__module__ == f"model.{stem}"
    ids = torch.randint(0, 29, (2, 9))
    torch.testing.assert_close(loaded(ids)[0], model(ids)[0], rtol=0, atol=0)


@pytest.mark.parametrize("v", [2, 3, 4])
def test_a_pair_computes_its_convolution(v, tmp_path):
    """x_in of the loaded model against conv1d over columns and the read vector, on the model's own
    state.
    """
    weights = released.state_dict(noisy("DDL-gpt-mha-rope-CC", ddl_value_channels=v))
    for name in list(weights):
        if name.endswith(("compress.read", "readout.read", "compress.weight", "readout.weight")):
            weights[name] = torch.randn_like(weights[name])
    keys = {"ddl_value_channels": v, "ddl_state_shortconv_kernel_size": v}
    model = released.load(write(tmp_path / "r", weights, **keys))
    state = torch.randn(7, 10, v)  # (tokens, d, v)
    kernel, read = (
        weights["transformer.h.1.compress.weight"],
        weights["transformer.h.1.compress.read"],
    )
    padded = F.pad(state, ((v - 1) // 2, v - 1 - (v - 1) // 2))
    expected = F.conv1d(padded, kernel[:, None], groups=10) @ read
    torch.testing.assert_close(model.transformer.h[1].compress(state.mT[None])[0], expected)


def test_constant_value_is_renamed(tmp_path):
    weights = released.state_dict(noisy("DDL-vdim1-gpt-mha-rope"))
    keys = {"ddl_v_dim1_constant": True, "ddl_v_dim1_constant_value": 3.0}
    config = released.load(write(tmp_path / "r", weights, **keys)).config
    assert (config.ddl_v_constant, config.ddl_v_constant_value) == (True, 3.0)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"use_k_shift": True}, "use_k_shift=True in the released config: only False"),
        ({"intermediate_size": 40}, "intermediate_size=40"),
        ({"rms_norm_eps": 1e-6}, "rms_norm_eps=1e-06"),
        (
            {"hidden_sizes": 10},
            "unknown key hidden_sizes in the released config, did you mean hidden_size",
        ),
        (
            {"ddl_beta_intt": 0.3},
            "unknown key ddl_beta_intt in the released config, did you mean ddl_beta_init",
        ),
        ({"num_hidden_layers": 3}, "does not fit DDL-gpt-mha-rope-CC: transformer.h.2"),
    ],
)
def test_what_this_code_lacks_is_refused(tmp_path, config, message):
    folder = write(tmp_path / "r", released.state_dict(noisy("DDL-gpt-mha-rope-CC")), **config)
    with pytest.raises(ValueError, match=message):
        released.load(folder)


def test_bfloat16_pairs_fold_in_fp32(tmp_path):
    weights = released.state_dict(noisy("DDL-gpt-mha-rope-CC", ddl_cc_read="folded"))
    weights["readout.read"] = torch.rand(4)
    rounded = {name: value.bfloat16() for name, value in weights.items()}
    loaded = released.load(write(tmp_path / "r", rounded, ddl_cc_read="folded"))
    assert loaded.readout.weight.dtype == torch.float32
    exact = fold_column_conv(rounded["readout.weight"].double(), rounded["readout.read"].double())
    torch.testing.assert_close(loaded.readout.weight.double(), exact, rtol=1e-6, atol=1e-7)


def test_damaged_weights_are_refused(tmp_path):
    folder = write(tmp_path / "r", released.state_dict(noisy("gpt-mha-rope")))
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(ValueError, match="is damaged"):
        released.load(folder)
    file.unlink()
    # a pickle that runs a command
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'echo executed'\ntR.")
    with pytest.raises(ValueError, match="is a pickle: save it as safetensors"):
        released.load(folder)


def test_missing_files_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"holds no config\.json"):
        released.load(tmp_path)


# ---- the current release ----

V, KERNEL, INNER = 3, 2, 26  # columns, taps over tokens, the MLP's width at hidden_size 10
EXPANDED = [stem for stem in PAPER if stem.startswith("DDL-gpt")]


def weights_of_the_release(stem: str, taps: int = V) -> tuple[dict, dict]:
    """Random weights by the names and in the shapes of the current release, and the same as `naive`
    calls them.
    """
    theirs, ours = {}, {}

    def add(name: str, *shape: int, as_ours: str | None = None, flat: tuple | None = None):
        theirs[name] = 0.4 * torch.randn(shape)
        ours[as_ours or name] = theirs[name].reshape(flat or shape)

    def add_read(owner: str):
        add(f"{owner}.read", V)
        if "-CC" in stem:
            add(f"{owner}.weight", 10, taps)
        else:
            add(
                f"{owner}.weight",
                10,
                V,
                KERNEL,
                as_ours=f"{owner}.shortconv.weight",
                flat=(10 * V, KERNEL),
            )

    add("transformer.wte.weight", 29, 10)
    add("ln_f.weight", 10)
    if stem.endswith("EC"):
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
            if stem != "gpt-mha-rope":
                columns = V if stem in EXPANDED else 1
                add(f"{block}.ddl_{name}.beta.weight", 1, 10)
                add(f"{block}.ddl_{name}.beta.bias", 1)
                add(f"{block}.ddl_{name}.v_proj.weight", columns, 10)
                add(f"{block}.ddl_{name}.v_proj.bias", columns)
        if stem in EXPANDED:
            add_read(f"{block}.compress")
    if stem in EXPANDED:
        add_read("readout")
    ours["lm_head.weight"] = ours["transformer.wte.weight"]
    return theirs, {name: value.double() for name, value in ours.items()}


def keys_of_the_release(stem: str) -> dict:
    """What the authors' code writes into config.json, as far as it bears on the forward pass or on
    loading.
    """
    keys = {
        "ddl_sequence_reduction_version": 1,
        "attention_dtype": "auto",
        "scale_attn_by_inverse_layer_idx": False,
    }
    keys |= {
        "q_activation": None,
        "using_groupnorm": False,
        "rope_ratio": 0.5,
        "hidden_init_std_factor": 0.5,
    }
    if stem in EXPANDED:
        kernel_size = 4 if "-CC" in stem else KERNEL
        keys |= {
            "ddl_value_channels": V,
            "ddl_state_shortconv_kernel_size": kernel_size,
            "ddl_v_sigmoid": False,
        }
    return keys


FORMS = [(stem, V, False) for stem in PAPER]
FORMS += [
    (stem, taps, causal)
    for stem in PAPER
    if "-CC" in stem
    for taps, causal in ((2, False), (2, True), (3, True))
]


@pytest.mark.parametrize(("stem", "taps", "causal"), FORMS)
def test_the_current_release_computes_its_equations(stem, taps, causal, tmp_path):
    theirs, weights = weights_of_the_release(stem, taps)
    keys = keys_of_the_release(stem) | {"parameterization": "completeP", "hidden_size_base": 5}
    keys |= {"num_hidden_layers_base": 1} | (
        {"ddl_state_dv_shortconv_causal": causal} if "-CC" in stem else {}
    )
    loaded = released.load(write(tmp_path / "r", theirs, **keys))
    assert type(loaded).__module__ == f"model.{stem}"
    assert loaded.config.init == "spectral"
    assert (loaded.config.mup, loaded.config.branch_mult) == (True, 0.5)
    if "-CC" in stem:
        wanted = ("pair", None if taps == V else taps)
        assert (loaded.config.ddl_cc_read, loaded.config.ddl_state_shortconv_kernel_size) == wanted
    ids = torch.randint(0, 29, (7,))
    expected = naive.logits(stem, weights, asdict(loaded.config), ids.tolist())
    torch.testing.assert_close(loaded.double()(ids[None])[0][0], expected, **naive.EXACT)
    back = released.state_dict(loaded.float())
    assert back.keys() - {"lm_head.weight"} == theirs.keys()
    assert all(torch.equal(back[name], value) for name, value in theirs.items())


OURS = [
    ("gpt-mha-rope", {}),
    ("DDL-vdim1-gpt-mha-rope", {"ddl_v_constant": True, "ddl_v_constant_value": 3.0}),
]
OURS += [(stem, {"ddl_value_channels": V}) for stem in ("DDL-gpt-mha-rope", "DDL-gpt-mha-rope-EC")]
for ending in ("CC", "CC-EC"):
    forms = [{"ddl_cc_read": "folded"}, {"ddl_cc_read": "pair"}]
    forms += [{**forms[1], "ddl_state_dv_shortconv_causal": True}]
    forms += [{**form, "ddl_state_shortconv_kernel_size": 2} for form in forms[1:]]
    OURS += [(f"DDL-gpt-mha-rope-{ending}", form) for form in forms]
SCALES = [
    {},
    {"mup": True, "hidden_size_base": 5},
    {"residual_branch_mult": 0.3},
    {"num_hidden_layers_base": 1},
    {"mup": True, "num_hidden_layers_base": 1},
    {"mup": True, "num_hidden_layers_base": 6, "residual_branch_mult": 0.7},
]


@pytest.mark.parametrize(("stem", "keys"), OURS)
def test_round_trip_through_the_current_names(stem, keys, tmp_path):
    for number, scale in enumerate(SCALES):
        model = noisy(stem, **keys, **scale)
        written, config = released.state_dict(model), released.config_of(model)
        assert any(name.endswith("attn.o_proj.weight") for name in written)
        assert not any("c_proj" in name or "conv" in name for name in written)
        assert "mup" not in config
        loaded = released.load(write(tmp_path / str(number), written, **config))
        assert type(loaded).__module__ == f"model.{stem}"
        ids = torch.randint(0, 29, (2, 9))
        assert torch.equal(loaded(ids)[0], model(ids)[0])
        if keys.get("ddl_cc_read") != "folded":
            assert all(
                torch.equal(value, model.state_dict()[name])
                for name, value in loaded.state_dict().items()
            )
        again = released.state_dict(loaded)
        assert all(torch.equal(value, again[name]) for name, value in written.items())


@pytest.mark.parametrize("file", released.FILES)
def test_a_config_may_name_a_file_of_the_release(file, tmp_path):
    stem = released.FILES[file]
    theirs, _ = weights_of_the_release(stem)
    for number, said in enumerate(
        ({"stem": file}, {"model_type": f"{file}-accelerated"}, {"architectures": [file]})
    ):
        loaded = released.load(
            write(tmp_path / str(number), theirs, **keys_of_the_release(stem), **said)
        )
        assert type(loaded).__module__ == f"model.{stem}"


@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        ({"parameterization": None, "num_hidden_layers_base": 1}, (False, None, 1.0)),
        ({"parameterization": "widthmuP", "num_hidden_layers_base": 1}, (True, None, 1.0)),
        ({"parameterization": "widthmup", "residual_branch_mult": 3}, (True, None, 3.0)),
        ({"parameterization": "spectralP"}, (True, None, 1.0)),
        (
            {"parameterization": "completep", "num_hidden_layers_base": 4, "mup": True},
            (True, 4, 2.0),
        ),
        (
            {
                "parameterization": "SpectralP",
                "num_hidden_layers_base": 4,
                "residual_branch_mult": 0.3,
            },
            (True, 4, 0.3),
        ),
    ],
)
def test_parameterization_is_mapped(keys, wanted, tmp_path):
    config = released.load(
        write(tmp_path / "r", weights_of_the_release("gpt-mha-rope")[0], **keys)
    ).config
    assert (config.mup, config.num_hidden_layers_base, config.branch_mult) == wanted


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"parameterization": "x"},
            "parameterization='x' in the released config: only None, 'widthmuP'",
        ),
        ({"parameterization": "muP"}, "parameterization='muP'"),
        ({"parameterization": []}, r"parameterization=\[\]"),
        (
            {"parameterization": "widthmuP", "mup": False},
            "mup=False in the released config contradicts",
        ),
        (
            {"num_hidden_layers_base": 6},
            "num_hidden_layers_base=6 .* with parameterization=completeP",
        ),
        ({"residual_branch_mult": 0}, "residual_branch_mult=0.0: give"),
        (
            {"ddl_sequence_reduction_version": 2},
            "ddl_sequence_reduction_version=2 .*: only 1 is supported",
        ),
        ({"attention_dtype": "fp8"}, "attention_dtype='fp8' .*: only 'auto' is supported"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
        (
            {"ddl_cc_read": "folded", "ddl_state_dv_shortconv_causal": True},
            "ddl_state_dv_shortconv_causal=True",
        ),
        ({"stem": "DDL-gpt-mha-rope-TC"}, "does not fit DDL-gpt-mha-rope: "),
    ],
)
def test_keys_that_cannot_be_are_refused(keys, message, tmp_path):
    stem = "DDL-gpt-mha-rope-CC"
    folder = write(
        tmp_path / "r", weights_of_the_release(stem)[0], **{**keys_of_the_release(stem), **keys}
    )
    with pytest.raises(ValueError, match=message) as error:
        released.load(folder)
    assert str(folder) in str(error.value)
    assert "\n" not in str(error.value)


def swapped(tensors, name):
    tensors[name] = tensors[name].transpose(0, 1)


@pytest.mark.parametrize(
    ("stem", "change", "message"),
    [
        (
            "-EC",
            lambda t: t.update({"readout.weight": t["readout.weight"][None]}),
            r"readout.weight is \(1, 10, 3, 2\)",
        ),
        (
            "-EC",
            lambda t: t.update({"readout.weight": t["readout.weight"][0, 0]}),
            r"readout.weight is \(2,\)",
        ),
        (
            "-EC",
            lambda t: t.update({"readout.weight": t["readout.weight"][0]}),
            "over columns .CC., .* over tokens",
        ),
        (
            "-EC",
            lambda t: swapped(t, "readout.weight"),
            r"readout.weight is \(3, 10, 2\): needed \(d, v, K\)",
        ),
        (
            "-EC",
            lambda t: swapped(t, "input_embed.weight"),
            r"input_embed.weight is \(3, 10, 4\): needed",
        ),
        (
            "-EC",
            lambda t: t.update({"input_embed.weight": torch.ones(30, 4)}),
            r"input_embed.weight is \(30, 4\)",
        ),
        ("-EC", lambda t: t.pop("readout.read"), "readout.read is missing"),
        ("-CC", lambda t: t.pop("readout.read"), "readout.read is missing"),
        ("-CC", lambda t: t.update({"readout.weight": torch.ones(10, 4)}), "no pair|kernel_size=4"),
        (
            "-CC",
            lambda t: t.update({"transformer.h.0.compress.weight": torch.ones(10, 2)}),
            "needed .10, 3.",
        ),
        (
            "-CC",
            lambda t: t.update({"transformer.wte.weight": torch.ones(29)}),
            "transformer.wte.weight",
        ),
        (
            "",
            lambda t: t.update(
                {"transformer.h.1.mlp.c_proj.weight": t.pop("transformer.h.1.mlp.o_proj.weight")}
            ),
            "is a weight of the authors' current release, transformer.h.1.mlp.c_proj.weight of "
            "their older one",
        ),
        (
            "",
            lambda t: t.update({"readout.shortconv.weight": t.pop("readout.weight").flatten(0, 1)}),
            "current release, readout.shortconv.weight of their older",
        ),
        (
            "-CC-EC",
            lambda t: t.update(
                {"input_embed.conv.weight": t.pop("input_embed.weight").reshape(30, 1, 4)}
            ),
            "current release, input_embed.conv.weight of their older",
        ),
    ],
)
def test_weights_that_cannot_be_are_refused(stem, change, message, tmp_path):
    stem = f"DDL-gpt-mha-rope{stem}"
    theirs, _ = weights_of_the_release(stem)
    change(theirs)
    folder = write(tmp_path / "r", theirs, **keys_of_the_release(stem))
    with pytest.raises(ValueError, match=message) as error:
        released.load(folder)
    assert str(folder) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("stem", "keys", "older", "message"),
    [
        (
            "HC-gpt-mha-rope",
            {},
            False,
            "model='HC-gpt-mha-rope': the authors' current release has no such variant",
        ),
        (
            "DDL-gpt-mha-rope",
            {"ddl_map": "v"},
            False,
            "ddl_map='v': the authors' current release has no such key",
        ),
        (
            "DDL-gpt-mha-rope",
            {"ddl_v_input": "context"},
            True,
            "ddl_v_input='context': the authors' older release",
        ),
        ("DDL-gpt-mha-rope-CC", {"ddl_update": "write_only"}, False, "ddl_update='write_only'"),
        ("DDL-gpt-mha-rope", {"ddl_value_channels": 1}, False, "ddl_value_channels=1"),
        (
            "gpt-mha-rope",
            {"residual_branch_mult": 0.5},
            True,
            "residual_branch_mult=0.5: the authors' older release",
        ),
        (
            "gpt-mha-rope",
            {"num_hidden_layers_base": 1},
            True,
            "num_hidden_layers_base=1: the authors' older release",
        ),
        (
            "DDL-gpt-mha-rope-CC",
            {"ddl_state_dv_shortconv_causal": True},
            True,
            "ddl_state_dv_shortconv_causal=True",
        ),
        (
            "DDL-gpt-mha-rope-CC",
            {"ddl_state_shortconv_kernel_size": 3},
            True,
            "ddl_state_shortconv_kernel_size=3",
        ),
    ],
)
def test_what_a_release_lacks_is_not_written(stem, keys, older, message):
    model = build(stem, **TINY, **keys, **({"ddl_cc_read": "pair"} if "-CC" in stem else {}))
    for write_back in (released.state_dict, released.config_of):
        with pytest.raises(ValueError, match=message):
            write_back(model, older=older)


@pytest.mark.parametrize(("form", "count"), [("pair", 123_722_668), ("folded", 123_722_616)])
def test_parameters_of_a_small_folder(form, count):
    with torch.device("meta"):
        model = build("DDL-gpt-mha-rope-CC", ddl_cc_read=form)
    assert model.num_parameters() == count
