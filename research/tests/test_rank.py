"""Effective rank and gradients over depth, against numpy and against the blocks run by hand."""

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gates_helpers import LabeledDocuments
from helpers import SMALL, one_line_error, small_run
from in_process import call

from data import shards
from data.loader import ValidationBatches
from model import MODEL_NAMES, build
from research.analysis import rank
from research.analysis.common import select_sequences
from training import checkpoint

# singular values of an 8 x 5 matrix -> its effective rank
KNOWN_RANKS = {
    (1, 1, 1, 1, 1): 1.0,
    (2, 0, 0, 0, 0): 0.2,
    (1, 1, 0, 0, 0): 0.4,
    (0, 0, 0, 0, 0): 0.0,
    (3, 1, 0, 0, 0): math.exp(-0.75 * math.log(0.75) - 0.25 * math.log(0.25)) / 5,
}


def test_effective_rank_of_matrices_whose_rank_is_known():
    generator = np.random.default_rng(0)
    u, _ = np.linalg.qr(generator.normal(size=(8, 5)))
    v, _ = np.linalg.qr(generator.normal(size=(5, 5)))
    matrices = np.stack([u @ np.diag(np.array(values, dtype=float)) @ v for values in KNOWN_RANKS])
    ranks = rank.effective_rank(torch.tensor(matrices))
    assert ranks.tolist() == pytest.approx(list(KNOWN_RANKS.values()), abs=1e-9)


def test_effective_rank_of_numbers_that_are_not_finite_is_refused():
    with pytest.raises(ValueError, match="diverged"):
        rank.effective_rank(torch.full((2, 3, 3), math.nan))


def compute_mean_rank(matrices: torch.Tensor) -> float:
    """Return the mean effective rank of matrices (B, T, d), by numpy."""
    ranks = []
    for matrix in matrices.detach().double().numpy():
        singular_values = np.linalg.svd(matrix, compute_uv=False)
        fractions = singular_values[singular_values > 0] / singular_values.sum()
        entropy = -(fractions * np.log(fractions)).sum()
        ranks.append(math.exp(entropy) / min(matrix.shape))
    return np.mean(ranks)


def measure_by_hand(model, ids, targets) -> dict:
    """Return the figures of a stream whose state is (B, T, d), by running the blocks one after the other."""
    positions = model.positions(ids)
    states = [model.transformer.wte(ids)]
    for block in model.transformer.h:
        new_state = block(states[-1], positions)
        states.append(new_state)
    logits = model.ln_f(states[-1]) @ model.transformer.wte.weight.T
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    state_grads = torch.autograd.grad(loss, states, retain_graph=True)
    block_grads = [
        torch.autograd.grad(loss, list(block.parameters()), retain_graph=True)
        for block in model.transformer.h
    ]
    ranks = [compute_mean_rank(state) for state in states]
    design = np.vander(np.arange(len(ranks)), 2)
    (slope, _), *_ = np.linalg.lstsq(design, np.log(ranks), rcond=None)
    return {
        "rank": ranks,
        "rank_difference": [
            compute_mean_rank(new_state - old_state)
            for old_state, new_state in itertools.pairwise(states)
        ],
        "preservation": ranks[-1] / ranks[0],
        "slope": slope,
        "state_rms": [state.detach().square().mean().sqrt().item() for state in states],
        "gradient_state": [grad.norm().item() for grad in state_grads],
        "gradient_parameters": [
            math.sqrt(sum(grad.square().sum().item() for grad in grads)) for grads in block_grads
        ],
    }


@pytest.mark.parametrize(
    "keys", [{"mgt_arm": "standard"}, {"mgt_arm": "full", "mgt_alpha_init": 0.3}]
)
def test_figures_over_depth_are_those_by_hand(keys, corpus):
    model = build("MGT-gpt-mha", **{**SMALL, "num_hidden_layers": 3, "block_size": 10, **keys})
    batches = ValidationBatches(shards.open_corpus(str(corpus)).val, 10)
    sequences = select_sequences(batches, 5)
    progress = []
    figures = rank.measure(model, batches, sequences, 2, progress.append)
    assert progress == [2, 4, 5]
    ids, targets = batches.get(sequences, 5)
    assert figures["rank_of"] == "state"
    assert figures["rank_read"] == figures["rank_state"] == figures["rank"]
    for name, expected in measure_by_hand(model, ids, targets).items():
        assert figures[name] == pytest.approx(expected, rel=1e-4), name
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("batch_size", [1, 2])
def test_gradients_are_those_of_the_mean_over_targets(batch_size):
    """Documents have 2, 10, 0 and 5 labels; the mean over the 17 is computed at once by hand."""
    documents = np.random.default_rng(0).integers(1, 200, (4, 20)).astype(np.uint16)
    for document, num_labels in zip(documents, (2, 10, 0, 5)):
        document[10 + num_labels :] = 0
    batches = LabeledDocuments(documents)
    model = build("MGT-gpt-mha", **{**SMALL, "block_size": 10}).double()
    figures = rank.measure(model, batches, [0, 1, 2, 3], batch_size)
    ids, _ = batches.get([0, 1, 2, 3], 4)
    positions = model.positions(ids)
    states = [model.transformer.wte(ids)]
    for block in model.transformer.h:
        new_state = block(states[-1], positions)
        states.append(new_state)
    log_probs = (model.ln_f(states[-1]) @ model.transformer.wte.weight.T).log_softmax(-1)
    loss = -sum(
        log_probs[row, position, label]
        for row, labels in enumerate(documents[:, 10:].tolist())
        for position, label in enumerate(labels)
        if label
    )
    state_grads = torch.autograd.grad(loss / 17, states, retain_graph=True)
    assert figures["gradient_state"] == pytest.approx([grad.norm().item() for grad in state_grads])
    for block, gradient in zip(model.transformer.h, figures["gradient_parameters"]):
        grads = torch.autograd.grad(loss / 17, list(block.parameters()), retain_graph=True)
        squares = sum(grad.square().sum().item() for grad in grads)
        assert gradient == pytest.approx(math.sqrt(squares))


@pytest.mark.parametrize("model_name", MODEL_NAMES)
def test_every_stream_has_ranks_at_all_depths(model_name, corpus):
    model = build(model_name, **{**SMALL, "num_hidden_layers": 3})
    batches = ValidationBatches(shards.open_corpus(str(corpus)).val, 16)
    figures = rank.measure(model, batches, [0, 3], 2)
    for name in ("rank", "rank_state", "rank_read", "state_rms", "gradient_state"):
        assert len(figures[name]) == 4
        assert min(figures[name]) > 0
    assert max(figures["rank"]) <= 1
    assert figures["rank"] == figures[f"rank_{figures['rank_of']}"]
    assert len(figures["rank_difference"]) == len(figures["gradient_parameters"]) == 3


def test_the_rank_of_what_is_read_counts_if_a_state_has_value_channels(corpus):
    """The embedding is repeated: its copies side by side (16, 48) have the rank of one (16, 12), over min(16, 48)."""
    model = build("DDL-gpt-mha-rope", **SMALL, ddl_state_conv_init="identity")
    batches = ValidationBatches(shards.open_corpus(str(corpus)).val, 16)
    figures = rank.measure(model, batches, [0], 1)
    ids, _ = batches.get([0], 1)
    embedding_rank = rank.effective_rank(model.transformer.wte(ids)).item()
    assert figures["rank_of"] == "read"
    assert figures["rank_read"][0] == pytest.approx(embedding_rank)
    assert figures["rank_state"][0] == pytest.approx(embedding_rank * 12 / 16)


# ---- the sequences that are measured ----


def make_batches(num_tokens: int, seq_len: int) -> ValidationBatches:
    return ValidationBatches([np.arange(num_tokens, dtype=np.uint16)], seq_len)


def test_a_last_sequence_that_is_short_is_not_selected():
    assert select_sequences(make_batches(25, 8), 9) == [0, 1, 2]
    assert select_sequences(make_batches(24, 8), 9) == [0, 1]


def test_a_split_without_a_sequence_of_full_length_is_refused():
    with pytest.raises(ValueError, match="no sequence of block_size=30"):
        select_sequences(make_batches(25, 30), 1)


# ---- the command ----


@pytest.fixture(scope="module")
def averaged_run(corpus, tmp_path_factory) -> Path:
    """Train a run of two steps with averaged weights."""
    run = tmp_path_factory.mktemp("runs") / "averaged"
    arguments = small_run(corpus, run, max_steps=2, warmup_steps=1, ema_half_life=1)
    assert call("train.py", *arguments).returncode == 0
    return run


def test_the_command_stores_a_row_for_each_run_and_draws_them(corpus, tmp_path):
    runs = [tmp_path / "a", tmp_path / "b"]
    for index, run in enumerate(runs):
        arguments = small_run(
            corpus,
            run,
            max_steps=2,
            warmup_steps=1,
            seed=index,
            num_hidden_layers=2 + index,
        )
        assert call("train.py", *arguments).returncode == 0
    result = call("research/analyze.py", "rank", runs[0], runs[1], "--windows=3")
    assert result.returncode == 0, result.stderr.decode()
    assert "a, step 2: effective rank 0." in result.stdout.decode()
    rows = json.loads((tmp_path / "rank.json").read_text())["rows"]
    assert [(row["layers"], row["seed"], row["sequences"]) for row in rows] == [
        (2, 0, 3),
        (3, 1, 3),
    ]
    assert (tmp_path / "rank.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("command", ["rank", "lens"])
def test_averaged_weights_are_analyzed_beside_the_trained_ones(averaged_run, tmp_path, command):
    rows = []
    for name, folder in (("trained", averaged_run), ("ema", checkpoint.find(averaged_run) / "ema")):
        out = tmp_path / f"{name}.json"
        result = call("research/analyze.py", command, folder, "--windows=1", f"--json={out}")
        assert result.returncode == 0, result.stderr.decode()
        rows.extend(json.loads(out.read_text())["rows"])
    trained, averaged = rows
    assert trained.pop("label") == "averaged, step 2"
    assert averaged.pop("label") == "averaged, step 2, averaged weights"
    assert trained != averaged


def test_mistakes_are_one_line(tmp_path):
    no_run = call("research/analyze.py", "rank", tmp_path)
    assert "no checkpoint" in one_line_error(no_run)
    no_sequences = call("research/analyze.py", "rank", tmp_path, "--windows=0")
    assert "--windows=0" in one_line_error(no_sequences)
