"""Layers with a common input as one matrix product, as on a GPU, and a padded inner width of the MLP.

The tests enable both on a CPU.
"""

import copy
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from models import TINY

from model import build, products
from model.causality import move_parameters
from model.gpt import GPT

INNER = 8 * TINY["hidden_size"] // 3  # 26: padded to 32 on a CPU and to 64 on a GPU


def compute_loss_and_gradients(model: GPT, run: Callable) -> dict[str, torch.Tensor]:
    """Return the loss, and the gradients of all parameters by name.

    run: the model, or what torch.compile makes of it
    """
    generator = torch.Generator().manual_seed(1)
    ids, targets = torch.randint(0, TINY["vocab_size"], (2, 2, 9), generator=generator)
    _, loss = run(ids, targets)
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {"loss": loss.detach(), **gradients}


def check_same(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    joins: bool = True,
    backend: str | None = None,
    **config,
) -> None:
    """Compare loss and gradients with those of separate products, and count the padding.

    Args:
        joins: whether products are joined, as on a GPU; otherwise only the inner width is padded
        backend: that of torch.compile; by default, the model is not compiled
    """
    plain_model = move_parameters(build("gpt-mha-rope", **{**TINY, **config})).to(dtype)
    model = copy.deepcopy(plain_model)
    expected = compute_loss_and_gradients(plain_model, plain_model)
    monkeypatch.setattr(products, "MIN_TOKENS_FOR_COPIED_WEIGHTS", 1)
    if joins:
        monkeypatch.setattr(products, "should_join_products", lambda x: True)
        monkeypatch.setitem(products.WIDTH_MULTIPLE, "cpu", products.WIDTH_MULTIPLE["cuda"])
    run = model
    if backend is not None:
        run = torch.compile(model, fullgraph=True, backend=backend)
    actual = compute_loss_and_gradients(model, run)
    tolerance = {"rtol": 1e-9, "atol": 1e-12}
    if dtype == torch.float32:
        tolerance = {"rtol": 1e-4, "atol": 1e-6}
    torch.testing.assert_close(actual, expected, **tolerance)


@pytest.mark.parametrize("joins", [True, False])
@pytest.mark.parametrize(
    "config", [{}, {"rope_ratio": 0.4}, {"use_qk_rmsnorm": False}, {"hidden_size": 24}], ids=str
)
def test_joined_and_padded_products_compute_the_same(config, joins, monkeypatch):
    """With hidden_size=24 the inner width is 64, which needs no padding."""
    check_same(monkeypatch, torch.float64, joins, **config)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_one_product_compiled(backend, monkeypatch):
    check_same(monkeypatch, torch.float32, backend=backend, num_hidden_layers=1)


def test_copied_weights_are_for_many_tokens_and_joined_products_for_a_gpu():
    def x(device: str, *shape: int) -> SimpleNamespace:
        return SimpleNamespace(device=torch.device(device), shape=torch.Size(shape))

    assert products.should_join_products(x("cuda", 2, 1024, 8))
    assert not products.should_join_products(x("cuda", 2, 1, 8))  # generation
    assert not products.should_join_products(x("cpu", 2, 1024, 8))
    assert products.count_padding(x("cuda", 2, 1024, 8), INNER) == 38
    assert products.count_padding(x("cpu", 2, 1024, 8), INNER) == 6
    assert products.count_padding(x("cpu", 2, 1, 8), INNER) == 0
