"""Shortcuts end to end: against dense products of a second implementation, numpy's spectra, and autograd."""

import dataclasses
import json

import naive
import naive_streams
import numpy as np
import pytest
import torch
from helpers import EXAMPLES, SMALL, one_line_error, small_run
from in_process import call

from data import shards
from model import MODEL_NAMES, build
from model.block import Stream
from model.causality import move_parameters
from research.analysis import common, products, spectrum
from research.analysis.products import Diagonal, LowRank, Mix

T = 5
DELTAS = [("DDL-vdim1-gpt-mha-rope", {}), ("DDL-gpt-mha-rope", {}), ("DDL-gpt-mha-rope-CC-EC", {})]
DELTAS += [
    ("DDL-gpt-mha-rope-CC", {"ddl_map": "v", "ddl_k_input": "mean", "ddl_beta_input": "flat"})
]
DELTAS += [
    ("DDL-gpt-mha-rope", {"ddl_k_norm": "shifted", "ddl_k_eps": 0.1, "hidden_size": 6})
]  # too narrow: dense


def double(stem, **keys):
    """A model of float64 whose parameters are off their initial values."""
    torch.manual_seed(0)
    return move_parameters(build(stem, **{**SMALL, **keys}).double())


def tokens():
    return torch.randint(0, SMALL["vocab_size"], (1, T), generator=torch.Generator().manual_seed(1))


def weights_of(model) -> tuple[dict, dict]:
    weights = {name: p.detach() for name, p in model.named_parameters()}
    return {**weights, "lm_head.weight": weights["transformer.wte.weight"]}, dataclasses.asdict(
        model.config
    )


def dense_delta(stem, model, ids):
    """[token][site] -> A and beta, from the states of naive.py's loops."""
    weights, cfg = weights_of(model)
    found = []

    def rewrite(w, X, h, x_in, c, cfg):
        d = len(X)
        k, beta = direction_and_gate(w, X, h, x_in, c, cfg)
        found.append((np.eye(d) - beta * np.outer(k, k), beta))
        return naive.rewrite(w, X, h, x_in, c, cfg)

    naive.logits(stem, weights, cfg, ids[0].tolist(), rewrite)
    sites = [found[i : i + T] for i in range(0, len(found), T)]
    return [[site[t] for site in sites] for t in range(T)]


def direction_and_gate(w, X, h, x_in, c, cfg):
    """k and beta of one token (eqs. 3, 8), by hand."""
    if cfg["ddl_map"] == "k":
        source = h
    else:
        hidden = w["k_in.weight"] @ naive.pool(X, cfg["ddl_k_input"])
        source = w["k_out.weight"] @ (hidden * naive.sigmoid(hidden))
    squared = float(source @ source)
    eps = cfg["ddl_k_eps"]
    k = source.numpy() / (
        np.sqrt(squared + eps**2) if cfg["ddl_k_norm"] == "guarded" else np.sqrt(squared) + eps
    )
    seen = c if cfg["ddl_beta_input"] == "context" else naive.pool(X, cfg["ddl_beta_input"])
    return k, float(2 * naive.sigmoid(w["beta.weight"][0] @ seen + w["beta.bias"][0]))


def recorded(model, ids) -> products.Spectra:
    return products.compute_spectra(spectrum.record_maps(model, ids, torch.arange(ids.shape[1])))


def compare(found: products.Spectra, matrices) -> None:
    """found against numpy's own spectra of the dense products; matrices[token][site]."""
    for t, sites in enumerate(matrices):
        product = np.eye(len(sites[0]))
        for s, A in enumerate(sites):
            product = A @ product
            values = np.linalg.svd(product, compute_uv=False)
            moved = np.linalg.matrix_rank(product - np.eye(len(A)), tol=1e-6)
            own = np.linalg.eigvals(A)
            expected = {
                "sign": np.sign(np.linalg.det(product)),
                "log_det": np.log(abs(np.linalg.det(product))),
                "largest": values[0],
                "smallest": values[-1],
                "untouched": 1 - moved / len(A),
                "energy": (product**2).sum() / len(A),
                "reflections": ((own.real < 0) & (abs(own.imag) < 1e-12)).sum(),
            }
            for name, value in expected.items():
                assert getattr(found, name)[s, t].item() == pytest.approx(
                    value, rel=1e-6, abs=1e-9
                ), (name, s, t)
        check_eigenvalues(found.eigenvalues[t].numpy(), np.linalg.eigvals(product))


def check_eigenvalues(found, expected) -> None:
    """The same, in some order, but for ones that `found` leaves out."""
    left = list(expected)
    for value in found:
        nearest = min(range(len(left)), key=lambda i: abs(left[i] - value))
        assert abs(left.pop(nearest) - value) < 1e-6
    assert left == pytest.approx(np.ones(len(left)), abs=1e-6)


@pytest.mark.parametrize(("stem", "keys"), DELTAS, ids=str)
def test_of_delta_rewrites_as_dense_products(stem, keys):
    model, ids = double(stem, **keys), tokens()
    found = dense_delta(stem, model, ids)
    spectra = recorded(model, ids)
    compare(spectra, [[A for A, _ in sites] for sites in found])
    betas = np.array([[beta for _, beta in sites] for sites in found])
    if "ddl_k_eps" not in keys:  # directions of unit length
        assert spectra.reflections.numpy().T.tolist() == (betas > 1).tolist()
        assert 0 < (betas > 1).mean() < 1
        assert np.log(abs(1 - betas)).sum(1) == pytest.approx(spectra.log_det[-1].numpy(), rel=1e-6)
        assert np.sign(1 - betas).prod(1).tolist() == spectra.sign[-1].tolist()


class Kept(Stream):
    """Keeps what every write was given."""

    def __init__(self):
        self.calls = []

    def write(self, site, state, h, c, x_in, cache):
        self.calls.append((site.write, h, x_in, c))
        self.first = state if len(self.calls) == 1 else self.first
        return super().write(site, state, h, c, x_in, cache)


@pytest.mark.parametrize(
    "stem", ["DDL-gpt-mha-rope", "HC-gpt-mha-rope", "mHC-gpt-mha-rope", "LAuReL-gpt-mha-rope"]
)
def test_is_the_jacobian_of_the_state_path(stem):
    """d state_S / d state_0 of one token, everything else that the writes are given held fast."""
    model, ids, kept = double(stem), tokens(), Kept()
    with torch.no_grad(), model.through(kept):
        model(ids)

    def path(state):
        for write, *given in kept.calls:
            state = write(state, *given)
        return state

    jacobian = torch.autograd.functional.jacobian(path, kept.first)[0, -1][..., 0, -1, :, :]
    if stem.startswith("DDL"):
        matrix = jacobian[0, :, 0]  # the first column's features
    elif stem.startswith("LAuReL"):
        matrix = torch.autograd.functional.jacobian(path, kept.first)[0, -1, :, 0, -1]
    else:
        matrix = jacobian[:, 0, :, 0]  # the streams' first feature
    found = recorded(model, ids)
    values = torch.linalg.svdvals(matrix)
    at = min(T - 1, found.log_det.shape[1] - 1)
    assert found.log_det[-1, at].item() == pytest.approx(
        torch.linalg.slogdet(matrix).logabsdet.item(), rel=1e-6
    )
    assert found.largest[-1, at].item() == pytest.approx(values[0].item(), rel=1e-6)
    assert found.smallest[-1, at].item() == pytest.approx(values[-1].item(), rel=1e-6)
    check_eigenvalues(found.eigenvalues[at].numpy(), torch.linalg.eigvals(matrix).numpy())


def dense_streams(model, ids, stem):
    """[token][site] -> the matrix on the streams, from naive_streams.py's loops."""
    weights, cfg = weights_of(model)
    found, of = [], "hyper_weights" if stem.startswith("HC") else "manifold_weights"
    original = getattr(naive_streams, of)

    def kept(w, H, cfg):
        result = original(w, H, cfg)
        found.append((result[2].T if of == "hyper_weights" else result[2]).numpy())
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(naive_streams, of, kept)
        naive_streams.logits(stem, weights, cfg, ids[0].tolist())
    sites = [found[i : i + T] for i in range(0, len(found), T)]
    return [[site[t] for site in sites] for t in range(T)]


@pytest.mark.parametrize("stem", ["HC-gpt-mha-rope", "mHC-gpt-mha-rope"])
def test_of_streams_as_dense_products(stem):
    model, ids = double(stem), tokens()
    compare(recorded(model, ids), dense_streams(model, ids, stem))


def test_static_mixing_is_measured_once():
    model, ids = double("HC-gpt-mha-rope", hc_dynamic=False), tokens()
    found = recorded(model, ids)
    assert found.log_det.shape == (4, 1)
    compare(found, dense_streams(model, ids, "HC-gpt-mha-rope")[:1])


def test_of_mgt_feature_by_feature():
    model, ids = double("MGT-gpt-mha", mgt_alpha_init=0.8), tokens()
    weights, cfg = weights_of(model)
    found, original = [], naive_streams.mgt_write

    def kept(w, X, h, norm, cfg):
        found.append(np.diag((1 - naive_streams.mgt_beta(w, X, cfg) * w["alpha"]).numpy()))
        return original(w, X, h, norm, cfg)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(naive_streams, "mgt_write", kept)
        naive_streams.logits("MGT-gpt-mha", weights, cfg, ids[0].tolist())
    sites = [found[i : i + T] for i in range(0, len(found), T)]
    compare(recorded(model, ids), [[site[t] for site in sites] for t in range(T)])


def test_of_a_chain_of_reflections_and_projections():
    """Gates of 0, 1 and 2 exactly, directions that repeat: ranks, a determinant of 0, eigenvalues of -1."""
    d, basis = 12, torch.eye(12, dtype=torch.float64)
    chains = {
        "reflect": ((2.0, 0), (2.0, 1)),
        "twice": ((2.0, 0), (2.0, 0)),
        "erase": ((1.0, 0), (0.0, 1)),
    }
    expected = {  # eigenvalues beside ones, sign, untouched, energy
        "reflect": ([-1, -1], 1, 10 / 12, 1.0),
        "twice": ([1, 1], 1, 1.0, 1.0),
        "erase": ([0, 1], 0, 11 / 12, 11 / 12),
    }
    for name, chain in chains.items():
        maps = [LowRank(-beta * basis[None, [i]], basis[None, [i]]) for beta, i in chain]
        found = products.compute_spectra(maps)
        values, sign, untouched, energy = expected[name]
        assert sorted(found.eigenvalues[0].real.tolist()) == pytest.approx(
            sorted(values), abs=1e-12
        )
        last = {key: getattr(found, key)[-1, 0].item() for key in products.BY_SITE}
        assert last["sign"] == sign
        assert last["untouched"] == pytest.approx(untouched)
        assert last["energy"] == pytest.approx(energy)
        assert last["largest"] == pytest.approx(1.0)
        assert last["smallest"] == pytest.approx(0.0 if name == "erase" else 1.0, abs=1e-12)
        assert found.size == d


def test_maps_of_several_kinds_have_no_product():
    ones = torch.ones(1, 4, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"several kinds \(Diagonal, Mix\)"):
        products.compute_spectra([Diagonal(ones), Mix(torch.eye(4)[None].double())])
    with pytest.raises(ValueError, match="diverged"):
        products.compute_spectra([Diagonal(ones * float("nan"))])


@pytest.mark.parametrize("stem", [*MODEL_NAMES, *(path.stem for path in EXAMPLES)])
def test_every_stream_has_a_spectrum_or_says_why_not(stem, corpus, example_streams):
    model = build(stem, **SMALL)
    batches = common.open_validation_batches(model, shards.open_corpus(str(corpus)))
    why = spectrum.explain_missing_shortcut(model)
    without = "AttnRes DenseFormer alternating momentum gated by-position earlier highway parallel"
    without += " reversible MUDD Lambdas"
    assert bool(why) == stem.startswith(tuple(without.split())), why
    if why:
        assert "has no linear shortcut" in why
        return
    found = spectrum.measure(model, batches, [0, 3], 2, 3)
    assert found["tokens"] in (1, 6)
    assert len(found["by_site"]["largest"]["median"]) == sum(
        len(block.sites) for block in model.transformer.h
    )
    assert sum(map(sum, found["density"]["counts"])) > 0
    if stem.startswith("mHC"):
        assert found["by_site"]["largest"]["95%"] == pytest.approx([1.0] * 4, abs=1e-4)
    if stem in ("gpt-mha-rope", "wide-gpt-mha-rope", "GatedResidual-gpt-mha-rope"):
        assert found["by_site"]["untouched"]["median"] == [1.0] * 4


def test_the_command_stores_rows_and_draws_them(corpus, tmp_path):
    for name, keys in {
        "a": {},
        "b": {"model": "mHC-gpt-mha-rope"},
        "c": {"model": "AttnRes-gpt-mha-rope"},
    }.items():
        run = small_run(corpus, tmp_path / name, max_steps=2, warmup_steps=1, **keys)
        assert call("train.py", *run).returncode == 0
    result = call(
        "research/analyze.py",
        "spectrum",
        tmp_path / "a",
        tmp_path / "b",
        "--windows=2",
        "--tokens=4",
    )
    assert result.returncode == 0, result.stderr.decode()
    assert "a, step 2: " in result.stdout.decode()
    rows = json.loads((tmp_path / "spectrum.json").read_text())["rows"]
    assert [(row["kind"], row["tokens"], row["size"]) for row in rows] == [
        ("LowRank", 8, 12),
        ("Mix", 8, 4),
    ]
    assert rows[0]["sites"] == ["0 attn", "0 mlp", "1 attn", "1 mlp"]
    assert (tmp_path / "spectrum.png").read_bytes().startswith(b"\x89PNG")
    said = one_line_error(call("research/analyze.py", "spectrum", tmp_path / "a", tmp_path / "c"))
    assert "c, step 2: Append has no linear shortcut" in said


def test_mistakes_are_one_line(tmp_path):
    assert "no checkpoint" in one_line_error(call("research/analyze.py", "spectrum", tmp_path))
    assert "--tokens=0" in one_line_error(
        call("research/analyze.py", "spectrum", tmp_path, "--tokens=0")
    )
