"""The Kneser-Ney trigram against its formulas in plain Python, and what it counts."""

import itertools
from collections import Counter

import numpy as np
import pytest

from data.loader import TrainBatches
from data.shards import open_corpus
from research.residual_streams.trigram import (
    Trigram,
    read_training_windows,
    read_validation_windows,
)

VOCAB_SIZE = 7


class PlainKneserNey:
    """The same model with dictionaries, for one token at a time."""

    def __init__(self, windows: list[list[int]]):
        trigrams = Counter()
        for window in windows:
            trigrams.update(zip(window, window[1:], window[2:]))
        bigrams = Counter(trigram[1:] for trigram in trigrams)
        unigrams = Counter(bigram[1:] for bigram in bigrams)
        self.counts = {3: trigrams, 2: bigrams, 1: unigrams}

    def probability(self, token: int, context: tuple[int, ...]) -> float:
        order = len(context) + 1
        if order == 1:
            lower = 1 / VOCAB_SIZE
        else:
            lower = self.probability(token, context[1:])
        counts = self.counts[order]
        frequencies = Counter(counts.values())
        discount = 0.5  # where the estimate of the discount is not defined
        if frequencies[1] > 0:
            discount = frequencies[1] / (frequencies[1] + 2 * frequencies[2])
        after_context = [count for ngram, count in counts.items() if ngram[:-1] == context]
        if not after_context:
            return lower
        discounted = max(counts[(*context, token)] - discount, 0)
        left_over = discount * len(after_context) * lower
        return (discounted + left_over) / sum(after_context)


@pytest.fixture
def windows() -> np.ndarray:
    """Draw windows in which tokens depend on the one before; token 6 never occurs."""
    rng = np.random.default_rng(0)
    steps = rng.choice(4, size=(30, 9), p=[0.6, 0.2, 0.1, 0.1])
    return (steps.cumsum(1) % 6).astype(np.int64)


def test_probabilities_are_those_of_the_formulas(windows):
    trigram = Trigram(windows[:20], VOCAB_SIZE)
    plain = PlainKneserNey(windows[:20].tolist())
    others = np.concatenate([windows[20:], np.full((1, 9), 6)])
    expected = [
        [
            plain.probability(window[position], tuple(window[max(position - 2, 0) : position]))
            for position in range(1, 9)
        ]
        for window in others.tolist()
    ]
    assert trigram.probabilities(others) == pytest.approx(np.array(expected), rel=1e-12)


def test_probabilities_after_a_context_sum_to_one(windows):
    trigram = Trigram(windows, VOCAB_SIZE)
    for context in itertools.product(range(VOCAB_SIZE), repeat=2):
        continued = np.array([[*context, token] for token in range(VOCAB_SIZE)])
        assert trigram.probabilities(continued)[:, 1].sum() == pytest.approx(1)


def test_the_loss_of_a_window_is_its_mean(windows):
    trigram = Trigram(windows[:20], VOCAB_SIZE)
    expected = -np.log(trigram.probabilities(windows[20:])).mean(1)
    assert trigram.losses(windows[20:]) == pytest.approx(expected)


def test_training_windows_are_those_of_a_run(corpus):
    """Compare with the batches of a run, step by step."""
    opened = open_corpus(str(corpus))
    read = read_training_windows(opened, seq_len=16, batch_size=4, seed=3, steps=5)
    batches = TrainBatches(opened.train, 16, 4, 3, opened.meta["vocab_size"])
    for step in range(5):
        ids, targets = batches.get(step, 0, 4)
        assert (read[4 * step : 4 * step + 4, :-1] == ids.numpy()).all()
        assert (read[4 * step : 4 * step + 4, 1:] == targets.numpy()).all()


def test_the_halves_of_the_validation_split_do_not_overlap(corpus):
    opened = open_corpus(str(corpus))
    first, second, everything = (
        read_validation_windows(opened, 16, part) for part in ("first", "second", "all")
    )
    assert len(first) + len(second) == len(everything)
    assert (np.concatenate([first, second]) == everything).all()
