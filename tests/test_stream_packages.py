"""HC, mHC, Attention Residuals and Gated Residual against public packages that hold them: a whole
model's loss and every gradient.

The packages compute the residual stream, with our parameters in place of theirs; sublayers and
norms are the model's. mHC is held to transformers' DeepSeek-V4 and, with mhc_rows_last=False, to
liger-kernel. Not compared is mHC of hyper-connections 0.4.11: it maps every stream by itself, where
the paper maps all n d features of a token together, and it mixes by the transpose of what it makes
doubly stochastic.
"""

import naive_streams
import pytest
import torch
import torch.nn.functional as F
from attn_res import AttnResOperator
from contract import TINY, tokens
from hyper_connections import HyperConnections
from liger_kernel.transformers import functional as liger
from torch.func import functional_call
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4HyperConnection,
    DeepseekV4HyperHead,
)
from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextGatedResidual

from model import build
from model.causality import move_parameters
from model.kernels.sinkhorn import fused_sinkhorn_knopp

# conftest.py turns the interpreter on where there is no GPU; on one, kernels may round what they
# multiply to 10 bits.
interpreted = pytest.mark.skipif(
    torch.cuda.is_available(), reason="liger's kernels run under Triton's interpreter"
)
SIZE = {**TINY, "hidden_size": 16}


def moved(stem, dtype=torch.float32, **keys):
    return move_parameters(build(stem, **{**SIZE, **keys})).to(dtype)


def sites(model, length):
    """Every site's number, its own read, and F(norm(x_in))."""
    positions = model.positions(torch.zeros(1, length, dtype=torch.int64))
    parts = [site for block in model.transformer.h for site in block.sites]
    for m, site in enumerate(parts):
        yield m, site.read, lambda x_in, site=site: site.sublayer(site.norm(x_in), positions)


def check(model, readout, tolerance=1e-5):
    """readout(model, x): what the package makes of the embeddings x (B, T, d), before ln_f."""
    ids = tokens(2, 3)
    found = model(ids, ids.roll(-1, 1))[1]
    logits = model.logits(model.ln_f(readout(model, model.transformer.wte(ids))))
    wanted = F.cross_entropy(logits.flatten(0, 1), ids.roll(-1, 1).flatten())
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
    names, parameters = zip(*model.named_parameters())
    gradients = [torch.autograd.grad(loss, parameters) for loss in (found, wanted)]
    for name, got, want in zip(names, *gradients):
        torch.testing.assert_close(
            got, want, rtol=tolerance, atol=tolerance, msg=lambda text, n=name: f"{n}: {text}"
        )


def by_liger(model, x):
    """Liger-Kernel 0.8.5: coefficients, read, and write are a kernel each, forward and backward."""
    n = model.config.hc_streams
    state, options = (
        x.unsqueeze(2).repeat(1, 1, n, 1),
        {"rms_eps": 1e-6, "pre_eps": 0.0, "sinkhorn_eps": 1e-6},
    )
    for _, own, process in sites(model, x.shape[1]):
        weights = own.maps.weight.T, own.bias, *own.scales
        options |= {"allow_fp32": True, "tmax": model.config.mhc_iterations, "post_mult": 2.0}
        pre, post, res = liger.liger_mhc_coeffs(state, *weights, **options)
        state = liger.liger_mhc_post_res(state, process(liger.liger_mhc_pre(state, pre)), post, res)
    return state.sum(2)


@interpreted
# 0 / 0 where liger masks a block's tail
@pytest.mark.filterwarnings("ignore:invalid value encountered in divide")
@pytest.mark.parametrize(("n", "iterations"), [(2, 20), (4, 20), (4, 1)])
def test_manifold_connections_equal_those_of_liger_kernel(n, iterations):
    """Which normalise what goes out of a stream last."""
    check(mixing(n, iterations, mhc_rows_last=False), by_liger)


def mixing(n, iterations, **keys):
    """mHC whose biases are somewhere else: where they start nothing is mixed."""
    model = moved(
        "mHC-gpt-mha-rope",
        hc_streams=n,
        mhc_iterations=iterations,
        num_hidden_layers=1,
        init_order="sequential",
        **keys,
    )
    with torch.no_grad():
        for own in (model.transformer.h[0].hc_attn, model.transformer.h[0].hc_mlp):
            own.bias.normal_()
    return model


def public_manifold(own, n: int, iterations: int):
    """The site's connection in transformers' DeepSeek-V4, and our parameters under its names."""
    options = {"hc_mult": n, "hc_sinkhorn_iters": iterations, "hc_eps": 1e-6, "rms_norm_eps": 1e-6}
    public = DeepseekV4HyperConnection(DeepseekV4Config(hidden_size=SIZE["hidden_size"], **options))
    return public, {"fn": own.maps.weight, "base": own.bias, "scale": own.scales}


def by_deepseek(model, x):
    """transformers 5: comb^T H + post h. Its reads have another 1e-6."""
    n = model.config.hc_streams
    state = x.unsqueeze(2).repeat(1, 1, n, 1)
    for _, own, process in sites(model, x.shape[1]):
        public, weights = public_manifold(own, n, model.config.mhc_iterations)
        post, comb, x_in = functional_call(public, weights, state)
        state = comb.mT @ state + post.unsqueeze(-1) * process(x_in).unsqueeze(2)
    return state.sum(2)


def test_the_readout_of_deepseek_v4():
    """Its weights have 1e-6 more."""
    model = moved("mHC-gpt-mha-rope", hc_streams=3, mhc_readout="sigmoid")
    own, options = model.readout, {"hc_mult": 3, "hc_eps": 1e-6, "rms_norm_eps": 1e-6}
    public = DeepseekV4HyperHead(DeepseekV4Config(hidden_size=SIZE["hidden_size"], **options))
    names = {"hc_fn": own.maps.weight, "hc_base": own.bias, "hc_scale": own.scale}
    state = torch.randn(2, 5, 3, SIZE["hidden_size"])
    with torch.no_grad():
        expected = functional_call(public, names, state)
        torch.testing.assert_close(own(state), expected, rtol=1e-5, atol=1e-5)


SIZES = [(2, 20), (4, 20), (4, 1), (3, 2)]


@pytest.mark.parametrize(("n", "iterations"), SIZES)
def test_manifold_connections_equal_those_of_deepseek_v4(n, iterations):
    check(mixing(n, iterations), by_deepseek)


@pytest.mark.parametrize(("n", "iterations"), SIZES)
def test_the_weights_of_manifold_connections_are_those_of_deepseek_v4(n, iterations):
    """Read, write and mix by themselves, from logits far apart; with the other order the mix is
    another.
    """
    own = mixing(n, iterations).transformer.h[0].hc_attn
    torch.nn.init.normal_(own.bias, std=3)
    state = torch.randn(2, 5, n, SIZE["hidden_size"])
    public, weights = public_manifold(own, n, iterations)
    with torch.no_grad():
        read, write, mix = own.weights(state)
        post, comb, x_in = functional_call(public, weights, state)
    close = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(mix, comb, **close)
    torch.testing.assert_close(write, post, **close)
    torch.testing.assert_close((read.unsqueeze(-1) * state).sum(2), x_in, **close)
    own.rows_last = False
    with torch.no_grad():
        assert (own.weights(state)[2] - comb).abs().max() > 1e-3


@interpreted
@pytest.mark.parametrize(("n", "iterations"), [(2, 5), (4, 1), (4, 3), (8, 2)])
def test_sinkhorn_knopp_by_ligers_kernels_equals_the_naive_loops(n, iterations):
    """Theirs alone, as kernels=on has them: value and gradient, from logits far apart."""
    logits = (3 * torch.randn(2, 2, n, n)).requires_grad_()
    exact = logits.detach().double().requires_grad_()
    wanted = torch.stack(
        [naive_streams.sinkhorn_knopp(each, iterations) for each in exact.flatten(0, 1)]
    )
    found = fused_sinkhorn_knopp(logits, iterations, 1e-6)
    torch.testing.assert_close(found.double(), wanted.view_as(exact), rtol=1e-5, atol=1e-6)
    weights = torch.randn(2, 2, n, n)
    (found * weights).sum().backward()
    (wanted.view_as(exact) * weights).sum().backward()
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=1e-5, atol=1e-5)


def public_connection(own, m: int, n: int):
    """The site's connection in hyper-connections 0.4.11, with the paper's LayerNorm: it has an
    RMSNorm there.
    """
    public = HyperConnections(n, dim=SIZE["hidden_size"], layer_index=m)
    public.norm = torch.nn.LayerNorm(SIZE["hidden_size"])
    weights = {
        "static_alpha": torch.cat((own.read[:, None], own.mix), dim=1),
        "static_beta": own.write,
    }
    if own.dynamic:
        weights |= {"norm.weight": own.norm.weight, "norm.bias": own.norm.bias}
        weights |= {
            "dynamic_alpha_fn": own.maps.weight[1:].T,
            "dynamic_beta_fn": own.maps.weight[0],
        }
        weights |= {"dynamic_alpha_scale": own.scale[0], "dynamic_beta_scale": own.write_scale[0]}
    return public.to(own.read), weights


def by_hyper_connections(model, x):
    n = model.config.hc_streams
    expand, reduce = HyperConnections.get_expand_reduce_stream_functions(n)
    state = expand(x)
    for m, own, process in sites(model, x.shape[1]):
        x_in, add = functional_call(*public_connection(own, m, n), state)
        state = add(process(x_in))
    return reduce(state)


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("dynamic", [False, True])
def test_hyper_connections_equal_those_of_their_package(n, dynamic):
    check(
        moved("HC-gpt-mha-rope", torch.float64, hc_streams=n, hc_dynamic=dynamic),
        by_hyper_connections,
        1e-9,
    )


@pytest.mark.parametrize("n", [2, 4])
def test_hyper_connections_start_as_those_of_their_package(n):
    model = build("HC-gpt-mha-rope", hc_streams=n, **SIZE)
    for m, own, _ in sites(model, 1):
        public, weights = public_connection(own, m, n)
        for name, parameter in public.named_parameters():
            assert torch.equal(weights[name].detach(), parameter), name


def by_attn_res(query, sources):
    return functional_call(AttnResOperator(len(query), eps=1e-5), {"pseudo_query": query}, sources)


def by_liger_attn_res(query, sources):
    return liger.liger_attn_res(sources, query, torch.ones_like(query), eps=1e-5)


OPERATORS = [
    (by_attn_res, None),
    (by_attn_res, 2),
    pytest.param(by_liger_attn_res, 2, marks=interpreted),
]


@pytest.mark.parametrize(("operator", "blocks"), OPERATORS)
def test_attention_residuals_equal_those_of_packages(operator, blocks):
    """attn_res 0.1.0 and Liger-Kernel 0.8.5.

    The readout attends as well; attn_res's own models sum there.
    """

    def readout(model, x):
        blocks, partial = [x], []
        for m, own, process in sites(model, x.shape[1]):
            h = process(operator(own.query, torch.stack([*blocks, *partial])))
            partial = [partial[0] + h if partial else h]
            if (m + 1) % model.config.run_length == 0:
                blocks, partial = blocks + partial, []
        return operator(model.readout.query, torch.stack([*blocks, *partial]))

    check(moved("AttnRes-gpt-mha-rope", attn_res_blocks=blocks, num_hidden_layers=2), readout)


# ---- Gated Residual: the layer of transformers' Qwen4-exp ----


@pytest.fixture
def norms_in_float64(monkeypatch):
    """Let the RMSNorm of Qwen4-exp, which casts its input by `.float()`, compute in float64."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


def public_gated_residual(own, with_inject: bool = True):
    """Return the layer of transformers for a read or readout, and our parameters by its names."""
    config = Qwen4ExpTextConfig(
        hidden_size=own.hidden_size,
        hc_count=own.num_streams,
        hc_lowrank=own.down.out_features,
        rms_norm_eps=own.eps,
    )
    public = Qwen4ExpTextGatedResidual(config, use_combine=with_inject).double()
    weights = {
        "hc_norm.weight": own.norm_weight.flatten() - 1,  # it multiplies by 1 + weight
        "input_mix_weight_down.weight": own.down.weight,
        "input_mix_weight_up.weight": own.up.weight,
    }
    if with_inject:
        weights["block_inject_weight.weight"] = own.inject.weight
    assert weights.keys() == dict(public.named_parameters()).keys()
    return public, weights


def by_qwen(model, x):
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
    check(moved("GatedResidual-gpt-mha-rope", torch.float64, **settings), by_qwen, 1e-12)


@pytest.mark.usefixtures("norms_in_float64")
@pytest.mark.parametrize("settings", GATED_SETTINGS, ids=str)
def test_a_gated_read_equals_that_of_qwen4_exp(settings):
    """Compare x_in, g, and the gradients of the state and of every weight, one layer by itself."""
    own = moved("GatedResidual-gpt-mha-rope", torch.float64, **settings).transformer.h[0].gated_mlp
    public, weights = public_gated_residual(own)
    state = torch.randn(2, 5, own.num_streams, own.hidden_size).double().requires_grad_()
    output = own(state)
    x_in, _, inject = functional_call(public, weights, state.flatten(2))
    torch.testing.assert_close(output.x_in, x_in, rtol=0, atol=1e-13)
    torch.testing.assert_close(output.inject, inject, rtol=0, atol=1e-13)
    parameters = [state, *own.parameters()]
    factors = torch.randn_like(x_in), torch.randn_like(inject)
    gradients = [
        torch.autograd.grad((a * factors[0]).sum() + (b * factors[1]).sum(), parameters)
        for a, b in ((output.x_in, output.inject), (x_in, inject))
    ]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-13)


def test_gated_residual_starts_as_in_qwen4_exp():
    """Its matrices have the standard deviation that Qwen's config gives all of them; norms are 1."""
    model = build("GatedResidual-gpt-mha-rope", hidden_size=128, num_hidden_layers=1)
    own = model.transformer.h[0].gated_attn
    expected = Qwen4ExpTextConfig().initializer_range
    for matrix in (own.down, own.up, own.inject):
        assert matrix.weight.std().item() == pytest.approx(expected, rel=0.05)
    assert torch.equal(own.norm_weight, torch.ones(4, 128))
