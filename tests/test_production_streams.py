"""Compare streams with the layers of six production models in transformers.

These are DeepSeek-V4 (mHC), Qwen4-exp (Gated Residual), Muse Spark, ZAYA, Dory (nGPT) and Beam
(sandwich norms). The oracle is their own code, which computes the residual stream with our
parameters and our sublayers.
"""

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from contract import TINY, tokens
from torch import nn
from torch.func import functional_call

from model import build
from model.causality import move_parameters
from model.gpt import GPT
from model.parameters import collect_rules
from model.streams.hyper_connections import ManifoldConnection

ROOT = Path(__file__).parents[1]
SIZE = {**TINY, "hidden_size": 16}

# in float64; outputs and gradients are of the order of 1
EXACT = {"rtol": 1e-11, "atol": 1e-11}


def find_class(package: str, name: str) -> type:
    """Return a class of a package of transformers.models; skip the test without it."""
    for kind in ("modeling", "configuration"):
        module = f"transformers.models.{package}.{kind}_{package}"
        try:
            found_class = getattr(importlib.import_module(module), name, None)
        except ModuleNotFoundError:
            pytest.skip(f"this transformers has no {package}")
        if found_class is not None:
            return found_class
    pytest.skip(f"this transformers has no {name}")


def empty_module(module_class: type[nn.Module], **attributes: object) -> nn.Module:
    """Return a module of the class with these attributes instead of what its __init__ makes."""
    module = object.__new__(module_class)
    nn.Module.__init__(module)
    vars(module).update(attributes)
    return module


@pytest.fixture
def in_float64(monkeypatch):
    """Let the layers, which call .float(), compute in float64."""
    monkeypatch.setattr(torch.Tensor, "float", lambda tensor: tensor)


def build_random(model_name: str, **keys: object) -> GPT:
    """Return a tiny model in float64 whose parameters are all off their initial values."""
    return move_parameters(build(model_name, **{**SIZE, **keys})).double()


def check_model(model: GPT, run_public: Callable) -> None:
    """Compare the loss and every gradient of a model with those of a production model.

    Args:
        run_public: returns for the model and the embeddings x (B, T, d) the input of ln_f
    """
    ids = tokens(2, 7)
    targets = ids.roll(-1, 1)
    loss = model(ids, targets)[1]
    logits = model.logits(model.ln_f(run_public(model, model.transformer.wte(ids))))
    expected_loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(loss, expected_loss, **EXACT)
    names, parameters = zip(*model.named_parameters())
    gradients = torch.autograd.grad(loss, parameters)
    expected_gradients = torch.autograd.grad(expected_loss, parameters)
    for name, gradient, expected in zip(names, gradients, expected_gradients):
        torch.testing.assert_close(
            gradient, expected, **EXACT, msg=lambda text, n=name: f"{n}: {text}"
        )


def with_weights(module: nn.Module, **weights: torch.Tensor) -> Callable:
    """Return a module's forward with other values of all its parameters."""
    return lambda *args: functional_call(module, weights, args, strict=True)


def blocks_with_sublayers(
    model: GPT, num_tokens: int
) -> Iterator[tuple[nn.Module, Callable, Callable]]:
    """Yield each block with its attention and its MLP, called as decoder layers call theirs."""
    positions = model.positions(torch.zeros(1, num_tokens, dtype=torch.int64))
    for block in model.transformer.h:

        def attend(hidden_states, block=block, **_):
            return block.attn(hidden_states, positions), None

        def run_mlp(hidden_states, block=block):
            return block.mlp(hidden_states, positions)

        yield block, attend, run_mlp


# ---- mHC: DeepSeek-V4 ----


def repeat_as_streams(model: GPT, x: torch.Tensor) -> torch.Tensor:
    """Return the initial state (B, T, n, d) of embeddings (B, T, d)."""
    return x.unsqueeze(2).repeat(1, 1, model.config.hc_streams, 1)


def deepseek_settings() -> object:
    """Return DeepSeek-V4's configuration at the width of our tiny models, with epsilons of 0."""
    return find_class("deepseek_v4", "DeepseekV4Config")(
        hidden_size=SIZE["hidden_size"], hc_eps=0.0
    )


def deepseek_connection(read: nn.Module) -> Callable:
    """Return DeepSeek-V4's hyper-connection with the parameters of a read."""
    return with_weights(
        find_class("deepseek_v4", "DeepseekV4HyperConnection")(deepseek_settings()),
        fn=read.maps.weight,
        base=read.bias,
        scale=read.scales,
    )


def run_deepseek(model: GPT, x: torch.Tensor) -> torch.Tensor:
    """Run the decoder layers and the readout of DeepSeek-V4 with our norms and sublayers."""
    state = repeat_as_streams(model, x)
    for block, attend, run_mlp in blocks_with_sublayers(model, x.shape[1]):
        layer = empty_module(
            find_class("deepseek_v4", "DeepseekV4DecoderLayer"),
            attn_hc=deepseek_connection(block.hc_attn),
            ffn_hc=deepseek_connection(block.hc_mlp),
            input_layernorm=block.ln_1,
            post_attention_layernorm=block.ln_2,
            self_attn=attend,
            mlp=lambda hidden_states, input_ids=None, run_mlp=run_mlp: run_mlp(hidden_states),
        )
        state = layer(state)
    readout = with_weights(
        find_class("deepseek_v4", "DeepseekV4HyperHead")(deepseek_settings()),
        hc_fn=model.readout.maps.weight,
        hc_base=model.readout.bias,
        hc_scale=model.readout.scale,
    )
    return readout(state)


def test_mhc_with_a_sigmoid_readout_equals_that_of_deepseek_v4(in_float64, monkeypatch):
    monkeypatch.setattr(ManifoldConnection, "EPS", 0.0)
    model = build_random("mHC-gpt-mha-rope", mhc_readout="sigmoid")
    check_model(model, run_deepseek)


# ---- Gated Residual: the layer of Qwen4-exp ----


def public_gated_residual(gated_read: nn.Module, with_inject: bool = True) -> Callable:
    """Return the layer of Qwen4-exp with the parameters of a read or of the readout."""
    config = find_class("qwen4_exp", "Qwen4ExpTextConfig")(
        hidden_size=gated_read.hidden_size,
        hc_count=gated_read.num_streams,
        hc_lowrank=gated_read.down.out_features,
        rms_norm_eps=gated_read.eps,
    )
    public_class = find_class("qwen4_exp", "Qwen4ExpTextGatedResidual")
    public = public_class(config, use_combine=with_inject).double()
    weights = {
        "hc_norm.weight": gated_read.norm_weight.flatten() - 1,  # it multiplies by 1 + weight
        "input_mix_weight_down.weight": gated_read.down.weight,
        "input_mix_weight_up.weight": gated_read.up.weight,
    }
    if with_inject:
        weights["block_inject_weight.weight"] = gated_read.inject.weight
    return lambda state: functional_call(public, weights, state, strict=True)


def run_qwen(model: GPT, x: torch.Tensor) -> torch.Tensor:
    """Run the residual stream as Qwen4ExpTextDecoderLayer and Qwen4ExpTextModel do."""
    positions = model.positions(torch.zeros(1, x.shape[1], dtype=torch.int64))
    state = x.repeat(1, 1, model.config.hc_streams)
    for site in model.sites:
        x_in, state, inject = public_gated_residual(site.read)(state)
        h = model.config.branch_mult * site.sublayer(x_in, positions)
        state = state + (h.unsqueeze(-2) * inject.unsqueeze(-1)).flatten(-2)
    return public_gated_residual(model.readout, with_inject=False)(state)


@pytest.mark.parametrize(
    "settings",
    [
        {"residual_branch_mult": 0.5},
        {"hc_streams": 2, "gated_residual_rank": 320, "gated_residual_eps": 0.1},
    ],
    ids=str,
)
def test_gated_residual_equals_that_of_qwen4_exp(settings, in_float64):
    check_model(build_random("GatedResidual-gpt-mha-rope", **settings), run_qwen)


# ---- Muse Spark, ZAYA, Dory and Beam: one state of width d ----


def run_muse_spark(model: GPT, x: torch.Tensor) -> torch.Tensor:
    """Run the normalized embedding and the decoder layers of Muse Spark with our sublayers."""

    def find(name: str) -> type:
        return find_class("muse_spark", f"MuseSpark{name}")

    d = SIZE["hidden_size"]
    config = find("TextConfig")(hidden_size=d, num_attention_heads=2)
    # its weighted norms multiply by 1 + weight
    input_norm = find("TextCenteredRMSNorm")(d, eps=config.rms_norm_eps)
    mlp_output_norm = find("TextInputScaledRMSNorm")(d, eps=config.post_norm_eps)
    gate = find("ResidualGate")(config)
    state = find("RMSNorm")(eps=config.rms_norm_eps, with_scale=False)(x)
    for block, attend, run_mlp in blocks_with_sublayers(model, x.shape[1]):
        layer = empty_module(
            find("TextDecoderLayer"),
            input_layernorm=with_weights(input_norm, weight=block.ln_1.weight - 1),
            self_attn=attend,
            post_attention_layernorm=find("RMSNorm")(eps=config.post_norm_eps, with_scale=False),
            post_attention_residual_gate=with_weights(gate, gate=block.write_attn.gate),
            pre_feedforward_layernorm=with_weights(input_norm, weight=block.ln_2.weight - 1),
            mlp=run_mlp,
            post_feedforward_layernorm=with_weights(
                mlp_output_norm, weight=block.write_mlp.output_scale - 1
            ),
            post_feedforward_residual_gate=with_weights(gate, gate=block.write_mlp.gate),
        )
        state = layer(state)
    return state


@pytest.mark.parametrize("largest_gate", [1, 4])
def test_muse_sparks_gate_equals_that_of_transformers(largest_gate, in_float64):
    """From a gate of 2.3 on, 1 - b^2 is clamped, and a has no gradient."""
    model = build_random("MuseSpark-gpt-mha-rope")
    for site in model.sites:
        site.write.gate.data = torch.linspace(-1, largest_gate, SIZE["hidden_size"]).double()
    check_model(model, run_muse_spark)


def run_zaya(model: GPT, x: torch.Tensor) -> torch.Tensor:
    """Run the decoder layers of ZAYA with our sublayers; `ZayaModel` scales the embedding itself."""

    def scaling(write: nn.Module) -> Callable:
        return with_weights(
            find_class("zaya", "ZayaResidualScaling")(SIZE["hidden_size"]),
            hidden_states_bias=write.affine_output.bias,
            hidden_states_scale=write.affine_output.scale,
            residual_bias=write.affine_state.bias,
            residual_scale=write.affine_state.scale,
        )

    state = (x + model.input_embed.bias) * model.input_embed.scale
    for block, attend, run_mlp in blocks_with_sublayers(model, x.shape[1]):
        layer = empty_module(
            find_class("zaya", "ZayaDecoderLayer"),
            input_layernorm=block.ln_1,
            self_attn=attend,
            post_attention_residual_scale=scaling(block.write_attn),
            post_attention_layernorm=block.ln_2,
            mlp=lambda c, router, run_mlp=run_mlp: (run_mlp(c), router),
            post_mlp_residual_scale=scaling(block.write_mlp),
        )
        state, _ = layer(state)
    return state


def test_zayas_scaling_equals_that_of_transformers(in_float64):
    check_model(build_random("LAuReL-gpt-mha-rope", laurel_form="zaya"), run_zaya)


def run_dory(model: GPT, x: torch.Tensor) -> torch.Tensor:
    """Run the decoder layers of Dory with our norms and sublayers; its states have the length 1."""
    l2_norm = find_class("dory", "DoryL2Norm")
    d = SIZE["hidden_size"]
    # a layer normalizes its input, where ours normalizes what it writes, which is sqrt(d) longer
    state_norm = l2_norm(eps=1e-6 / d)
    state = x
    for block, attend, run_mlp in blocks_with_sublayers(model, x.shape[1]):
        layer = empty_module(
            find_class("dory", "DoryDecoderLayer"),
            input_layernorm=l2_norm() if block.layer == 0 else state_norm,
            self_attn=lambda c, block=block, attend=attend, **_: attend(block.ln_1(d**0.5 * c)),
            post_attention_layernorm=l2_norm(),
            lambda_1=block.write_attn.alpha,
            pre_feedforward_layernorm=state_norm,
            mlp=lambda c, block=block, run_mlp=run_mlp: run_mlp(block.ln_2(d**0.5 * c)),
            post_feedforward_layernorm=l2_norm(),
            lambda_2=block.write_mlp.alpha,
            lambda_scale=1.0,
        )
        state = layer(state)
    return d**0.5 * state_norm(state)


def test_the_residual_connection_of_ngpt_equals_dorys(in_float64):
    check_model(build_random("nGPT-gpt-mha-rope"), run_dory)


def test_the_rate_of_ngpt_starts_and_learns_as_dorys():
    """A step of AdamW on Dory's lambda moves its rate by the factor lambda_scale."""
    config = find_class("dory", "DoryConfig")()
    model = build("nGPT-gpt-mha-rope", **SIZE)
    name = "transformer.h.0.write_mlp.alpha"
    assert model.get_parameter(name).tolist() == pytest.approx([config.ngpt_alpha_init] * 16)
    lambda_scale = config.ngpt_alpha_init / config.initializer_range
    assert collect_rules(model)[name].lr_scale == pytest.approx(lambda_scale)


def run_beam(model: GPT, x: torch.Tensor) -> torch.Tensor:
    """Run the decoder layers of Beam with our norms and sublayers."""
    for block, attend, run_mlp in blocks_with_sublayers(model, x.shape[1]):
        layer = empty_module(
            find_class("beam", "BeamDecoderLayer"),
            attn_residual_add_idx=2 * block.layer + 2,
            mlp_residual_add_idx=2 * block.layer + 3,
            input_layernorm=block.ln_1,
            self_attn=attend,
            post_attention_layernorm=block.write_attn.norm,
            pre_feedforward_layernorm=block.ln_2,
            mlp=run_mlp,
            post_feedforward_layernorm=block.write_mlp.norm,
        )
        x = layer(x, position_embeddings=None)
    return x


def test_beams_stream_is_that_of_sandwich_norms(in_float64):
    """Beam's state is that of sandwich norms over a root, which an epsilon alone would notice."""
    model = build_random("NormPlacement-gpt-mha-rope", norm_placement="sandwich")
    for norm in (model.ln_f, *(site.norm for site in model.sites)):
        norm.eps = 1e-30
    check_model(model, run_beam)
