"""Test the streams beside DDL's: their equations, first outputs, statistics and precision.

The equations are checked against naive_streams.py, or in test_production_streams.py.
"""

import copy
import math
from types import SimpleNamespace

import naive
import naive_streams
import pytest
import torch
from models import TINY
from torch.utils._pytree import tree_leaves, tree_map

from model import build
from model.causality import move_parameters
from model.parameters import collect_rules
from training.residual_statistics import ObservedStream

WITH_ROPE = (
    "HC mHC GatedResidual AttnRes ReZero DenseFormer LAuReL conv wide MUDD Lambdas "
    "NormPlacement MuseSpark nGPT"
).split()
# model names by the name of the stream
MODEL_NAMES = {
    **{name: f"{name}-gpt-mha-rope" for name in WITH_ROPE},
    "MGT": "MGT-gpt-mha",
    "additive": "gpt-mha-rope",
    "DDL": "DDL-gpt-mha-rope",
}


def build_initial(name, **keys):
    """Build a tiny model in float64 with its initial parameters."""
    return build(MODEL_NAMES[name], **{**TINY, **keys}).double()


def build_random(name, **keys):
    """Build a tiny model in float64 with every parameter randomized.

    Biases of mHC, which start where nothing is mixed, are drawn anew instead of shifted.
    """
    model = move_parameters(build_initial(name, **keys))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if name == "mHC" and key.endswith(".bias"):
                parameter.normal_()
    return model


def random_ids(*shape):
    return torch.randint(0, TINY["vocab_size"], shape)


DEEP = {"num_hidden_layers": 3}
MGT_GATE = {
    "mgt_lambda": 1.7,
    "mgt_epsilon": -0.4,
    "mgt_alpha_init": 0.6,
    "mgt_beta_bias_init": -0.3,
}
SMALLER_UPDATES = {"residual_branch_mult": 0.4}
EVERY_LAMBDA = {"lambda_value_embeddings": True, "lambda_skips": True, "num_hidden_layers": 5}
NO_LAMBDA = {"lambda_values": "none", "lambda_input": False}
MAIN_GAIN = {**NO_LAMBDA, "lambda_gain": True}
CASES = [
    *(
        ("HC", {"hc_dynamic": dynamic, "hc_streams": n, **DEEP})
        for dynamic in (False, True)
        for n in (1, 2, 4)
    ),
    ("HC", {"mup": True, "rope_ratio": 0.5, "use_qk_rmsnorm": False}),
    *(
        ("mHC", {"hc_streams": n, "mhc_iterations": k, "mhc_rows_last": rows_last})
        for n, k in ((2, 20), (4, 20), (4, 1), (4, 2))
        for rows_last in (True, False)
    ),
    ("mHC", {"mhc_mix": "identity", "hc_streams": 3}),
    *(("AttnRes", {"attn_res_blocks": n}) for n in (None, 1, 2, 4, 8)),
    # sites in runs of 3, 3, 2 and of 2, 2, 2: the last run is shorter, or there are fewer runs than
    # asked for
    ("AttnRes", {"attn_res_blocks": 3, "num_hidden_layers": 4}),
    ("AttnRes", {"attn_res_blocks": 4, **DEEP}),
    *(("MGT", {"mgt_arm": arm, **MGT_GATE}) for arm in ("full", "full_post", "ddl", "ddl_post")),
    *(("MGT", {"mgt_arm": arm}) for arm in ("mhc", "mhc_pre", "standard", "additive")),
    ("ReZero", {}),
    ("LAuReL", {"laurel_form": "rw"}),
    ("LAuReL", {"laurel_rank": 3}),
    *(
        ("wide", {"wide_read": read, "ddl_value_channels": v})
        for read in ("tc", "cc")
        for v in (1, 2, 4)
    ),
    *(
        ("Lambdas", keys)
        for keys in (
            DEEP,
            {"lambda_values": "head", **EVERY_LAMBDA},
            {**NO_LAMBDA, **EVERY_LAMBDA, "num_hidden_layers": 4},
            {**MAIN_GAIN, **DEEP},
            {**MAIN_GAIN, **EVERY_LAMBDA},
            {**MAIN_GAIN, "lambda_values": "head", "num_hidden_layers": 5},
        )
    ),
    *((name, keys) for name in ("conv", "DenseFormer", "MUDD") for keys in ({}, DEEP)),
    *((name, SMALLER_UPDATES) for name in ("conv", "DenseFormer", "Lambdas", "MGT", "MUDD")),
    *(
        ("NormPlacement", {"norm_placement": placement, **keys})
        for placement in ("lns", "keel", "post", "deepnorm")
        for keys in (DEEP, SMALLER_UPDATES)
    ),
]


def describe_case(argument: str | dict) -> str:
    """Return the part of a test's id that stands for an argument."""
    if isinstance(argument, str):
        return argument
    return ",".join(f"{key}={value}" for key, value in argument.items()) or "defaults"


@pytest.mark.parametrize(("name", "keys"), CASES, ids=describe_case)
def test_loss_logits_and_gradients_equal_the_naive_loops(name, keys):
    targets = random_ids(1, 5)
    targets[0, 3] = -1
    unused = naive.check(
        MODEL_NAMES[name],
        build_random(name, **keys),
        random_ids(1, 5),
        targets,
        naive_streams.logits,
    )
    assert not unused


# ---- models before their first step ----


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("DenseFormer", DEEP),
        ("LAuReL", {"laurel_form": "rw"}),
        ("LAuReL", {"laurel_form": "lr"}),
        ("LAuReL", {"laurel_form": "zaya"}),
        ("conv", {"conv_init": "identity"}),
        ("MUDD", DEEP),
        ("Lambdas", {"lambda_values": "none", "lambda_value_embeddings": True}),
        ("Lambdas", MAIN_GAIN),
    ],
    ids=describe_case,
)
def test_starts_as_the_additive_model(name, keys):
    model = build_initial(name, **keys)
    additive = build_initial("additive", num_hidden_layers=model.config.num_hidden_layers)
    missing, _ = additive.load_state_dict(model.state_dict(), strict=False)
    assert not missing
    ids = random_ids(2, 7)
    torch.testing.assert_close(model(ids)[0], additive(ids)[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", [name for name in MODEL_NAMES if name != "additive"])
def test_muon_trains_the_matrices_of_the_backbone_alone(name):
    rules = collect_rules(build_initial(name))
    additive_rules = collect_rules(build_initial("additive"))
    expected = {key for key, rule in additive_rules.items() if rule.muon}
    assert {key for key, rule in rules.items() if rule.muon} == expected


def test_the_factor_of_the_stream_in_lambdas_learns_slowly():
    for keys in ({}, MAIN_GAIN):
        rules = collect_rules(build_initial("Lambdas", **keys))
        assert rules["transformer.h.0.begin.a"].lr_scale == 0.01
    assert collect_rules(build_initial("Lambdas"))["transformer.h.0.begin.b"].lr_scale == 1


# ---- statistics of the writes, by hand ----

# (name, what the read returns, statistics of the write)
STATISTICS = [
    # the weights into the two streams sum to 0.9 + 0.3 and to 0.2 + 0.5
    (
        "HC",
        SimpleNamespace(mix=torch.tensor([[0.9, 0.2], [0.3, 0.5]])),
        {"mix_kept": 0.7, "mix_error": 0.3},
    ),
    # the entropy of 3/4 and 1/4 is 2 ln 2 - 3/4 ln 3
    (
        "AttnRes",
        (None, torch.tensor([[[0.75, 0.25]]])),
        {"embedding_weight": 0.75, "effective_sources": 4 / 3**0.75},
    ),
    (
        "GatedResidual",
        SimpleNamespace(
            gate=torch.full((1, 1, 4, 10), 0.25),
            inject=torch.tensor([[[0.5, 1.2, 1.0, 0.1]]]),
        ),
        {"read_gate": 0.25, "inject": 0.7, "inject_spread": 1.1},
    ),
]


@pytest.mark.parametrize(("name", "read_output", "expected"), STATISTICS)
def test_statistics_of_what_the_read_returns(name, read_output, expected):
    write = build_initial(name).sites[0].write
    h = torch.zeros(1, 1, TINY["hidden_size"])
    statistics = write.statistics(None, h, read_output, None, None)
    assert {key: value.item() for key, value in statistics.items()} == pytest.approx(expected)


def test_defaults_of_mgt_are_those_of_its_paper():
    config = build_initial("MGT").config
    assert (config.mgt_arm, config.mgt_lambda, config.mgt_epsilon) == ("full", 1.0, 0.0)


def test_statistics_of_mgt():
    """Eight features have beta = 2 tanh(1) - 0.1, and two have beta = 2 tanh(-1/2) - 0.1.

    The gate of all features is sigmoid(2).
    """
    write = build_initial("MGT", mgt_lambda=2.0, mgt_epsilon=-0.1).sites[0].write
    with torch.no_grad():
        write.beta.weight.zero_()
        write.beta.bias.copy_(torch.tensor([1.0] * 8 + [-0.5] * 2))
        write.gate_norm.weight.zero_()
        write.gate_norm.bias.fill_(2)
    state = torch.randn(1, 1, TINY["hidden_size"], dtype=torch.float64)
    statistics = write.statistics(state, None, None, None, None)
    high = 2 * math.tanh(1) - 0.1
    low = 2 * math.tanh(-0.5) - 0.1
    expected = {
        "beta": 0.8 * high + 0.2 * low,
        "beta_variance": 0.8 * 0.2 * (high - low) ** 2,
        "beta_negative": 0.2,
        "gate": 1 / (1 + math.exp(-2)),
    }
    assert {key: value.item() for key, value in statistics.items()} == pytest.approx(expected)


# ---- precision ----


def test_mixing_matrices_are_not_rounded_by_autocast():
    connection = build_random("mHC").float().transformer.h[0].hc_attn
    state = torch.randn(2, 7, 4, 10)
    with torch.no_grad():
        expected = connection.weights(state).mix
        with torch.autocast("cpu", dtype=torch.bfloat16):
            autocast_mix = connection.weights(state).mix
    assert autocast_mix.dtype == torch.float32
    torch.testing.assert_close(autocast_mix, expected, rtol=1e-5, atol=1e-6)


# a state of bfloat16 is read and written in float32, and rounded once
BFLOAT16_CASES = [
    ("additive", {"residual_branch_mult": 0.3}),
    ("DDL", {}),
    ("HC", {}),
    ("HC", {"hc_dynamic": False}),
    ("mHC", {}),
    ("GatedResidual", {}),
    ("AttnRes", {}),
    ("ReZero", {}),
    ("DenseFormer", DEEP),
    ("MUDD", DEEP),
    ("LAuReL", {"laurel_form": "rw"}),
    ("LAuReL", {"laurel_form": "lr"}),
    ("LAuReL", {"laurel_form": "zaya"}),
    ("MuseSpark", {}),
    ("nGPT", {}),
    ("conv", {}),
    ("wide", {}),
    ("wide", {"wide_read": "cc"}),
    ("MGT", {}),
    ("MGT", {"mgt_arm": "standard"}),
    *(("NormPlacement", {"norm_placement": placement}) for placement in ("sandwich", "post")),
]


def run_to_last_site(model):
    """Return in bfloat16 the state that the last site reads, and the output h of its sublayer."""
    writes = []
    with torch.no_grad(), model.through(ObservedStream(lambda _, write: writes.append(write))):
        model(random_ids(4, 8))
    return tree_map(torch.Tensor.bfloat16, (writes[-2].state, writes[-1].h))


ONE_ROUNDING = 2**-8


def assert_trees_close(actual, expected, tolerance: float) -> None:
    for tensor, expected_tensor in zip(tree_leaves(actual), tree_leaves(expected), strict=True):
        torch.testing.assert_close(tensor.double(), expected_tensor, rtol=tolerance, atol=1e-5)


def apply_norm(site, x_in: torch.Tensor | tuple) -> torch.Tensor:
    """Return c, the input of the sublayer."""
    first = x_in[0] if isinstance(x_in, tuple) else x_in
    return first if site.norm is None else site.norm(first)


@pytest.mark.parametrize(("name", "keys"), BFLOAT16_CASES, ids=describe_case)
def test_a_state_in_bfloat16_is_read_and_written_in_float32(name, keys):
    float64_model = build_random(name, **keys)
    model = copy.deepcopy(float64_model).float()
    state, h = run_to_last_site(float64_model)
    float64_state, float64_h = tree_map(torch.Tensor.double, (state, h))
    site = model.transformer.h[-1].sites[1]
    float64_site = float64_model.transformer.h[-1].sites[1]
    with torch.no_grad():
        x_in = site.read(state)
        expected_x_in = float64_site.read(float64_state)
        assert_trees_close(x_in, expected_x_in, 1e-5)
        c = apply_norm(float64_site, expected_x_in)
        written = site.write(state, h, x_in, c.float())
        expected = float64_site.write(float64_state, float64_h, expected_x_in, c)
        assert_trees_close(written, expected, ONE_ROUNDING)
        assert {leaf.dtype for leaf in tree_leaves(written)} == {torch.bfloat16}
        if site.post_write is not None:
            expected = float64_site.post_write(tree_map(torch.Tensor.double, written))
            assert_trees_close(site.post_write(written), expected, ONE_ROUNDING)


def test_the_embedding_convolution_of_bfloat16_is_summed_in_float32():
    float64_model = move_parameters(build("DDL-gpt-mha-rope-EC", **TINY).double())
    expander = copy.deepcopy(float64_model).float().input_embed
    embedding = torch.randn(2, 8, TINY["hidden_size"], dtype=torch.bfloat16)
    with torch.no_grad():
        expected = float64_model.input_embed(embedding.double())
        torch.testing.assert_close(
            expander(embedding).double(), expected, rtol=ONE_ROUNDING, atol=1e-5
        )
