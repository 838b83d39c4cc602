"""Properties of the delta rewrite, in float64, against a dense A = I - beta k k^T (section 3).

X (d, v) is the state of one token, k (d,) a unit vector, and t (v,) the value.
"""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model import build
from model.block import Past, delay
from model.ddl import (
    delta_rewrite,
    normalize_direction,
    read_value_channels,
)

TINY = {
    "vocab_size": 7,
    "block_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "head_dim": 4,
}
SIZES = st.tuples(st.integers(1, 9), st.integers(1, 5))  # (d, v)
SEEDS = st.integers(0, 2**31)
BETAS = st.floats(0, 2)


def draw_inputs(size, seed):
    """Return random X, k and t."""
    d, v = size
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(d, v, dtype=torch.float64, generator=generator)
    k = torch.randn(d, dtype=torch.float64, generator=generator)
    t = torch.randn(v, dtype=torch.float64, generator=generator)
    return X, k / k.norm(), t


def rewrite(X, k, beta, t, erase=True):
    """Apply `delta_rewrite` to one token, in the paper's (d, v) layout."""
    state = X.T[None, None]
    khat = (k * len(k) ** 0.5)[None, None]
    gate = torch.as_tensor(beta, dtype=torch.float64).reshape(1, 1, 1)
    return delta_rewrite(state, khat, gate, t[None, None], erase)[0, 0].T


def assert_close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@given(SIZES, SEEDS, BETAS)
@settings(deadline=None)
def test_equals_the_dense_operator(size, seed, beta):
    X, k, t = draw_inputs(size, seed)
    A = torch.eye(size[0], dtype=torch.float64) - beta * torch.outer(k, k)
    assert_close(rewrite(X, k, beta, t), A @ X + beta * torch.outer(k, t))
    assert_close(rewrite(X, k, beta, t, erase=False), X + beta * torch.outer(k, t))


def operator(k, beta):
    """Return the matrix that the code applies to a state, by rewriting the identity without a write."""
    d = len(k)
    return rewrite(torch.eye(d, dtype=torch.float64), k, beta, torch.zeros(d, dtype=torch.float64))


@given(SIZES, SEEDS, BETAS)
@settings(deadline=None)
def test_spectrum_and_determinant(size, seed, beta):
    _, k, _ = draw_inputs(size, seed)
    A = operator(k, beta)
    assert_close(A, A.T.contiguous())
    expected = torch.tensor([1.0] * (size[0] - 1) + [1 - beta], dtype=torch.float64).sort().values
    assert_close(torch.linalg.eigvalsh(A), expected)
    assert_close(torch.linalg.det(A), torch.tensor(1 - beta, dtype=torch.float64))
    lifted = torch.kron(A, torch.eye(size[1], dtype=torch.float64))
    assert_close(torch.linalg.det(lifted), torch.tensor((1 - beta) ** size[1], dtype=torch.float64))


@given(SIZES, SEEDS, BETAS, st.integers(0, 8))
@settings(deadline=None)
def test_a_one_hot_direction_overwrites_one_feature(size, seed, beta, feature):
    """With k = e_i, row i becomes (1 - beta) X_i + beta t (section 3.5).

    No other row changes by a bit.
    """
    X, _, t = draw_inputs(size, seed)
    i = feature % size[0]
    others = torch.arange(size[0]) != i
    one_hot = torch.eye(size[0], dtype=torch.float64)[i]
    rewritten = rewrite(X, one_hot, beta, t)
    assert torch.equal(rewritten[others], X[others])
    assert_close(rewritten[i], (1 - beta) * X[i] + beta * t)
    assert_close(rewrite(X, one_hot, 1.0, t)[i], t)
    assert_close(
        operator(one_hot, beta), torch.diag(1 - beta * one_hot)
    )  # a diagonal state stays one


@given(SIZES, SEEDS, st.integers(1, 8))
@settings(deadline=None, max_examples=40)
def test_depth_as_time_is_the_delta_rule(size, seed, steps):
    """Several rewrites are DeltaNet's recurrence, which is computed entry by entry here.

    S_t = S_{t-1} - beta_t k_t (k_t^T S_{t-1}) + beta_t k_t v_t^T
    """
    d, v = size
    generator = torch.Generator().manual_seed(seed)
    S = [[0.0] * v for _ in range(d)]
    X = torch.zeros(d, v, dtype=torch.float64)
    for _ in range(steps):
        k = torch.randn(d, dtype=torch.float64, generator=generator)
        t = torch.randn(v, dtype=torch.float64, generator=generator)
        k = k / k.norm()
        beta = torch.rand((), dtype=torch.float64, generator=generator).item() * 2
        X = rewrite(X, k, beta, t)
        read = [sum(k[i].item() * S[i][j] for i in range(d)) for j in range(v)]
        S = [
            [S[i][j] + beta * k[i].item() * (t[j].item() - read[j]) for j in range(v)]
            for i in range(d)
        ]
    assert_close(X, torch.tensor(S, dtype=torch.float64))


@functools.cache
def build_config(norm):
    """Return the config of a model with directions (6,) and eps = 1e-5."""
    model = build("DDL-vdim1-gpt-mha-rope", hidden_size=6, ddl_k_eps=1e-5, ddl_k_norm=norm, **TINY)
    return model.config


def normalize_k(source, norm):
    """Return the direction k of source k~ (6,)."""
    return normalize_direction(source, build_config(norm)) / 6**0.5


def draw_source(scale, seed):
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(6, dtype=torch.float64, generator=generator)


@given(st.floats(1e-12, 1e3), SEEDS)
@settings(deadline=None)
def test_guarded_direction(scale, seed):
    """k = k~ / sqrt(|k~|^2 + eps^2), for any size of k~."""
    source = draw_source(scale, seed)
    k = normalize_k(source, "guarded")
    assert_close(k, source / (source.square().sum() + 1e-10).sqrt())


@given(st.floats(1e-12, 1e3), SEEDS)
@settings(deadline=None)
def test_shifted_direction(scale, seed):
    """k = k~ / (|k~| + eps), for any size of k~."""
    source = draw_source(scale, seed)
    k = normalize_k(source, "shifted")
    assert_close(k, source / (source.square().sum().sqrt() + 1e-5))


@pytest.mark.parametrize("norm", ["guarded", "shifted"])
def test_direction_of_zero_is_zero(norm):
    assert normalize_k(torch.zeros(6, dtype=torch.float64), norm).abs().max() == 0


def test_shifted_direction_has_a_finite_gradient_at_zero():
    zero = torch.zeros(6, dtype=torch.float64, requires_grad=True)
    normalize_k(zero, "shifted").sum().backward()
    assert_close(zero.grad, torch.full((6,), 1e5, dtype=torch.float64))


@given(st.integers(0, 6), st.lists(st.integers(1, 4), min_size=1, max_size=5))
@settings(deadline=None)
def test_delay_of_chunks_is_delay_of_the_sequence(tokens, chunks):
    x = torch.arange(1.0, sum(chunks) + 1)[None, :, None]
    expected = torch.cat((torch.zeros(tokens), x.flatten()))[: sum(chunks)]
    cache: dict = {}
    parts = [delay(part, tokens, Past(cache, "slot")) for part in x.split(chunks, dim=1)]
    assert torch.cat(parts, dim=1).flatten().tolist() == expected.tolist()
    assert delay(x, tokens).flatten().tolist() == expected.tolist()


def test_read_of_one_tap_is_a_weighted_sum():
    state = torch.randn(2, 3, 4, 5).double()
    weights = torch.randn(1, 4, 5).double()
    assert_close(
        read_value_channels(state, weights), torch.einsum("btjd,jd->btd", state, weights[0])
    )
