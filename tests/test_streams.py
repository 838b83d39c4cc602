"""The streams beside DDL's: against the loops of naive_streams.py, and at the start against what
SPEC says of it.
"""

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
from model.hyper_connections import mix_orthogonal, quaternion_product, sinkhorn_knopp
from model.parameters import rules_of
from training.residual_statistics import ObservedStream, compute_residual_statistics

ROPE = "HC mHC GatedResidual AttnRes ReZero DenseFormer LAuReL conv wide MUDD Lambdas".split()
FULL_STEMS = {name: f"{name}-gpt-mha-rope" for name in ROPE} | {
    "MGT": "MGT-gpt-mha",
    "additive": "gpt-mha-rope",
}


def fresh(name, **keys):
    """A tiny model of float64 as it starts."""
    return build(FULL_STEMS[name], **{**TINY, **keys}).double()


def moved(name, **keys):
    """The same with every parameter somewhere else; mHC's biases, which start where nothing is
    mixed, all alike.
    """
    model = move_parameters(fresh(name, **keys))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if name == "mHC" and key.endswith(".bias"):
                parameter.normal_()
    return model


def tokens(*shape):
    return torch.randint(0, TINY["vocab_size"], shape)


DEEP = {"num_hidden_layers": 3}
CASES = [
    ("HC", {"hc_dynamic": dynamic, "hc_streams": n} | DEEP)
    for dynamic in (False, True)
    for n in (1, 2, 4)
]
CASES += [
    ("mHC", {"hc_streams": n, "mhc_iterations": k})
    for n, k in ((2, 20), (4, 20), (2, 1), (4, 1), (4, 2))
]
CASES += [
    ("mHC", {"hc_streams": 4, "mhc_iterations": k, "mhc_rows_last": False}) for k in (20, 2, 1)
]
CASES += [("AttnRes", {"attn_res_blocks": n}) for n in (None, 1, 2, 4, 8)]
# Sites in runs of 3, 3, 2 and of 2, 2, 2: the last run is shorter, or there are fewer of them than
# asked for.
CASES += [
    ("AttnRes", {"attn_res_blocks": 3, "num_hidden_layers": 4}),
    ("AttnRes", {"attn_res_blocks": 4} | DEEP),
]
MGT_GATE = {
    "mgt_lambda": 1.7,
    "mgt_epsilon": -0.4,
    "mgt_alpha_init": 0.6,
    "mgt_beta_bias_init": -0.3,
}
CASES += [("MGT", {"mgt_arm": arm} | MGT_GATE) for arm in ("full", "ddl", "full_post", "ddl_post")]
CASES += [("MGT", {"mgt_arm": arm}) for arm in ("mhc", "standard", "additive", "mhc_pre")]
CASES += [
    ("MGT", {"mgt_arm": arm, "residual_branch_mult": 0.38})
    for arm in ("additive", "standard", "mhc_pre")
]
CASES += [
    ("MGT", {"mgt_arm": arm, "residual_branch_mult": 0.38} | MGT_GATE)
    for arm in ("full", "full_post")
]
CASES += [
    ("ReZero", {}),
    ("DenseFormer", DEEP),
    ("LAuReL", {"laurel_form": "rw"}),
    ("LAuReL", {"laurel_rank": 3}),
]
CASES += [("conv", {"conv_init": start}) for start in ("normal", "identity")]
CASES += [("conv", {"canon": places}) for places in ("AC", "BD", "ABCD")]
CASES += [
    ("wide", {"wide_read": read, "ddl_value_channels": v})
    for read in ("tc", "cc")
    for v in (1, 2, 4)
]
CASES += [
    ("mHC", {"mhc_mix": mix, "hc_streams": n})
    for mix, n in (("identity", 3), ("permutations", 3), ("permutations", 4))
]
CASES += [("mHC", {"mhc_mix": "kronecker", "hc_streams": n}) for n in (2, 8)]
CASES += [
    ("mHC", {"mhc_readout": "sigmoid"}),
    ("mHC", {"mhc_mix": "identity", "mhc_readout": "sigmoid"}),
    ("mHC", {"mhc_mix": "orthogonal"}),
    ("mHC", {"mhc_mix": "orthogonal", "mhc_readout": "mean"}),
]
PRODUCTION = {"mhc_read_eps": 0.03, "mhc_write_eps": 0.07, "mhc_write_magnitude": 1.4}
PRODUCTION |= {"mhc_norm_eps": 0.02, "mhc_read_dtype": "state", "mhc_write_dtype": "state"}
CASES += [("mHC", {"mhc_readout": readout, **PRODUCTION}) for readout in ("mean", "sigmoid")]
CASES += [("AttnRes", {"attn_res_form": "delta", "attn_res_blocks": n} | DEEP) for n in (None, 2)]
CASES += [("MUDD", {"mudd_ways": ways} | DEEP) for ways in ("qkvr", "r")]
EVERY_LAMBDA = {"lambda_value_embeddings": True, "lambda_skips": True, "num_hidden_layers": 5}
CASES += [("Lambdas", DEEP), ("Lambdas", {"lambda_values": "head"} | EVERY_LAMBDA)]
CASES += [("Lambdas", {"lambda_values": "none", "lambda_input": False} | EVERY_LAMBDA)]
CASES += [
    ("GatedResidual", DEEP),
    ("GatedResidual", {"hc_streams": 1, "gated_residual_eps": 0.1}),
    ("GatedResidual", {"hc_streams": 2, "gated_residual_rank": 3}),
]
MAIN_GAIN = {"lambda_input": False, "lambda_values": "none", "lambda_gain": True}
CASES += [("Lambdas", MAIN_GAIN | DEEP), ("Lambdas", MAIN_GAIN | EVERY_LAMBDA)]
CASES += [("Lambdas", MAIN_GAIN | {"lambda_values": "head", "num_hidden_layers": 5})]
CASES += [("HC", {"mup": True, "rope_ratio": 0.5, "use_qk_rmsnorm": False})]


def case_name(keys):
    return (
        keys
        if isinstance(keys, str)
        else ",".join(f"{key}={value}" for key, value in keys.items()) or "defaults"
    )


@pytest.mark.parametrize(("name", "keys"), CASES, ids=case_name)
def test_loss_logits_and_gradients_equal_the_naive_loops(name, keys):
    targets = tokens(2, 5)
    targets[0, 3] = -1
    unused = naive.check(
        FULL_STEMS[name], moved(name, **keys), tokens(2, 5), targets, naive_streams.logits
    )
    assert not unused


# What a model is before its first step: SPEC 7 and 8. Weights of the backbone are those of an
# additive model.


def backbone_of(model, name="additive", **keys):
    """Another model with the same backbone, whose own parameters start as they do."""
    other = fresh(name, **keys)
    missing, _ = other.load_state_dict(model.state_dict(), strict=False)
    assert name != "additive" or not missing
    return other


def before_the_norm(model, ids):
    """The readout (B, T, d), which ln_f takes."""
    seen = []
    hook = model.ln_f.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    with torch.no_grad():
        model(ids)
    hook.remove()
    return seen[0]


CLOSE = {"rtol": 0, "atol": 1e-12}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_hyper_connections_start_as_the_additive_stream(n, dynamic):
    model, ids = fresh("HC", hc_streams=n, hc_dynamic=dynamic, **DEEP), tokens(2, 7)
    wanted = before_the_norm(backbone_of(model, **DEEP), ids)
    torch.testing.assert_close(before_the_norm(model, ids) / n, wanted, **CLOSE)


def test_hyper_connections_read_their_streams_in_turn_at_the_start():
    model = fresh("HC", **DEEP)
    connections = [part for block in model.transformer.h for part in (block.hc_attn, block.hc_mlp)]
    assert [part.read.tolist().index(1) for part in connections] == [0, 1, 2, 3, 0, 1]
    assert all(part.read.sum() == 1 for part in connections)
    for part in connections:
        assert torch.equal(part.mix, torch.eye(4, dtype=torch.float64))
        assert part.write.tolist() == [1.0] * 4
        assert (part.scale.item(), part.write_scale.item()) == pytest.approx((0.01, 0.01))
        assert not part.maps.weight.any()


def test_manifold_connections_start_close_to_the_additive_stream():
    """Doubly stochastic to 1e-3, reads of 1/n each, writes of 1 each; then z phi matters, by no
    more than a = 0.01.
    """
    model, ids, n = fresh("mHC"), tokens(2, 7), 4
    for block in model.transformer.h:
        for connection in (block.hc_attn, block.hc_mlp):
            _, read, write, mix = connected(
                connection, torch.randn(2, 7, n, 10, dtype=torch.float64)
            )
            for axis in (-1, -2):
                torch.testing.assert_close(
                    mix.sum(axis), torch.ones(2, 7, n).double(), rtol=0, atol=1e-3
                )
            torch.testing.assert_close(mix, torch.eye(n).double().expand_as(mix), rtol=0, atol=2e-3)
            torch.testing.assert_close(read, torch.full_like(read, 1 / n), rtol=0, atol=0.02)
            torch.testing.assert_close(write, torch.ones_like(write), rtol=0, atol=0.05)
    wanted = before_the_norm(backbone_of(model), ids)
    error = (before_the_norm(model, ids) / n - wanted).norm() / wanted.norm()
    assert 0 < error < 0.02


def connected(connection, state):
    """x_in, and the three weightings of a connection."""
    x_in, write, mix = connection(state)
    return x_in, connection.weights(state)[0], write, mix


def test_manifold_connections_mix_doubly_stochastically_wherever_their_logits_are_moderate():
    """20 iterations from logits of N(0, 1): far from the identity, both sums are 1 all the same."""
    connection = moved("mHC").transformer.h[0].hc_attn
    _, _, _, mix = connected(connection, torch.randn(2, 7, 4, 10, dtype=torch.float64))
    assert (mix - torch.eye(4)).abs().max() > 0.5
    assert mix.min() > 0
    for axis in (-1, -2):
        torch.testing.assert_close(mix.sum(axis), torch.ones(2, 7, 4).double(), rtol=0, atol=1e-3)


@pytest.mark.parametrize("rows_last", [True, False])
def test_what_comes_into_a_stream_sums_to_one_however_far_apart_the_logits_are(rows_last):
    """Streams that are all alike stay as they are, to rounding; with mhc_rows_last=False they do
    not.
    """
    connection = moved("mHC", mhc_rows_last=rows_last).transformer.h[0].hc_attn
    torch.nn.init.normal_(connection.bias, std=6)
    _, _, _, mix = connected(connection, torch.randn(2, 7, 4, 10, dtype=torch.float64))
    into, out_of = ((mix.sum(axis) - 1).abs().amax().item() for axis in (-2, -1))
    exact, other = (into, out_of) if rows_last else (out_of, into)
    assert exact < 2e-6  # the guard of the sums
    assert other > 1e-2


def rotations(shape=(2, 7)) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits (*shape, 8) and the mixing matrices that are made of them, in float64."""
    logits = torch.randn(*shape, 8, dtype=torch.float64)
    return logits, mix_orthogonal(logits)


def test_an_orthogonal_mix_is_a_rotation():
    _, mix = rotations()
    identity = torch.eye(4, dtype=torch.float64).expand_as(mix)
    torch.testing.assert_close(mix @ mix.mT, identity, rtol=0, atol=1e-12)
    determinants = torch.linalg.det(mix)
    torch.testing.assert_close(determinants, torch.ones_like(determinants), rtol=0, atol=1e-12)
    assert (mix - identity).abs().amax((-1, -2)).min() > 0.1


def test_an_orthogonal_mix_multiplies_by_two_quaternions():
    """p x conj(q) by complex matrices; the matrix that meets the streams is mix^T."""
    logits, mix = rotations()
    for own, matrix in zip(logits.flatten(0, 1), mix.flatten(0, 1)):
        expected = naive_streams.quaternion_rotation(own[:4], own[4:])
        torch.testing.assert_close(matrix.mT, expected, rtol=0, atol=1e-12)


def test_the_product_of_quaternions_has_the_table_of_hamilton():
    one, i, j, k = torch.eye(4)
    products = {(i, i): -one, (j, j): -one, (k, k): -one, (i, j): k, (j, i): -k, (one, j): j}
    products |= {(j, k): i, (k, j): -i, (k, i): j, (i, k): -j, (i, one): i}
    for (x, y), expected in products.items():
        assert torch.equal(quaternion_product(x, y), expected)


def test_the_gradient_of_an_orthogonal_mix_is_that_of_finite_differences():
    logits, _ = rotations((1, 3))
    assert torch.autograd.gradcheck(mix_orthogonal, (logits.requires_grad_(),))


def test_an_orthogonal_mix_starts_at_the_identity_and_leaves_it():
    """To the bit, whatever the state is; the gradient of the factor a is not zero there."""
    connection = fresh("mHC", mhc_mix="orthogonal").transformer.h[0].hc_attn
    mix = connection.weights(torch.randn(2, 7, 4, 10, dtype=torch.float64)).mix
    assert torch.equal(mix, torch.eye(4, dtype=mix.dtype).expand_as(mix))
    (mix * torch.randn(4, 4, dtype=mix.dtype)).sum().backward()
    assert connection.scales.grad[2].abs() > 1e-6


def test_an_orthogonal_mix_keeps_the_norm_of_the_state():
    connection = moved("mHC", mhc_mix="orthogonal").transformer.h[0].hc_attn
    state = torch.randn(2, 7, 4, 10, dtype=torch.float64)
    mixed = connection.weights(state).mix.mT @ state
    assert (mixed - state).abs().max() > 0.1
    norms = [each.flatten(2).norm(dim=-1) for each in (mixed, state)]
    torch.testing.assert_close(*norms, rtol=1e-12, atol=0)


@pytest.mark.parametrize("mix", ["sinkhorn", "permutations", "kronecker", "orthogonal"])
def test_mixing_matrices_are_not_rounded_by_autocast(mix):
    connection = moved("mHC", mhc_mix=mix).float().transformer.h[0].hc_attn
    state = torch.randn(2, 7, 4, 10)
    with torch.no_grad():
        expected = connection.weights(state).mix
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = connection.weights(state).mix
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("blocks", [None, 2])
def test_attention_residuals_start_at_the_mean_of_their_sources(blocks):
    """Every norm's input, from what the sublayers gave: each output a source, or two of them."""
    model, ids = fresh("AttnRes", attn_res_blocks=blocks), tokens(2, 7)
    embedding, outputs, inputs = model.transformer.wte(ids), [], []
    for block in model.transformer.h:
        for norm, sublayer in ((block.ln_1, block.attn), (block.ln_2, block.mlp)):
            norm.register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
            sublayer.register_forward_hook(lambda _, __, output: outputs.append(output))
    final = before_the_norm(model, ids)
    for m, x_in in enumerate([*inputs, final]):
        h = outputs[:m]
        runs = h if blocks is None else [sum(h[i : i + 2]) for i in range(0, m, 2)]
        torch.testing.assert_close(x_in, torch.stack([embedding, *runs]).mean(0), **CLOSE)
    assert len(inputs) == 4


def test_rezero_starts_with_the_embedding_alone():
    model, ids = fresh("ReZero"), tokens(2, 7)
    x = model.transformer.wte.weight[ids]
    normed = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(model(ids)[0], normed @ model.transformer.wte.weight.T, **CLOSE)


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("DenseFormer", DEEP),
        ("LAuReL", {"laurel_form": "rw"}),
        ("LAuReL", {"laurel_form": "lr"}),
        ("conv", {"conv_init": "identity"}),
        ("MUDD", {"mudd_ways": "r"} | DEEP),
        ("MUDD", DEEP),
        ("AttnRes", {"attn_res_form": "delta", "attn_res_gate": 0.0}),
        ("Lambdas", {"lambda_values": "none", "lambda_value_embeddings": True}),
        ("Lambdas", MAIN_GAIN),
    ],
    ids=case_name,
)
def test_starts_as_the_additive_model(name, keys):
    model, ids = fresh(name, **keys), tokens(2, 7)
    depth = {key: value for key, value in keys.items() if key in TINY}
    torch.testing.assert_close(model(ids)[0], backbone_of(model, **depth)(ids)[0], **CLOSE)
    assert (move_parameters(model)(ids)[0] - backbone_of(model, **depth)(ids)[0]).abs().max() > 1e-3


def test_mgt_with_open_gates_is_its_additive_arm():
    model, ids = fresh("MGT", mgt_arm="full"), tokens(2, 7)
    with torch.no_grad():
        for block in model.transformer.h:
            for write in (block.write_attn, block.write_mlp):
                write.gate_norm.weight.zero_()
                write.gate_norm.bias.fill_(40)
                write.beta.bias.fill_(40)
    additive = backbone_of(model, "MGT", mgt_arm="additive")
    torch.testing.assert_close(model(ids)[0], additive(ids)[0], **CLOSE)


@pytest.mark.parametrize("read", ["tc", "cc"])
def test_the_wide_state_with_equal_columns_is_the_additive_stream(read):
    model, ids = fresh("wide", wide_read=read, ddl_state_conv_init="identity"), tokens(2, 7)
    additive = backbone_of(model)(ids)[0]
    assert (model(ids)[0] - additive).abs().max() > 1e-3  # its columns start apart
    with torch.no_grad():
        for block in model.transformer.h:
            block.write_attn.weights.fill_(1)
            block.write_mlp.weights.fill_(1)
    torch.testing.assert_close(model(ids)[0], additive, **CLOSE)


WIDE = {
    "hidden_size": 256,
    "num_attention_heads": 2,
    "head_dim": 128,
    "num_hidden_layers": 4,
    "vocab_size": 128,
}
STARTS = [
    ("mHC", {}, "hc_mlp.maps.weight", 0, 0.5 / math.sqrt(4 * 256)),
    ("LAuReL", {}, "write_mlp.down.weight", 0, 0.5 / 16),
    ("LAuReL", {}, "write_attn.up.weight", 0, 0),
    ("conv", {}, "compress.shortconv.weight", 0, 0.5 / 16),
    ("MGT", {}, "write_attn.gate.weight", 0, 0.5 / 16),
    ("MGT", {}, "write_mlp.beta.weight", 0, 0.5 / 16),
    ("HC", {"hc_scale_outputs": True}, "attn.c_proj.weight", 0, 0.5 / 16 / 4 / 2),
    ("HC", {"hc_scale_outputs": True, "init": "normal"}, "attn.c_proj.weight", 0, 0.5 / 16 / 2 / 2),
    ("HC", {"hc_scale_outputs": True, "init": "normal"}, "mlp.c_proj.weight", 0, 0.5 / 16 / 2 / 2),
    ("HC", {"init": "normal"}, "mlp.c_proj.weight", 0, 0.5 / 16 / 2),
    ("wide", {"ddl_value_channels": 4096}, "write_attn.weights", 1, 0.5),
    ("GatedResidual", {}, "gated_attn.down.weight", 0, 0.02),
    ("GatedResidual", {}, "gated_mlp.up.weight", 0, 0.02),
    ("GatedResidual", {}, "gated_mlp.inject.weight", 0, 0.02),
    ("GatedResidual", {"mup": True}, "gated_attn.down.weight", 0, 0.04),
    ("GatedResidual", {"mup": True}, "gated_mlp.up.weight", 0, 0.04),
    ("GatedResidual", {"mup": True}, "gated_mlp.inject.weight", 0, 0.04),
    # an inner size that does not grow with the width
    ("GatedResidual", {"mup": True, "gated_residual_rank": 8}, "gated_mlp.up.weight", 0, 0.02),
]


@pytest.mark.parametrize(("name", "keys", "parameter", "mean", "std"), STARTS)
def test_starting_values(name, keys, parameter, mean, std):
    size = WIDE if name != "wide" else {"hidden_size": 2}
    weight = build(FULL_STEMS[name], **{**TINY, **size, **keys}).state_dict()[
        f"transformer.h.1.{parameter}"
    ]
    assert weight.std().item() == pytest.approx(std, rel=0.05)
    assert abs(weight.mean().item() - mean) <= 0.1 * std


def test_biases_and_scales_of_manifold_connections_at_the_start():
    connection = build("mHC-gpt-mha-rope", hc_streams=3, **TINY).transformer.h[1].hc_attn
    assert connection.scales.tolist() == pytest.approx([0.01] * 3)
    off = -8.0
    wanted = [-math.log(2)] * 3 + [0] * 3 + [0, off, off, off, 0, off, off, off, 0]
    assert connection.bias.tolist() == pytest.approx(wanted)


OWN_STARTS = [
    ("MUDD", {}, "h.1.dense.static", [0.0, 0.0, 1.0]),
    ("Lambdas", {}, "h.1.begin.a", [1.0]),
    ("Lambdas", {}, "h.1.begin.b", [0.0]),
    ("Lambdas", MAIN_GAIN, "h.1.begin.a", [1.0]),
    ("Lambdas", {"lambda_values": "head"}, "h.1.g", [0.5, 0.5]),
    ("Lambdas", {"lambda_skips": True}, "h.1.begin.skip", [1.0]),
    ("AttnRes", {"attn_res_form": "delta"}, "h.1.depth_mlp.gate", [1.0]),
    (
        "mHC",
        {"mhc_mix": "kronecker"},
        "h.1.hc_mlp.bias",
        [-math.log(3)] * 4 + [0] * 4 + [0, -8] * 2,
    ),
    ("mHC", {"mhc_mix": "identity"}, "h.1.hc_mlp.scales", [0.01, 0.01]),
    ("mHC", {"mhc_mix": "orthogonal"}, "h.1.hc_mlp.scales", [0.01, 0.01, 0]),
    (
        "mHC",
        {"mhc_mix": "orthogonal"},
        "h.1.hc_mlp.bias",
        [-math.log(3)] * 4 + [0] * 4 + [1, 0, 0, 0] * 2,
    ),
    ("mHC", {"mhc_scale_init": 1.0}, "h.0.hc_attn.scales", [1, 1, 1]),
    ("mHC", {"mhc_bias_init": "zeros"}, "h.0.hc_attn.bias", [0] * 24),
]


@pytest.mark.parametrize(("name", "keys", "parameter", "values"), OWN_STARTS, ids=str)
def test_numbers_that_start_by_themselves(name, keys, parameter, values):
    found = fresh(name, **keys).transformer.get_parameter(parameter)
    assert found.flatten().tolist() == pytest.approx(values)


def test_a_permutation_mix_starts_close_to_the_identity():
    model = fresh("mHC", mhc_mix="permutations", hc_streams=3)
    model.transformer.h[0].hc_mlp.scales.data.zero_()
    mix = model.transformer.h[0].hc_mlp.weights(torch.randn(1, 1, 3, 10).double())[2][0, 0]
    others = math.exp(-8) / (1 + 5 * math.exp(-8))
    wanted = torch.full((3, 3), 2 * others, dtype=torch.float64).fill_diagonal_(1 - 4 * others)
    torch.testing.assert_close(mix, wanted, rtol=1e-6, atol=1e-9)


def test_mgt_gates_start_as_specified():
    write = build("MGT-gpt-mha", **TINY).transformer.h[1].write_mlp
    assert write.alpha.item() == 0
    assert write.beta.bias.tolist() == [1.0] * 10
    assert write.gate.bias is None
    config = build("MGT-gpt-mha", **TINY).config
    assert (config.mgt_arm, config.mgt_lambda, config.mgt_epsilon) == ("full", 1.0, 0.0)


# Weight decay falls on these alone, besides the backbone's matrices (SPEC 5 and 8).
DECAYED = {
    "HC": {"maps.weight"},
    "mHC": {"maps.weight"},
    "GatedResidual": {"down.weight", "up.weight", "inject.weight"},
    "AttnRes": set(),
    "ReZero": set(),
    "DenseFormer": set(),
    "MUDD": {"first.weight", "second.weight"},
    "Lambdas": set(),
}
DECAYED |= {
    "LAuReL": {"down.weight", "up.weight"},
    "conv": {"shortconv.weight"},
    "wide": {"shortconv.weight"},
}
DECAYED |= {"MGT": {"gate.weight", "beta.weight"}}


@pytest.mark.parametrize("name", DECAYED)
def test_weight_decay_and_muon_of_the_streams_own_parameters(name):
    model = fresh(name)
    rules, plain = rules_of(model), rules_of(fresh("additive"))
    own = {
        ".".join(key.split(".")[-2:])
        for key, rule in rules.items()
        if key not in plain and rule.decay
    }
    assert own == DECAYED[name]
    assert {key for key, rule in rules.items() if rule.muon} == {
        key for key, rule in plain.items() if rule.muon
    }
    shared = [key for key in plain if key in rules]  # a stream may have other norms
    assert all(rules[key].decay == plain[key].decay for key in shared)


def test_a_main_gain_is_the_only_parameter_beside_the_additive_model():
    model = fresh("Lambdas", **MAIN_GAIN, **DEEP)
    own = model.state_dict().keys() - fresh("additive", **DEEP).state_dict().keys()
    assert own == {f"transformer.h.{layer}.begin.a" for layer in range(3)}
    flops, additive = (
        fresh(name, **keys, **DEEP).flops_per_token()
        for name, keys in (("Lambdas", MAIN_GAIN), ("additive", {}))
    )
    # a product for each of 10 features in each of 3 blocks, and twice as much in the backward pass
    assert flops - additive == 3 * 3 * 10


# Statistics of the writes, by hand.


def statistics(model, ids):
    return compute_residual_statistics(model, ids, torch.no_grad())


def test_statistics_of_the_mixing():
    model = fresh("HC", hc_streams=2, hc_dynamic=False)
    with torch.no_grad():
        model.transformer.h[1].hc_mlp.mix.copy_(torch.tensor([[0.9, 0.2], [0.3, 0.5]]))
    found = statistics(model, tokens(2, 6))
    assert found["attn.mix_kept_mean"] == [1, 1]
    assert found["mlp.mix_kept_mean"] == pytest.approx([1, (0.9 + 0.5) / 2])
    # into the first 0.9 + 0.3, the second 0.2 + 0.5
    assert found["mlp.mix_error_mean"] == pytest.approx([0, 0.3])
    assert found["mlp.mix_error_std"] == pytest.approx([0, 0], abs=1e-7)


@pytest.mark.parametrize(("rows_last", "error"), [(True, 0), (False, 1 / 15)])
def test_statistics_of_the_manifold_mixing(rows_last, error):
    """softmax [[3, 1], [1, 1]] / rows = [[3/4, 1/4], [1/2, 1/2]], by columns [[3/5, 1/3], [2/5,
    2/3]].

    What comes into a stream is a column of it, or, with mhc_rows_last=False, a row: 3/5 + 1/3.
    """
    model = fresh("mHC", hc_streams=2, mhc_iterations=1, mhc_rows_last=rows_last)
    with torch.no_grad():
        model.transformer.h[0].hc_attn.scales.zero_()
        model.transformer.h[0].hc_attn.bias[4:] = torch.tensor([3.0, 1, 1, 1]).log()
    found = statistics(model, tokens(2, 6))
    assert found["attn.mix_kept_mean"][0] == pytest.approx((3 / 5 + 2 / 3) / 2, abs=1e-5)
    assert found["attn.mix_error_mean"][0] == pytest.approx(error, abs=1e-5)


def test_statistics_of_attention_over_depth():
    """With queries of zero all of 1, 2, 3, ... sources count alike; one far along a source's
    direction has it all.
    """
    model, ids = fresh("AttnRes", attn_res_blocks=None), torch.tensor([[5, 5]])
    found = statistics(model, ids)
    assert found["attn.embedding_weight_mean"] == pytest.approx([1, 1 / 3])
    assert found["mlp.embedding_weight_mean"] == pytest.approx([1 / 2, 1 / 4])
    assert found["mlp.effective_sources_mean"] == pytest.approx([2, 4])
    with torch.no_grad():
        model.transformer.h[0].depth_mlp.query.copy_(1e6 * model.transformer.wte.weight[5])
    found = statistics(model, ids)
    assert found["mlp.embedding_weight_mean"][0] == pytest.approx(1)
    assert found["mlp.effective_sources_mean"][0] == pytest.approx(1)


def test_statistics_of_unequal_weights_over_depth():
    """Two sources, scores ln 3 apart: weights 3/4 and 1/4, of entropy 2 ln 2 - 3/4 ln 3."""
    read = fresh("AttnRes").transformer.h[0].depth_mlp
    write = fresh("AttnRes").transformer.h[0].sites[1].write
    # RMSNorm makes sqrt(10) of each 1, but for eps
    V = torch.eye(10, dtype=torch.float64)[:2, None, None]
    with torch.no_grad():
        read.query.zero_()[0] = math.log(3) * math.sqrt(1 / 10 + 1e-5)
    state = tuple(V)
    found = write.statistics(state, None, read(state), None, None)
    assert found["embedding_weight"].item() == pytest.approx(3 / 4)
    assert found["effective_sources"].item() == pytest.approx(
        math.exp(2 * math.log(2) - 0.75 * math.log(3))
    )


def test_statistics_of_gated_residual():
    """Two streams get g = 2 sigmoid(1) and 2 sigmoid(-1), from the one feature of u, and a is 1/2."""
    model = fresh("GatedResidual", hc_streams=2, gated_residual_eps=1e-12)
    read = model.transformer.h[0].gated_attn
    with torch.no_grad():
        model.transformer.wte.weight.zero_()[:, 3] = 1
        read.up.weight.zero_()
        read.inject.weight.zero_()[:, 3] = torch.tensor([1.0, -1]) * 2 / math.sqrt(10)
    means = statistics(model, tokens(2, 6))
    high = 2 / (1 + math.exp(-1))
    low = 2 / (1 + math.exp(1))
    assert means["attn.read_gate_mean"][0] == pytest.approx(0.5)
    assert means["attn.inject_mean"][0] == pytest.approx((high + low) / 2)
    assert means["attn.inject_spread_mean"][0] == pytest.approx(high - low)


def test_statistics_of_mgt():
    """Eight features with beta = 2 tanh(1) - 0.1, two with 2 tanh(-1/2) - 0.1; gates of
    sigmoid(2).
    """
    model = fresh("MGT", mgt_lambda=2.0, mgt_epsilon=-0.1)
    with torch.no_grad():
        write = model.transformer.h[1].write_mlp
        write.beta.weight.zero_()
        write.beta.bias.copy_(torch.tensor([1.0] * 8 + [-0.5] * 2))
        write.gate_norm.weight.zero_()
        write.gate_norm.bias.fill_(2)
    found = {
        name: values[1]
        for name, values in statistics(model, tokens(2, 6)).items()
        if name.startswith("mlp.")
    }
    high, low = 2 * math.tanh(1) - 0.1, 2 * math.tanh(-0.5) - 0.1
    assert found["mlp.beta_mean"] == pytest.approx(0.8 * high + 0.2 * low)
    assert found["mlp.beta_variance_mean"] == pytest.approx(0.8 * 0.2 * (high - low) ** 2)
    assert found["mlp.beta_negative_mean"] == pytest.approx(0.2)
    assert found["mlp.gate_mean"] == pytest.approx(1 / (1 + math.exp(-2)))


# Values that make no sense, or have no effect, are refused before anything is done.
REFUSED = [
    ("mHC", {"hc_streams": 1}, "hc_streams=1 leaves mHC no streams to mix"),
    ("mHC", {"mhc_iterations": 0}, "mhc_iterations=0: give 1 or more"),
    ("HC", {"hc_streams": 0}, "hc_streams=0: give 1 or more"),
    ("HC", {"hc_stream": 2}, "unknown key --hc_stream, did you mean hc_streams"),
    ("HC", {"mhc_iterations": 3}, "mhc_iterations"),
    ("AttnRes", {"attn_res_blocks": 0}, "attn_res_blocks=0: give 1 or more"),
    ("AttnRes", {"attn_res_gate": 0.5}, "attn_res_gate"),
    ("mHC", {"mhc_mix": "permutations", "hc_streams": 6}, "hc_streams=6 with mhc_mix=permutations"),
    ("mHC", {"mhc_mix": "kronecker", "hc_streams": 3}, "give a power of two"),
    ("mHC", {"mhc_mix": "identity", "mhc_iterations": 3}, "no effect with mhc_mix=identity"),
    ("GatedResidual", {"gated_residual_rank": 0}, "gated_residual_rank=0: give 1 or more"),
    ("GatedResidual", {"gated_residual_eps": 0}, "gated_residual_eps=0.0: give"),
    ("GatedResidual", {"mhc_iterations": 3}, "mhc_iterations"),
    ("mHC", {"mhc_mix": "orthogonal", "hc_streams": 3}, "rotates four streams; give hc_streams=4"),
    ("mHC", {"mhc_mix": "orthogonal", "mhc_iterations": 3}, "no effect with mhc_mix=orthogonal"),
    ("mHC", {"mhc_mix": "orthogonal", "mhc_bias_init": "zeros"}, "omit mhc_bias_init"),
    ("mHC", {"mhc_readout_bias_init": "mean"}, "no effect with mhc_readout=sum"),
    ("mHC", {"mhc_write_magnitude": 0}, "mhc_write_magnitude=0"),
    ("conv", {"canon": "CA"}, "canon='CA' is not a string of the letters"),
    ("Lambdas", {"lambda_values": "none", "lambda_input": False}, "use --model=gpt-mha-rope"),
    ("Lambdas", {"lambda_gain": True}, "lambda_gain=True has no effect with lambda_input=True"),
    ("wide", {"wide_read": "ct"}, "wide_read"),
    ("wide", {"wide_reed": "tc"}, "unknown key --wide_reed, did you mean wide_read"),
    ("wide", {"wide_read": "cc", "ddl_state_shortconv_kernel_size": 3}, "omit the key"),
    ("conv", {"conv_init": "zero"}, "conv_init"),
    ("LAuReL", {"laurel_form": "lo"}, "laurel_form"),
    ("LAuReL", {"laurel_rank": 0}, "laurel_rank=0: give 1 or more"),
    (
        "LAuReL",
        {"laurel_form": "rw", "laurel_rank": 4},
        "laurel_rank=4 has no effect with laurel_form=rw",
    ),
    ("MGT", {"mgt_arm": "plain"}, "mgt_arm"),
    (
        "MGT",
        {"mgt_arm": "additive", "mgt_epsilon": 0.1},
        "mgt_epsilon=0.1 has no effect with mgt_arm=additive",
    ),
    (
        "MGT",
        {"mgt_arm": "standard", "mgt_alpha_init": 0.1},
        "mgt_alpha_init=0.1 has no effect with mgt_arm=standard",
    ),
    ("MGT", {"mgt_arm": "mhc", "mgt_lambda": 2.0}, "mgt_lambda=2.0 has no effect with mgt_arm=mhc"),
]


@pytest.mark.parametrize(("name", "keys", "message"), REFUSED, ids=case_name)
def test_refusals_are_one_line_that_names_the_key(name, keys, message, corpus, tmp_path):
    out = tmp_path / "run"
    line = one_line_error(call("train.py", *small_run(corpus, out, model=FULL_STEMS[name], **keys)))
    assert message in line
    assert not out.exists()


# With a state of bfloat16: reads are computed in float32, and what is written is rounded once.

ROUNDED = [
    ("HC", {}),
    ("HC", {"hc_dynamic": False}),
    ("mHC", {}),
    ("GatedResidual", {}),
    ("AttnRes", {}),
    ("ReZero", {}),
    ("DenseFormer", DEEP),
]
ROUNDED += [("LAuReL", {"laurel_form": form}) for form in ("rw", "lr")]
ROUNDED += [
    ("conv", {}),
    ("wide", {}),
    ("wide", {"wide_read": "cc"}),
    ("MGT", {}),
    ("MGT", {"mgt_arm": "standard"}),
]


def last_step(model):
    """State and h of the last site, as it meets them, in bfloat16."""
    seen = []
    with torch.no_grad(), model.through(ObservedStream(lambda _, write: seen.append(write))):
        model(tokens(4, 8))
    return tree_map(torch.Tensor.bfloat16, (seen[-2].state, seen[-1].h))


def close(found, exact, tolerance):
    for got, wanted in zip(tree_leaves(found), tree_leaves(exact), strict=True):
        torch.testing.assert_close(got.double(), wanted, rtol=tolerance, atol=1e-5)


@pytest.mark.parametrize(("name", "keys"), ROUNDED, ids=case_name)
def test_a_state_in_bfloat16_is_computed_with_in_float32(name, keys):
    exact = moved(name, **keys)
    model = copy.deepcopy(exact).float()
    state, h = last_step(exact)
    (site, other), once = (each.transformer.h[-1].sites[1] for each in (model, exact)), 2**-8
    double = tree_map(torch.Tensor.double, (state, h))
    with torch.no_grad():
        taken, wanted = site.read(state), other.read(double[0])
        if not isinstance(taken, torch.Tensor) or taken.dtype == torch.float32:
            close(taken, wanted, 1e-5)
        written = site.write(state, h, taken, None)
        close(written, other.write(*double, wanted, None), once)
        assert {leaf.dtype for leaf in tree_leaves(written)} == {torch.bfloat16}
        if site.post_write is not None:
            close(
                site.post_write(written),
                other.post_write(tree_map(torch.Tensor.double, written)),
                once,
            )


@pytest.mark.parametrize(("n", "iterations"), [(2, 1), (3, 7), (4, 20)])
def test_the_gradient_of_sinkhorn_knopp_is_that_of_finite_differences(n, iterations):
    logits = (2 * torch.randn(1, 3, n, n, dtype=torch.float64)).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: sinkhorn_knopp(x, iterations, 1e-6), (logits,))


def test_sinkhorn_knopp_goes_to_the_matrix_of_sinkhorns_theorem():
    """The one doubly stochastic D exp(logits) E: scaling rows and columns leaves every cross ratio
    as it was.
    """
    logits = torch.randn(5, 1, 3, 3, dtype=torch.float64)
    found, powers = sinkhorn_knopp(logits, 1000, 0.0), logits.exp()
    for axis in (-1, -2):
        torch.testing.assert_close(found.sum(axis), torch.ones(5, 1, 3, dtype=torch.float64))
    for i, j in ((1, 1), (1, 2), (2, 1), (2, 2)):
        ratios = [
            m[..., 0, 0] * m[..., i, j] / m[..., 0, j] / m[..., i, 0] for m in (found, powers)
        ]
        torch.testing.assert_close(*ratios)
