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
from research.analysis.products import Diagonal, LowRank, Mix, Spectra

NUM_TOKENS = 5
DELTA_REWRITES = [
    ("DDL-vdim1-gpt-mha-rope", {}),
    ("DDL-gpt-mha-rope", {}),
    ("DDL-gpt-mha-rope-CC-EC", {}),
    (
        "DDL-gpt-mha-rope-CC",
        {"ddl_map": "v", "ddl_k_input": "mean", "ddl_beta_input": "flat"},
    ),
    ("DDL-gpt-mha-rope", {"residual_branch_mult": 0.8}),
    # too narrow for the compact form
    (
        "DDL-gpt-mha-rope",
        {"ddl_k_norm": "shifted", "ddl_k_eps": 0.1, "hidden_size": 6},
    ),
]
# streams of which some part has no linear shortcut, by the beginning of their names
WITHOUT_SHORTCUT = (
    "AttnRes",
    "DenseFormer",
    "alternating",
    "momentum",
    "gated",
    "by-position",
    "earlier",
    "highway",
    "parallel",
    "reversible",
    "MUDD",
    "Lambdas",
    "SinglePassMHC",
    "Frac",
    "NormPlacement",
)


def build_moved(model_name: str, **keys):
    """Return a model in float64 whose parameters are off their initial values."""
    torch.manual_seed(0)
    return move_parameters(build(model_name, **{**SMALL, **keys}).double())


@pytest.fixture
def ids() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, SMALL["vocab_size"], (1, NUM_TOKENS), generator=generator)


def get_weights(model) -> dict[str, torch.Tensor]:
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    weights["lm_head.weight"] = weights["transformer.wte.weight"]
    return weights


def group_by_token(values: list) -> list[list]:
    """Return [token][site] of values in the order of the loops: all tokens of a site, then the next."""
    sites = [values[start : start + NUM_TOKENS] for start in range(0, len(values), NUM_TOKENS)]
    return [[site[token] for site in sites] for token in range(NUM_TOKENS)]


def compute_spectra(model, ids) -> Spectra:
    """Return the spectra of all tokens."""
    return products.compute_spectra(spectrum.record_maps(model, ids, torch.arange(ids.shape[1])))


def check_spectra(spectra: Spectra, matrices: list[list[np.ndarray]]) -> None:
    """Compare with numpy's spectra of the dense products of matrices[token][site]."""
    for token, site_matrices in enumerate(matrices):
        product = np.eye(len(site_matrices[0]))
        for site, A in enumerate(site_matrices):
            product = A @ product
            singular_values = np.linalg.svd(product, compute_uv=False)
            num_moved = np.linalg.matrix_rank(product - np.eye(len(A)), tol=1e-6)
            eigenvalues = np.linalg.eigvals(A)
            is_reflection = (eigenvalues.real < 0) & (abs(eigenvalues.imag) < 1e-12)
            expected = {
                "sign": np.sign(np.linalg.det(product)),
                "log_det": np.log(abs(np.linalg.det(product))),
                "largest": singular_values[0],
                "smallest": singular_values[-1],
                "untouched": 1 - num_moved / len(A),
                "energy": (product**2).sum() / len(A),
                "reflections": is_reflection.sum(),
            }
            for name, value in expected.items():
                result = getattr(spectra, name)[site, token].item()
                assert result == pytest.approx(value, rel=1e-6, abs=1e-9), (name, site, token)
        check_eigenvalues(spectra.eigenvalues[token].numpy(), np.linalg.eigvals(product))


def check_eigenvalues(eigenvalues: np.ndarray, expected: np.ndarray) -> None:
    """Compare in any order; ones may be missing in `eigenvalues`."""
    unmatched = list(expected)
    for value in eigenvalues:
        nearest = min(range(len(unmatched)), key=lambda index: abs(unmatched[index] - value))
        assert abs(unmatched.pop(nearest) - value) < 1e-6
    assert unmatched == pytest.approx(np.ones(len(unmatched)), abs=1e-6)


# ---- delta rewrites ----


def compute_direction_and_gate(w, X, h, c, cfg) -> tuple[np.ndarray, float]:
    """Return k and beta of one token (equations 3 and 8), by hand."""
    k_tilde = h
    if cfg["ddl_map"] == "v":
        hidden = w["k_in.weight"] @ naive.pool(X, cfg["ddl_k_input"])
        k_tilde = w["k_out.weight"] @ (hidden * naive.sigmoid(hidden))
    squared_norm = float(k_tilde @ k_tilde)
    eps = cfg["ddl_k_eps"]
    if cfg["ddl_k_norm"] == "guarded":
        norm = np.sqrt(squared_norm + eps**2)
    else:
        norm = np.sqrt(squared_norm) + eps
    gate_input = c
    if cfg["ddl_beta_input"] != "context":
        gate_input = naive.pool(X, cfg["ddl_beta_input"])
    beta = 2 * naive.sigmoid(w["beta.weight"][0] @ gate_input + w["beta.bias"][0])
    return k_tilde.numpy() / norm, float(beta)


def compute_dense_rewrites(model_name: str, model, ids) -> tuple[list, list]:
    """Return the matrices A and the scaled gates m beta, [token][site], from naive.py's loops."""
    matrices = []
    betas = []

    def record_and_rewrite(w, X, h, x_in, c, cfg):
        k, beta = compute_direction_and_gate(w, X, h, c, cfg)
        beta *= naive.branch_mult(cfg)
        matrices.append(np.eye(len(X)) - beta * np.outer(k, k))
        betas.append(beta)
        return naive.rewrite(w, X, h, x_in, c, cfg)

    cfg = dataclasses.asdict(model.config)
    naive.logits(model_name, get_weights(model), cfg, ids[0].tolist(), record_and_rewrite)
    return group_by_token(matrices), group_by_token(betas)


@pytest.mark.parametrize(("model_name", "keys"), DELTA_REWRITES, ids=str)
def test_spectra_of_delta_rewrites_are_those_of_dense_products(model_name, keys, ids):
    model = build_moved(model_name, **keys)
    matrices, betas = compute_dense_rewrites(model_name, model, ids)
    spectra = compute_spectra(model, ids)
    check_spectra(spectra, matrices)
    betas = np.array(betas)
    if "ddl_k_eps" not in keys:  # k has length 1, so the eigenvalue is 1 - beta
        assert spectra.reflections.numpy().T.tolist() == (betas > 1).tolist()
        assert 0 < (betas > 1).mean() < 1
        log_det = np.log(abs(1 - betas)).sum(1)
        assert log_det == pytest.approx(spectra.log_det[-1].numpy(), rel=1e-6)
        assert np.sign(1 - betas).prod(1).tolist() == spectra.sign[-1].tolist()


# gates of exactly 0, 1 and 2 along axes, some of them twice: (beta, axis) of each site, then what
# the product has: the eigenvalues beside ones, and fields of the spectra
CHAINS = {
    "two reflections": (
        [(2.0, 0), (2.0, 1)],
        [-1, -1],
        {"sign": 1, "untouched": 10 / 12, "energy": 1.0, "smallest": 1.0},
    ),
    "a reflection and its inverse": (
        [(2.0, 0), (2.0, 0)],
        [1, 1],
        {"sign": 1, "untouched": 1.0, "energy": 1.0, "smallest": 1.0},
    ),
    "a projection": (
        [(1.0, 0), (0.0, 1)],
        [0, 1],
        {"sign": 0, "untouched": 11 / 12, "energy": 11 / 12, "smallest": 0.0},
    ),
}


@pytest.mark.parametrize("chain", CHAINS)
def test_spectra_of_exact_reflections_and_projections(chain):
    rewrites, eigenvalues, fields = CHAINS[chain]
    d = 12
    eye = torch.eye(d, dtype=torch.float64)
    maps = [LowRank(-beta * eye[None, [axis]], eye[None, [axis]]) for beta, axis in rewrites]
    spectra = products.compute_spectra(maps)
    assert spectra.size == d
    assert sorted(spectra.eigenvalues[0].real.tolist()) == pytest.approx(
        sorted(eigenvalues), abs=1e-12
    )
    last = {name: getattr(spectra, name)[-1, 0].item() for name in products.BY_SITE}
    assert last["sign"] == fields["sign"]
    assert last["untouched"] == pytest.approx(fields["untouched"])
    assert last["energy"] == pytest.approx(fields["energy"])
    assert last["largest"] == pytest.approx(1.0)
    assert last["smallest"] == pytest.approx(fields["smallest"], abs=1e-12)


# ---- the state path, by autograd ----


class WriteRecorder(Stream):
    """Run the stream as it is, and record the first state and the arguments of all writes."""

    def __init__(self):
        self.first_state = None
        self.writes = []

    def write(self, site, state, h, c, x_in, cache):
        if self.first_state is None:
            self.first_state = state
        self.writes.append((site.write, h, x_in, c))
        return super().write(site, state, h, c, x_in, cache)


@pytest.mark.parametrize(
    "model_name",
    ["DDL-gpt-mha-rope", "HC-gpt-mha-rope", "mHC-gpt-mha-rope", "LAuReL-gpt-mha-rope"],
)
def test_a_shortcut_is_the_jacobian_of_the_state_path(model_name, ids):
    """d state_S / d state_0 of one token, with everything else that the writes get held fixed."""
    model = build_moved(model_name)
    recorder = WriteRecorder()
    with torch.no_grad(), model.through(recorder):
        model(ids)

    def run_writes(state):
        for write, h, x_in, c in recorder.writes:
            state = write(state, h, x_in, c)
        return state

    jacobian = torch.autograd.functional.jacobian(run_writes, recorder.first_state)
    # of the last token: to its new state from all old states (1, T, ...)
    jacobian = jacobian[0, -1]
    if model_name.startswith("DDL"):
        matrix = jacobian[0, :, 0, -1, 0]  # the features of the first value channel
    elif model_name.startswith("LAuReL"):
        matrix = jacobian[:, 0, -1]
    else:
        matrix = jacobian[:, 0, 0, -1, :, 0]  # the first feature of the streams
    spectra = compute_spectra(model, ids)
    singular_values = torch.linalg.svdvals(matrix)
    # the last token, or the one that stands for all
    token = min(NUM_TOKENS - 1, spectra.log_det.shape[1] - 1)
    assert spectra.log_det[-1, token].item() == pytest.approx(
        torch.linalg.slogdet(matrix).logabsdet.item(), rel=1e-6
    )
    assert spectra.largest[-1, token].item() == pytest.approx(singular_values[0].item(), rel=1e-6)
    assert spectra.smallest[-1, token].item() == pytest.approx(singular_values[-1].item(), rel=1e-6)
    check_eigenvalues(spectra.eigenvalues[token].numpy(), torch.linalg.eigvals(matrix).numpy())


# ---- mixed streams and MGT ----


def compute_dense_mixes(model_name: str, model, ids, monkeypatch) -> list[list[np.ndarray]]:
    """Return the matrices on the streams, [token][site], from naive_streams.py's loops."""
    is_hc = model_name.startswith("HC")
    function_name = "hyper_weights" if is_hc else "manifold_weights"
    compute_weights = getattr(naive_streams, function_name)
    mixes = []

    def record_weights(w, H, cfg):
        weights = compute_weights(w, H, cfg)
        mix = weights[2].T if is_hc else weights[2]
        mixes.append(mix.numpy())
        return weights

    monkeypatch.setattr(naive_streams, function_name, record_weights)
    cfg = dataclasses.asdict(model.config)
    naive_streams.logits(model_name, get_weights(model), cfg, ids[0].tolist())
    return group_by_token(mixes)


@pytest.mark.parametrize("model_name", ["HC-gpt-mha-rope", "mHC-gpt-mha-rope"])
def test_spectra_of_mixed_streams_are_those_of_dense_products(model_name, ids, monkeypatch):
    model = build_moved(model_name)
    mixes = compute_dense_mixes(model_name, model, ids, monkeypatch)
    check_spectra(compute_spectra(model, ids), mixes)


def test_static_mixing_is_measured_once(ids, monkeypatch):
    model = build_moved("HC-gpt-mha-rope", hc_dynamic=False)
    spectra = compute_spectra(model, ids)
    assert spectra.log_det.shape == (4, 1)
    mixes = compute_dense_mixes("HC-gpt-mha-rope", model, ids, monkeypatch)
    check_spectra(spectra, mixes[:1])


@pytest.mark.parametrize(
    "keys", [{}, {"residual_branch_mult": 0.4}, {"num_hidden_layers_base": 1}], ids=str
)
def test_spectra_of_mgt_are_those_of_diagonal_matrices(keys, ids, monkeypatch):
    model = build_moved("MGT-gpt-mha", mgt_alpha_init=0.8, **keys)
    write = naive_streams.mgt_write
    matrices = []

    def record_and_write(w, X, h, norm, cfg):
        beta = naive.branch_mult(cfg) * naive_streams.mgt_beta(w, X, cfg)
        values = 1 - beta * w["alpha"]
        matrices.append(np.diag(values.numpy()))
        return write(w, X, h, norm, cfg)

    monkeypatch.setattr(naive_streams, "mgt_write", record_and_write)
    cfg = dataclasses.asdict(model.config)
    naive_streams.logits("MGT-gpt-mha", get_weights(model), cfg, ids[0].tolist())
    check_spectra(compute_spectra(model, ids), group_by_token(matrices))


# ---- maps without a spectrum ----


def test_maps_of_several_kinds_have_no_product():
    maps = [Diagonal(torch.ones(1, 4).double()), Mix(torch.eye(4)[None].double())]
    with pytest.raises(ValueError, match=r"several kinds \(Diagonal, Mix\)"):
        products.compute_spectra(maps)


def test_maps_that_are_not_finite_have_no_spectrum():
    with pytest.raises(ValueError, match="diverged"):
        products.compute_spectra([Diagonal(torch.full((1, 4), float("nan")).double())])


# ---- every stream, and the command ----


@pytest.mark.parametrize("model_name", [*MODEL_NAMES, *(path.stem for path in EXAMPLES)])
def test_every_stream_has_a_spectrum_or_says_why_not(model_name, corpus, example_streams):
    model = build(model_name, **SMALL)
    batches = common.open_validation_batches(model, shards.open_corpus(str(corpus)))
    reason = spectrum.explain_missing_shortcut(model)
    assert bool(reason) == model_name.startswith(WITHOUT_SHORTCUT), reason
    if reason:
        assert "has no linear shortcut" in reason
        return
    figures = spectrum.measure(model, batches, [0, 3], 2, 3)
    assert figures["tokens"] in (1, 6)
    num_sites = sum(len(block.sites) for block in model.transformer.h)
    assert len(figures["by_site"]["largest"]["median"]) == num_sites
    assert sum(map(sum, figures["density"]["counts"])) > 0
    if model_name.startswith("mHC"):
        assert figures["by_site"]["largest"]["95%"] == pytest.approx([1.0] * 4, abs=1e-4)
    if model_name in ("gpt-mha-rope", "wide-gpt-mha-rope", "GatedResidual-gpt-mha-rope"):
        assert figures["by_site"]["untouched"]["median"] == [1.0] * 4


def test_one_token_at_a_time_is_measured_in_every_sequence(corpus):
    model = build_moved("DDL-gpt-mha-rope")
    batches = common.open_validation_batches(model, shards.open_corpus(str(corpus)))
    figures = spectrum.measure(model, batches, [0, 3, 5], 1, 1)
    assert figures["tokens"] == 3
    expected = spectrum.measure(model, batches, [0, 3, 5], 3, 1)
    for name, values in figures["by_site"].items():
        assert values["mean"] == pytest.approx(expected["by_site"][name]["mean"])


def train(corpus, run, model_name: str) -> None:
    arguments = small_run(corpus, run, model=model_name, max_steps=2, warmup_steps=1)
    assert call("train.py", *arguments).returncode == 0


def test_the_command_stores_rows_and_draws_them(corpus, tmp_path):
    train(corpus, tmp_path / "a", "DDL-gpt-mha-rope")
    train(corpus, tmp_path / "b", "mHC-gpt-mha-rope")
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


def test_a_run_without_a_linear_shortcut_is_refused(corpus, tmp_path):
    train(corpus, tmp_path / "a", "DDL-gpt-mha-rope")
    train(corpus, tmp_path / "c", "AttnRes-gpt-mha-rope")
    result = call("research/analyze.py", "spectrum", tmp_path / "a", tmp_path / "c")
    assert "c, step 2: Append has no linear shortcut" in one_line_error(result)
    assert not (tmp_path / "spectrum.json").exists()


def test_mistakes_are_one_line(tmp_path):
    no_run = call("research/analyze.py", "spectrum", tmp_path)
    assert "no checkpoint" in one_line_error(no_run)
    no_tokens = call("research/analyze.py", "spectrum", tmp_path, "--tokens=0")
    assert "--tokens=0" in one_line_error(no_tokens)
