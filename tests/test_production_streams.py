"""mHC's family against the layers of production models in transformers: DeepSeek-V4 and GLM-5.3
(mHC) and Hunyuan V4 (iHC).

The oracle is their own code: the forward pass of their decoder layer, with their hyper-connections
and our sublayers, and their readout. It runs on our parameters.
"""

import importlib
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from contract import TINY, tokens
from torch import nn
from torch.func import functional_call

from model import build, make_config
from model.causality import move_parameters
from model.gpt import GPT

ROOT = Path(__file__).parents[1]
SIZE = {**TINY, "hidden_size": 16, "num_hidden_layers": 2}

# in float64; outputs and gradients are of the order of 1
EXACT = {"rtol": 1e-11, "atol": 1e-11}


def empty_module(module_class: type[nn.Module]) -> nn.Module:
    """Return a module of the class without the parts that its __init__ makes."""
    module = object.__new__(module_class)
    nn.Module.__init__(module)
    return module


class Production(NamedTuple):
    """A production model whose residual stream one of our configs has."""

    config_file: str
    package: str  # in transformers.models
    prefix: str  # of the names of its classes
    decoder_layer: str
    settings: str
    pretrained_model: str

    # of its decoder layer, beyond hyper-connections, norms and sublayers
    attributes: dict

    # what its attention returns for our h
    attention_output: Callable

    def find(self, name: str) -> type:
        """Return a class of its modeling or configuration file; skip the test without the model."""
        for kind in ("modeling", "configuration"):
            module = f"transformers.models.{self.package}.{kind}_{self.package}"
            try:
                found_class = getattr(importlib.import_module(module), name, None)
            except ModuleNotFoundError:
                pytest.skip(f"this transformers has no {self.package}")
            if found_class is not None:
                return found_class
        pytest.skip(f"this transformers has no {name}")

    def stream_keys(self) -> dict:
        """Return the keys of the residual stream that its config sets."""
        keys = runpy.run_path(str(ROOT / "config" / f"{self.config_file}.py"))
        return {key: value for key, value in keys.items() if key.startswith(("hc_", "mhc_"))}

    def build(self, **keys: object) -> GPT:
        """Return a tiny model with its stream, whose parameters are all off their initial values."""
        model = build("mHC-gpt-mha-rope", **{**SIZE, **self.stream_keys(), **keys})
        return move_parameters(model)

    def public_settings(self, **settings: object) -> object:
        """Return its configuration at the width of our tiny models."""
        return self.find(self.settings)(hidden_size=SIZE["hidden_size"], **settings)

    def connection(self, read: nn.Module) -> Callable:
        """Return its hyper-connection with the parameters of a read."""
        public = self.find(f"{self.prefix}HyperConnection")(self.public_settings())
        weights = {"fn": read.maps.weight, "base": read.bias, "scale": read.scales}
        return lambda state: functional_call(public, weights, (state,))

    def layer(self, block: nn.Module, sublayers: list[Callable]) -> Callable:
        """Return its decoder layer, from state to state, with a block's parameters and sublayers."""
        layer = empty_module(self.find(self.decoder_layer))
        parts = {
            "attn_hc": self.connection(block.hc_attn),
            "ffn_hc": self.connection(block.hc_mlp),
            "input_layernorm": block.ln_1,
            "post_attention_layernorm": block.ln_2,
            "self_attn": lambda hidden_states, **_: self.attention_output(
                sublayers[0](hidden_states)
            ),
            "mlp": lambda hidden_states, input_ids=None: sublayers[1](hidden_states),
            **self.attributes,
        }
        for name, part in parts.items():
            setattr(layer, name, part)

        def run(state: torch.Tensor) -> torch.Tensor:
            result = layer(state)
            return result[0] if isinstance(result, tuple) else result

        return run

    def readout(self, readout: nn.Module) -> Callable:
        """Return its readout with the parameters of ours."""
        public_class = self.find(f"{self.prefix}HyperHead")
        if not list(readout.parameters()):
            return public_class()
        public = public_class(self.public_settings())
        weights = {
            "hc_fn": readout.maps.weight,
            "hc_base": readout.bias,
            "hc_scale": readout.scale,
        }
        return lambda state: functional_call(public, weights, (state,))


MODELS = [
    Production(
        config_file="mhc_deepseek_v4_small",
        package="deepseek_v4",
        prefix="DeepseekV4",
        decoder_layer="DeepseekV4DecoderLayer",
        settings="DeepseekV4Config",
        pretrained_model="DeepseekV4PreTrainedModel",
        attributes={},
        attention_output=lambda h: (h, None),
    ),
    Production(
        config_file="mhc_glm_5_3_small",
        package="glm5_next",
        prefix="Glm5NextText",
        decoder_layer="Glm5NextTextDecoderLayer",
        settings="Glm5NextTextConfig",
        pretrained_model="Glm5NextPreTrainedModel",
        attributes={"block_type": "linear_attention"},
        attention_output=lambda h: h,
    ),
    Production(
        config_file="ihc_hunyuan_v4_small",
        package="hy_v4",
        prefix="HYV4",
        decoder_layer="HYV4DecoderLayer",
        settings="HYV4Config",
        pretrained_model="HYV4PreTrainedModel",
        attributes={},
        attention_output=lambda h: (h, None, None),
    ),
]
each_model = pytest.mark.parametrize("production", MODELS, ids=lambda each: each.config_file)


@pytest.fixture
def in_float64(monkeypatch):
    """Let the layers, which call .float(), compute in float64."""
    monkeypatch.setattr(torch.Tensor, "float", lambda tensor: tensor)


def public_logits(production: Production, model: GPT, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits of a model whose residual stream the production model computes."""
    positions = model.positions(ids)
    state = model.transformer.wte(ids).unsqueeze(2).expand(-1, -1, model.config.hc_streams, -1)
    for block in model.transformer.h:
        sublayers = [
            lambda c, sublayer=sublayer: sublayer(c, positions)
            for sublayer in (block.attn, block.mlp)
        ]
        state = production.layer(block, sublayers)(state.contiguous())
    return model.logits(model.ln_f(production.readout(model.readout)(state)))


@each_model
def test_loss_and_gradients_are_those_of_the_production_model(production, in_float64):
    model = production.build().double()
    ids = tokens(2, 7)
    targets = ids.roll(-1, 1)
    loss = model(ids, targets)[1]
    expected_logits = public_logits(production, model, ids)
    expected_loss = F.cross_entropy(expected_logits.flatten(0, 1), targets.flatten())
    with torch.no_grad():
        torch.testing.assert_close(model(ids)[0], expected_logits, **EXACT)
    torch.testing.assert_close(loss, expected_loss, **EXACT)
    names, parameters = zip(*model.named_parameters())
    gradients = torch.autograd.grad(loss, parameters)
    expected_gradients = torch.autograd.grad(expected_loss, parameters)
    for name, gradient, expected in zip(names, gradients, expected_gradients):
        assert expected.abs().max() > 0, name
        torch.testing.assert_close(
            gradient, expected, **EXACT, msg=lambda text, n=name: f"{n} {text}"
        )


# Values of the options that no production model has.
OTHER_VALUES = [
    ("mhc_read_eps", 0.0),
    ("mhc_write_eps", 1e-7),
    ("mhc_write_magnitude", 1.9),
    ("mhc_norm_eps", 1e-4),
    ("mhc_readout", "sum"),
]
MIXING_VALUES = [("mhc_iterations", 3), ("mhc_rows_last", False), ("mhc_mix", "identity")]


@each_model
def test_every_option_changes_the_logits(production, in_float64):
    """Another value of any option changes the logits by more than the tolerance."""
    values = list(OTHER_VALUES)
    if production.stream_keys()["mhc_mix"] == "sinkhorn":
        values += MIXING_VALUES
    ids = tokens(2, 7)
    model = production.build().double()
    with torch.no_grad():
        expected = public_logits(production, model, ids)
        for key, value in values:
            settings = {**SIZE, **production.stream_keys(), key: value}
            other = build("mHC-gpt-mha-rope", make_config("mHC-gpt-mha-rope", settings))
            copy_parameters(model, other.double())
            assert (other(ids)[0] - expected).abs().max() > 1e-9, key


def copy_parameters(source: nn.Module, target: nn.Module) -> None:
    """Copy the parameters, and of those that have more rows in the source only the first ones."""
    for name, parameter in target.named_parameters():
        value = source.get_parameter(name)
        parameter.copy_(value[: len(parameter)] if parameter.ndim else value)


def fraction_equal(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the fraction of the numbers that have the same bits."""
    assert actual.dtype == expected.dtype == torch.bfloat16
    return (actual == expected).double().mean().item()


def step_in_bfloat16(production: Production, **keys: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the state after a block in bfloat16, as ours and as the production model computes it."""
    model = production.build(**keys)
    block = model.transformer.h[0]
    generator = torch.Generator().manual_seed(4)
    state = torch.randn(8, 16, 4, SIZE["hidden_size"], generator=generator).bfloat16()
    hs = [torch.randn(8, 16, SIZE["hidden_size"], generator=generator).bfloat16() for _ in range(2)]
    actual = state
    with torch.no_grad():
        expected = production.layer(block, [lambda c, h=h: h for h in hs])(state)
        for site, h in zip(block.sites, hs):
            actual = site.write(actual, h, site.read(actual), None)
    return actual, expected


@each_model
def test_a_state_in_bfloat16_is_rounded_as_in_the_production_model(production):
    """The order of a sum in float32 decides the rounding of a few numbers, which may differ."""
    actual, expected = step_in_bfloat16(production)
    assert fraction_equal(actual, expected) > 0.99
    torch.testing.assert_close(actual, expected, rtol=2**-6, atol=2**-6)


@each_model
def test_the_other_dtype_of_the_write_rounds_differently(production):
    own = production.stream_keys()["mhc_write_dtype"]
    other = {"state": "float32", "float32": "state"}[own]
    actual, expected = step_in_bfloat16(production, mhc_write_dtype=other)
    assert fraction_equal(actual, expected) < 0.95


@each_model
def test_reads_and_readouts_are_rounded_as_in_the_production_model(production):
    model = production.build()
    read = model.transformer.h[0].hc_mlp
    state = torch.randn(8, 16, 4, SIZE["hidden_size"]).bfloat16()
    with torch.no_grad():
        x_in = read(state).x_in
        expected_x_in = production.connection(read)(state)[-1]
        x = model.readout(state)
        expected_x = production.readout(model.readout)(state)
    assert fraction_equal(x_in, expected_x_in) > 0.99
    assert fraction_equal(x, expected_x) > 0.99


@each_model
def test_a_config_has_the_values_of_the_production_model(production):
    public = production.find(production.settings)()
    keys = production.stream_keys()
    expected = {
        "hc_streams": public.hc_mult,
        "mhc_read_eps": public.hc_eps,
        "mhc_norm_eps": public.rms_norm_eps,
        "mhc_write_magnitude": getattr(public, "hc_magnitude", 2.0),
        "mhc_maps_init_std": public.initializer_range,
    }
    if keys["mhc_mix"] == "sinkhorn":
        expected["mhc_iterations"] = public.hc_sinkhorn_iters
    assert {key: keys[key] for key in expected} == expected


def build_wide(production: Production) -> GPT:
    """Return an untrained model that is wide enough to measure the spread of its maps."""
    keys = {**SIZE, "hidden_size": 64, "head_dim": 16}
    return build("mHC-gpt-mha-rope", **{**keys, **production.stream_keys()})


def initialize_public(production: Production, name: str) -> nn.Module:
    """Return a module of the production model as its own code initializes it."""
    settings = production.find(production.settings)(hidden_size=64)
    pretrained = empty_module(production.find(production.pretrained_model))
    pretrained.config = settings
    module = production.find(f"{production.prefix}{name}")(settings)
    pretrained._init_weights(module)
    return module


@each_model
def test_reads_are_initialized_as_in_the_production_model(production):
    """Biases and scales are equal; the random maps have the same spread."""
    read = build_wide(production).transformer.h[1].hc_attn
    public = initialize_public(production, "HyperConnection")
    assert read.bias.tolist() == pytest.approx(public.base.tolist())
    assert read.scales.tolist() == pytest.approx(public.scale.tolist())
    assert read.maps.weight.std().item() == pytest.approx(public.fn.std().item(), rel=0.1)


@each_model
def test_readouts_are_initialized_as_in_the_production_model(production):
    model = build_wide(production)
    if model.config.mhc_readout != "sigmoid":
        pytest.skip("this readout has no parameters")
    public = initialize_public(production, "HyperHead")
    assert model.readout.bias.tolist() == pytest.approx(public.hc_base.tolist())
    assert model.readout.scale.tolist() == pytest.approx(public.hc_scale.tolist())
    assert model.readout.maps.weight.std().item() == pytest.approx(
        public.hc_fn.std().item(), rel=0.1
    )
