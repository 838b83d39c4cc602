"""The algebra of the delta rewrite as properties, in float64, against a dense A = I - beta k k^T
(paper, section 3).
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model import build
from model.block import Past, delay
from model.residual import (
    ChannelConvRead,
    EmbeddingConv,
    TokenConvRead,
    delta_rewrite,
    read_value_channels,
)

TINY = {
    "vocab_size": 7,
    "block_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "head_dim": 4,
}
SIZES = st.tuples(st.integers(1, 9), st.integers(1, 5))  # d, v
SEEDS = st.integers(0, 2**31)
BETAS = st.floats(0, 2)


def case(size, seed):
    """X (d, v), unit k (d,), t (v,)."""
    d, v = size
    generator = torch.Generator().manual_seed(seed)
    X, k, t = (
        torch.randn(*shape, dtype=torch.float64, generator=generator)
        for shape in ((d, v), (d,), (v,))
    )
    return X, k / k.norm(), t


def rewrite(X, k, beta, t, erase=True):
    """`delta_rewrite` of one token, in the paper's (d, v) layout."""
    state, khat = X.T[None, None], (k * len(k) ** 0.5)[None, None]
    gate = torch.as_tensor(beta, dtype=torch.float64).reshape(1, 1, 1)
    return delta_rewrite(state, khat, gate, t[None, None], erase)[0, 0].T


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@given(SIZES, SEEDS, BETAS)
@settings(deadline=None)
def test_equals_the_dense_operator(size, seed, beta):
    X, k, t = case(size, seed)
    A = torch.eye(size[0], dtype=torch.float64) - beta * torch.outer(k, k)
    close(rewrite(X, k, beta, t), A @ X + beta * torch.outer(k, t))
    close(rewrite(X, k, beta, t, erase=False), X + beta * torch.outer(k, t))


def operator(k, beta):
    """The matrix that the code applies: its action, without a write, on the identity's columns."""
    d = len(k)
    return rewrite(torch.eye(d, dtype=torch.float64), k, beta, torch.zeros(d, dtype=torch.float64))


@given(SIZES, SEEDS, BETAS)
@settings(deadline=None)
def test_spectrum_and_determinant(size, seed, beta):
    _, k, _ = case(size, seed)
    A = operator(k, beta)
    close(A, A.T.contiguous())
    expected = torch.tensor([1.0] * (size[0] - 1) + [1 - beta], dtype=torch.float64).sort().values
    close(torch.linalg.eigvalsh(A), expected)
    close(torch.linalg.det(A), torch.tensor(1 - beta, dtype=torch.float64))
    lifted = torch.kron(A, torch.eye(size[1], dtype=torch.float64))
    close(torch.linalg.det(lifted), torch.tensor((1 - beta) ** size[1], dtype=torch.float64))


@given(SIZES, SEEDS)
@settings(deadline=None)
def test_identity_overwrite_and_reflection(size, seed):
    X, k, t = case(size, seed)
    close(rewrite(X, k, 0.0, t), X)
    close(k @ rewrite(X, k, 1.0, t), t)
    H = operator(k, 2.0)
    close(H @ H, torch.eye(size[0], dtype=torch.float64))
    close(H @ k, -k)


@given(SIZES, SEEDS, BETAS)
@settings(deadline=None)
def test_projection_error_and_complement(size, seed, beta):
    X, k, t = case(size, seed)
    after = rewrite(X, k, beta, t)
    close(k @ after, (1 - beta) * (k @ X) + beta * t)
    close(k @ after - t, (1 - beta) * (k @ X - t))
    P = torch.eye(size[0], dtype=torch.float64) - torch.outer(k, k)
    close(P @ after, P @ X)


@given(st.integers(1, 6), SEEDS, BETAS)
@settings(deadline=None)
def test_a_diagonal_state_couples(d, seed, beta):
    """Section 3.4: entry (i, j) becomes -beta s_j k_i k_j, (i, i) s_i (1 - beta k_i^2); the write
    adds beta k_i t_j.
    """
    X, k, t = case((d, d), seed)
    s = X.diagonal()
    after, written = (rewrite(s.diag(), k, beta, value) for value in (torch.zeros_like(t), t))
    for i in range(d):
        for j in range(d):
            shortcut = s[i] * (1 - beta * k[i] ** 2) if i == j else -beta * s[j] * k[i] * k[j]
            close(after[i, j], shortcut)
            close(written[i, j], shortcut + beta * k[i] * t[j])


@given(SIZES, SEEDS, BETAS, st.integers(0, 8))
@settings(deadline=None)
def test_a_one_hot_direction_overwrites_one_feature(size, seed, beta, feature):
    """Section 3.5, k = e_i: row i goes from X_i to (1 - beta) X_i + beta t, and no other row
    changes by a bit.
    """
    X, _, t = case(size, seed)
    i, others = feature % size[0], torch.arange(size[0]) != feature % size[0]
    one_hot = torch.eye(size[0], dtype=torch.float64)[i]
    after = rewrite(X, one_hot, beta, t)
    assert torch.equal(after[others], X[others])
    close(after[i], (1 - beta) * X[i] + beta * t)
    close(rewrite(X, one_hot, 1.0, t)[i], t)
    close(operator(one_hot, beta), torch.diag(1 - beta * one_hot))  # a diagonal state stays one


@given(SIZES, SEEDS, BETAS)
@settings(deadline=None)
def test_commutes_with_rotations_of_the_features(size, seed, beta):
    X, k, t = case(size, seed)
    Q = torch.linalg.qr(case((size[0], size[0]), seed + 1)[0]).Q
    close(rewrite(Q @ X, Q @ k, beta, t), Q @ rewrite(X, k, beta, t))


@given(SIZES, SEEDS, BETAS)
@settings(deadline=None)
def test_columns_are_independent(size, seed, beta):
    X, k, t = case(size, seed)
    columns = [rewrite(X[:, [j]], k, beta, t[[j]]) for j in range(size[1])]
    close(rewrite(X, k, beta, t), torch.cat(columns, dim=1))


@given(SIZES, SEEDS, st.integers(1, 8))
@settings(deadline=None, max_examples=40)
def test_depth_as_time_is_the_delta_rule(size, seed, steps):
    """S_t = S_{t-1} - beta_t k_t (k_t^T S_{t-1}) + beta_t k_t v_t^T, entry by entry (DeltaNet's
    recurrence).
    """
    d, v = size
    generator = torch.Generator().manual_seed(seed)
    S = [[0.0] * v for _ in range(d)]
    X = torch.zeros(d, v, dtype=torch.float64)
    for _ in range(steps):
        k, t = (torch.randn(n, dtype=torch.float64, generator=generator) for n in (d, v))
        k, beta = k / k.norm(), torch.rand((), dtype=torch.float64, generator=generator).item() * 2
        X = rewrite(X, k, beta, t)
        read = [sum(k[i].item() * S[i][j] for i in range(d)) for j in range(v)]
        S = [
            [S[i][j] + beta * k[i].item() * (t[j].item() - read[j]) for j in range(v)]
            for i in range(d)
        ]
    close(X, torch.tensor(S, dtype=torch.float64))


@given(st.floats(1e-12, 1e3), SEEDS)
@settings(deadline=None)
def test_guarded_direction(scale, seed):
    """k = k~ / sqrt(|k~|^2 + eps^2), for any size of k~; zero gives zero."""
    rewrite_module = (
        build("DDL-vdim1-gpt-mha-rope", hidden_size=6, ddl_k_eps=1e-5, **TINY)
        .transformer.h[0]
        .ddl_mlp
    )
    source = scale * torch.randn(
        6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )
    k = rewrite_module.normalize_k(source) / 6**0.5
    close(k, source / (source.square().sum() + 1e-10).sqrt())
    assert rewrite_module.normalize_k(torch.zeros(6, dtype=torch.float64)).abs().max() == 0


@given(st.floats(1e-12, 1e3), SEEDS)
@settings(deadline=None)
def test_shifted_direction(scale, seed):
    """k = k~ / (|k~| + eps), shorter than the guarded one; zero gives zero, and a finite
    gradient.
    """
    build_one = {"hidden_size": 6, "ddl_k_eps": 1e-5, "ddl_k_norm": "shifted", **TINY}
    write = build("DDL-vdim1-gpt-mha-rope", **build_one).transformer.h[0].ddl_mlp
    source = scale * torch.randn(
        6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )
    close(write.normalize_k(source) / 6**0.5, source / (source.square().sum().sqrt() + 1e-5))
    zero = torch.zeros(6, dtype=torch.float64, requires_grad=True)
    k = write.normalize_k(zero) / 6**0.5
    assert k.abs().max() == 0
    k.sum().backward()
    close(zero.grad, torch.full((6,), 1e5, dtype=torch.float64))


def config(stem, **keys):
    model = build(stem, hidden_size=3, **TINY, **keys)
    return model.config


def test_gradcheck_of_the_rewrite():
    shapes = (2, 2, 3, 4), (2, 2, 4), (2, 2, 1), (2, 2, 3)
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    for erase in (True, False):
        assert torch.autograd.gradcheck(lambda *x, e=erase: delta_rewrite(*x, erase=e), inputs)


@pytest.mark.parametrize(
    ("module", "stem", "shape"),
    [
        (TokenConvRead, "DDL-gpt-mha-rope", (2, 5, 4, 3)),
        (ChannelConvRead, "DDL-gpt-mha-rope-CC", (2, 5, 4, 3)),
        (EmbeddingConv, "DDL-gpt-mha-rope-EC", (2, 5, 3)),
    ],
)
def test_gradcheck_of_reads_and_expander(module, stem, shape):
    part = module(config(stem)).double()
    parameters = [
        torch.randn(p.shape, dtype=torch.float64, requires_grad=True) for p in part.parameters()
    ]
    names = [name for name, _ in part.named_parameters()]
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)

    def call(x, *values):
        return torch.func.functional_call(part, dict(zip(names, values)), (x,))

    assert torch.autograd.gradcheck(call, (x, *parameters))


@given(st.integers(0, 6), st.lists(st.integers(1, 4), min_size=1, max_size=5))
@settings(deadline=None)
def test_delay_by_chunks_is_delay_of_the_whole(tokens, chunks):
    x = torch.arange(1.0, sum(chunks) + 1)[None, :, None]
    expected = torch.cat((torch.zeros(tokens), x.flatten()))[: sum(chunks)]
    cache: dict = {}
    parts = [delay(part, tokens, Past(cache, "slot")) for part in x.split(chunks, dim=1)]
    assert torch.cat(parts, dim=1).flatten().tolist() == expected.tolist()
    assert delay(x, tokens).flatten().tolist() == expected.tolist()


def test_read_of_one_tap_is_a_weighted_sum():
    state, weights = torch.randn(2, 3, 4, 5).double(), torch.randn(1, 4, 5).double()
    close(read_value_channels(state, weights), torch.einsum("btjd,jd->btd", state, weights[0]))
