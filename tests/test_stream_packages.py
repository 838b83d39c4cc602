"""Test HC, mHC, Single-Pass mHC, Attention Residuals and Gated Residual against public packages.

Compare the loss and every gradient of a whole model. The packages compute the residual stream, with
our parameters in place of theirs; sublayers and norms are the model's. mHC is compared with
transformers' DeepSeek-V4 and, with mhc_rows_last=False, with liger-kernel. It is not compared with
mHC of hyper-connections 0.4.11, which maps every stream by itself, where the paper maps all n d
features of a token together, and which mixes by the transpose of what it makes doubly stochastic.
"""

import naive_streams
import pytest
import torch
import torch.nn.functional as F
from attn_res import AttnResOperator
from contract import TINY, tokens
from hyper_connections import HyperConnections
from liger_kernel.transformers import functional as liger
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
from model.kernels.sinkhorn import fused_sinkhorn_knopp

# helpers.py turns the interpreter on where there is no GPU; on one, kernels may round the factors of
# a product to 10 bits
interpreted = pytest.mark.skipif(
    torch.cuda.is_available(), reason="liger's kernels run under Triton's interpreter"
)
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


def run_liger(model: GPT, x: torch.Tensor) -> torch.Tensor:
    """Run Liger-Kernel 0.8.5: one kernel each for coefficients, read and write."""
    n = model.config.hc_streams
    state = x.unsqueeze(2).repeat(1, 1, n, 1)
    for _, read, process in list_sites(model, x.shape[1]):
        pre, post, res = liger.liger_mhc_coeffs(
            state,
            read.maps.weight.T,
            read.bias,
            *read.scales,
            rms_eps=1e-6,
            pre_eps=0.0,
            sinkhorn_eps=1e-6,
            allow_fp32=True,
            tmax=model.config.mhc_iterations,
            post_mult=2.0,
        )
        h = process(liger.liger_mhc_pre(state, pre))
        state = liger.liger_mhc_post_res(state, h, post, res)
    return state.sum(2)


@interpreted
# 0 / 0 where liger masks a block's tail
@pytest.mark.filterwarnings("ignore:invalid value encountered in divide")
@pytest.mark.parametrize(("n", "iterations"), [(2, 20), (4, 20), (4, 1)])
def test_manifold_connections_equal_those_of_liger_kernel(n, iterations):
    """Liger-Kernel normalizes the weights out of a stream last, as mhc_rows_last=False does."""
    check_model(build_mhc(n, iterations, mhc_rows_last=False), run_liger)


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


@interpreted
@pytest.mark.parametrize(
    ("n", "iterations", "num_tokens"),
    [(2, 5, 2), (4, 1, 2), (4, 3, 2), (8, 2, 2), (4, 2, 9)],  # 18 rows are padded to 20
)
def test_sinkhorn_knopp_by_ligers_kernels_equals_the_naive_loops(n, iterations, num_tokens):
    """Compare value and gradient, from logits far apart, of the kernels that kernels=on uses."""
    logits = (3 * torch.randn(2, num_tokens, n, n)).requires_grad_()
    float64_logits = logits.detach().double().requires_grad_()
    expected = torch.stack(
        [
            naive_streams.sinkhorn_knopp(matrix, iterations)
            for matrix in float64_logits.flatten(0, 1)
        ]
    ).view_as(float64_logits)
    mix = fused_sinkhorn_knopp(logits, iterations, 1e-6)
    torch.testing.assert_close(mix.double(), expected, rtol=1e-5, atol=1e-6)
    weights = torch.randn(2, num_tokens, n, n)
    (mix * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(logits.grad.double(), float64_logits.grad, rtol=1e-5, atol=1e-5)


def public_connection(connection: nn.Module, site_number: int, n: int):
    """Return the connection of hyper-connections 0.4.11, and our parameters by its names.

    Give it the paper's LayerNorm in place of its RMSNorm.
    """
    public = HyperConnections(n, dim=SIZE["hidden_size"], layer_index=site_number)
    public.norm = torch.nn.LayerNorm(SIZE["hidden_size"])
    weights = {
        "static_alpha": torch.cat((connection.read[:, None], connection.mix), dim=1),
        "static_beta": connection.write,
    }
    if connection.dynamic:
        weights.update(
            {
                "norm.weight": connection.norm.weight,
                "norm.bias": connection.norm.bias,
                "dynamic_alpha_fn": connection.maps.weight[1:].T,
                "dynamic_beta_fn": connection.maps.weight[0],
                "dynamic_alpha_scale": connection.scale[0],
                "dynamic_beta_scale": connection.write_scale[0],
            }
        )
    return public.to(connection.read), weights


def run_hyper_connections(model, x):
    n = model.config.hc_streams
    expand, reduce = HyperConnections.get_expand_reduce_stream_functions(n)
    state = expand(x)
    for number, connection, process in list_sites(model, x.shape[1]):
        public, weights = public_connection(connection, number, n)
        x_in, add = functional_call(public, weights, state)
        state = add(process(x_in))
    return reduce(state)


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("dynamic", [False, True])
def test_hyper_connections_equal_those_of_their_package(n, dynamic):
    check_model(
        build_random("HC-gpt-mha-rope", torch.float64, hc_streams=n, hc_dynamic=dynamic),
        run_hyper_connections,
        1e-9,
    )


@pytest.mark.parametrize("n", [2, 4])
def test_hyper_connections_start_as_those_of_their_package(n):
    model = build("HC-gpt-mha-rope", hc_streams=n, **SIZE)
    for number, connection, _ in list_sites(model, 1):
        public, weights = public_connection(connection, number, n)
        for name, parameter in public.named_parameters():
            assert torch.equal(weights[name].detach(), parameter), name


def attend_by_attn_res(query, sources):
    return functional_call(AttnResOperator(len(query), eps=1e-5), {"pseudo_query": query}, sources)


def attend_by_liger(query, sources):
    return liger.liger_attn_res(sources, query, torch.ones_like(query), eps=1e-5)


OPERATORS = [
    (attend_by_attn_res, None),
    (attend_by_attn_res, 2),
    pytest.param(attend_by_liger, 2, marks=interpreted),
]


@pytest.mark.parametrize(("operator", "blocks"), OPERATORS)
def test_attention_residuals_equal_those_of_packages(operator, blocks):
    """Compare with attn_res 0.1.0 and Liger-Kernel 0.8.5.

    Let the readout attend as well, where attn_res's gated_read models sum.
    """

    def run_operator(model, x):
        complete_blocks = [x]
        partial_block = []  # empty, or the sum of the outputs of the current block
        for number, read, process in list_sites(model, x.shape[1]):
            h = process(operator(read.query, torch.stack([*complete_blocks, *partial_block])))
            partial_block = [partial_block[0] + h if partial_block else h]
            if (number + 1) % model.config.run_length == 0:
                complete_blocks.extend(partial_block)
                partial_block = []
        return operator(model.readout.query, torch.stack([*complete_blocks, *partial_block]))

    model = build_random("AttnRes-gpt-mha-rope", attn_res_blocks=blocks, num_hidden_layers=2)
    check_model(model, run_operator)


# ---- Gated Residual: the layer of transformers' Qwen4-exp ----


@pytest.fixture
def norms_in_float64(monkeypatch):
    """Let the RMSNorm of Qwen4-exp, which casts its input by `.float()`, compute in float64."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


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


def test_gated_residual_starts_as_in_qwen4_exp():
    """All matrices have the standard deviation of Qwen's config, and the weights of norms are 1."""
    model = build("GatedResidual-gpt-mha-rope", hidden_size=128, num_hidden_layers=1)
    gated_read = model.transformer.h[0].gated_attn
    expected = Qwen4ExpTextConfig().initializer_range
    for matrix in (gated_read.down, gated_read.up, gated_read.inject):
        assert matrix.weight.std().item() == pytest.approx(expected, rel=0.05)
    assert torch.equal(gated_read.norm_weight, torch.ones(4, 128))
