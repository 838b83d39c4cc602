"""Test streams against transformers' layers of DeepSeek-V4, Inkling 2 and Qwen4-exp.

Compare the loss and every gradient of a whole model. transformers computes the residual stream, with
our parameters in place of its own; sublayers and norms are the model's.
"""

import importlib

import pytest
import torch
import torch.nn.functional as F
from contract import TINY, tokens
from torch import nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4HyperConnection,
    DeepseekV4HyperHead,
)
from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextGatedResidual

from model import build
from model.causality import move_parameters
from model.gpt import GPT
from model.layers import AttentionInputs

SIZE = {**TINY, "hidden_size": 16}


def build_random(model_name: str, dtype: torch.dtype = torch.float32, **settings) -> GPT:
    return move_parameters(build(model_name, **{**SIZE, **settings})).to(dtype)


def list_sites(model: GPT, num_positions: int):
    """Yield the number of every site, its read, and the function F(norm(x_in))."""
    positions = model.positions(torch.zeros(1, num_positions, dtype=torch.int64))
    sites = [site for block in model.transformer.h for site in block.sites]
    for number, site in enumerate(sites):
        yield number, site.read, lambda x_in, site=site: site.sublayer(site.norm(x_in), positions)


def check_model(model: GPT, run_public, tolerance: float = 1e-5) -> None:
    """Compare the loss and every gradient of a model with those of a public package.

    Args:
        run_public: returns for the model and the embeddings x (B, T, d) the input of ln_f
    """
    ids = tokens(2, 3)
    targets = ids.roll(-1, 1)
    loss = model(ids, targets)[1]
    logits = model.logits(model.ln_f(run_public(model, model.transformer.wte(ids))))
    public_loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(loss, public_loss, rtol=tolerance, atol=tolerance)
    names, parameters = zip(*model.named_parameters())
    gradients = torch.autograd.grad(loss, parameters)
    public_gradients = torch.autograd.grad(public_loss, parameters)
    for name, gradient, public_gradient in zip(names, gradients, public_gradients):
        torch.testing.assert_close(
            gradient,
            public_gradient,
            rtol=tolerance,
            atol=tolerance,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def build_mhc(n: int, iterations: int, **settings) -> GPT:
    """Build an mHC model with random biases: with the initial ones nothing is mixed."""
    model = build_random(
        "mHC-gpt-mha-rope",
        hc_streams=n,
        mhc_iterations=iterations,
        num_hidden_layers=1,
        init_order="sequential",
        **settings,
    )
    with torch.no_grad():
        for connection in (model.transformer.h[0].hc_attn, model.transformer.h[0].hc_mlp):
            connection.bias.normal_()
    return model


def public_manifold(connection: nn.Module, n: int, iterations: int, norm_eps: float = 1e-6):
    """Return the connection of transformers' DeepSeek-V4, and our parameters by its names."""
    config = DeepseekV4Config(
        hidden_size=SIZE["hidden_size"],
        hc_mult=n,
        hc_sinkhorn_iters=iterations,
        hc_eps=1e-6,
        rms_norm_eps=norm_eps,
    )
    weights = {
        "fn": connection.maps.weight,
        "base": connection.bias,
        "scale": connection.scales,
    }
    return DeepseekV4HyperConnection(config), weights


def run_deepseek(model: GPT, x: torch.Tensor) -> torch.Tensor:
    """Run comb^T H + post h as transformers 5 does, whose reads have 1e-6 more."""
    n = model.config.hc_streams
    state = x.unsqueeze(2).repeat(1, 1, n, 1)
    for _, connection, process in list_sites(model, x.shape[1]):
        public, weights = public_manifold(connection, n, model.config.mhc_iterations)
        post, comb, x_in = functional_call(public, weights, state)
        state = comb.mT @ state + post.unsqueeze(-1) * process(x_in).unsqueeze(2)
    return state.sum(2)


def test_the_readout_equals_that_of_deepseek_v4():
    """The tolerance allows for the weights of DeepSeek-V4, which are larger by 1e-6."""
    model = build_random("mHC-gpt-mha-rope", hc_streams=3, mhc_readout="sigmoid")
    config = DeepseekV4Config(
        hidden_size=SIZE["hidden_size"], hc_mult=3, hc_eps=1e-6, rms_norm_eps=1e-6
    )
    public = DeepseekV4HyperHead(config)
    readout = model.readout
    weights = {
        "hc_fn": readout.maps.weight,
        "hc_base": readout.bias,
        "hc_scale": readout.scale,
    }
    state = torch.randn(2, 5, 3, SIZE["hidden_size"])
    with torch.no_grad():
        expected = functional_call(public, weights, state)
        torch.testing.assert_close(readout(state), expected, rtol=1e-5, atol=1e-5)


class SigmoidRecorder(TorchFunctionMode):
    """Record what torch.sigmoid returns."""

    def __init__(self):
        super().__init__()
        self.outputs: list[torch.Tensor] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        if func is torch.sigmoid:
            self.outputs.append(output)
        return output


def run_single_pass(model: GPT, x: torch.Tensor) -> torch.Tensor:
    """Shift the reads of transformers' DeepSeek-V4 by a site; the first reads stream 0."""
    config = model.config
    n = config.hc_streams
    state = x.unsqueeze(2).repeat(1, 1, n, 1)
    pre = torch.eye(n, dtype=x.dtype)[0].expand(*x.shape[:2], n)
    for _, connection, process in list_sites(model, x.shape[1]):
        public, weights = public_manifold(connection, n, config.mhc_iterations, config.mhc_norm_eps)
        # it uses its read weights without returning them: pre is its first sigmoid plus hc_eps
        with SigmoidRecorder() as recorder:
            post, comb, _ = functional_call(public, weights, state)
        h = process((pre.unsqueeze(-1) * state).sum(2))
        state = comb.mT @ state + post.unsqueeze(-1) * h.unsqueeze(2)
        pre = recorder.outputs[0] + public.hc_eps
    return (pre.unsqueeze(-1) * state).sum(2)


@pytest.mark.parametrize("n", [2, 4])
def test_single_pass_mhc_equals_deepseek_v4_with_shifted_reads(n, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "float", lambda tensor: tensor)  # let it compute in float64
    model = build_random(
        "SinglePassMHC-gpt-mha-rope",
        torch.float64,
        hc_streams=n,
        mhc_read_eps=1e-6,
        mhc_norm_eps=1e-20,
    )
    with torch.no_grad():
        for block in model.transformer.h:
            block.hc_attn.bias.normal_()
            block.hc_mlp.bias.normal_()
    check_model(model, run_single_pass, 1e-12)


SIZES = [(2, 20), (4, 20), (4, 1), (3, 2)]


@pytest.mark.parametrize(("n", "iterations"), SIZES)
def test_manifold_connections_equal_those_of_deepseek_v4(n, iterations):
    check_model(build_mhc(n, iterations), run_deepseek)


@pytest.mark.parametrize(("n", "iterations"), SIZES)
def test_the_weights_of_manifold_connections_are_those_of_deepseek_v4(n, iterations):
    """Compare read, write and mix of logits far apart."""
    connection = build_mhc(n, iterations).transformer.h[0].hc_attn
    torch.nn.init.normal_(connection.bias, std=3)
    state = torch.randn(2, 5, n, SIZE["hidden_size"])
    public, weights = public_manifold(connection, n, iterations)
    with torch.no_grad():
        read, write, mix = connection.weights(state)
        post, comb, x_in = functional_call(public, weights, state)
    torch.testing.assert_close(mix, comb, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(write, post, rtol=1e-5, atol=1e-5)
    read_state = (read.unsqueeze(-1) * state).sum(2)
    torch.testing.assert_close(read_state, x_in, rtol=1e-5, atol=1e-5)

    # the order of the normalizations matters
    connection.rows_last = False
    with torch.no_grad():
        assert (connection.weights(state).mix - comb).abs().max() > 1e-3


@pytest.fixture
def norms_in_float64(monkeypatch):
    """Let layers of transformers, which cast their input by `.float()`, compute in float64."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


# ---- Attention Residuals of Inkling 2: its decoder layers ----


INKLING_2 = "transformers.models.inkling2.modeling_inkling2"


def public_depth_attention(read):
    """Return the attention over blocks of transformers' Inkling 2 with the queries of a read."""
    inkling2 = importlib.import_module(INKLING_2)
    config = inkling2.Inkling2TextConfig(hidden_size=SIZE["hidden_size"])
    config._attn_implementation = "sdpa"
    num_routes = len(read.query) if read.query.ndim == 2 else 1
    public = inkling2.Inkling2BlockAttentionResidual(config, num_routes)
    return lambda *states: functional_call(public, {"query": read.query}, states)


def run_inkling2(model, x):
    """Run the decoder layers of Inkling 2 with our sublayers, as its Inkling2TextModel does."""
    positions = model.positions(torch.zeros(1, x.shape[1], dtype=torch.int64))
    has_routes = model.config.attn_res_routes == "q_k_v"
    name = "Inkling2FullDecoderLayer" if has_routes else "Inkling2SlidingDecoderLayer"
    layer_class = getattr(importlib.import_module(INKLING_2), name)
    # its first attention has no query; that of ours has a gradient of 0
    state = x + 0 * model.transformer.h[0].depth_attn.query.sum()
    block_states = x.unsqueeze(2)[:, :, :0]
    for layer, block in enumerate(model.transformer.h):

        def attend(hidden_states, block=block, **inputs):
            k = inputs.get("key_hidden_states", hidden_states)
            v = inputs.get("value_hidden_states", hidden_states)
            return block.attn(AttentionInputs(hidden_states, k, v), positions), None

        public_layer = object.__new__(layer_class)
        nn.Module.__init__(public_layer)
        vars(public_layer).update(
            is_block_boundary=2 * layer % model.config.run_length == 0,
            attention_input=public_depth_attention(block.depth_attn) if layer > 0 else None,
            mlp_input=public_depth_attention(block.depth_mlp),
            self_attn=attend,
            mlp=lambda c, mlp=block.mlp: mlp(c, positions),
            input_layernorm=block.ln_1,
            q_input_layernorm=block.ln_1,
            k_input_layernorm=getattr(block, "ln_k", None),
            v_input_layernorm=getattr(block, "ln_v", None),
            post_attention_layernorm=block.ln_2,
            # ours has no convolutions over tokens
            post_attention_convolution=lambda h, **_: h,
            post_mlp_convolution=lambda h, **_: h,
        )
        new_state = public_layer(state, block_states)
        if public_layer.is_block_boundary:
            block_states = torch.cat([block_states, state.unsqueeze(-2)], dim=-2)
        state = new_state
    return public_depth_attention(model.readout)(block_states, state)[0]


@pytest.mark.usefixtures("norms_in_float64")
@pytest.mark.parametrize("routes", ["1", "q_k_v"])
def test_attention_residuals_equal_those_of_inkling_2(routes):
    pytest.importorskip(INKLING_2, reason="this transformers has no Inkling 2")
    model = build_random(
        "AttnRes-gpt-mha-rope",
        torch.float64,
        num_hidden_layers=4,
        attn_res_blocks=2,
        attn_res_routes=routes,
        attn_res_values="normed",
        attn_res_scale=SIZE["hidden_size"] ** -0.5,
        attn_res_norm_eps=1e-6,
    )
    check_model(model, run_inkling2, 1e-12)


# ---- Gated Residual: the layer of transformers' Qwen4-exp ----


def public_gated_residual(gated_read, with_inject: bool = True):
    """Return the layer of transformers for a read or readout, and our parameters by its names."""
    config = Qwen4ExpTextConfig(
        hidden_size=gated_read.hidden_size,
        hc_count=gated_read.num_streams,
        hc_lowrank=gated_read.down.out_features,
        rms_norm_eps=gated_read.eps,
    )
    public = Qwen4ExpTextGatedResidual(config, use_combine=with_inject).double()
    weights = {
        "hc_norm.weight": gated_read.norm_weight.flatten() - 1,  # it multiplies by 1 + weight
        "input_mix_weight_down.weight": gated_read.down.weight,
        "input_mix_weight_up.weight": gated_read.up.weight,
    }
    if with_inject:
        weights["block_inject_weight.weight"] = gated_read.inject.weight
    assert weights.keys() == dict(public.named_parameters()).keys()
    return public, weights


def run_qwen(model, x):
    """Run the residual stream as Qwen4ExpTextDecoderLayer and Qwen4ExpTextModel of transformers do."""
    positions = model.positions(torch.zeros(1, x.shape[1], dtype=torch.int64))
    state = x.repeat(1, 1, model.config.hc_streams)
    for site in model.sites:
        assert site.norm is None
        x_in, state, inject = functional_call(*public_gated_residual(site.read), state)
        h = site.sublayer(x_in, positions)
        state = state + (h.unsqueeze(-2) * inject.unsqueeze(-1)).flatten(-2)
    return functional_call(*public_gated_residual(model.readout, with_inject=False), state)


GATED_SETTINGS = [
    {},
    {"hc_streams": 2, "gated_residual_rank": 5},
    {"gated_residual_rank": 320, "gated_residual_eps": 0.1},
]


@pytest.mark.usefixtures("norms_in_float64")
@pytest.mark.parametrize("settings", GATED_SETTINGS, ids=str)
def test_gated_residual_equals_that_of_qwen4_exp(settings):
    check_model(
        build_random("GatedResidual-gpt-mha-rope", torch.float64, **settings), run_qwen, 1e-12
    )


@pytest.mark.usefixtures("norms_in_float64")
@pytest.mark.parametrize("settings", GATED_SETTINGS, ids=str)
def test_a_gated_read_equals_that_of_qwen4_exp(settings):
    """One layer has the same x_in and g, and the same gradients of the state and of every weight."""
    gated_read = (
        build_random("GatedResidual-gpt-mha-rope", torch.float64, **settings)
        .transformer.h[0]
        .gated_mlp
    )
    public, weights = public_gated_residual(gated_read)
    state = (
        torch.randn(2, 5, gated_read.num_streams, gated_read.hidden_size).double().requires_grad_()
    )
    output = gated_read(state)
    x_in, _, inject = functional_call(public, weights, state.flatten(2))
    torch.testing.assert_close(output.x_in, x_in, rtol=0, atol=1e-13)
    torch.testing.assert_close(output.inject, inject, rtol=0, atol=1e-13)
    parameters = [state, *gated_read.parameters()]
    factors = torch.randn_like(x_in), torch.randn_like(inject)
    gradients = [
        torch.autograd.grad((a * factors[0]).sum() + (b * factors[1]).sum(), parameters)
        for a, b in ((output.x_in, output.inject), (x_in, inject))
    ]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-13)
