"""Effective rank and gradients over depth, against numpy and against the blocks run by hand."""

import itertools
import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import SMALL, one_line_error, small_run
from in_process import call

from data import shards
from data.loader import ValidationBatches
from model import MODEL_NAMES, build
from research.analysis import rank
from research.analysis.common import select_sequences


def test_effective_rank_of_matrices_whose_rank_is_known():
    generator = np.random.default_rng(0)
    left, _ = np.linalg.qr(generator.normal(size=(8, 5)))
    right, _ = np.linalg.qr(generator.normal(size=(5, 5)))
    cases = {(1, 1, 1, 1, 1): 1.0, (2, 0, 0, 0, 0): 0.2, (1, 1, 0, 0, 0): 0.4, (0, 0, 0, 0, 0): 0.0}
    cases[(3, 1, 0, 0, 0)] = math.exp(-0.75 * math.log(0.75) - 0.25 * math.log(0.25)) / 5
    matrices = np.stack([left @ np.diag(np.array(values, dtype=float)) @ right for values in cases])
    assert rank.effective_rank(torch.tensor(matrices)).tolist() == pytest.approx(
        list(cases.values()), abs=1e-9
    )
    with pytest.raises(ValueError, match="diverged"):
        rank.effective_rank(torch.full((2, 3, 3), math.nan))


def by_hand(model, ids, targets) -> dict:
    """The same of a stream (B, T, d): blocks one after the other, a sequence at a time, singular values by numpy."""
    positions = model.positions(ids)
    states = [model.transformer.wte(ids)]
    for block in model.transformer.h:
        states.append(block(states[-1], positions)[0])
    logits = model.ln_f(states[-1]) @ model.transformer.wte.weight.T
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    grads = torch.autograd.grad(loss, states, retain_graph=True)
    weights = [
        torch.autograd.grad(loss, list(block.parameters()), retain_graph=True)
        for block in model.transformer.h
    ]

    def mean_rank(matrices):
        found = []
        for matrix in matrices.detach().double().numpy():
            share = np.linalg.svd(matrix, compute_uv=False)
            share = share[share > 0] / share.sum()
            found.append(math.exp(-(share * np.log(share)).sum()) / min(matrix.shape))
        return np.mean(found)

    ranks = [mean_rank(state) for state in states]
    slope = np.linalg.lstsq(np.vander(np.arange(len(ranks)), 2), np.log(ranks), rcond=None)[0][0]
    return {
        "rank": ranks,
        "rank_difference": [
            mean_rank(after - before) for before, after in itertools.pairwise(states)
        ],
        "preservation": ranks[-1] / ranks[0],
        "slope": slope,
        "state_rms": [state.detach().square().mean().sqrt().item() for state in states],
        "gradient_state": [grad.norm().item() for grad in grads],
        "gradient_parameters": [
            math.sqrt(sum(g.square().sum().item() for g in each)) for each in weights
        ],
    }


@pytest.mark.parametrize(
    "keys", [{"mgt_arm": "standard"}, {"mgt_arm": "full", "mgt_alpha_init": 0.3}]
)
def test_measured_over_depth_as_by_hand(keys, corpus):
    model = build("MGT-gpt-mha", **{**SMALL, "num_hidden_layers": 3, "block_size": 10, **keys})
    batches = ValidationBatches(shards.open_corpus(str(corpus)).val, 10)
    windows = select_sequences(batches, 5)
    told = []
    found = rank.measure(model, batches, windows, 2, told.append)
    assert told == [2, 4, 5]
    expected = by_hand(model, *batches.get(windows, 5))
    assert found["rank_of"] == "state"
    assert found["rank_read"] == found["rank_state"] == found["rank"]
    for name, values in expected.items():
        assert found[name] == pytest.approx(values, rel=1e-4), name
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("stem", MODEL_NAMES)
def test_every_stream_has_a_course_of_ranks(stem, corpus):
    model = build(stem, **{**SMALL, "num_hidden_layers": 3})
    batches = ValidationBatches(shards.open_corpus(str(corpus)).val, 16)
    found = rank.measure(model, batches, [0, 3], 2)
    for name in ("rank", "rank_state", "rank_read", "state_rms", "gradient_state"):
        assert len(found[name]) == 4
        assert min(found[name]) > 0
    assert max(found["rank"]) <= 1
    assert found["rank"] == found[f"rank_{found['rank_of']}"]
    assert len(found["rank_difference"]) == len(found["gradient_parameters"]) == 3


def test_what_is_read_counts_where_a_state_has_columns(corpus):
    """The embedding is repeated: its columns side by side have the rank of one, over another smaller side."""
    model = build("DDL-gpt-mha-rope", **SMALL, ddl_state_conv_init="identity")
    batches = ValidationBatches(shards.open_corpus(str(corpus)).val, 16)
    found = rank.measure(model, batches, [0], 1)
    ids, _ = batches.get([0], 1)
    embedded = model.transformer.wte(ids)
    assert found["rank_of"] == "read"
    assert found["rank_read"][0] == pytest.approx(rank.effective_rank(embedded).item())
    assert found["rank_state"][0] == pytest.approx(rank.effective_rank(embedded).item() * 12 / 16)


def test_short_windows_are_left_out():
    batches = ValidationBatches([np.arange(25, dtype=np.uint16)], 8)
    assert select_sequences(batches, 9) == [0, 1, 2]
    batches = ValidationBatches([np.arange(24, dtype=np.uint16)], 8)
    assert select_sequences(batches, 9) == [0, 1]
    with pytest.raises(ValueError, match="no sequence of block_size=30"):
        select_sequences(ValidationBatches([np.arange(25, dtype=np.uint16)], 30), 1)


def test_the_command_stores_a_row_for_each_run_and_draws_them(corpus, tmp_path):
    runs = [tmp_path / "a", tmp_path / "b"]
    for index, run in enumerate(runs):
        keys = {"max_steps": 2, "warmup_steps": 1, "seed": index, "num_hidden_layers": 2 + index}
        assert call("train.py", *small_run(corpus, run, **keys)).returncode == 0
    result = call("research/analyze.py", "rank", *runs, "--windows=3")
    assert result.returncode == 0, result.stderr.decode()
    assert "a, step 2: effective rank 0." in result.stdout.decode()
    rows = json.loads((tmp_path / "rank.json").read_text())["rows"]
    assert [(row["layers"], row["seed"], row["sequences"]) for row in rows] == [
        (2, 0, 3),
        (3, 1, 3),
    ]
    assert (tmp_path / "rank.png").read_bytes().startswith(b"\x89PNG")


def test_mistakes_are_one_line(tmp_path):
    assert "no checkpoint" in one_line_error(call("research/analyze.py", "rank", tmp_path))
    assert "--windows=0" in one_line_error(
        call("research/analyze.py", "rank", tmp_path, "--windows=0")
    )
