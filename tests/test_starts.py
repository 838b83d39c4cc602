"""Test initial values: those of the paper's current release by its formula, and a table of others."""

import fnmatch
import functools
import math

import pytest
import torch
from helpers import configure
from models import TINY, authors_form

from model import build
from model.gpt import GPT

SIZES = {
    "small": {
        "hidden_size": 768,
        "num_attention_heads": 6,
        "head_dim": 128,
        "num_hidden_layers": 12,
    },
    "medium": {
        "hidden_size": 1024,
        "num_attention_heads": 8,
        "head_dim": 128,
        "num_hidden_layers": 24,
    },
}
WITH_VALUE_CHANNELS = [f"DDL-gpt-mha-rope{kind}" for kind in ("", "-EC", "-CC", "-CC-EC")]
MODEL_NAMES = ["gpt-mha-rope", "DDL-vdim1-gpt-mha-rope", *WITH_VALUE_CHANNELS]
FEW_TOKENS = {"vocab_size": 512, "block_size": 16}


def settings_of(size: str, num_layers: int) -> dict:
    return {**SIZES[size], **FEW_TOKENS, "num_hidden_layers": num_layers}


def expected_moments(name: str, shape: torch.Size, d: int, layers: int) -> tuple[float, float]:
    """Return mean and standard deviation of an initial parameter with init=spectral.

    A read starts as a mean over the value channels.
    """
    if name.endswith("wte.weight"):
        return 0.0, 0.02
    if name.endswith("v_proj.bias"):
        return 0.0, 1 / math.sqrt(3 * d)  # uniform
    if name.endswith("beta.bias"):
        return 0.0, 0.0
    if name.endswith(".read") and len(shape) == 1:
        return 0.25, 0.0
    if len(shape) == 1:
        return 1.0, 0.0
    if "compress." in name or name.startswith("readout."):
        return 1 / shape[-1], 0.0
    if name.startswith("input_embed."):
        return 1 / shape[-1], math.sqrt((1 - 1 / shape[-1]) / shape[-1])  # one tap is 1
    outputs, inputs = shape
    std = 0.5 / math.sqrt(inputs) * min(1.0, math.sqrt(outputs / inputs))
    return 0.0, std / layers if name.endswith("c_proj.weight") else std


@pytest.mark.parametrize("model_name", MODEL_NAMES)
@pytest.mark.parametrize(
    ("size", "num_layers"),
    [
        ("small", 2),
        ("medium", 1),
    ],
)
def test_every_parameter_starts_as_in_the_release(model_name, size, num_layers):
    settings = settings_of(size, num_layers)
    model = build(model_name, init="spectral", **settings, **authors_form(model_name))
    for name, parameter in model.named_parameters():
        mean, std = expected_moments(name, parameter.shape, settings["hidden_size"], num_layers)
        values = parameter.detach().double()
        tolerance = 5 / math.sqrt(parameter.numel())
        assert abs(values.mean().item() - mean) <= max(tolerance * std, 1e-6), name
        if parameter.numel() > 100 or not std:
            actual_std = values.std(correction=0).item()
            assert actual_std == pytest.approx(std, rel=tolerance, abs=1e-8), name


WIDE = {
    **TINY,
    "hidden_size": 256,
    "num_attention_heads": 2,
    "head_dim": 128,
    "num_hidden_layers": 4,
    "vocab_size": 128,
}
NORMAL = {"init": "normal"}
NORMAL_CONVOLUTIONS = {**NORMAL, "ddl_state_conv_init": None}
IDENTITY = {"ddl_state_conv_init": "identity"}
MEAN = {"ddl_state_conv_init": "mean"}
PAIR = {"ddl_cc_read": "pair"}
RELEASE = settings_of("small", 12)
MANY_CHANNELS = {"ddl_value_channels": 4096}
LOG_ODDS_LIMIT = math.log(1e6 - 1)  # of a gate: probabilities are kept in [1e-6, 1 - 1e-6]
DEEPNORM = {"norm_placement": "deepnorm", **NORMAL}
EYE = torch.eye(4).flatten().tolist()
OFF = -8.0  # logit of an entry of the mixing matrix that is not on its diagonal
# By model: settings, pattern of the names of parameters, mean or exact values, standard deviation.
# If it is 0, the values are exact and belong to the tiny size; otherwise d = 256 and L = 4.
STARTS = {
    "DDL-gpt-mha-rope": [
        (NORMAL, "transformer.wte.weight", 0, 0.02),
        (NORMAL, "*.attn.c_q.weight", 0, 0.5 / 16),
        (NORMAL, "*.mlp.c_fc2.weight", 0, 0.5 / 16),
        (NORMAL, "*.c_proj.weight", 0, 0.5 / 16 / 2),
        ({}, "*.compress.shortconv.weight", 0, 0.5 / 16),
        ({"ddl_state_shortconv_kernel_size": 2}, "readout.shortconv.weight", 0, 0.5 / 16),
        (NORMAL_CONVOLUTIONS, "*.compress.shortconv.weight", 0, 0.5 / 16),
        (NORMAL, "*.read", 0.25, 0),
        (NORMAL, "*ln_?.weight", 1, 0),
        # uniform in [-1/16, 1/16]
        (
            {**NORMAL, **MANY_CHANNELS, "num_hidden_layers": 1, "ddl_v_bias": True},
            "*.v_proj.bias",
            0,
            1 / 16 / 3**0.5,
        ),
        ({"ddl_beta_init": 0.5}, "*.beta.bias", -math.log(3), 0),
        ({"ddl_beta_init": "1/L", "num_hidden_layers": 4}, "*.beta.bias", -math.log(7), 0),
        (IDENTITY, "*shortconv.weight", [0, 0, 0, 1] * 120, 0),
        ({**IDENTITY, "ddl_state_read_init": 0.5}, "*.read", 0.5, 0),
        # as stated in the release
        (RELEASE, "*.ddl_attn.beta.weight", 0, 0.00065),
        (RELEASE, "*.mlp.c_proj.weight", 0, 0.00056),
    ],
    "DDL-gpt-mha-rope-CC": [
        # a quarter of the sum of 2, 3, 4 and 3 of the pair's values
        ({}, "*.compress.weight", 0, 0.5 / 16 * (2 + 3 + 4 + 3) ** 0.5 / 8),
        # a folded read is the mean over the value channels
        (MEAN, "readout.weight", 0.25, 0),
        ({**MEAN, "ddl_state_read_init": 0.5}, "readout.weight", 0.5, 0),
        ({**NORMAL_CONVOLUTIONS, **PAIR}, "*.compress.weight", 0, 0.5 / 16),
        ({**IDENTITY, **PAIR, "ddl_value_channels": 3}, "*.compress.weight", [0, 1, 0] * 20, 0),
        ({**IDENTITY, **PAIR, "ddl_value_channels": 3}, "*.read", 1 / 3, 0),
    ],
    "DDL-gpt-mha-rope-CC-EC": [({}, "input_embed.conv.weight", [0, 0, 0, 1] * 40, 0)],
    "DDL-vdim1-gpt-mha-rope": [
        ({"ddl_beta_init": beta, **keys}, pattern, log_odds, 0)
        for beta, log_odds in ((0.0, -LOG_ODDS_LIMIT), (2.0, LOG_ODDS_LIMIT), (1.5, math.log(3)))
        for keys, pattern in (
            ({}, "*.beta.bias"),
            ({"ddl_beta_single_linear": False}, "*.beta_out.bias"),
        )
    ],
    "AttnRes-gpt-mha-rope": [({}, "*query", 0, 0)],
    "conv-gpt-mha-rope": [({}, "*.compress.shortconv.weight", 0, 0.5 / 16)],
    "GatedResidual-gpt-mha-rope": [
        # as in Qwen's config
        *(({}, f"*.gated_*.{matrix}.weight", 0, 0.02) for matrix in ("down", "up", "inject")),
        ({"mup": True}, "*.gated_*.inject.weight", 0, 0.04),
        # an inner size that does not grow with the width
        ({"mup": True, "gated_residual_rank": 8}, "*.gated_*.up.weight", 0, 0.02),
        ({}, "*.norm_weight", 1, 0),
    ],
    "HC-gpt-mha-rope": [
        ({"num_hidden_layers": 3}, "*.read", [*EYE, *EYE[:8]], 0),
        ({}, "*.mix", EYE * 4, 0),
        ({}, "*.write", 1, 0),
        ({}, "*.scale", 0.01, 0),
        ({}, "*.write_scale", 0.01, 0),
        ({}, "*.maps.weight", 0, 0),
    ],
    "LAuReL-gpt-mha-rope": [
        ({}, "*.down.weight", 0, 0.5 / 16),
        ({}, "*.up.weight", 0, 0),
        ({"laurel_form": "zaya"}, "*.bias", 0, 0),
        ({"laurel_form": "zaya"}, "*.scale", 1, 0),
    ],
    "Lambdas-gpt-mha-rope": [
        ({}, "*.begin.a", 1, 0),
        ({}, "*.begin.b", 0, 0),
        ({"lambda_values": "none", "lambda_input": False, "lambda_gain": True}, "*.begin.a", 1, 0),
        ({"lambda_values": "head"}, "*.h.1.g", 0.5, 0),
        ({"lambda_skips": True}, "*.begin.skip", 1, 0),
    ],
    "mHC-gpt-mha-rope": [
        ({}, "*.maps.weight", 0, 0.5 / math.sqrt(4 * 256)),
        ({"hc_streams": 3}, "*.scales", 0.01, 0),
        (
            {"hc_streams": 3},
            "*.h.1.hc_attn.bias",
            [-math.log(2)] * 3 + [0] * 3 + [0, OFF, OFF, OFF, 0, OFF, OFF, OFF, 0],
            0,
        ),
        ({"mhc_readout": "sigmoid"}, "readout.maps.weight", 0, 0.5 / math.sqrt(4 * 256)),
        ({"mhc_readout": "sigmoid"}, "readout.bias", 0, 0),
        ({"mhc_readout": "sigmoid"}, "readout.scale", 0.01, 0),
    ],
    "MGT-gpt-mha": [
        ({}, "*.gate.weight", 0, 0.5 / 16),
        ({}, "*.beta.weight", 0, 0.5 / 16),
        ({}, "*.beta.bias", 1, 0),
        ({}, "*.alpha", 0, 0),
    ],
    "MUDD-gpt-mha-rope": [
        ({}, "*.dense.first.weight", 0, 0.5 / 16),
        ({}, "*.h.1.dense.static", [0, 0, 1], 0),
    ],
    "MuseSpark-gpt-mha-rope": [
        ({}, "*.gate", 0, 0.02),
        ({}, "*.output_scale", 1, 0),
    ],
    "NormPlacement-gpt-mha-rope": [
        ({}, "*.write_*.norm.weight", 1, 0),
        (DEEPNORM, "*.attn.c_q.weight", 0, 0.5 / 16),
        (DEEPNORM, "*.attn.c_v.weight", 0, 0.5 / 16 / 32**0.25),
        (DEEPNORM, "*.c_proj.weight", 0, 0.5 / 16 / 32**0.25),
        (DEEPNORM, "*.mlp.c_fc1.weight", 0, 0.5 / 16 / 32**0.25),
    ],
    "nGPT-gpt-mha-rope": [({}, "*.alpha", 0.05, 0)],
    "ReZero-gpt-mha-rope": [({}, "*.write_*.scale", 0, 0)],
    "wide-gpt-mha-rope": [({"hidden_size": 2, **MANY_CHANNELS}, "*.weights", 1, 0.5)],
}


@functools.lru_cache(maxsize=1)
def build_start(model_name: str, *settings: tuple[str, object]) -> GPT:
    """Build a model; successive rows of the table that need the same one share it."""
    torch.manual_seed(0)
    return build(model_name, **dict(settings))


@pytest.mark.parametrize(
    ("model_name", "keys", "pattern", "value", "std"),
    [(model_name, *row) for model_name, rows in STARTS.items() for row in rows],
)
def test_initial_values(model_name, keys, pattern, value, std):
    settings = {**(WIDE if std else TINY), **keys}
    parameters = dict(build_start(model_name, *settings.items()).named_parameters())
    names = fnmatch.filter(parameters, pattern)
    values = torch.cat([parameters[name].detach().flatten().double() for name in names])
    if std:
        tolerance = max(0.02, 5 / math.sqrt(len(values)))
        assert values.std().item() == pytest.approx(std, rel=tolerance)
        assert abs(values.mean().item() - value) <= tolerance * std
    else:
        expected = torch.tensor(value, dtype=torch.float64).expand_as(values)
        torch.testing.assert_close(values, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("start", ["normal", "identity"])
def test_a_folded_read_starts_as_the_pair_folds(start):
    weights = []
    for form in ("pair", "folded"):
        torch.manual_seed(1)
        model = build(
            "DDL-gpt-mha-rope-CC",
            ddl_cc_read=form,
            ddl_state_conv_init=start,
            num_hidden_layers=1,
            hidden_size=64,
            head_dim=16,
            **FEW_TOKENS,
        )
        weights.append(model.readout.weights())
    torch.testing.assert_close(weights[0], weights[1])


SMALL_CONFIGS = [
    "gpt_small",
    "ddl_dv1_small",
    "ddl_dv4_small",
    "ddl_dv4_ec_small",
    "ddl_dv4_cc_small",
    "ddl_dv4_cc_ec_small",
]
OTHER_CONFIGS = [name.replace("_small", "_medium") for name in SMALL_CONFIGS]
OTHER_CONFIGS += ["ddl_january_v1_small", "ddl_july_small"]


@pytest.mark.parametrize(
    "name", [*SMALL_CONFIGS, *(pytest.param(x, marks=pytest.mark.slow) for x in OTHER_CONFIGS)]
)
def test_the_first_loss_of_the_papers_models_is_that_of_a_guess(name):
    """A readout that keeps the token's own embedding predicts this token, with a loss of 20."""
    run_config, model_config = configure([f"config/{name}.py"])
    model = build(run_config.model, model_config)
    ids = torch.randint(0, model_config.vocab_size, (1, 65))
    with torch.no_grad():
        _, loss = model(ids[:, :-1], ids[:, 1:])
    assert loss.item() == pytest.approx(math.log(model_config.vocab_size), abs=1.5)
