"""Test the streams beside DDL's: against the loops of naive_streams.py, and their initial values."""

import copy
import math

import naive
import naive_streams
import pytest
import torch
from helpers import one_line_error, small_run
from in_process import call
from models import TINY
from torch.utils._pytree import tree_leaves, tree_map

from model import build
from model.causality import move_parameters
from model.parameters import collect_rules
from model.streams.hyper_connections import sinkhorn_knopp
from training.residual_statistics import ObservedStream, compute_residual_statistics

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
PLACEMENTS = ("sandwich", "lns", "keel", "post", "deepnorm")
EVERY_LAMBDA = {"lambda_value_embeddings": True, "lambda_skips": True, "num_hidden_layers": 5}
NO_LAMBDA = {"lambda_values": "none", "lambda_input": False}
MAIN_GAIN = {**NO_LAMBDA, "lambda_gain": True}
CASES = [
    *(
        ("HC", {"hc_dynamic": dynamic, "hc_streams": n, **DEEP})
        for dynamic in (False, True)
        for n in (1, 2, 4)
    ),
    *(
        ("mHC", {"hc_streams": n, "mhc_iterations": k})
        for n, k in ((2, 20), (4, 20), (2, 1), (4, 1), (4, 2))
    ),
    *(("mHC", {"hc_streams": 4, "mhc_iterations": k, "mhc_rows_last": False}) for k in (20, 2, 1)),
    *(("AttnRes", {"attn_res_blocks": n}) for n in (None, 1, 2, 4, 8)),
    # sites in runs of 3, 3, 2 and of 2, 2, 2: the last run is shorter, or there are fewer runs than
    # asked for
    ("AttnRes", {"attn_res_blocks": 3, "num_hidden_layers": 4}),
    ("AttnRes", {"attn_res_blocks": 4, **DEEP}),
    *(("MGT", {"mgt_arm": arm, **MGT_GATE}) for arm in ("full", "full_post", "ddl", "ddl_post")),
    *(("MGT", {"mgt_arm": arm}) for arm in ("mhc", "mhc_pre", "standard", "additive")),
    ("ReZero", {}),
    ("DenseFormer", DEEP),
    ("LAuReL", {"laurel_form": "rw"}),
    ("LAuReL", {"laurel_rank": 3}),
    ("LAuReL", {"laurel_form": "zaya"}),
    ("MuseSpark", DEEP),
    ("nGPT", DEEP),
    ("conv", {}),
    *(
        ("wide", {"wide_read": read, "ddl_value_channels": v})
        for read in ("tc", "cc")
        for v in (1, 2, 4)
    ),
    ("mHC", {"mhc_mix": "identity", "hc_streams": 3}),
    ("mHC", {"mhc_readout": "sigmoid"}),
    ("mHC", {"mhc_mix": "identity", "mhc_readout": "sigmoid"}),
    ("MUDD", DEEP),
    ("Lambdas", DEEP),
    ("Lambdas", {"lambda_values": "head", **EVERY_LAMBDA}),
    ("Lambdas", {**NO_LAMBDA, **EVERY_LAMBDA}),
    ("GatedResidual", DEEP),
    ("GatedResidual", {"hc_streams": 1, "gated_residual_eps": 0.1}),
    ("GatedResidual", {"hc_streams": 2, "gated_residual_rank": 3}),
    ("Lambdas", {**MAIN_GAIN, **DEEP}),
    ("Lambdas", {**MAIN_GAIN, **EVERY_LAMBDA}),
    ("Lambdas", {**MAIN_GAIN, "lambda_values": "head", "num_hidden_layers": 5}),
    ("HC", {"mup": True, "rope_ratio": 0.5, "use_qk_rmsnorm": False}),
    *(("NormPlacement", {"norm_placement": placement, **DEEP}) for placement in PLACEMENTS),
    *(
        ("NormPlacement", {"norm_placement": placement, "residual_branch_mult": 0.4})
        for placement in PLACEMENTS
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


# ---- models before their first step (SPEC 7 and 8) ----


def build_additive_with_backbone_of(model, **keys):
    """Build an additive model with the same backbone."""
    additive = build_initial("additive", **keys)
    missing, _ = additive.load_state_dict(model.state_dict(), strict=False)
    assert not missing
    return additive


def read_final_state(model, ids):
    """Return the readout (B, T, d), which is the input of the final norm ln_f."""
    readouts = []
    hook = model.ln_f.register_forward_pre_hook(lambda _, inputs: readouts.append(inputs[0]))
    with torch.no_grad():
        model(ids)
    hook.remove()
    return readouts[0]


CLOSE = {"rtol": 0, "atol": 1e-12}


@pytest.mark.parametrize(
    ("name", "keys", "scale", "largest_error"),
    [
        *(
            ("HC", {"hc_streams": n, "hc_dynamic": dynamic, **DEEP}, n, 1e-12)
            for dynamic in (False, True)
            for n in (1, 2, 4)
        ),
        # the term z phi has a factor a = 0.01
        ("mHC", {}, 4, 0.02),
    ],
    ids=str,
)
def test_starts_close_to_the_additive_stream(name, keys, scale, largest_error):
    model = build_initial(name, **keys)
    ids = random_ids(2, 7)
    num_layers = keys.get("num_hidden_layers", TINY["num_hidden_layers"])
    additive = build_additive_with_backbone_of(model, num_hidden_layers=num_layers)
    expected = read_final_state(additive, ids)
    error = (read_final_state(model, ids) / scale - expected).norm() / expected.norm()
    assert error < largest_error


def test_manifold_connections_mix_doubly_stochastically_wherever_their_logits_are_moderate():
    """With logits of N(0, 1), the mix is far from the identity, and its rows and columns sum to 1."""
    connection = build_random("mHC").transformer.h[0].hc_attn
    mix = connection.weights(torch.randn(2, 7, 4, 10, dtype=torch.float64)).mix
    assert (mix - torch.eye(4)).abs().max() > 0.5
    assert mix.min() > 0
    for axis in (-1, -2):
        torch.testing.assert_close(mix.sum(axis), torch.ones(2, 7, 4).double(), rtol=0, atol=1e-3)


@pytest.mark.parametrize("rows_last", [True, False])
def test_what_comes_into_a_stream_sums_to_one_however_far_apart_the_logits_are(rows_last):
    """With mhc_rows_last, equal streams stay equal up to rounding."""
    connection = build_random("mHC", mhc_rows_last=rows_last).transformer.h[0].hc_attn
    torch.nn.init.normal_(connection.bias, std=6)
    mix = connection.weights(torch.randn(2, 7, 4, 10, dtype=torch.float64)).mix
    error_into_streams = (mix.sum(-2) - 1).abs().amax().item()
    error_out_of_streams = (mix.sum(-1) - 1).abs().amax().item()
    # 2e-6 is the guard of the sums
    if rows_last:
        assert error_into_streams < 2e-6
        assert error_out_of_streams > 1e-2
    else:
        assert error_out_of_streams < 2e-6
        assert error_into_streams > 1e-2


def test_mixing_matrices_are_not_rounded_by_autocast():
    connection = build_random("mHC").float().transformer.h[0].hc_attn
    state = torch.randn(2, 7, 4, 10)
    with torch.no_grad():
        expected = connection.weights(state).mix
        with torch.autocast("cpu", dtype=torch.bfloat16):
            autocast_mix = connection.weights(state).mix
    assert autocast_mix.dtype == torch.float32
    torch.testing.assert_close(autocast_mix, expected, rtol=1e-5, atol=1e-6)


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
    ids = random_ids(2, 7)
    num_layers = keys.get("num_hidden_layers", TINY["num_hidden_layers"])
    additive = build_additive_with_backbone_of(model, num_hidden_layers=num_layers)
    torch.testing.assert_close(model(ids)[0], additive(ids)[0], **CLOSE)

    # and no longer, once its own parameters are others
    move_parameters(model)
    additive = build_additive_with_backbone_of(model, num_hidden_layers=num_layers)
    assert (model(ids)[0] - additive(ids)[0]).abs().max() > 1e-3


@pytest.mark.parametrize("read", ["tc", "cc"])
def test_the_wide_state_with_equal_value_channels_is_the_additive_stream(read):
    model = build_initial("wide", wide_read=read, ddl_state_conv_init="identity")
    ids = random_ids(2, 7)
    additive = build_additive_with_backbone_of(model)(ids)[0]
    assert (model(ids)[0] - additive).abs().max() > 1e-3  # its value channels start apart
    with torch.no_grad():
        for block in model.transformer.h:
            block.write_attn.weights.fill_(1)
            block.write_mlp.weights.fill_(1)
    torch.testing.assert_close(model(ids)[0], additive, **CLOSE)


def test_defaults_of_mgt_are_those_of_its_paper():
    config = build("MGT-gpt-mha", **TINY).config
    assert config.mgt_arm == "full"
    assert config.mgt_lambda == 1.0
    assert config.mgt_epsilon == 0.0


@pytest.mark.parametrize("name", [name for name in MODEL_NAMES if name != "additive"])
def test_muon_trains_the_matrices_of_the_backbone_alone(name):
    rules = collect_rules(build_initial(name))
    additive_rules = collect_rules(build_initial("additive"))
    expected = {key for key, rule in additive_rules.items() if rule.muon}
    assert {key for key, rule in rules.items() if rule.muon} == expected


# ---- statistics of the writes, by hand ----


def compute_statistics(model, ids):
    return compute_residual_statistics(model, ids, torch.no_grad())


def test_statistics_of_the_mixing():
    model = build_initial("HC", hc_streams=2, hc_dynamic=False)
    with torch.no_grad():
        model.transformer.h[1].hc_mlp.mix.copy_(torch.tensor([[0.9, 0.2], [0.3, 0.5]]))
    means = compute_statistics(model, random_ids(2, 6))
    assert means["attn.mix_kept_mean"] == [1, 1]
    assert means["mlp.mix_kept_mean"] == pytest.approx([1, (0.9 + 0.5) / 2])
    # into the first 0.9 + 0.3, the second 0.2 + 0.5
    assert means["mlp.mix_error_mean"] == pytest.approx([0, 0.3])
    assert means["mlp.mix_error_std"] == pytest.approx([0, 0], abs=1e-7)


@pytest.mark.parametrize(("rows_last", "error"), [(True, 0), (False, 1 / 15)])
def test_statistics_of_the_manifold_mixing(rows_last, error):
    """Normalizing [[3, 1], [1, 1]] by rows and then by columns gives [[3/5, 1/3], [2/5, 2/3]].

    The weights into a stream are a column of it, whose sum is 1. With mhc_rows_last=False they are
    a row, such as the first, whose sum is 3/5 + 1/3.
    """
    model = build_initial("mHC", hc_streams=2, mhc_iterations=1, mhc_rows_last=rows_last)
    with torch.no_grad():
        model.transformer.h[0].hc_attn.scales.zero_()
        model.transformer.h[0].hc_attn.bias[4:] = torch.tensor([3.0, 1, 1, 1]).log()
    means = compute_statistics(model, random_ids(2, 6))
    assert means["attn.mix_kept_mean"][0] == pytest.approx((3 / 5 + 2 / 3) / 2, abs=1e-5)
    assert means["attn.mix_error_mean"][0] == pytest.approx(error, abs=1e-5)


def test_statistics_of_attention_over_depth():
    """Queries of zero weigh all sources equally; a large query along one source selects it."""
    model = build_initial("AttnRes", attn_res_blocks=None)
    ids = torch.tensor([[5, 5]])
    means = compute_statistics(model, ids)
    assert means["attn.embedding_weight_mean"] == pytest.approx([1, 1 / 3])
    assert means["mlp.embedding_weight_mean"] == pytest.approx([1 / 2, 1 / 4])
    assert means["mlp.effective_sources_mean"] == pytest.approx([2, 4])
    with torch.no_grad():
        model.transformer.h[0].depth_mlp.query.copy_(1e6 * model.transformer.wte.weight[5])
    means = compute_statistics(model, ids)
    assert means["mlp.embedding_weight_mean"][0] == pytest.approx(1)
    assert means["mlp.effective_sources_mean"][0] == pytest.approx(1)


def test_statistics_of_unequal_weights_over_depth():
    """Scores ln 3 apart give the weights 3/4 and 1/4, whose entropy is 2 ln 2 - 3/4 ln 3."""
    read = build_initial("AttnRes").transformer.h[0].depth_mlp
    write = build_initial("AttnRes").transformer.h[0].sites[1].write
    # RMSNorm makes sqrt(10) of each 1, but for eps
    V = torch.eye(10, dtype=torch.float64)[:2, None, None]
    with torch.no_grad():
        read.query.zero_()[0] = math.log(3) * math.sqrt(1 / 10 + 1e-5)
    state = tuple(V)
    values = write.statistics(state, None, read(state), None, None)
    assert values["embedding_weight"].item() == pytest.approx(3 / 4)
    assert values["effective_sources"].item() == pytest.approx(
        math.exp(2 * math.log(2) - 0.75 * math.log(3))
    )


def test_statistics_of_gated_residual():
    """The one feature of u gives two streams g = 2 sigmoid(1) and 2 sigmoid(-1); a is 1/2."""
    model = build_initial("GatedResidual", hc_streams=2, gated_residual_eps=1e-12)
    read = model.transformer.h[0].gated_attn
    with torch.no_grad():
        model.transformer.wte.weight.zero_()[:, 3] = 1
        read.up.weight.zero_()
        read.inject.weight.zero_()[:, 3] = torch.tensor([1.0, -1]) * 2 / math.sqrt(10)
    means = compute_statistics(model, random_ids(2, 6))
    high = 2 / (1 + math.exp(-1))
    low = 2 / (1 + math.exp(1))
    assert means["attn.read_gate_mean"][0] == pytest.approx(0.5)
    assert means["attn.inject_mean"][0] == pytest.approx((high + low) / 2)
    assert means["attn.inject_spread_mean"][0] == pytest.approx(high - low)


def test_statistics_of_mgt():
    """Eight features have beta = 2 tanh(1) - 0.1, and two have beta = 2 tanh(-1/2) - 0.1.

    The gate of all features is sigmoid(2).
    """
    model = build_initial("MGT", mgt_lambda=2.0, mgt_epsilon=-0.1)
    with torch.no_grad():
        write = model.transformer.h[1].write_mlp
        write.beta.weight.zero_()
        write.beta.bias.copy_(torch.tensor([1.0] * 8 + [-0.5] * 2))
        write.gate_norm.weight.zero_()
        write.gate_norm.bias.fill_(2)
    means = compute_statistics(model, random_ids(2, 6))
    high = 2 * math.tanh(1) - 0.1
    low = 2 * math.tanh(-0.5) - 0.1
    assert means["mlp.beta_mean"][1] == pytest.approx(0.8 * high + 0.2 * low)
    assert means["mlp.beta_variance_mean"][1] == pytest.approx(0.8 * 0.2 * (high - low) ** 2)
    assert means["mlp.beta_negative_mean"][1] == pytest.approx(0.2)
    assert means["mlp.gate_mean"][1] == pytest.approx(1 / (1 + math.exp(-2)))


# ---- mistakes ----

MISTAKES = [
    ("mHC", {"hc_streams": 1}, "hc_streams=1 leaves mHC no streams to mix"),
    ("mHC", {"mhc_iterations": 0}, "mhc_iterations=0: give a number at least 1"),
    ("HC", {"hc_streams": 0}, "hc_streams=0: give a number at least 1"),
    ("HC", {"hc_stream": 2}, "unknown key --hc_stream, did you mean hc_streams"),
    ("HC", {"mhc_iterations": 3}, "mhc_iterations"),
    ("AttnRes", {"attn_res_blocks": 0}, "attn_res_blocks=0: give a number at least 1"),
    (
        "GatedResidual",
        {"gated_residual_rank": 0},
        "gated_residual_rank=0: give a number at least 1",
    ),
    ("GatedResidual", {"gated_residual_eps": 0}, "gated_residual_eps=0.0: give"),
    ("GatedResidual", {"mhc_iterations": 3}, "mhc_iterations"),
    ("Lambdas", {"lambda_values": "none", "lambda_input": False}, "use --model=gpt-mha-rope"),
    ("NormPlacement", {"norm_placement": "pre"}, "norm_placement"),
    ("wide", {"wide_read": "ct"}, "wide_read"),
    ("wide", {"wide_reed": "tc"}, "unknown key --wide_reed, did you mean wide_read"),
    ("wide", {"wide_read": "cc", "ddl_state_shortconv_kernel_size": 3}, "omit the key"),
    ("conv", {"conv_init": "zero"}, "conv_init"),
    ("LAuReL", {"laurel_form": "lo"}, "laurel_form"),
    ("LAuReL", {"laurel_rank": 0}, "laurel_rank=0: give a number at least 1"),
    ("MGT", {"mgt_arm": "plain"}, "mgt_arm"),
]


@pytest.mark.parametrize(("name", "keys", "message"), MISTAKES, ids=describe_case)
def test_mistakes_are_refused_in_one_line_that_names_the_key(name, keys, message, corpus, tmp_path):
    out = tmp_path / "run"
    result = call("train.py", *small_run(corpus, out, model=MODEL_NAMES[name], **keys))
    assert message in one_line_error(result)
    assert not out.exists()


# ---- a state of bfloat16: computed in float32, rounded once ----

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
    *(("NormPlacement", {"norm_placement": placement}) for placement in PLACEMENTS),
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
        if not isinstance(x_in, torch.Tensor) or x_in.dtype == torch.float32:
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


@pytest.mark.parametrize(("n", "iterations"), [(2, 1), (3, 7), (4, 20)])
def test_the_gradient_of_sinkhorn_knopp_is_that_of_finite_differences(n, iterations):
    logits = (2 * torch.randn(1, 3, n, n, dtype=torch.float64)).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: sinkhorn_knopp(x, iterations, 1e-6), (logits,))


def test_sinkhorn_knopp_converges_to_the_matrix_of_sinkhorns_theorem():
    """By the theorem, exactly one matrix D exp(logits) E is doubly stochastic.

    Scaling rows and columns leaves every cross ratio as it was.
    """
    logits = torch.randn(5, 1, 3, 3, dtype=torch.float64)
    mix = sinkhorn_knopp(logits, 1000, 0.0)
    for axis in (-1, -2):
        torch.testing.assert_close(mix.sum(axis), torch.ones(5, 1, 3, dtype=torch.float64))
    for i, j in ((1, 1), (1, 2), (2, 1), (2, 2)):
        torch.testing.assert_close(cross_ratio(mix, i, j), cross_ratio(logits.exp(), i, j))


def cross_ratio(matrix: torch.Tensor, i: int, j: int) -> torch.Tensor:
    """Return the cross ratio (...,) of matrices (..., n, n) with their first row and column."""
    return matrix[..., 0, 0] * matrix[..., i, j] / matrix[..., 0, j] / matrix[..., i, 0]
