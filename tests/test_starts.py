"""Test initial values: each standard deviation against the formula of the paper's current release."""

import math

import pytest
import torch
import torch.nn.functional as F

from model import build
from model.ddl import fold_channel_conv

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
        ("medium", 3),
        pytest.param("small", 12, marks=pytest.mark.slow),
        pytest.param("medium", 24, marks=pytest.mark.slow),
    ],
)
def test_every_parameter_starts_as_in_the_release(model_name, size, num_layers):
    settings = settings_of(size, num_layers)
    if "-CC" in model_name:
        settings["ddl_cc_read"] = "pair"
    model = build(model_name, init="spectral", **settings)
    for name, parameter in model.named_parameters():
        mean, std = expected_moments(name, parameter.shape, settings["hidden_size"], num_layers)
        values = parameter.detach().double()
        tolerance = 5 / math.sqrt(parameter.numel())
        assert abs(values.mean().item() - mean) <= max(tolerance * std, 1e-6), name
        if parameter.numel() > 100 or not std:
            actual_std = values.std(correction=0).item()
            assert actual_std == pytest.approx(std, rel=tolerance, abs=1e-8), name


@pytest.mark.parametrize(
    ("name", "std"),
    [
        ("ddl_attn.beta.weight", 0.00065),
        ("ddl_mlp.v_proj.weight", 0.0013),
        ("attn.c_proj.weight", 0.0015),
        ("mlp.c_proj.weight", 0.00056),
    ],
)
def test_standard_deviations_that_the_release_states(small_model, name, std):
    """Compare parameters of all layers together."""
    weights = [
        weight.flatten() for key, weight in small_model.state_dict().items() if key.endswith(name)
    ]
    assert torch.cat(weights).std().item() == pytest.approx(std, rel=0.02)


@pytest.fixture(scope="module")
def small_model():
    """Build the small size: d = 768, 12 layers."""
    torch.manual_seed(0)
    return build("DDL-gpt-mha-rope", init="spectral", **settings_of("small", 12))


@pytest.mark.parametrize(("causal", "folded"), [(False, (2, 3, 4, 3)), (True, (4, 3, 2, 1))])
def test_the_mean_of_a_pair_folds_to_a_window(causal, folded):
    model = build(
        "DDL-gpt-mha-rope-CC",
        ddl_cc_read="pair",
        ddl_state_dv_shortconv_causal=causal,
        init="spectral",
        **settings_of("small", 1),
    )
    expected = torch.tensor(folded) / 16
    for read in (model.readout, model.transformer.h[0].compress):
        torch.testing.assert_close(read.weights()[0].T, expected.expand(768, 4))


@pytest.mark.parametrize("start", ["mean", "normal", "identity"])
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


@pytest.mark.parametrize(
    ("size", "causal"), [(1, False), (2, False), (3, True), (4, False), (4, True)]
)
def test_folding_and_its_gradients_are_those_of_the_two_steps(size, causal):
    """Compare with torch's convolution over value channels, padded with zeros, then the vector."""
    weight = torch.randn(7, size, requires_grad=True)
    read = torch.randn(4, requires_grad=True)
    state = torch.randn(5, 7, 4)
    num_left = size - 1 if causal else (size - 1) // 2
    padded = F.pad(state, (num_left, size - 1 - num_left))
    expected = F.conv1d(padded, weight[:, None], groups=7) @ read
    output = (state * fold_channel_conv(weight, read, causal)).sum(-1)
    torch.testing.assert_close(output, expected, rtol=1e-6, atol=1e-6)
    factors = torch.randn(5, 7)
    gradients = torch.autograd.grad((output * factors).sum(), (weight, read))
    expected_gradients = torch.autograd.grad((expected * factors).sum(), (weight, read))
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("init", "divisor"), [("spectral", 2), ("normal", math.sqrt(2))])
def test_a_depth_base_divides_the_initial_outputs_by_itself(init, divisor):
    model = build("gpt-mha-rope", num_hidden_layers_base=2, init=init, **settings_of("small", 4))
    assert model.config.branch_mult == 0.5
    std = model.transformer.h[3].attn.c_proj.weight.std().item()
    assert std == pytest.approx(0.5 / math.sqrt(768) / divisor, rel=0.01)


@pytest.mark.parametrize(
    "model_name", ["HC-gpt-mha-rope", "AttnRes-gpt-mha-rope", "mHC-gpt-mha-rope"]
)
def test_streams_without_a_factor_refuse_it(model_name):
    with pytest.raises(
        ValueError,
        match=r"have no effect on this model, whose write \(\w+\) does not multiply its update \(by 0.5",
    ):
        build(model_name, num_hidden_layers_base=6, hidden_size=16, head_dim=4, **FEW_TOKENS)


def measure_contexts(model) -> list[float]:
    """Return the RMS of the input of each sublayer, after its norm, site by site."""
    rms = []
    hooks = []
    for block in model.transformer.h:
        for norm in (block.ln_1, block.ln_2):
            hook = norm.register_forward_hook(
                lambda _, inputs, output: rms.append(output.square().mean().sqrt().item())
            )
            hooks.append(hook)
    with torch.no_grad():
        model(torch.randint(0, FEW_TOKENS["vocab_size"], (2, 16)))
    for hook in hooks:
        hook.remove()
    return rms


def test_inputs_of_sublayers_are_normalized_from_the_first_step():
    """Avoid the fault of init=normal: reads of four value channels that are as small as ln_1's eps."""
    spectral = build("DDL-gpt-mha-rope", init="spectral", **settings_of("small", 2))
    normal = build("DDL-gpt-mha-rope", init="normal", **settings_of("small", 2))
    spectral_rms = measure_contexts(spectral)
    normal_rms = measure_contexts(normal)
    assert len(spectral_rms) == len(normal_rms) == 4
    assert min(spectral_rms) > 0.9
    assert normal_rms[0] < 0.2
