"""The chunked loss against F.cross_entropy on all logits at once."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from model import build, loss
from model.loss import LinearCrossEntropy, linear_cross_entropy


def inputs(tokens=23, vocabulary=37, width=5, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=generator, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocabulary, width, generator=generator, dtype=dtype, requires_grad=True)
    targets = torch.randint(0, vocabulary, (tokens,), generator=generator)
    targets[[0, 4, 5, 6, 22]] = -1
    return hidden, weight, targets


def whole(hidden, weight, targets, scale):
    return F.cross_entropy(scale * hidden @ weight.T, targets, ignore_index=-1)


@pytest.mark.parametrize("scale", [1.0, 0.25])
# of 8 tokens: the last has 7; of 3: one counts for nothing
@pytest.mark.parametrize("chunk", [1, 3, 8, 22, 23, 100])
def test_loss_and_gradients_equal_those_of_the_whole(chunk, scale):
    hidden, weight, targets = inputs()
    chunked = linear_cross_entropy(hidden, weight, targets, scale, chunk)
    expected = whole(hidden, weight, targets, scale)
    torch.testing.assert_close(chunked, expected, rtol=1e-12, atol=1e-12)
    got, right = (torch.autograd.grad(3 * value, (hidden, weight)) for value in (chunked, expected))
    torch.testing.assert_close(got, right, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        assert not linear_cross_entropy(hidden, weight, targets, scale, chunk).requires_grad
        torch.testing.assert_close(
            linear_cross_entropy(hidden, weight, targets, scale, chunk), expected
        )


def test_gradcheck():
    hidden, weight, targets = inputs(tokens=23, vocabulary=6, width=3)
    targets = targets.clamp_max(5)
    assert torch.autograd.gradcheck(
        lambda h, w: LinearCrossEntropy.apply(h, w, targets, 0.5, 10), (hidden, weight)
    )


@pytest.mark.parametrize("chunk", [4, 100])
def test_no_target_that_counts(chunk):
    hidden, weight, targets = inputs()
    value = linear_cross_entropy(hidden, weight, torch.full_like(targets, -1), 1.0, chunk)
    assert value.isnan()
    assert all((g == 0).all() for g in torch.autograd.grad(value, (hidden, weight)))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiles_in_one_graph(backend):
    hidden, weight, targets = inputs()
    compiled = torch.compile(linear_cross_entropy, fullgraph=True, backend=backend)
    value, expected = compiled(hidden, weight, targets, 0.5, 8), whole(hidden, weight, targets, 0.5)
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)
    got, right = (torch.autograd.grad(v, (hidden, weight)) for v in (value, expected))
    torch.testing.assert_close(got, right, rtol=1e-12, atol=1e-12)


def test_half_precision_is_as_close_as_the_whole():
    """Products in bfloat16, softmax and the weight's gradient in float32, though summed over eight
    chunks.
    """
    hidden, weight, targets = inputs(tokens=512, vocabulary=300, width=64)
    exact = whole(hidden, weight, targets, 0.3)
    right = torch.autograd.grad(exact, (hidden, weight))
    rounded, single = (
        hidden.detach().bfloat16().requires_grad_(),
        weight.detach().float().requires_grad_(),
    )
    with torch.autocast("cpu", torch.bfloat16):
        values = [linear_cross_entropy(rounded, single, targets, 0.3, chunk) for chunk in (512, 64)]
    errors = []
    for value in values:
        assert value.dtype == torch.float32
        got = torch.autograd.grad(value, (rounded, single))
        assert [g.dtype for g in got] == [torch.bfloat16, torch.float32]
        errors.append([((g.double() - r).norm() / r.norm()).item() for g, r in zip(got, right)])
        errors[-1].append(abs(value.item() / exact.item() - 1))
    assert max(errors[0]) < 0.01
    assert all(chunked < 1.1 * once + 1e-5 for once, chunked in zip(*errors))


@pytest.mark.parametrize(
    ("tokens", "cpu", "cuda"), [(16384, 2560, 8192), (8192, 2560, 8192), (300, 2560, 512)]
)
def test_few_chunks_on_a_gpu_and_of_one_size(tokens, cpu, cuda):
    for device, chunk in (("cpu", cpu), ("cuda", cuda)):
        weight = SimpleNamespace(shape=(50304, 768), device=torch.device(device))
        assert loss.default_chunk_size(tokens, weight) == chunk
        assert chunk * 50304 <= loss.MAX_LOGITS[device]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_model_gives_the_same_gradients_by_chunks(monkeypatch, checkpointing):
    """Through the tied weight, which learns from the embedding as well, and muP's factor."""
    size = {
        "vocab_size": 29,
        "block_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "head_dim": 6,
    }
    model = build("DDL-gpt-mha-rope-CC-EC", hidden_size=10, mup=True, **size).double()
    ids, targets = torch.randint(0, 29, (2, 40, 16))  # 640 tokens: chunks of 256
    targets[:, 3] = -1
    results = []
    for logits in (2**27, 29 * 256):
        monkeypatch.setitem(loss.MAX_LOGITS, "cpu", logits)
        model.activation_checkpointing = checkpointing
        model.zero_grad()
        _, value = model(ids, targets)
        value.backward()
        results.append([value.detach(), *(p.grad.clone() for p in model.parameters())])
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-12)
    logits, value = model(ids, targets, return_logits=True)
    assert logits.shape == (40, 16, 29)
    torch.testing.assert_close(value, results[0][0], rtol=1e-9, atol=1e-12)
