"""The kernel of SwiGLU's backward pass, interpreted, against float64."""

import pytest
import torch
from models import TINY

from model import build, kernels, products

pytest.importorskip("triton")

import fused
from fused import INTERPRETED

from model.kernels import swiglu_kernel

pytestmark = pytest.mark.skipif(
    not INTERPRETED, reason="compiled kernels are tested by test_gpu_kernels.py"
)


# the second has three programs, the last of them not full, and rows that two programs share
@pytest.mark.parametrize("shape", [(2, 3, 64), (5, 500), (1, 1)], ids=str)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_swiglu_and_its_gradient(shape, dtype):
    fused.check_swiglu(*shape, dtype=dtype)


def test_opcheck():
    joined, grad = fused.swiglu_inputs(3, 5, dtype="fp32")
    torch.library.opcheck(torch.ops.ddl.swiglu_backward, (grad, joined))


def test_a_gradient_of_other_strides():
    joined, grad = fused.swiglu_inputs(6, 6, dtype="fp32")
    expected = swiglu_kernel.swiglu_backward(grad.T.contiguous(), joined)
    assert torch.equal(swiglu_kernel.swiglu_backward(grad.T, joined), expected)


class OtherMLP(products.JoinedMLP):
    pass


def test_the_kernel_comes_and_goes_with_the_others():
    model = build("gpt-mha-rope", **TINY)
    model.transformer.h[0].mlp.__class__ = OtherMLP
    assert kernels.use(model, "on", "cpu") is None
    # one's own MLP is left alone
    assert model.transformer.h[0].mlp.swiglu is products.swiglu
    assert model.transformer.h[1].mlp.swiglu is swiglu_kernel.fused_swiglu
    assert kernels.use(model, "off", "cpu") == "kernels=off"
    assert model.transformer.h[1].mlp.swiglu is products.swiglu


def test_the_kernel_serves_joined_products(monkeypatch):
    """Separate products have a plain backward pass, which torch.compile makes as fast."""
    model = build("gpt-mha-rope", **TINY)
    kernels.use(model, "on", "cpu")
    calls = []
    backward = swiglu_kernel.swiglu_backward
    monkeypatch.setattr(
        swiglu_kernel, "swiglu_backward", lambda *inputs: calls.append(inputs) or backward(*inputs)
    )
    ids, targets = fused.tokens_of(model)
    model(ids, targets)[1].backward()
    assert len(calls) == 0
    monkeypatch.setattr(products, "should_join_products", lambda x: True)
    model(ids, targets)[1].backward()
    assert len(calls) == TINY["num_hidden_layers"]
