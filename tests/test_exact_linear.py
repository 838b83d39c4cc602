"""The product that nothing rounds; on a GPU, where it matters, test_gpu.py has it."""

import pytest
import torch
import torch.nn.functional as F
from helpers import precision
from torch import nn

from model.layers import exact_linear


def factors(dtype, bias: bool, *shape):
    """(x, weight, bias or None), leaves."""
    made = [
        torch.randn(*shape, 12, dtype=dtype),
        torch.randn(3, 12, dtype=dtype),
        torch.randn(3, dtype=dtype),
    ]
    return [leaf.requires_grad_() for leaf in made[: 2 + bias]] + [None] * (not bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(7,), (2, 5)], ids=str)
def test_the_operator_is_one_to_torch_and_the_compiler(dtype, bias, shape):
    torch.library.opcheck(exact_linear, factors(dtype, bias, *shape))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bias", [True, False])
def test_result_and_gradients_are_those_of_the_plain_product(dtype, bias):
    """Of float64 to the last bits: nothing is rounded on its way."""
    leaves = factors(dtype, bias, 2, 5)
    exact = [None if leaf is None else leaf.detach().double().requires_grad_() for leaf in leaves]
    found, wanted = exact_linear(*leaves), F.linear(*exact)
    gradient, many = torch.randn_like(wanted), 2 + bias
    pairs = zip(
        (found, *torch.autograd.grad(found, leaves[:many], gradient.to(dtype))),
        (wanted, *torch.autograd.grad(wanted, exact[:many], gradient.to(dtype).double())),
    )
    for got, want in pairs:
        assert got.dtype == dtype
        assert (got.double() - want).norm() <= 4 * torch.finfo(dtype).eps * want.norm()


def test_it_has_second_derivatives():
    assert torch.autograd.gradgradcheck(exact_linear, factors(torch.float64, True, 2, 5))


def test_only_what_is_wanted_has_a_gradient():
    x, weight, bias = factors(torch.float32, True, 7)
    exact_linear(x.detach(), weight, bias.detach()).sum().backward()
    assert (x.grad, bias.grad) == (None, None)
    assert weight.grad.shape == weight.shape


def test_autocast_rounds_neither_it_nor_its_gradients():
    leaves = factors(torch.float32, True, 2, 5)
    wanted = torch.autograd.grad(exact_linear(*leaves).square().sum(), leaves)
    with torch.autocast("cpu", torch.bfloat16):
        found = torch.autograd.grad(exact_linear(*leaves).square().sum(), leaves)
    assert all(map(torch.equal, found, wanted))


@pytest.fixture
def setting():
    with precision("high"):
        yield torch.get_float32_matmul_precision


def test_the_setting_is_the_highest_inside_and_as_it_was_after(setting, monkeypatch):
    inside, product = [], F.linear
    monkeypatch.setattr(F, "linear", lambda *each: (inside.append(setting()), product(*each))[1])
    exact_linear(*(leaves := factors(torch.float32, True, 2, 5))).sum().backward()
    assert inside == ["highest"] * 3  # forward, and the gradients of x and the weight
    assert setting() == "high"
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        exact_linear(leaves[0].detach(), torch.randn(3, 4), None)
    assert setting() == "high"


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(12, 3)

    def forward(self, x):
        return exact_linear(x, self.layer.weight, self.layer.bias).sigmoid()


def test_compiled_modules_have_it_whole(setting):
    gate, x = Gate(), torch.randn(2, 5, 12)
    wanted = torch.autograd.grad(gate(x).square().sum(), list(gate.parameters()))
    loss = torch.compile(gate, backend="aot_eager", fullgraph=True)(x).square().sum()
    for got, want in zip(torch.autograd.grad(loss, list(gate.parameters())), wanted):
        torch.testing.assert_close(got, want)
    assert setting() == "high"
