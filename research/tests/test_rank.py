"""Effective rank over depth, against numpy and against the blocks run by hand."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gates_helpers import open_run
from helpers import SMALL

from data.loader import ValidationBatches
from model import MODEL_NAMES, build
from research.analysis import rank
from research.analysis.common import select_sequences

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

    with pytest.raises(ValueError, match="diverged"):
        rank.effective_rank(torch.full((2, 3, 3), math.nan))


def measure(run) -> list[float]:
    return rank.measure_run(run, SimpleNamespace(rows=2))["rank"]


@torch.no_grad()
def test_ranks_over_depth_are_those_by_hand(corpus):
    model = build("MGT-gpt-mha", **{**SMALL, "num_hidden_layers": 3, "block_size": 10})
    run = open_run(model, corpus, num_sequences=5)
    ids, _ = run.batches.get(run.sequences, 5)
    states = [model.transformer.wte(ids)]
    for block in model.transformer.h:
        new_state = block(states[-1], model.positions(ids))
        states.append(new_state)
    expected = []
    for state in states:
        ranks = []
        for matrix in state.double().numpy():
            singular_values = np.linalg.svd(matrix, compute_uv=False)
            fractions = singular_values[singular_values > 0] / singular_values.sum()
            ranks.append(math.exp(-(fractions * np.log(fractions)).sum()) / min(matrix.shape))
        expected.append(np.mean(ranks))
    assert measure(run) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("model_name", MODEL_NAMES)
def test_every_stream_has_ranks_at_all_depths(model_name, corpus):
    model = build(model_name, **{**SMALL, "num_hidden_layers": 3})
    ranks = measure(open_run(model, corpus, num_sequences=2))
    assert len(ranks) == 4
    assert 0 < min(ranks) <= max(ranks) <= 1


def test_the_rank_of_what_is_read_counts_if_a_state_has_value_channels(corpus):
    """The embedding is repeated, so that every read of the first site is the embedding."""
    model = build("DDL-gpt-mha-rope", **SMALL, ddl_state_conv_init="identity")
    run = open_run(model, corpus, num_sequences=1)
    ids, _ = run.batches.get(run.sequences, 1)
    embedding_rank = rank.effective_rank(model.transformer.wte(ids)).item()
    assert measure(run)[0] == pytest.approx(embedding_rank)


# ---- the sequences that are measured ----


def test_a_last_sequence_that_is_short_is_not_selected():
    split = [np.arange(25, dtype=np.uint16)]
    assert select_sequences(ValidationBatches(split, 8), 9) == [0, 1, 2]
    assert select_sequences(ValidationBatches([split[0][:24]], 8), 9) == [0, 1]
    with pytest.raises(ValueError, match="no sequence of block_size=30"):
        select_sequences(ValidationBatches(split, 30), 1)
