"""The chunked loss equals F.cross_entropy on all logits at once."""

from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from models import TINY, build_tiny

from model import loss
from model.loss import linear_cross_entropy


def make_inputs(
    num_tokens: int = 23, vocab_size: int = 37, width: int = 5
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return random hidden states, weights of the output layer, and targets, in float64."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_tokens, width, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocab_size, width, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, vocab_size, (num_tokens,), generator=generator)
    targets[[0, 4, 5, 6, 22]] = -1
    return hidden.requires_grad_(), weight.requires_grad_(), targets


def compute_reference_loss(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, scale: float
) -> torch.Tensor:
    """Return the cross entropy of all tokens, computed on all logits at once."""
    return F.cross_entropy(scale * hidden @ weight.T, targets, ignore_index=-1)


# of chunks of 8 tokens, the last has 7; of chunks of 3, one has no targets
CHUNK_SIZES = [1, 3, 8, 22, 23, 100]


@pytest.mark.parametrize("scale", [1.0, 0.25])
@pytest.mark.parametrize("chunk_size", CHUNK_SIZES)
def test_loss_and_gradients_equal_cross_entropy_on_all_logits(chunk_size, scale):
    hidden, weight, targets = make_inputs()
    chunked = linear_cross_entropy(hidden, weight, targets, scale, chunk_size)
    expected = compute_reference_loss(hidden, weight, targets, scale)
    torch.testing.assert_close(chunked, expected, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        without_gradients = linear_cross_entropy(hidden, weight, targets, scale, chunk_size)
    torch.testing.assert_close(without_gradients, expected, rtol=1e-12, atol=1e-12)
    gradients = torch.autograd.grad(3 * chunked, (hidden, weight))
    expected_gradients = torch.autograd.grad(3 * expected, (hidden, weight))
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        (torch.float16, 2e-2),
        (torch.bfloat16, 2e-2),
        (torch.float32, 1e-5),
        (torch.float64, 1e-12),
    ],
)
def test_large_logits_and_tokens_without_targets(dtype, tolerance):
    """Logits of up to 700 overflow without their maximum; the factor 0 has the logarithm -inf."""
    hidden, weight, targets = make_inputs()
    hidden = (40 * hidden).detach().to(dtype).requires_grad_()
    weight = weight.detach().to(dtype).requires_grad_()
    exact_inputs = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    expected = compute_reference_loss(*exact_inputs, targets, 1.0)
    expected_gradients = torch.autograd.grad(expected, exact_inputs)
    value = linear_cross_entropy(hidden, weight, targets, chunk_size=8)
    gradients = torch.autograd.grad(value, (hidden, weight))
    assert value.item() == pytest.approx(expected.item(), rel=tolerance)
    for gradient, expected_gradient in zip(gradients, expected_gradients):
        error = (gradient.double() - expected_gradient).norm()
        assert error < tolerance * expected_gradient.norm()
    assert (gradients[0][targets == -1] == 0).all()


@pytest.mark.parametrize("chunk_size", [4, 100])
def test_the_loss_without_targets_is_nan_and_its_gradients_are_zero(chunk_size):
    hidden, weight, targets = make_inputs()
    value = linear_cross_entropy(hidden, weight, torch.full_like(targets, -1), 1.0, chunk_size)
    assert value.isnan()
    gradients = torch.autograd.grad(value, (hidden, weight))
    assert all((gradient == 0).all() for gradient in gradients)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiles_in_one_graph(backend):
    hidden, weight, targets = make_inputs()
    compiled = torch.compile(linear_cross_entropy, fullgraph=True, backend=backend)
    chunked = compiled(hidden, weight, targets, 0.5, 8)
    expected = compute_reference_loss(hidden, weight, targets, 0.5)
    torch.testing.assert_close(chunked, expected, rtol=1e-12, atol=1e-12)
    gradients = torch.autograd.grad(chunked, (hidden, weight))
    expected_gradients = torch.autograd.grad(expected, (hidden, weight))
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-12, atol=1e-12)


# ---- half precision ----


class AutocastErrors(NamedTuple):
    """Relative errors of a loss under bfloat16 autocast, and of its gradients."""

    loss: float
    hidden_grad: float
    weight_grad: float


def measure_autocast_errors(chunk_size: int) -> AutocastErrors:
    """Compare 512 tokens in chunks with the exact loss, and check the dtypes."""
    hidden, weight, targets = make_inputs(num_tokens=512, vocab_size=300, width=64)
    exact = compute_reference_loss(hidden, weight, targets, 0.3)
    exact_gradients = torch.autograd.grad(exact, (hidden, weight))

    bfloat16_hidden = hidden.detach().bfloat16().requires_grad_()
    float32_weight = weight.detach().float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        value = linear_cross_entropy(bfloat16_hidden, float32_weight, targets, 0.3, chunk_size)
    gradients = torch.autograd.grad(value, (bfloat16_hidden, float32_weight))
    assert value.dtype == torch.float32
    assert [gradient.dtype for gradient in gradients] == [torch.bfloat16, torch.float32]

    hidden_error, weight_error = (
        ((gradient.double() - exact_gradient).norm() / exact_gradient.norm()).item()
        for gradient, exact_gradient in zip(gradients, exact_gradients)
    )
    return AutocastErrors(abs(value.item() / exact.item() - 1), hidden_error, weight_error)


def test_chunks_in_half_precision_are_as_close_as_one():
    """Softmax and the sum of the weight's gradients over chunks are in float32."""
    one = measure_autocast_errors(chunk_size=512)
    eight = measure_autocast_errors(chunk_size=64)
    assert max(one) < 0.01
    for error_of_eight, error_of_one in zip(eight, one):
        assert error_of_eight < 1.1 * error_of_one + 1e-5


def test_small_gradients_in_float16_are_not_rounded_to_zero(monkeypatch):
    """Each of 2^14 tokens has a gradient of 6e-5 times p, and the loss scale multiplies only the sum."""
    hidden, weight, targets = make_inputs(num_tokens=2**14, vocab_size=300, width=64)
    hidden = hidden.detach().half().requires_grad_()
    exact = compute_reference_loss(hidden.double(), weight, targets, 0.3)
    exact_gradients = torch.autograd.grad(exact, (hidden, weight))
    float32_weight = weight.detach().float().requires_grad_()
    with torch.autocast("cpu", torch.float16):
        value = linear_cross_entropy(hidden, float32_weight, targets, 0.3, chunk_size=256)
    gradients = torch.autograd.grad(2.0**16 * value, (hidden, float32_weight))
    for gradient, exact_gradient in zip(gradients, exact_gradients):
        error = gradient.double() / 2**16 - exact_gradient
        assert error.norm() < 0.01 * exact_gradient.norm()


# ---- sizes of chunks ----


@pytest.mark.parametrize(
    ("num_tokens", "device", "chunk_size"),
    [
        (16384, "cpu", 2560),
        (8192, "cpu", 2560),
        (300, "cpu", 2560),
        (16384, "cuda", 8192),
        (8192, "cuda", 8192),
        (300, "cuda", 512),
    ],
)
def test_chunks_have_few_sizes_and_fit_the_memory(num_tokens, device, chunk_size):
    # stands for a tensor on a device that this machine may lack
    weight = SimpleNamespace(shape=(50304, 768), device=torch.device(device))
    assert loss.default_chunk_size(num_tokens, weight) == chunk_size
    assert chunk_size * 50304 <= loss.MAX_LOGITS[device]


# ---- the model ----


def test_the_model_gives_the_same_loss_and_gradients_by_chunks(monkeypatch):
    """The weight of the output layer is tied to the embedding and scaled by muP."""
    model = build_tiny("DDL-gpt-mha-rope-CC-EC", mup=True)
    ids, targets = torch.randint(0, TINY["vocab_size"], (2, 40, TINY["block_size"]))
    targets[:, 3] = -1

    def compute_loss_and_gradients(max_logits: int, **options) -> list[torch.Tensor]:
        monkeypatch.setitem(loss.MAX_LOGITS, "cpu", max_logits)
        _, value = model(ids, targets, **options)
        return [value.detach(), *torch.autograd.grad(value, list(model.parameters()))]

    expected = compute_loss_and_gradients(2**27, return_logits=True)
    for max_logits in (2**27, TINY["vocab_size"] * 256):
        in_chunks = compute_loss_and_gradients(max_logits)
        torch.testing.assert_close(in_chunks, expected, rtol=1e-9, atol=1e-12)
