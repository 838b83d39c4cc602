"""The paper's models: parameter counts, equations, options and operations.

The equations are checked against naive.py, which computes them with plain loops, and with them the
names in the state dict, by which released weights are loaded.
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

from model import build, cost
from model.ddl import DeltaRewrite

SMALL = {"num_hidden_layers": 12, "num_attention_heads": 6, "head_dim": 128, "hidden_size": 768}


@pytest.mark.parametrize("model_name", PAPER)
def test_parameter_counts_of_the_small_size(model_name):
    with torch.device("meta"):
        counts = tuple(
            build(model_name, **SMALL, **form).num_parameters()
            for form in ({}, authors_form(model_name))
        )
    assert counts == PARAMETER_COUNTS[model_name]


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
    {"residual_branch_mult": 0.5, "ddl_beta_init": "1/L"},
    *INPUTS.values(),
]
TC, EC, CC, CC_EC = EXPANDED
VDIM1 = DDL[0]
CAUSAL_PAIR = {"ddl_cc_read": "pair", "ddl_state_dv_shortconv_causal": True}
# (model name, options)
CASES = [
    ("gpt-mha-rope", {}),
    ("gpt-mha-rope", {"rope_ratio": 0.5, "mup": True, "use_qk_rmsnorm": False}),
    ("gpt-mha-rope", {"residual_branch_mult": 0.3}),
    # the writes of TC, EC and CC are those of the others
    *[(model_name, options) for model_name in (VDIM1, CC_EC) for options in DDL_OPTIONS],
    *[(model_name, {}) for model_name in (TC, EC, CC)],
    (CC_EC, {"ddl_map": "v", "ddl_k_branch": "attention"}),
    # token convolution
    (TC, {"ddl_value_channels": 1, "ddl_state_shortconv_kernel_size": 3}),
    (TC, {"ddl_value_channels": 2, "ddl_state_shortconv_kernel_size": 1}),
    (TC, {"ddl_value_channels": 8, "ddl_state_shortconv_kernel_size": 2}),
    (TC, {"residual_branch_mult": 0.3, "ddl_update": "erase_only"}),
    # convolution over value channels
    *[(CC, {"ddl_value_channels": v}) for v in (1, 2, 8)],
    (CC, {**AUTHORS_CC, "ddl_state_shortconv_kernel_size": 2}),
    *[(CC, {**AUTHORS_CC, "ddl_value_channels": v}) for v in (1, 4, 8)],
    *[(CC_EC, {**CAUSAL_PAIR, "ddl_state_shortconv_kernel_size": k}) for k in (1, 3, 4)],
    # embedding convolution
    *[(EC, {"ddl_value_channels": v}) for v in (1, 2, 8)],
    *[(CC_EC, {"input_embed_shortconv_kernel_size": k}) for k in (1, 2)],
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
    # a constant write value does not use its projection, which is not trained
    not_trained = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert unused_parameters == not_trained
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


# ---- options ----


@pytest.mark.parametrize(
    ("model_name", "options", "message"),
    [
        ("DDL-gpt-mha-rop", {}, "did you mean DDL-gpt-mha-rope"),
        ("gpt-mha-rope", {"hiden_size": 8}, "unknown key hiden_size, did you mean hidden_size"),
        ("gpt-mha-rope", {"hidden_size": 0}, "hidden_size=0: give a number at least 1"),
        (TC, {"ddl_update": "add"}, "ddl_update='add'"),
        # keys that do not fit each other
        (
            TC,
            {"ddl_k_branch": "attention", "ddl_map": "v", "ddl_value_channels": 1},
            "ddl_value_channels is 1; use --ddl_k_branch=mlp",
        ),
        (TC, {"ddl_map": "v", "ddl_v_constant": True}, "leaves the sublayer outputs unused"),
        (TC, {"ddl_map": "v", "ddl_update": "erase_only"}, "leaves the sublayer outputs unused"),
        (CC, {"ddl_state_shortconv_kernel_size": 3}, "differs from ddl_value_channels=4"),
        (
            CC,
            {"ddl_state_shortconv_kernel_size": 5, "ddl_cc_read": "pair"},
            "larger than ddl_value_channels=4.*; give at most 4",
        ),
        (VDIM1, {"ddl_value_channels": 4}, "this model has one value channel"),
        ("mHC-gpt-mha-rope", {"hc_streams": 1}, "hc_streams=1 leaves mHC no streams to mix"),
        (
            "Lambdas-gpt-mha-rope",
            {"lambda_values": "none", "lambda_input": False},
            "use --model=gpt-mha-rope",
        ),
    ],
)
def test_build_names_the_mistake(model_name, options, message):
    with torch.device("meta"), pytest.raises(ValueError, match=message):
        build(model_name, **options)


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
