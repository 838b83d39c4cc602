"""How attention makes its heads: the kernel of rotation and norm, and layers that share their input as one product.

What a GPU does is tried on a CPU: the kernel interpreted, the decision for one product taken in its place.
"""

import copy

import pytest
import torch
from test_model import TINY, randomise

from model import STEMS, build, gpt

INNER = 8 * TINY["hidden_size"] // 3  # 26: filled up to 64


def one_product(monkeypatch) -> None:
    monkeypatch.setattr(gpt, "as_one_product", lambda x: True)


def outcome(model, run=None):
    """The loss, and the gradient of every parameter by its name."""
    ids, targets = torch.randint(0, TINY["vocab_size"], (2, 2, 9), generator=torch.Generator().manual_seed(1))
    _, loss = (model if run is None else run)(ids, targets)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def check_same(stem, monkeypatch, dtype, compiled=None, **config):
    plain = randomise(build(stem, **{**TINY, **config})).to(dtype)
    joined = copy.deepcopy(plain)
    loss, gradients = outcome(plain)
    one_product(monkeypatch)
    run = torch.compile(joined, fullgraph=True, backend=compiled) if compiled else joined
    other_loss, others = outcome(joined, run)
    tolerance = {"rtol": 1e-9, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-6}
    torch.testing.assert_close(other_loss, loss, **tolerance)
    torch.testing.assert_close(others, gradients, **tolerance)
    assert joined.state_dict().keys() == plain.state_dict().keys()


@pytest.mark.parametrize("stem", STEMS)
def test_one_product_computes_the_same(stem, monkeypatch):
    check_same(stem, monkeypatch, torch.float64)


@pytest.mark.parametrize("config", [{"rope_ratio": 0.4}, {"use_qk_rmsnorm": False}, {"hidden_size": 24}])
def test_one_product_of_other_models(config, monkeypatch):
    """The last has an inner width, 64, that nothing is to be added to."""
    check_same("gpt-mha-rope", monkeypatch, torch.float64, **config)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_one_product_compiled(backend, monkeypatch):
    check_same("gpt-mha-rope", monkeypatch, torch.float32, backend)


def test_one_product_is_for_many_tokens_on_a_gpu():
    def x(device, *shape):
        return type("X", (), {"device": torch.device(device), "shape": torch.Size(shape)})

    assert gpt.as_one_product(x("cuda", 2, 1024, 8))
    assert not gpt.as_one_product(x("cuda", 2, 1, 8))  # generation
    assert not gpt.as_one_product(x("cpu", 2, 1024, 8))


def test_products_have_wide_sides(monkeypatch):
    """The width of the MLP is filled up in the products alone, and a gradient has its parameter's shape."""
    one_product(monkeypatch)
    seen, linear = [], torch.nn.functional.linear
    monkeypatch.setattr(gpt.F, "linear", lambda x, w, *args: seen.append(tuple(w.shape)) or linear(x, w, *args))
    model = build("gpt-mha-rope", **TINY)
    model(torch.zeros(1, 3, dtype=torch.int64))
    assert (128, 10) in seen
    assert (10, 64) in seen
    assert model.transformer.h[0].mlp.c_fc1.weight.shape == (INNER, 10)


# ---- the kernel ----

pytest.importorskip("triton")

import fused
from fused import INTERPRETED

from model import kernels
from model.kernels import rope

interpreted = pytest.mark.skipif(not INTERPRETED, reason="compiled kernels are tested by test_gpu_kernels.py")
SHAPES = [(2, 9, 3, 6), (1, 1, 1, 2), (1, 5, 2, 16), (2, 3, 6, 128), (3, 4, 1, 10)]


@interpreted
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_rotation_and_norm(shape, dtype):
    fused.check_heads(*shape, dtype)


@interpreted
def test_sequences_at_positions_of_their_own():
    fused.check_heads(3, 5, 2, 6, "fp32", own_positions=True)


@interpreted
@pytest.mark.parametrize("count", [1, 2, 3])
def test_programs_share_the_rows(count, monkeypatch):
    """79 rows are five tiles, the last of them not full."""
    monkeypatch.setattr(rope, "PROGRAMS", 1)
    fused.programs(monkeypatch, count)
    fused.check_heads(1, 79, 1, 6, "fp32")


@interpreted
def test_two_runs_give_the_same_bits():
    inputs = fused.heads_inputs(2, 9, 3, 6, "bf16", False)
    assert all(torch.equal(one, other) for one, other in zip(fused.heads(*inputs), fused.heads(*inputs)))


@interpreted
def test_opcheck():
    qkv, angle, norms, weights = fused.heads_inputs(1, 3, 2, 6, "fp32", False)
    tables = angle.cos().float(), angle.sin().float()
    torch.library.opcheck(torch.ops.ddl.rope_norm, (qkv, *tables, *norms, 1e-5))
    torch.library.opcheck(torch.ops.ddl.rope_norm_backward, (*weights, qkv, *tables, *norms, 1e-5))


@interpreted
def test_heads_come_with_the_fused_stream():
    model = build("gpt-mha-rope", **TINY)
    assert kernels.use(model, "on", "cpu") is None
    assert {type(block.attn.heads) for block in model.transformer.h} == {rope.FusedHeads}
    assert kernels.use(model, "off", "cpu") == "kernels=off"
    assert {type(block.attn.heads) for block in model.transformer.h} == {gpt.Heads}
    for config in ({"rope_ratio": 0.4}, {"use_qk_rmsnorm": False}, {"head_dim": 5}):
        model = build("gpt-mha-rope", **{**TINY, **config})
        assert kernels.use(model, "on", "cpu") is None
        assert {type(block.attn.heads) for block in model.transformer.h} == {gpt.Heads}


@interpreted
def test_heads_of_one_product(monkeypatch):
    model = randomise(build("gpt-mha-rope", **TINY))
    one_product(monkeypatch)
    fused.check_model(model)


@interpreted
def test_heads_of_one_product_compiled(monkeypatch):
    one_product(monkeypatch)
    fused.check_compiled(randomise(build("gpt-mha-rope", **TINY, mup=True)), "aot_eager", 1e-5)
