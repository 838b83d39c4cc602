"""Check the matrix product without rounding to TF32; test_gpu.py checks it on a GPU."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from helpers import precision
from torch import nn

from model.precision import exact_linear


def random_factors(
    dtype: torch.dtype, bias: bool, *shape: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return x (*shape, 12), the weight and the bias of a layer; all require gradients."""
    x = torch.randn(*shape, 12, dtype=dtype, requires_grad=True)
    weight = torch.randn(3, 12, dtype=dtype, requires_grad=True)
    return x, weight, torch.randn(3, dtype=dtype, requires_grad=True) if bias else None


def gradients_of(
    output: torch.Tensor, factors: tuple[torch.Tensor | None, ...], gradient: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of the factors that are not None."""
    leaves = [factor for factor in factors if factor is not None]
    return torch.autograd.grad(output, leaves, gradient)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(7,), (2, 5)], ids=str)
def test_the_operator_is_registered_correctly(bias, shape):
    torch.library.opcheck(exact_linear, random_factors(torch.float32, bias, *shape))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bias", [True, False])
def test_result_and_gradients_are_those_of_the_product_in_float64(dtype, bias):
    factors = random_factors(dtype, bias, 2, 5)
    exact_factors = tuple(
        None if factor is None else factor.detach().double().requires_grad_() for factor in factors
    )
    output = exact_linear(*factors)
    exact_output = F.linear(*exact_factors)
    gradient = torch.randn_like(exact_output).to(dtype)
    tensors = (output, *gradients_of(output, factors, gradient))
    exact_tensors = (exact_output, *gradients_of(exact_output, exact_factors, gradient.double()))
    for tensor, exact in zip(tensors, exact_tensors, strict=True):
        assert tensor.dtype == dtype
        assert (tensor.double() - exact).norm() <= 4 * torch.finfo(dtype).eps * exact.norm()


def test_it_has_second_derivatives():
    assert torch.autograd.gradgradcheck(exact_linear, random_factors(torch.float64, True, 2, 5))


def test_only_factors_that_require_a_gradient_get_one():
    x, weight, bias = random_factors(torch.float32, True, 7)
    exact_linear(x.detach(), weight, bias.detach()).sum().backward()
    assert x.grad is None
    assert bias.grad is None
    assert weight.grad.shape == weight.shape


def test_autocast_rounds_neither_it_nor_its_gradients():
    factors = random_factors(torch.float32, True, 2, 5)
    expected = torch.autograd.grad(exact_linear(*factors).square().sum(), factors)
    with torch.autocast("cpu", torch.bfloat16):
        gradients = torch.autograd.grad(exact_linear(*factors).square().sum(), factors)
    assert all(map(torch.equal, gradients, expected))


@pytest.fixture
def high_precision() -> Iterator[None]:
    """Allow TF32 in matrix products, as train.py does."""
    with precision("high"):
        yield


def test_its_products_have_the_highest_precision(high_precision, monkeypatch):
    precisions = []
    linear = F.linear

    def record_precision(*factors):
        precisions.append(torch.get_float32_matmul_precision())
        return linear(*factors)

    monkeypatch.setattr(F, "linear", record_precision)
    exact_linear(*random_factors(torch.float32, True, 2, 5)).sum().backward()
    assert precisions == ["highest"] * 3  # forward, and the gradients of x and the weight
    assert torch.get_float32_matmul_precision() == "high"


def test_the_precision_is_restored_after_an_error(high_precision):
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        exact_linear(torch.randn(2, 5, 12), torch.randn(3, 4), None)
    assert torch.get_float32_matmul_precision() == "high"


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(12, 3)

    def forward(self, x):
        return exact_linear(x, self.layer.weight, self.layer.bias).sigmoid()


def test_modules_with_it_compile_to_one_graph(high_precision):
    gate = Gate()
    x = torch.randn(2, 5, 12)
    parameters = list(gate.parameters())
    expected = torch.autograd.grad(gate(x).square().sum(), parameters)
    loss = torch.compile(gate, backend="aot_eager", fullgraph=True)(x).square().sum()
    torch.testing.assert_close(torch.autograd.grad(loss, parameters), expected)
    assert torch.get_float32_matmul_precision() == "high"
