"""The models against SPEC's counts and names, and against the plain-loop implementation of
naive.py.
"""

import dataclasses
import math
from collections import OrderedDict

import naive
import pytest
import torch
from helpers import ROOT
from models import DDL, EXPANDED, INPUTS, PAPER, PARAMETER_COUNTS, TINY, build_tiny
from torch.utils.flop_counter import FlopCounterMode

from model import MODEL_NAMES, build, cost, layers, model_class
from model.gpt import GPTConfig, takes_branch_mult
from model.layers import MLP
from model.residual import DeltaRewrite, fold_channel_conv, pool, read_value_channels
from training.settings import configure

SMALL = {"num_hidden_layers": 12, "num_attention_heads": 6, "head_dim": 128, "hidden_size": 768}
MEDIUM = {"num_hidden_layers": 24, "num_attention_heads": 8, "head_dim": 128, "hidden_size": 1024}


@pytest.mark.parametrize("stem", PAPER)
def test_parameter_count_of_the_small_size(stem):
    with torch.device("meta"):
        assert build(stem, **SMALL).num_parameters() == PARAMETER_COUNTS[stem]


def test_parameter_count_of_the_medium_baseline():
    with torch.device("meta"):
        assert build("gpt-mha-rope", **MEDIUM).num_parameters() == 353_508_352


TOKEN_READ, COLUMN_READ = (
    ["compress.shortconv.weight", "compress.read"],
    ["compress.weight", "compress.read"],
)
READ_NAMES = {"DDL-gpt-mha-rope": TOKEN_READ, "DDL-gpt-mha-rope-EC": TOKEN_READ}
READ_NAMES |= {"DDL-gpt-mha-rope-CC": COLUMN_READ, "DDL-gpt-mha-rope-CC-EC": COLUMN_READ}


def expected_names(stem, layers):
    names = ["transformer.wte.weight", "lm_head.weight", "ln_f.weight"]
    for i in range(layers):
        block = f"transformer.h.{i}."
        names += [
            f"{block}{n}.weight" for n in ("ln_1", "ln_2", "mlp.c_fc1", "mlp.c_fc2", "mlp.c_proj")
        ]
        names += [
            f"{block}attn.{n}.weight" for n in ("c_q", "c_k", "c_v", "c_proj", "q_rms", "k_rms")
        ]
        if stem.startswith("DDL"):
            for site in ("ddl_attn", "ddl_mlp"):
                names += [
                    f"{block}{site}.{n}"
                    for n in ("beta.weight", "beta.bias", "v_proj.weight", "v_proj.bias")
                ]
        names += [f"{block}{name}" for name in READ_NAMES.get(stem, [])]
    names += [name.replace("compress", "readout") for name in READ_NAMES.get(stem, [])]
    names += ["input_embed.conv.weight"] * stem.endswith("-EC")
    return sorted(names)


@pytest.mark.parametrize("stem", PAPER)
def test_state_dict_names(stem):
    model = build(stem, **TINY)
    assert sorted(model.state_dict()) == expected_names(stem, TINY["num_hidden_layers"])
    assert model.lm_head.weight is model.transformer.wte.weight


PARAMETERISATIONS = OrderedDict(
    plain={},
    two_layer_gate={"ddl_beta_single_linear": False, "ddl_beta_hidden_size": 5},
    no_sigmoid_from_context={"ddl_v_sigmoid": False, "ddl_v_input": "context"},
    constant_value={"ddl_v_constant": True, "ddl_v_constant_value": 1.5},
    write_only={"ddl_update": "write_only", "ddl_v_sigmoid_scale": 2.5},
    erase_only={"ddl_update": "erase_only"},
    own_erase_gate={"ddl_erase_gate": "own"},
    own_two_layer_gate={
        "ddl_erase_gate": "own",
        "ddl_beta_single_linear": False,
        "ddl_beta_hidden_size": 5,
    },
    large_guard={"ddl_k_eps": 0.5},
    v_map={"ddl_map": "v", "ddl_k_hidden_size": 3},
)
CASES = [
    ("gpt-mha-rope", {}),
    ("gpt-mha-rope", {"rope_ratio": 0.5, "mup": True, "use_qk_rmsnorm": False}),
]
CASES += [(stem, keys) for stem in DDL for keys in PARAMETERISATIONS.values()]
CASES += [(stem, keys) for stem in (DDL[0], DDL[-1]) for keys in INPUTS.values()]
CASES += [
    ("DDL-gpt-mha-rope", {"ddl_value_channels": v, "ddl_state_shortconv_kernel_size": k})
    for v, k in ((1, 3), (2, 1), (8, 2))
]
CASES += [(stem, {"ddl_map": "v", "ddl_k_branch": "attention"}) for stem in EXPANDED]
CASES += [(stem, {"ddl_value_channels": v}) for stem in EXPANDED[1:] for v in (1, 2, 8)]
FOLDED, CAUSAL = {"ddl_cc_read": "folded"}, {"ddl_state_dv_shortconv_causal": True}
CASES += [
    ("DDL-gpt-mha-rope-CC", keys) for keys in (FOLDED, {"ddl_state_shortconv_kernel_size": 2})
]
CASES += [("DDL-gpt-mha-rope-CC", FOLDED | {"ddl_value_channels": v}) for v in (1, 8)]
CASES += [
    ("DDL-gpt-mha-rope-CC-EC", CAUSAL | {"ddl_state_shortconv_kernel_size": k}) for k in (1, 3, 4)
]
CASES += [(stem, {"residual_branch_mult": 0.3}) for stem in ("gpt-mha-rope", *DDL)]
CASES += [(stem, {"num_hidden_layers_base": 1, "ddl_beta_init": "1/L"}) for stem in DDL[:2]]
CASES += [(DDL[-1], {"ddl_erase_gate": "own", **keys}) for keys in INPUTS.values()]
CASES += [
    ("DDL-gpt-mha-rope", {"residual_branch_mult": 0.3, **keys})
    for keys in ({"ddl_erase_gate": "own"}, {"ddl_update": "erase_only"})
]
CASES += [("DDL-gpt-mha-rope-CC-EC", {"input_embed_shortconv_kernel_size": k}) for k in (1, 2)]
CASES += [
    ("DDL-gpt-mha-rope-EC", {"ddl_value_channels": 1, "ddl_map": "v", "ddl_k_hidden_size": 4})
]


@pytest.mark.parametrize(
    ("stem", "keys"), CASES, ids=lambda x: x if isinstance(x, str) else "-".join(x) or "plain"
)
def test_forward_and_backward_equal_the_naive_loops(stem, keys):
    model = build_tiny(stem, **keys)
    ids = torch.randint(0, TINY["vocab_size"], (2, 7))
    targets = torch.randint(0, TINY["vocab_size"], (2, 7))
    targets[0, 3] = -1
    unused = naive.check(stem, model, ids, targets)
    assert all("v_proj" in name for name in unused)  # the constant write value leaves it out
    assert bool(unused) == keys.get("ddl_v_constant", False)


# Config files that name a text, and the other stems that July's says with the same words.
TEXTS = [("january_v1", naive.january_v1, None), ("january_v2", naive.january_v2, None)]
TEXTS += [
    ("january_v2_dv1", naive.january_v2, None),
    ("january_v2", naive.january_v2, "DDL-gpt-mha-rope-CC"),
]
TEXTS += [("july", naive.july, stem) for stem in (None, DDL[0], "DDL-gpt-mha-rope-EC")]


@pytest.mark.parametrize(("text", "rewrite", "stem"), TEXTS)
def test_config_files_of_a_text_compute_its_equations(text, rewrite, stem):
    options = [f"--{key}={value}" for key, value in TINY.items()] + [f"--model={stem}"] * (
        stem is not None
    )
    run, config = configure([str(ROOT / "config" / f"ddl_{text}_small.py"), *options])
    model = build_tiny(run.model, **dataclasses.asdict(config))
    if text == "january_v1":  # it writes no output bias of the gate, which is learned from 0
        for block in model.transformer.h:
            for write in (block.ddl_attn, block.ddl_mlp):
                torch.nn.init.zeros_(write.beta_out.bias)
    ids = torch.randint(0, TINY["vocab_size"], (1, 7))
    wanted = naive.logits(
        run.model, model.state_dict(), dataclasses.asdict(config), ids[0].tolist(), rewrite
    )
    torch.testing.assert_close(model(ids)[0][0], wanted, rtol=1e-9, atol=1e-9)


def test_forward_contract():
    model = build("gpt-mha-rope", **TINY)
    ids = torch.randint(0, 29, (2, 5))
    logits, loss = model(ids)
    assert logits.shape == (2, 5, 29)
    assert loss is None
    logits, loss = model(ids, ids)
    assert logits is None
    assert loss.shape == ()
    assert loss.dtype == torch.float32
    with pytest.raises(ValueError, match=r"17 tokens do not fit block_size=16"):
        model(torch.zeros(1, 17, dtype=torch.int64))


def test_rope_tables_survive_changes_of_dtype():
    model = build("gpt-mha-rope", **TINY)
    assert model.rope_cos.dtype == torch.float32
    angle = 3 * 10000 ** (-2 / 6)  # position 3, pair 1 of head_dim 6
    assert model.double().rope_cos[3, 1].item() == pytest.approx(math.cos(angle), abs=1e-15)
    assert model.bfloat16().rope_sin[3, 1].item() == pytest.approx(math.sin(angle), abs=1e-7)


# The older start; tests/test_starts.py has the other. At this width 5% is far from chance.
@pytest.fixture(scope="module")
def initialised():
    torch.manual_seed(0)
    size = {
        "hidden_size": 256,
        "num_attention_heads": 2,
        "head_dim": 128,
        "num_hidden_layers": 4,
        "vocab_size": 512,
    }
    return build("DDL-gpt-mha-rope", ddl_beta_init=0.5, init="normal", **size)


@pytest.mark.parametrize(
    ("name", "std"),
    [
        ("transformer.wte.weight", 0.02),
        ("transformer.h.0.attn.c_q.weight", 0.5 / 16),
        ("transformer.h.3.mlp.c_fc2.weight", 0.5 / 16),
        ("transformer.h.1.attn.c_proj.weight", 0.5 / 16 / 2),
        ("transformer.h.1.mlp.c_proj.weight", 0.5 / 16 / 2),
        ("transformer.h.2.compress.shortconv.weight", 0.5 / 16),
        ("readout.shortconv.weight", 0.5 / 16),
    ],
)
def test_matrices_start_normal(initialised, name, std):
    weight = initialised.state_dict()[name]
    assert weight.std().item() == pytest.approx(std, rel=0.05)
    assert abs(weight.mean().item()) < 0.1 * std


def test_vectors_start_as_specified(initialised):
    state = initialised.state_dict()
    for site in ("ddl_attn", "ddl_mlp"):
        beta = 2 * torch.sigmoid(state[f"transformer.h.0.{site}.beta.bias"])
        assert beta.item() == pytest.approx(0.5, rel=1e-6)
        bias = state[f"transformer.h.0.{site}.v_proj.bias"]
        assert bias.abs().max() <= 1 / 16
        assert bias.unique().numel() == 4
    assert state["transformer.h.0.compress.read"].tolist() == [0.25] * 4
    ones = [
        value
        for name, value in state.items()
        if name.rsplit(".", 2)[-2] in ("ln_1", "ln_2", "ln_f", "q_rms", "k_rms")
    ]
    assert len(ones) == 4 * 4 + 1
    assert all((value == 1).all() for value in ones)


@pytest.mark.parametrize(("beta", "probability"), [(0.0, 1e-6), (2.0, 1 - 1e-6), (1.5, 0.75)])
@pytest.mark.parametrize("single", [True, False])
def test_gate_starts_at_beta_init_clamped(beta, probability, single):
    model = build(
        "DDL-vdim1-gpt-mha-rope", ddl_beta_init=beta, ddl_beta_single_linear=single, **TINY
    )
    rewrite = model.transformer.h[1].ddl_mlp
    bias = (rewrite.beta if single else rewrite.beta_out).bias.double()
    assert torch.sigmoid(bias).item() == pytest.approx(probability, rel=1e-6)


GATES = {
    "one layer": {},
    "two layers": {"ddl_beta_single_linear": False, "ddl_beta_hidden_size": 5},
    "of the flattened state": {"ddl_beta_input": "flat"},
}


@pytest.mark.parametrize("init_order", ["named", "sequential"])
@pytest.mark.parametrize("gate", GATES)
def test_an_own_erase_gate_starts_as_the_shared_rule(gate, init_order):
    """Its parameters are its own, equal to those of beta, in every site."""
    keys = {**TINY, **GATES[gate], "init_order": init_order, "ddl_beta_init": 0.7}
    own = build("DDL-gpt-mha-rope", ddl_erase_gate="own", **keys).double()
    weights = own.state_dict()
    erase_names = [name for name in weights if ".beta_erase" in name]
    assert len(erase_names) == 4 * (3 if gate == "two layers" else 2)
    for name in erase_names:
        assert torch.equal(weights[name], weights[name.replace("beta_erase", "beta")])
    shared = build("DDL-gpt-mha-rope", **keys).double()
    shared.load_state_dict(
        {name: value for name, value in weights.items() if name not in erase_names}
    )
    ids = torch.randint(0, 29, (2, 9))
    torch.testing.assert_close(own(ids)[0], shared(ids)[0], rtol=1e-12, atol=1e-12)


def test_an_own_erase_gate_leaves_the_other_starts_as_they_are():
    torch.manual_seed(3)
    shared = build("DDL-gpt-mha-rope", **TINY).state_dict()
    torch.manual_seed(3)
    own = build("DDL-gpt-mha-rope", ddl_erase_gate="own", **TINY).state_dict()
    assert all(torch.equal(own[name], value) for name, value in shared.items())


def test_a_closed_erase_gate_leaves_the_write():
    """With the erase's gate shut, the model with a gate of its own is the one that only writes."""
    own = build_tiny("DDL-gpt-mha-rope", ddl_erase_gate="own")
    for block in own.transformer.h:
        for write in (block.ddl_attn, block.ddl_mlp):
            torch.nn.init.zeros_(write.beta_erase.weight)
            torch.nn.init.constant_(write.beta_erase.bias, -60)
    write_only = build_tiny("DDL-gpt-mha-rope", ddl_update="write_only")
    write_only.load_state_dict(own.state_dict(), strict=False)
    ids = torch.randint(0, 29, (2, 9))
    torch.testing.assert_close(own(ids)[0], write_only(ids)[0], rtol=1e-12, atol=1e-12)


def test_the_erase_alone_is_the_delta_rule_with_a_value_of_0():
    zero = build_tiny("DDL-gpt-mha-rope", ddl_v_constant=True, ddl_v_constant_value=0.0)
    erase_only = build_tiny("DDL-gpt-mha-rope", ddl_update="erase_only")
    _, unexpected = erase_only.load_state_dict(zero.state_dict(), strict=False)
    assert unexpected == [name for name in zero.state_dict() if "v_proj" in name]
    ids = torch.randint(0, 29, (2, 9))
    assert torch.equal(erase_only(ids)[0], zero(ids)[0])


def test_identity_convolution_reads_the_channel_mean():
    model = build("DDL-gpt-mha-rope", ddl_state_conv_init="identity", **TINY)
    state = torch.randn(2, 5, 4, 10)
    torch.testing.assert_close(model.readout(state), state.mean(2))
    other = build(
        "DDL-gpt-mha-rope", ddl_state_conv_init="identity", ddl_state_read_init=0.5, **TINY
    )
    torch.testing.assert_close(other.readout(state), state.sum(2) / 2)


@pytest.mark.parametrize("stem", PAPER)
def test_state_and_gate_dtypes_under_autocast(stem):
    """The state is kept in bfloat16; gate and write value are computed in float32."""
    model = build(stem, **TINY)
    seen = {"state": set(), "fp32": set()}
    for block in model.transformer.h:
        block.register_forward_hook(lambda _, __, output: seen["state"].add(output[0].dtype))
        for rewrite in (m for m in block.modules() if isinstance(m, DeltaRewrite)):
            beta, value = rewrite.compute_beta, rewrite.compute_v
            rewrite.compute_beta = lambda *args, f=beta: seen["fp32"].add(f(*args).dtype) or f(
                *args
            )
            rewrite.compute_v = lambda *args, f=value: seen["fp32"].add(f(*args).dtype) or f(*args)
    with torch.autocast("cpu", torch.bfloat16):
        _, loss = model(*torch.randint(0, 29, (2, 2, 8)))
    assert seen["state"] == {torch.bfloat16}
    assert seen["fp32"] == (set() if stem == "gpt-mha-rope" else {torch.float32})
    assert loss.dtype == torch.float32


def test_half_precision_reads_accumulate_in_fp32():
    state, weights = torch.randn(1, 3, 4, 64).bfloat16(), torch.rand(2, 4, 64)
    exact = torch.einsum("btjd,sjd->btsd", state.double(), weights.double())
    expected = exact[:, :, 0].clone()
    expected[:, 1:] += exact[:, :-1, 1]
    read = read_value_channels(state, weights)
    assert read.dtype == torch.float32
    torch.testing.assert_close(read.double(), expected, rtol=1e-6, atol=1e-6)


def test_identity_column_convolution_reads_the_channel_mean():
    model = build(
        "DDL-gpt-mha-rope-CC", ddl_state_conv_init="identity", ddl_value_channels=3, **TINY
    )
    state = torch.randn(2, 5, 3, 10)
    torch.testing.assert_close(model.transformer.h[1].compress(state), state.mean(2))


@pytest.mark.parametrize("v", [1, 2, 3, 4, 8])
def test_folding_is_the_convolution_then_the_read_vector(v):
    """Against conv1d over columns with (v-1)//2 zeros on the left, then the read vector: the
    released computation.
    """
    weight, read = torch.randn(6, v, dtype=torch.float64), torch.randn(v, dtype=torch.float64)
    state = torch.randn(5, 6, v, dtype=torch.float64)  # (tokens, d, v)
    padded = torch.nn.functional.pad(state, ((v - 1) // 2, v - 1 - (v - 1) // 2))
    convolved = torch.nn.functional.conv1d(padded, weight[:, None], groups=6)  # (tokens, d, v)
    torch.testing.assert_close((state * fold_channel_conv(weight, read)).sum(-1), convolved @ read)


@pytest.mark.parametrize("stem", ["DDL-gpt-mha-rope", "DDL-gpt-mha-rope-CC"])
def test_embedding_convolution_starts_as_repetition(stem):
    torch.manual_seed(3)
    plain = build(stem, **TINY)
    expanded = build(f"{stem}-EC", **TINY)
    expanded.load_state_dict(plain.state_dict(), strict=False)
    ids = torch.randint(0, 29, (2, 9))
    torch.testing.assert_close(expanded(ids)[0], plain(ids)[0], rtol=0, atol=1e-6)
    with torch.no_grad():
        expanded.input_embed.conv.weight[3, 0, 1] = 0.5
    assert (expanded(ids)[0] - plain(ids)[0]).abs().max() > 1e-5


def test_normal_column_convolution_is_a_folded_pair():
    """Its columns differ in variance: column u collects one tap for every j that reaches it."""
    keys = {
        **TINY,
        "hidden_size": 4096,
        "num_hidden_layers": 1,
        "init": "normal",
        "ddl_cc_read": "folded",
    }
    model = build("DDL-gpt-mha-rope-CC", **keys)
    std = 0.5 / 64 / 4
    taps = [sum(0 <= u - j + 1 < 4 for j in range(4)) for u in range(4)]
    assert model.readout.weight.std(0).tolist() == pytest.approx(
        [std * math.sqrt(n) for n in taps], rel=0.06
    )


def test_build_names_the_mistake():
    with pytest.raises(ValueError, match=r"did you mean DDL-gpt-mha-rope"):
        build("DDL-gpt-mha-rop")
    with pytest.raises(ValueError, match=r"unknown key hiden_size, did you mean hidden_size"):
        build("gpt-mha-rope", hiden_size=8)
    with pytest.raises(ValueError, match=r"ddl_beta_init=2.5: give a number from 0 to 2"):
        build("DDL-gpt-mha-rope", ddl_beta_init=2.5)
    with pytest.raises(ValueError, match=r"hidden_size=0: give 1 or more"):
        build("gpt-mha-rope", hidden_size=0)
    with pytest.raises(ValueError, match=r"ddl_update='add'"):
        build("DDL-gpt-mha-rope", ddl_update="add")
    for keys, message in (
        ({"ddl_k_branch": "attention"}, "add --ddl_map=v"),
        (
            {"ddl_k_branch": "attention", "ddl_map": "v", "ddl_value_channels": 1},
            "ddl_value_channels is 1; use --ddl_k_branch=mlp",
        ),
        ({"ddl_v_input": "context", "ddl_map": "v"}, "has no effect with ddl_map=v"),
        ({"ddl_map": "v", "ddl_v_constant": True}, "leaves the sublayer outputs unused"),
        ({"ddl_v_input": "context", "ddl_v_constant": True}, "has no effect with ddl_v_constant"),
        ({"ddl_v_bias": False, "ddl_v_constant": True}, "has no effect with ddl_v_constant"),
        ({"ddl_k_input": "mean"}, "add --ddl_map=v or omit ddl_k_input"),
        (
            {"ddl_erase_gate": "own", "ddl_update": "write_only"},
            "ddl_erase_gate=own has no effect with ddl_update=write_only",
        ),
        (
            {"ddl_erase_gate": "own", "ddl_update": "erase_only"},
            "ddl_erase_gate=own has no effect with ddl_update=erase_only",
        ),
        ({"ddl_update": "erase_only", "ddl_map": "v"}, "leaves the sublayer outputs unused"),
        (
            {"ddl_update": "erase_only", "ddl_v_sigmoid": False},
            "ddl_v_sigmoid=False has no effect with ddl_update=erase_only",
        ),
        (
            {"ddl_update": "erase_only", "ddl_v_sigmoid_scale": 2.0},
            "ddl_v_sigmoid_scale=2.0 has no effect with ddl_update=erase_only",
        ),
        (
            {"ddl_update": "erase_only", "ddl_v_constant": True},
            "ddl_v_constant=True has no effect with ddl_update=erase_only",
        ),
        (
            {"ddl_update": "erase_only", "ddl_v_input": "context"},
            "ddl_v_input=context has no effect with ddl_update=erase_only",
        ),
        (
            {"ddl_update": "erase_only", "ddl_v_bias": False},
            "ddl_v_bias=False has no effect with ddl_update=erase_only",
        ),
        (
            {"ddl_k_input": "flat", "ddl_map": "v", "ddl_k_branch": "attention"},
            "has no effect with ddl_k_branch=attention",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            build("DDL-gpt-mha-rope", **keys)
    with pytest.raises(ValueError, match=r"differs from ddl_value_channels=4, .*; omit the key"):
        build(
            "DDL-gpt-mha-rope-CC", ddl_state_shortconv_kernel_size=3, ddl_cc_read="folded", **TINY
        )
    with pytest.raises(ValueError, match=r"larger than ddl_value_channels=4.*; give at most 4"):
        build("DDL-gpt-mha-rope-CC", ddl_state_shortconv_kernel_size=5, **TINY)
    with pytest.raises(
        ValueError, match=r"ddl_value_channels=4, but this model has one value channel"
    ):
        build("DDL-vdim1-gpt-mha-rope", ddl_value_channels=4)


def test_defaults_are_the_specification():
    config = model_class("DDL-gpt-mha-rope").Config()
    expected = {
        "block_size": 1024,
        "vocab_size": 50304,
        "rope_ratio": 1.0,
        "use_qk_rmsnorm": True,
        "mup": False,
        "ddl_erase_gate": "shared",
    }
    expected |= {
        "ddl_value_channels": 4,
        "ddl_beta_init": 1.0,
        "ddl_beta_single_linear": True,
        "ddl_k_eps": 1e-5,
    }
    expected |= {
        "ddl_beta_hidden_size": 128,
        "ddl_v_sigmoid": True,
        "ddl_v_constant": False,
        "rope_base": 10000.0,
    }
    expected |= {
        "hidden_init_std_factor": 0.5,
        "embedding_init_std": 0.02,
        "ddl_v_sigmoid_scale": 4.0,
    }
    expected |= {"ddl_v_constant_value": 2.0, "ddl_v_input": "residual", "ddl_update": "delta"}
    expected |= {"init": "spectral", "num_hidden_layers_base": None, "residual_branch_mult": None}
    expected |= {"ddl_state_conv_init": None, "ddl_state_read_init": None, "hidden_size_base": 1024}
    assert {name: getattr(config, name) for name in expected} == expected
    assert (config.ddl_state_shortconv_kernel_size, config.read_start) == (None, 0.25)
    assert (config.ddl_map, config.ddl_k_branch, config.ddl_k_hidden_size) == ("k", "mlp", 128)
    assert (config.ddl_k_input, config.ddl_k_norm) == ("read", "guarded")
    assert (config.ddl_beta_input, config.ddl_v_bias) == ("context", True)
    columns = model_class("DDL-gpt-mha-rope-CC").Config()
    assert (columns.ddl_cc_read, columns.ddl_state_dv_shortconv_causal) == ("pair", False)
    assert model_class("DDL-gpt-mha-rope-EC").Config().input_embed_shortconv_kernel_size == 4
    with torch.device("meta"):
        assert build("DDL-gpt-mha-rope", **TINY).readout.shortconv.weight.shape == (40, 4)


@pytest.mark.parametrize("option", INPUTS)
def test_inputs_and_norm_are_those_of_the_papers(option):
    """Shapes of the layers; of one column, its mean and the flattened state are the state."""
    for stem, columns in ((DDL[0], 1), (DDL[-1], 4)):
        write = build(stem, **TINY, **INPUTS[option]).transformer.h[0].ddl_mlp
        seen = 10 * columns if option == "flat" else 10
        gate = write.beta_in if option == "mean" else write.beta
        assert gate.in_features == seen
        assert (write.v_proj.bias is None) == (option != "mean")
        assert option == "read" or write.k_in.in_features == seen
    state = torch.randn(2, 3, 1, 10)
    assert all(torch.equal(pool(state, form), state[:, :, 0]) for form in ("mean", "flat"))


@pytest.mark.parametrize("stem", PAPER)
def test_flops_are_those_that_torch_counts(stem):
    """The counter sees matrix products alone: attention on the CPU and the residual's elementwise
    work are added.
    """
    model = build(stem, **TINY)
    ids = torch.randint(0, 29, (2, 16))
    with FlopCounterMode(display=False) as counter:
        model(ids)
    counted = counter.get_total_flops() / ids.numel()
    d, v, layers, k = 10, 1 if "vdim1" in stem else 4, 2, 4
    attention = layers * 4 * 16 * 2 * 6
    if counter.get_flop_counts()["Global"].keys() & cost.ATTENTION.keys():
        attention = 0
    residual = layers * 2 * d if stem == "gpt-mha-rope" else layers * 2 * 4 * d * v
    if "CC" in stem:
        residual += (2 * layers + 1) * 2 * d * v
    elif stem.startswith("DDL-gpt"):
        residual += (2 * layers + 1) * 2 * d * v * k
    if stem.endswith("EC"):
        residual += 2 * d * v * 4
    assert model.flops_per_token() == 3 * (counted + attention + residual)


@pytest.mark.parametrize(
    ("keys", "change"),
    [
        ({"ddl_update": "write_only"}, -2 * 40),
        ({"ddl_update": "erase_only"}, -2 * 40),
        ({"ddl_erase_gate": "own"}, 2 * 10),
        ({"ddl_v_constant": True}, -2 * 40),
        ({"ddl_beta_single_linear": False, "ddl_beta_hidden_size": 3}, 2 * (30 + 3) - 20),
        ({"ddl_map": "v", "ddl_k_hidden_size": 3}, 4 * 30),
        (
            {
                "ddl_map": "v",
                "ddl_k_hidden_size": 3,
                "ddl_k_input": "mean",
                "ddl_beta_input": "mean",
            },
            4 * 30 + 2 * 40,
        ),
        ({"ddl_map": "v", "ddl_k_hidden_size": 3, "ddl_k_input": "flat"}, 2 * 3 * 40 + 2 * 30),
        ({"ddl_beta_input": "flat"}, 2 * 30),
    ],
)
def test_flops_of_parameterisations(keys, change):
    """By hand, relative to the default, per site (of four): d = 10, v = 4."""
    plain, other = (build("DDL-gpt-mha-rope", **TINY, **k).flops_per_token() for k in ({}, keys))
    assert other - plain == 3 * 4 * change


@pytest.mark.parametrize("stem", MODEL_NAMES)
def test_a_factor_on_branches_changes_the_model_or_is_refused(stem):
    """With the same weights: a stream that would ignore `residual_branch_mult` must say so."""
    plain, ids = build_tiny(stem), torch.arange(8)[None]
    if not all(
        takes_branch_mult(type(site.write)) for block in plain.transformer.h for site in block.sites
    ):
        with pytest.raises(ValueError, match="has no effect on this model, whose write"):
            build_tiny(stem, residual_branch_mult=0.5)
        return
    scaled = build_tiny(stem, residual_branch_mult=0.5)
    generator = torch.Generator().manual_seed(0)
    for own, other in zip(plain.parameters(), scaled.parameters(), strict=True):
        values = 0.3 * torch.randn(own.shape, generator=generator)
        own.data.copy_(values)
        other.data.copy_(values)
    with torch.no_grad():
        assert not torch.equal(plain(ids)[0], scaled(ids)[0])


@pytest.mark.parametrize("hidden_size", [16, 24])
def test_a_padded_inner_width_of_the_mlp_computes_the_same_function(hidden_size, monkeypatch):
    mlp = MLP(GPTConfig(**{**SMALL, "hidden_size": hidden_size})).double()
    generator = torch.Generator().manual_seed(0)
    for parameter in mlp.parameters():
        parameter.data.normal_(generator=generator)
    x = torch.randn(2, 5, hidden_size, dtype=torch.float64, generator=generator)
    x.requires_grad_()

    def outputs_and_gradients():
        y = mlp(x)
        return y, *torch.autograd.grad(y.square().sum(), [x, *mlp.parameters()])

    plain = outputs_and_gradients()
    monkeypatch.setattr(layers, "MIN_TOKENS_FOR_COPIED_WEIGHTS", 10)
    padded = outputs_and_gradients()
    # 16 -> 42, which is padded to 48; 24 -> 64, which is not
    assert mlp.count_padding(x) == (6 if hidden_size == 16 else 0)
    for padded_tensor, plain_tensor in zip(padded, plain, strict=True):
        torch.testing.assert_close(padded_tensor, plain_tensor, rtol=1e-12, atol=1e-10)
