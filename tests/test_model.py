"""The paper's models: parameter counts, names, initial values, options and equations.

The equations are checked against naive.py, which computes them with plain loops.
"""

import dataclasses
import math
from functools import partial

import naive
import pytest
import torch
from helpers import ROOT, configure
from models import (
    AUTHORS,
    AUTHORS_CC,
    DDL,
    EXPANDED,
    INPUTS,
    PAPER,
    PARAMETER_COUNTS,
    TINY,
    authors_form,
    build_tiny,
)

from model import build, cost, model_class, products
from model.ddl import DeltaRewrite, read_value_channels
from model.gpt import GPTConfig
from model.products import JoinedMLP

SMALL = {"num_hidden_layers": 12, "num_attention_heads": 6, "head_dim": 128, "hidden_size": 768}
MEDIUM = {"num_hidden_layers": 24, "num_attention_heads": 8, "head_dim": 128, "hidden_size": 1024}


@pytest.mark.parametrize("model_name", PAPER)
def test_parameter_counts_of_the_small_size(model_name):
    with torch.device("meta"):
        counts = tuple(
            build(model_name, **SMALL, **form).num_parameters()
            for form in ({}, authors_form(model_name))
        )
    assert counts == PARAMETER_COUNTS[model_name]


def test_parameter_count_of_the_medium_baseline():
    with torch.device("meta"):
        assert build("gpt-mha-rope", **MEDIUM).num_parameters() == 353_508_352


# parameters that read from a state of several value channels
TOKEN_READ = ["compress.shortconv.weight", "compress.read"]
COLUMN_READ = ["compress.weight"]
READ_NAMES = {
    "DDL-gpt-mha-rope": TOKEN_READ,
    "DDL-gpt-mha-rope-EC": TOKEN_READ,
    "DDL-gpt-mha-rope-CC": COLUMN_READ,
    "DDL-gpt-mha-rope-CC-EC": COLUMN_READ,
}


def list_parameter_names(model_name: str, num_layers: int) -> list[str]:
    """Return the names in the state dict of one of the paper's models."""
    block_names = [
        "ln_1.weight",
        "ln_2.weight",
        "attn.c_q.weight",
        "attn.c_k.weight",
        "attn.c_v.weight",
        "attn.c_proj.weight",
        "attn.q_rms.weight",
        "attn.k_rms.weight",
        "mlp.c_fc1.weight",
        "mlp.c_fc2.weight",
        "mlp.c_proj.weight",
    ]
    if model_name.startswith("DDL"):
        for site in ("ddl_attn", "ddl_mlp"):
            block_names += [f"{site}.beta.weight", f"{site}.beta.bias"]
            block_names.append(f"{site}.v_proj.weight")
    read_names = READ_NAMES.get(model_name, [])
    block_names += read_names

    names = ["transformer.wte.weight", "lm_head.weight", "ln_f.weight"]
    for layer in range(num_layers):
        names += [f"transformer.h.{layer}.{name}" for name in block_names]
    names += [name.replace("compress", "readout") for name in read_names]
    if model_name.endswith("-EC"):
        names.append("input_embed.conv.weight")
    return sorted(names)


@pytest.mark.parametrize("model_name", PAPER)
def test_state_dict_names(model_name):
    model = build(model_name, **TINY)
    expected = list_parameter_names(model_name, TINY["num_hidden_layers"])
    assert sorted(model.state_dict()) == expected


# ---- equations ----

DDL_OPTIONS = [
    {},
    {"ddl_beta_single_linear": False, "ddl_beta_hidden_size": 5},
    AUTHORS,
    {"ddl_v_sigmoid": False, "ddl_v_input": "context"},
    {"ddl_v_constant": True, "ddl_v_constant_value": 1.5},
    {"ddl_update": "write_only", "ddl_v_sigmoid": True, "ddl_v_sigmoid_scale": 2.5},
    {"ddl_update": "erase_only"},
    {"ddl_k_eps": 0.5},
    {"ddl_map": "v", "ddl_k_hidden_size": 3},
]
# (model name, options)
CASES = [
    ("gpt-mha-rope", {}),
    ("gpt-mha-rope", {"rope_ratio": 0.5, "mup": True, "use_qk_rmsnorm": False}),
    ("gpt-mha-rope", {"residual_branch_mult": 0.3}),
    *[(model_name, options) for model_name in (DDL[0], DDL[-1]) for options in DDL_OPTIONS],
    # their writes are those of the others
    *[
        pytest.param(model_name, options, marks=[pytest.mark.slow] if options else [])
        for model_name in DDL[1:-1]
        for options in DDL_OPTIONS
    ],
    *[(model_name, {"residual_branch_mult": 0.3}) for model_name in (DDL[0], DDL[-1])],
    *[(model_name, options) for model_name in (DDL[0], DDL[-1]) for options in INPUTS.values()],
    *[
        (model_name, {"residual_branch_mult": 0.5, "ddl_beta_init": "1/L"})
        for model_name in DDL[:2]
    ],
    (DDL[-1], {"ddl_map": "v", "ddl_k_branch": "attention"}),
    *[(model_name, {"ddl_value_channels": v}) for model_name in EXPANDED[1:] for v in (1, 2, 8)],
    # token convolution
    ("DDL-gpt-mha-rope", {"ddl_value_channels": 1, "ddl_state_shortconv_kernel_size": 3}),
    ("DDL-gpt-mha-rope", {"ddl_value_channels": 2, "ddl_state_shortconv_kernel_size": 1}),
    ("DDL-gpt-mha-rope", {"ddl_value_channels": 8, "ddl_state_shortconv_kernel_size": 2}),
    ("DDL-gpt-mha-rope", {"residual_branch_mult": 0.3, "ddl_update": "erase_only"}),
    # column convolution
    ("DDL-gpt-mha-rope-CC", {**AUTHORS_CC, "ddl_state_shortconv_kernel_size": 2}),
    *[("DDL-gpt-mha-rope-CC", {**AUTHORS_CC, "ddl_value_channels": v}) for v in (1, 4, 8)],
    *[
        (
            "DDL-gpt-mha-rope-CC-EC",
            {
                "ddl_cc_read": "pair",
                "ddl_state_dv_shortconv_causal": True,
                "ddl_state_shortconv_kernel_size": k,
            },
        )
        for k in (1, 3, 4)
    ],
    # embedding convolution
    ("DDL-gpt-mha-rope-CC-EC", {"input_embed_shortconv_kernel_size": 1}),
    ("DDL-gpt-mha-rope-CC-EC", {"input_embed_shortconv_kernel_size": 2}),
    ("DDL-gpt-mha-rope-EC", {"ddl_value_channels": 1, "ddl_map": "v", "ddl_k_hidden_size": 4}),
]


def name_case(value: str | dict) -> str:
    """Return the id of a model name or of options."""
    return value if isinstance(value, str) else "-".join(value) or "plain"


@pytest.mark.parametrize(("model_name", "options"), CASES, ids=name_case)
def test_forward_and_backward_equal_the_naive_loops(model_name, options):
    model = build_tiny(model_name, **options)
    ids = torch.randint(0, TINY["vocab_size"], (1, 7))
    targets = torch.randint(0, TINY["vocab_size"], (1, 7))
    targets[0, 3] = -1
    unused_parameters = naive.check(model_name, model, ids, targets)
    # a constant write value does not use its projection
    assert all("v_proj" in name for name in unused_parameters)
    assert bool(unused_parameters) == options.get("ddl_v_constant", False)


# Config files with the equations that they follow. Those of the paper's tables follow the text of
# January 29, 2026, whose equations `naive` has in loops of their own, for the read too.
PAPER_CONFIGS = [
    f"{name}_{size}"
    for name in ("ddl_dv1", "ddl_dv4", "ddl_dv4_ec", "ddl_dv4_cc", "ddl_dv4_cc_ec")
    for size in ("small", "medium")
]
VERSIONS = [
    *((name, naive.january_v2, None) for name in PAPER_CONFIGS),
    ("ddl_january_v1_small", naive.january_v1, None),
    *(
        ("ddl_july_small", naive.july, model_name)
        for model_name in (None, DDL[0], "DDL-gpt-mha-rope-EC", "DDL-gpt-mha-rope-CC")
    ),
]


@pytest.mark.parametrize(("config_name", "rewrite", "model_name"), VERSIONS)
def test_config_files_of_a_version_compute_its_equations(config_name, rewrite, model_name):
    arguments = [str(ROOT / "config" / f"{config_name}.py")]
    arguments += [f"--{key}={value}" for key, value in TINY.items()]
    if model_name is not None:
        arguments.append(f"--model={model_name}")
    run_config, model_config = configure(arguments)
    settings = dataclasses.asdict(model_config)
    model = build_tiny(run_config.model, **settings)
    if config_name == "ddl_january_v1_small":
        # The equations of this version have no output bias in the gate; it is learned from 0.
        for block in model.transformer.h:
            for write in (block.ddl_attn, block.ddl_mlp):
                torch.nn.init.zeros_(write.beta_out.bias.requires_grad_(False))
    ids = torch.randint(0, TINY["vocab_size"], (1, 7))
    targets = torch.randint(0, TINY["vocab_size"], (1, 7))
    logits = partial(naive.logits, rewrite=rewrite)
    unused_parameters = naive.check(run_config.model, model, ids, targets, logits)
    assert all("beta_out.bias" in name for name in unused_parameters)


# ---- forward ----


def test_forward_without_targets_returns_logits():
    model = build("gpt-mha-rope", **TINY)
    logits, loss = model(torch.randint(0, 29, (2, 5)))
    assert logits.shape == (2, 5, 29)
    assert loss is None


def test_forward_with_targets_returns_the_loss():
    model = build("gpt-mha-rope", **TINY)
    ids = torch.randint(0, 29, (2, 5))
    logits, loss = model(ids, ids)
    assert logits is None
    assert loss.shape == ()
    assert loss.dtype == torch.float32


def test_more_tokens_than_block_size_are_refused():
    model = build("gpt-mha-rope", **TINY)
    with pytest.raises(ValueError, match=r"17 tokens do not fit block_size=16"):
        model(torch.zeros(1, 17, dtype=torch.int64))


def test_rope_tables_survive_changes_of_dtype():
    model = build("gpt-mha-rope", **TINY)
    assert model.rope_cos.dtype == torch.float32
    angle = 3 * 10000 ** (-2 / 6)  # position 3, pair 1 of head_dim 6
    assert model.double().rope_cos[3, 1].item() == pytest.approx(math.cos(angle), abs=1e-15)
    assert model.bfloat16().rope_sin[3, 1].item() == pytest.approx(math.sin(angle), abs=1e-7)


# ---- initial values ----


# ---- precision ----


@pytest.mark.parametrize("part", ["gate", "value"])
@pytest.mark.parametrize("model_name", DDL)
def test_gate_and_value_are_float32_under_autocast(model_name, part, monkeypatch):
    dtypes = []
    compute = getattr(DeltaRewrite, part)

    def record_dtype(self, *args):
        result = compute(self, *args)
        dtypes.append(result.dtype)
        return result

    monkeypatch.setattr(DeltaRewrite, part, record_dtype)
    model = build(model_name, **TINY)
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.randint(0, 29, (2, 8)))
    assert dtypes == [torch.float32] * 4  # two sites in each of two blocks


def test_half_precision_reads_accumulate_in_fp32():
    state = torch.randn(1, 3, 4, 64).bfloat16()
    weights = torch.rand(2, 4, 64)
    exact = torch.einsum("btjd,sjd->btsd", state.double(), weights.double())
    expected = exact[:, :, 0].clone()
    expected[:, 1:] += exact[:, :-1, 1]
    read = read_value_channels(state, weights)
    assert read.dtype == torch.float32
    torch.testing.assert_close(read.double(), expected, rtol=1e-6, atol=1e-6)


# ---- options ----

DDL_NAME = "DDL-gpt-mha-rope"
CC_NAME = "DDL-gpt-mha-rope-CC"


@pytest.mark.parametrize(
    ("model_name", "options", "message"),
    [
        ("DDL-gpt-mha-rop", {}, "did you mean DDL-gpt-mha-rope"),
        ("gpt-mha-rope", {"hiden_size": 8}, "unknown key hiden_size, did you mean hidden_size"),
        ("gpt-mha-rope", {"hidden_size": 0}, "hidden_size=0: give a number at least 1"),
        (
            DDL_NAME,
            {"ddl_beta_init": 2.5},
            "ddl_beta_init=2.5: give a number at least 0 and at most 2",
        ),
        (DDL_NAME, {"ddl_update": "add"}, "ddl_update='add'"),
        (
            DDL_NAME,
            {"ddl_k_branch": "attention", "ddl_map": "v", "ddl_value_channels": 1},
            "ddl_value_channels is 1; use --ddl_k_branch=mlp",
        ),
        (
            DDL_NAME,
            {"ddl_map": "v", "ddl_v_constant": True},
            "leaves the sublayer outputs unused",
        ),
        (
            DDL_NAME,
            {"ddl_update": "erase_only", "ddl_map": "v"},
            "leaves the sublayer outputs unused",
        ),
        (
            CC_NAME,
            {"ddl_state_shortconv_kernel_size": 3, **TINY},
            "differs from ddl_value_channels=4, .*; omit the key",
        ),
        (
            CC_NAME,
            {"ddl_state_shortconv_kernel_size": 5, "ddl_cc_read": "pair", **TINY},
            "larger than ddl_value_channels=4.*; give at most 4",
        ),
        (
            "DDL-vdim1-gpt-mha-rope",
            {"ddl_value_channels": 4},
            "ddl_value_channels=4, but this model has one value channel",
        ),
    ],
)
def test_build_names_the_mistake(model_name, options, message):
    with pytest.raises(ValueError, match=message):
        build(model_name, **options)


WAYS_OF_THE_WRITE = [
    {},
    {"ddl_beta_single_linear": False},
    {"ddl_map": "v"},
    {"ddl_map": "v", "ddl_k_branch": "attention"},
]


@pytest.mark.parametrize("keys", WAYS_OF_THE_WRITE, ids=str)
def test_layers_of_the_write_may_be_replaced(keys):
    """Libraries for LoRA and quantization do so."""
    model = build("DDL-gpt-mha-rope", **{**TINY, **keys})
    write = model.transformer.h[0].ddl_attn
    d = model.config.hidden_size
    for parameter in write.parameters():
        torch.nn.init.normal_(parameter)
    inputs = (torch.randn(1, 3, 4, d), *torch.randn(3, 1, 3, d))
    expected = write(*inputs)
    for name, layer in list(write.named_children()):
        has_bias = layer.bias is not None
        setattr(write, name, torch.nn.Linear(layer.in_features, layer.out_features, has_bias))
        assert not torch.equal(write(*inputs), expected), name
        setattr(write, name, layer)
    assert torch.equal(write(*inputs), expected)


def test_defaults_are_the_specification():
    config = model_class("DDL-gpt-mha-rope").Config()
    expected = {
        "block_size": 1024,
        "ddl_beta_hidden_size": 128,
        "ddl_beta_init": 1.0,
        "ddl_beta_input": "context",
        "ddl_beta_single_linear": True,
        "ddl_k_branch": "mlp",
        "ddl_k_eps": 1e-5,
        "ddl_k_hidden_size": 128,
        "ddl_k_input": "read",
        "ddl_k_norm": "guarded",
        "ddl_map": "k",
        "ddl_state_conv_init": "normal",
        "ddl_state_read_init": None,
        "ddl_state_shortconv_kernel_size": None,
        "ddl_update": "delta",
        "ddl_v_bias": False,
        "ddl_v_constant": False,
        "ddl_v_constant_value": 2.0,
        "ddl_v_input": "residual",
        "ddl_v_sigmoid": False,
        "ddl_v_sigmoid_scale": 1.0,
        "ddl_value_channels": 4,
        "embedding_init_std": 0.02,
        "hidden_init_std_factor": 0.5,
        "hidden_size_base": 1024,
        "init": "spectral",
        "mup": False,
        "residual_branch_mult": None,
        "rope_base": 10000.0,
        "rope_ratio": 1.0,
        "state_dtype": "bfloat16",
        "use_qk_rmsnorm": True,
        "vocab_size": 50304,
    }
    assert {name: getattr(config, name) for name in expected} == expected
    assert config.read_start == 0.25


def test_with_one_value_channel_the_write_value_has_a_sigmoid_by_default():
    assert model_class("DDL-vdim1-gpt-mha-rope").Config().ddl_v_sigmoid is True


def test_defaults_of_column_compression():
    config = model_class("DDL-gpt-mha-rope-CC").Config()
    assert config.ddl_cc_read == "folded"
    assert config.ddl_state_dv_shortconv_causal is False


def test_the_embedding_convolution_covers_four_tokens_by_default():
    assert model_class("DDL-gpt-mha-rope-EC").Config().input_embed_shortconv_kernel_size == 4


def test_the_token_convolution_covers_four_tokens_by_default():
    with torch.device("meta"):
        model = build("DDL-gpt-mha-rope", **TINY)
    assert model.readout.shortconv.weight.shape == (40, 4)


# ---- floating-point operations ----


@pytest.mark.parametrize("model_name", PAPER)
def test_flops_are_those_of_products_and_attention(model_name):
    """Every matrix meets a token once, and its attention meets the whole context."""
    model = build(model_name, **TINY)
    names = ("attn.c_", "mlp.c_", ".beta.weight", ".v_proj.weight", "wte.weight")
    matrices = [
        parameter
        for name, parameter in model.named_parameters()
        if any(part in name for part in names)
    ]
    num_products = sum(matrix.numel() for matrix in matrices)
    num_layers, context, num_heads, head_dim = 2, 16, 2, 6
    num_products += num_layers * 2 * context * num_heads * head_dim
    # two operations a product, in a forward pass and in a backward pass twice as long
    assert cost.flops_per_token(model) == 3 * 2 * num_products


# a list, because a variant of the user's need not apply it
WITH_BRANCH_MULT = (
    "DenseFormer-gpt-mha-rope",
    "GatedResidual-gpt-mha-rope",
    "Lambdas-gpt-mha-rope",
    "MGT-gpt-mha",
    "MUDD-gpt-mha-rope",
    "conv-gpt-mha-rope",
)


@pytest.mark.parametrize("model_name", WITH_BRANCH_MULT)
def test_branch_mult_changes_the_model(model_name):
    plain = build_tiny(model_name)
    scaled = build_tiny(model_name, residual_branch_mult=0.5)
    generator = torch.Generator().manual_seed(0)
    for parameter, scaled_parameter in zip(plain.parameters(), scaled.parameters(), strict=True):
        values = 0.3 * torch.randn(parameter.shape, generator=generator)
        parameter.data.copy_(values)
        scaled_parameter.data.copy_(values)
    ids = torch.arange(8)[None]
    with torch.no_grad():
        assert not torch.equal(plain(ids)[0], scaled(ids)[0])


@pytest.mark.parametrize("hidden_size", [16, 24])
def test_a_padded_inner_width_of_the_mlp_computes_the_same_function(hidden_size, monkeypatch):
    mlp = JoinedMLP(GPTConfig(**{**SMALL, "hidden_size": hidden_size})).double()
    generator = torch.Generator().manual_seed(0)
    for parameter in mlp.parameters():
        parameter.data.normal_(generator=generator)
    x = torch.randn(2, 5, hidden_size, dtype=torch.float64, generator=generator)
    x.requires_grad_()

    def compute_output_and_gradients():
        y = mlp(x)
        return y, *torch.autograd.grad(y.square().sum(), [x, *mlp.parameters()])

    plain = compute_output_and_gradients()
    monkeypatch.setattr(products, "MIN_TOKENS_FOR_COPIED_WEIGHTS", 10)
    padded = compute_output_and_gradients()
    # 16 -> 42, which is padded to 48; 24 -> 64, which is not
    assert products.count_padding(x, mlp.c_fc1.out_features) == (6 if hidden_size == 16 else 0)
    for padded_tensor, plain_tensor in zip(padded, plain, strict=True):
        torch.testing.assert_close(padded_tensor, plain_tensor, rtol=1e-12, atol=1e-10)
