"""The direction of the delta rewrite at its limits, and the shift of tokens, in float64.

test_model.py compares the rewrite itself with a dense A = I - beta k k^T.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import TINY

from model import build
from model.block import Past, delay
from model.ddl import normalize_direction


def normalize_k(source: torch.Tensor, norm: str, eps: float = 1e-5) -> torch.Tensor:
    """Return the direction k of a source k~."""
    with torch.device("meta"):
        model = build("DDL-vdim1-gpt-mha-rope", **TINY, ddl_k_eps=eps, ddl_k_norm=norm)
    return normalize_direction(source, model.config) / len(source) ** 0.5


@pytest.mark.parametrize("scale", [1e-12, 1e-5, 1.0, 1e3])
def test_a_direction_of_any_size_has_its_guard(scale):
    source = scale * torch.randn(6, dtype=torch.float64)
    length = source.square().sum().sqrt()
    guarded = source / (length.square() + 1e-10).sqrt()
    shifted = source / (length + 1e-5)
    torch.testing.assert_close(normalize_k(source, "guarded"), guarded, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(normalize_k(source, "shifted"), shifted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("eps", [1e-5, 0.0])
@pytest.mark.parametrize("norm", ["guarded", "shifted"])
def test_a_direction_of_zero_is_zero_and_has_a_finite_gradient(norm, eps):
    zero = torch.zeros(6, dtype=torch.float64, requires_grad=True)
    k = normalize_k(zero, norm, eps)
    assert k.abs().max() == 0
    (gradient,) = torch.autograd.grad(k.sum(), zero)
    assert gradient.isfinite().all()


@given(st.integers(0, 6), st.lists(st.integers(1, 4), min_size=1, max_size=5))
@settings(deadline=None)
def test_delay_of_chunks_is_delay_of_the_sequence(tokens, chunks):
    x = torch.arange(1.0, sum(chunks) + 1)[None, :, None]
    expected = torch.cat((torch.zeros(tokens), x.flatten()))[: sum(chunks)]
    cache: dict = {}
    parts = [delay(part, tokens, Past(cache, "slot")) for part in x.split(chunks, dim=1)]
    assert torch.cat(parts, dim=1).flatten().tolist() == expected.tolist()
    assert delay(x, tokens).flatten().tolist() == expected.tolist()
