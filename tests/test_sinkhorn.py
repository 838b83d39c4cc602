"""Test liger-kernel's kernels of Sinkhorn-Knopp, which kernels=on uses for mHC."""

import naive_streams
import pytest
import torch

from model.kernels.sinkhorn import fused_sinkhorn_knopp


# helpers.py turns the interpreter on where there is no GPU; on one, kernels may round the factors of
# a product to 10 bits
@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run under Triton's interpreter")
@pytest.mark.parametrize(
    ("n", "iterations", "num_tokens"),
    [(2, 5, 2), (4, 1, 2), (4, 3, 2), (8, 2, 2), (4, 2, 9)],  # 18 rows are padded to 20
)
def test_sinkhorn_knopp_by_ligers_kernels_equals_the_naive_loops(n, iterations, num_tokens):
    """Compare value and gradient, from logits far apart."""
    logits = (3 * torch.randn(2, num_tokens, n, n)).requires_grad_()
    float64_logits = logits.detach().double().requires_grad_()
    expected = torch.stack(
        [
            naive_streams.sinkhorn_knopp(matrix, iterations)
            for matrix in float64_logits.flatten(0, 1)
        ]
    ).view_as(float64_logits)
    mix = fused_sinkhorn_knopp(logits, iterations, 1e-6)
    torch.testing.assert_close(mix.double(), expected, rtol=1e-5, atol=1e-6)
    weights = torch.randn(2, num_tokens, n, n)
    (mix * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(logits.grad.double(), float64_logits.grad, rtol=1e-5, atol=1e-5)
