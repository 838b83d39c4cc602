"""Layers that share their input as one product, as on a GPU: here the decision for it is taken in its place."""

import copy

import pytest
import torch
from models import PAPER, TINY

from model import build, layers
from model.causality import move_parameters

INNER = 8 * TINY["hidden_size"] // 3  # 26: filled up to 64


def one_product(monkeypatch) -> None:
    monkeypatch.setattr(layers, "should_copy_weights", lambda x: True)
    monkeypatch.setattr(layers, "should_join_products", lambda x: True)
    monkeypatch.setitem(layers.WIDTH_MULTIPLE, "cpu", layers.WIDTH_MULTIPLE["cuda"])


def outcome(model, run=None):
    """The loss, and the gradient of every parameter by its name."""
    ids, targets = torch.randint(
        0, TINY["vocab_size"], (2, 2, 9), generator=torch.Generator().manual_seed(1)
    )
    _, loss = (model if run is None else run)(ids, targets)
    loss.backward()
    return loss.detach(), {
        name: p.grad for name, p in model.named_parameters() if p.grad is not None
    }


def check_same(model_name, monkeypatch, dtype, compiled=None, **config):
    plain = move_parameters(build(model_name, **{**TINY, **config})).to(dtype)
    joined = copy.deepcopy(plain)
    loss, gradients = outcome(plain)
    one_product(monkeypatch)
    run = torch.compile(joined, fullgraph=True, backend=compiled) if compiled else joined
    other_loss, others = outcome(joined, run)
    if dtype == torch.float64:
        rtol = 1e-9
        atol = 1e-12
    else:
        rtol = 1e-4
        atol = 1e-6
    torch.testing.assert_close(other_loss, loss, rtol=rtol, atol=atol)
    torch.testing.assert_close(others, gradients, rtol=rtol, atol=atol)
    assert joined.state_dict().keys() == plain.state_dict().keys()


@pytest.mark.parametrize("model_name", PAPER)
def test_one_product_computes_the_same(model_name, monkeypatch):
    check_same(model_name, monkeypatch, torch.float64)


@pytest.mark.parametrize(
    "config", [{"rope_ratio": 0.4}, {"use_qk_rmsnorm": False}, {"hidden_size": 24}]
)
def test_one_product_of_other_models(config, monkeypatch):
    """The last one has an inner width of 64, which needs no padding."""
    check_same("gpt-mha-rope", monkeypatch, torch.float64, **config)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_one_product_compiled(backend, monkeypatch):
    check_same("gpt-mha-rope", monkeypatch, torch.float32, backend)


def test_one_product_is_for_many_tokens_on_a_gpu():
    def x(device, *shape):
        return type("X", (), {"device": torch.device(device), "shape": torch.Size(shape)})

    assert layers.should_join_products(x("cuda", 2, 1024, 8))
    assert not layers.should_join_products(x("cuda", 2, 1, 8))  # generation
    assert not layers.should_join_products(x("cpu", 2, 1024, 8))


def test_products_have_wide_sides(monkeypatch):
    """The inner width of the MLP is padded in the products, and not in the parameters."""
    one_product(monkeypatch)
    shapes = []
    linear = torch.nn.functional.linear

    def record_shape(x, weight, *args):
        shapes.append(tuple(weight.shape))
        return linear(x, weight, *args)

    monkeypatch.setattr(layers.F, "linear", record_shape)
    model = build("gpt-mha-rope", **TINY)
    model(torch.zeros(1, 3, dtype=torch.int64))
    assert (128, 10) in shapes
    assert (10, 64) in shapes
    assert model.transformer.h[0].mlp.c_fc1.weight.shape == (INNER, 10)
