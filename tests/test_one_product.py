"""Test layers with a common input that are computed as one matrix product, as on a GPU; the tests
enable it on a CPU.
"""

import copy
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from models import PAPER, TINY

from model import build, products
from model.causality import move_parameters
from model.gpt import GPT

INNER = 8 * TINY["hidden_size"] // 3  # 26: filled up to 64


def enable_joined_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "should_copy_weights", lambda x: True)
    monkeypatch.setattr(products, "should_join_products", lambda x: True)
    monkeypatch.setitem(products.WIDTH_MULTIPLE, "cpu", products.WIDTH_MULTIPLE["cuda"])


class LossAndGradients(NamedTuple):
    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]  # by name of the parameter


def compute_loss_and_gradients(model: GPT, run: Callable | None = None) -> LossAndGradients:
    """Return the loss, and the gradients of all parameters that are used.

    run: the compiled model; by default, the model itself is called
    """
    generator = torch.Generator().manual_seed(1)
    ids, targets = torch.randint(0, TINY["vocab_size"], (2, 2, 9), generator=generator)
    if run is None:
        run = model
    _, loss = run(ids, targets)
    loss.backward()
    gradients = {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return LossAndGradients(loss.detach(), gradients)


def check_same(
    model_name: str,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    backend: str | None = None,
    **config,
) -> None:
    """Compare loss, gradients and parameter names with those of separate products.

    backend: that of torch.compile; by default, the model is not compiled
    """
    plain_model = move_parameters(build(model_name, **{**TINY, **config})).to(dtype)
    joined_model = copy.deepcopy(plain_model)
    loss, gradients = compute_loss_and_gradients(plain_model)
    enable_joined_products(monkeypatch)
    run = None
    if backend is not None:
        run = torch.compile(joined_model, fullgraph=True, backend=backend)
    joined_loss, joined_gradients = compute_loss_and_gradients(joined_model, run)
    if dtype == torch.float64:
        rtol = 1e-9
        atol = 1e-12
    else:
        rtol = 1e-4
        atol = 1e-6
    torch.testing.assert_close(joined_loss, loss, rtol=rtol, atol=atol)
    torch.testing.assert_close(joined_gradients, gradients, rtol=rtol, atol=atol)
    assert joined_model.state_dict().keys() == plain_model.state_dict().keys()


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
    check_same("gpt-mha-rope", monkeypatch, torch.float32, backend, num_hidden_layers=1)


def test_one_product_is_for_many_tokens_on_a_gpu():
    def x(device, *shape):
        return type("X", (), {"device": torch.device(device), "shape": torch.Size(shape)})

    assert products.should_join_products(x("cuda", 2, 1024, 8))
    assert not products.should_join_products(x("cuda", 2, 1, 8))  # generation
    assert not products.should_join_products(x("cpu", 2, 1024, 8))


def test_products_have_wide_sides(monkeypatch):
    """The inner width of the MLP is padded in the products, and not in the parameters."""
    enable_joined_products(monkeypatch)
    shapes = []
    linear = torch.nn.functional.linear

    def record_shape(x, weight, *args):
        shapes.append(tuple(weight.shape))
        return linear(x, weight, *args)

    monkeypatch.setattr(products.F, "linear", record_shape)
    model = build("gpt-mha-rope", **TINY)
    model(torch.zeros(1, 3, dtype=torch.int64))
    assert (128, 10) in shapes
    assert (10, 64) in shapes
    assert model.transformer.h[0].mlp.c_fc1.weight.shape == (INNER, 10)
