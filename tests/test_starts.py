"""Where parameters start: each standard deviation against the formula of the paper's current
release, written anew.
"""

import math

import pytest
import torch
import torch.nn.functional as F

from model import build
from model.residual import fold_channel_conv

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
COLUMNS = [f"DDL-gpt-mha-rope{kind}" for kind in ("", "-EC", "-CC", "-CC-EC")]
MODEL_NAMES = ["gpt-mha-rope", "DDL-vdim1-gpt-mha-rope", *COLUMNS]
FEW = {"vocab_size": 512, "block_size": 16}
WHOLE = [pytest.param(size, None, marks=pytest.mark.slow) for size in SIZES]


def wanted(name: str, shape: torch.Size, d: int, layers: int) -> tuple[float, float]:
    """(mean, standard deviation) of a parameter's start with init=spectral; a read starts as a
    mean.
    """
    if name.endswith("wte.weight"):
        return 0.0, 0.02
    if name.endswith("v_proj.bias"):
        return 0.0, 1 / math.sqrt(3 * d)  # uniform
    if len(shape) == 1:
        return 0.0 if name.endswith("beta.bias") else 0.25 if name.endswith(".read") else 1.0, 0.0
    if "compress." in name or name.startswith("readout."):
        return 1 / shape[-1], 0.0
    if name.startswith("input_embed."):
        return 1 / shape[-1], math.sqrt((1 - 1 / shape[-1]) / shape[-1])  # one tap is 1
    outputs, inputs = shape
    std = 0.5 / math.sqrt(inputs) * min(1.0, math.sqrt(outputs / inputs))
    return 0.0, std / layers if name.endswith("c_proj.weight") else std


@pytest.mark.parametrize("stem", MODEL_NAMES)
@pytest.mark.parametrize(("size", "layers"), [("small", 2), ("medium", 3), *WHOLE])
def test_every_parameter_starts_as_the_release_has_it(stem, size, layers):
    keys = SIZES[size] | ({"num_hidden_layers": layers} if layers else {})
    pair = {"ddl_cc_read": "pair"} if "-CC" in stem else {}
    model = build(stem, init="spectral", **pair, **keys, **FEW)
    for name, parameter in model.named_parameters():
        mean, std = wanted(name, parameter.shape, keys["hidden_size"], keys["num_hidden_layers"])
        found, few = parameter.detach().double(), 5 / math.sqrt(parameter.numel())
        assert abs(found.mean().item() - mean) <= max(few * std, 1e-6), name
        if parameter.numel() > 100 or not std:
            assert found.std(correction=0).item() == pytest.approx(std, rel=few, abs=1e-8), name


def test_a_few_starts_are_the_figures_of_the_release():
    """d = 768, 12 layers: gate, write value, and the outputs of attention and MLP, of all layers
    together.
    """
    model = build("DDL-gpt-mha-rope", init="spectral", **SIZES["small"], **FEW)
    figures = {"ddl_attn.beta.weight": 0.00065, "ddl_mlp.v_proj.weight": 0.0013}
    figures |= {"attn.c_proj.weight": 0.0015, "mlp.c_proj.weight": 0.00056}
    state = model.state_dict()
    for name, std in figures.items():
        found = torch.cat([value.flatten() for key, value in state.items() if key.endswith(name)])
        assert found.std().item() == pytest.approx(std, rel=0.02), name


@pytest.mark.parametrize(("causal", "folded"), [(False, (2, 3, 4, 3)), (True, (4, 3, 2, 1))])
def test_the_mean_of_a_pair_folds_to_a_window(causal, folded):
    keys = {"ddl_cc_read": "pair", "ddl_state_dv_shortconv_causal": causal, "init": "spectral"}
    model = build("DDL-gpt-mha-rope-CC", **keys, **SIZES["small"] | {"num_hidden_layers": 1}, **FEW)
    expected = torch.tensor(folded) / 16
    for read in (model.readout, model.transformer.h[0].compress):
        torch.testing.assert_close(read.weights()[0].T, expected.expand(768, 4))


@pytest.mark.parametrize("start", ["mean", "normal", "identity"])
def test_a_folded_read_starts_as_the_pair_folds(start):
    made = []
    for form in ("pair", "folded"):
        torch.manual_seed(1)
        keys = {"ddl_cc_read": form, "ddl_state_conv_init": start, "num_hidden_layers": 1}
        made.append(
            build(
                "DDL-gpt-mha-rope-CC", **keys, hidden_size=64, head_dim=16, **FEW
            ).readout.weights()
        )
    torch.testing.assert_close(*made)


@pytest.mark.parametrize(
    ("size", "causal"), [(1, False), (2, False), (3, True), (4, False), (4, True)]
)
def test_folding_and_its_gradients_are_those_of_the_two_steps(size, causal):
    """A convolution over columns, zeros beyond them, by torch's own; then the vector.

    In float32.
    """
    weight, read = torch.randn(7, size, requires_grad=True), torch.randn(4, requires_grad=True)
    state, before = torch.randn(5, 7, 4), size - 1 if causal else (size - 1) // 2
    padded = F.pad(state, (before, size - 1 - before))
    outcomes = [F.conv1d(padded, weight[:, None], groups=7) @ read]
    outcomes.append((state * fold_channel_conv(weight, read, causal)).sum(-1))
    torch.testing.assert_close(*outcomes, rtol=1e-6, atol=1e-6)
    toward = torch.randn(5, 7)
    theirs, ours = (
        torch.autograd.grad((outcome * toward).sum(), (weight, read)) for outcome in outcomes
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("init", "divisor"), [("spectral", 2), ("normal", math.sqrt(2))])
def test_a_depth_base_divides_by_itself(init, divisor):
    keys = SIZES["small"] | {"num_hidden_layers": 4, "num_hidden_layers_base": 2, "init": init}
    model = build("gpt-mha-rope", **keys, **FEW)
    assert model.config.branch_mult == 0.5
    found = model.transformer.h[3].attn.c_proj.weight.std().item()
    assert found == pytest.approx(0.5 / math.sqrt(768) / divisor, rel=0.01)


@pytest.mark.parametrize("stem", ["HC-gpt-mha-rope", "AttnRes-gpt-mha-rope", "mHC-gpt-mha-rope"])
def test_streams_without_a_factor_refuse_it(stem):
    with pytest.raises(
        ValueError,
        match=r"residual_branch_mult=0.5 has no effect on this model, whose write \(\w+\) does not",
    ):
        build(stem, num_hidden_layers_base=6, hidden_size=16, head_dim=4, **FEW)


def contexts(model) -> list[float]:
    """RMS of what each sublayer is given, after its norm, site by site."""
    found, hooks = [], []
    for norm in (norm for block in model.transformer.h for norm in (block.ln_1, block.ln_2)):
        note = norm.register_forward_hook(
            lambda *given: found.append(given[-1].square().mean().sqrt().item())
        )
        hooks.append(note)
    with torch.no_grad():
        model(torch.randint(0, FEW["vocab_size"], (2, 16)))
    for hook in hooks:
        hook.remove()
    return found


def test_what_sublayers_are_given_is_normed_from_the_first_step_on():
    """With the older start four columns were read so small that ln_1's eps decided what came of
    it.
    """
    keys = SIZES["small"] | {"num_hidden_layers": 2} | FEW
    now, before = (
        contexts(build("DDL-gpt-mha-rope", init=init, **keys)) for init in ("spectral", "normal")
    )
    assert len(now) == len(before) == 4
    assert min(now) > 0.9
    assert before[0] < 0.2
