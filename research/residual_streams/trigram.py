"""A Kneser-Ney trigram model, counted on the tokens that a run was trained on.

Interpolated Kneser-Ney smoothing with one discount for each order (Kneser and Ney, "Improved backing-off
for m-gram language modeling", 1995; Chen and Goodman, "An empirical study of smoothing techniques for
language modeling", 1999, section 2.7): n-grams that occurred are discounted, and what they lose goes to
the next lower order, whose counts are those of different continuations.
"""

from dataclasses import dataclass

import numpy as np

from data.loader import TrainBatches, ValidationBatches
from data.shards import Corpus


def read_training_windows(
    corpus: Corpus, seq_len: int, batch_size: int, seed: int, steps: int
) -> np.ndarray:
    """Return the tokens that a run is trained on, int64 (steps * batch_size, seq_len + 1).

    A window has the inputs of a sequence and its last target.
    """
    vocab_size = corpus.meta["vocab_size"]
    batches = TrainBatches(corpus.train, seq_len, batch_size, seed, vocab_size)
    ids, targets = batches.get(step=0, first=0, count=steps * batch_size)
    return np.concatenate([ids.numpy(), targets.numpy()[:, -1:]], axis=1)


def read_validation_windows(corpus: Corpus, seq_len: int, part: str) -> np.ndarray:
    """Return the sequences of a part of the validation split, int64 (sequences, seq_len + 1).

    Args:
        part: "all", "first" or "second", as train.py's `eval_part`
    """
    batches = ValidationBatches(corpus.val, seq_len, corpus.meta["vocab_size"])
    sequences = batches.spread(None, part)
    ids, targets = batches.get(sequences, len(sequences))
    is_complete = (targets >= 0).all(1)  # the last sequence of the split may be shorter
    windows = np.concatenate([ids.numpy(), targets.numpy()[:, -1:]], axis=1)
    return windows[is_complete.numpy()]


@dataclass(frozen=True)
class CountTable:
    """How often each n-gram occurs; an n-gram is one number, its tokens as digits."""

    codes: np.ndarray  # int64 (number of different n-grams,), sorted
    counts: np.ndarray  # int64, of each

    @classmethod
    def count(cls, codes: np.ndarray) -> "CountTable":
        """Count the occurrences of each code."""
        return cls(*np.unique(codes, return_counts=True))

    def look_up(self, codes: np.ndarray) -> np.ndarray:
        """Return the counts of codes, 0 for those that do not occur."""
        places = np.searchsorted(self.codes, codes).clip(max=len(self.codes) - 1)
        return np.where(self.codes[places] == codes, self.counts[places], 0)

    def sum_by(self, groups: np.ndarray) -> "CountTable":
        """Return the sum of the counts of all n-grams with the same group number.

        Args:
            groups: of each n-gram, such as the code of its context
        """
        codes, places = np.unique(groups, return_inverse=True)
        return CountTable(codes, np.bincount(places, weights=self.counts).astype(np.int64))

    def discount(self) -> float:
        """Return n1 / (n1 + 2 n2), where n1 and n2 n-grams occur once and twice; 0.5 if none does."""
        once = (self.counts == 1).sum()
        twice = (self.counts == 2).sum()
        if once == 0:
            return 0.5
        return float(once / (once + 2 * twice))


class Trigram:
    """An interpolated Kneser-Ney trigram model of tokens.

    Args:
        windows: token ids, int64 (windows, length); n-grams do not cross windows
        vocab_size: of the model; tokens that do not occur share what is left for them
    """

    def __init__(self, windows: np.ndarray, vocab_size: int):
        self.vocab_size = vocab_size
        self.trigrams = CountTable.count(self.encode(windows, 3).ravel())
        # The counts of a lower order are numbers of different tokens that precede an n-gram.
        self.bigrams = CountTable.count(self.trigrams.codes % vocab_size**2)
        self.unigrams = CountTable.count(self.bigrams.codes % vocab_size)

    def encode(self, windows: np.ndarray, order: int) -> np.ndarray:
        """Return the code of the n-gram that ends at each position from order - 1 on."""
        length = windows.shape[1] - order + 1
        codes = np.zeros((len(windows), length), dtype=np.int64)
        for offset in range(order):
            codes = codes * self.vocab_size + windows[:, offset : offset + length]
        return codes

    def interpolate(self, table: CountTable, codes: np.ndarray, lower: np.ndarray) -> np.ndarray:
        """Return the probability of the last token of each n-gram after the others.

        Args:
            table: counts of n-grams of this order
            codes: n-grams
            lower: their probabilities by the next lower order
        """
        discount = table.discount()
        contexts = codes // self.vocab_size
        table_contexts = table.codes // self.vocab_size
        totals = table.sum_by(table_contexts).look_up(contexts)
        num_continuations = CountTable.count(table_contexts).look_up(contexts)
        discounted = np.maximum(table.look_up(codes) - discount, 0)
        probability = discounted + discount * num_continuations * lower
        # a context that does not occur leaves everything to the lower order
        return np.where(totals > 0, probability / np.maximum(totals, 1), lower)

    def probabilities(self, windows: np.ndarray) -> np.ndarray:
        """Return the probability of every token but the first of each window.

        The first of them is predicted from one token and the others from two, as far as a model
        that reads the window sees them.

        Returns:
            float64 (windows, length - 1)
        """
        uniform = np.full(windows.shape, 1 / self.vocab_size)
        unigram = self.interpolate(self.unigrams, windows, uniform)
        bigram = self.interpolate(self.bigrams, self.encode(windows, 2), unigram[:, 1:])
        trigram = self.interpolate(self.trigrams, self.encode(windows, 3), bigram[:, 1:])
        return np.concatenate([bigram[:, :1], trigram], axis=1)

    def losses(self, windows: np.ndarray) -> np.ndarray:
        """Return the mean loss of each window in nats per token, float64 (windows,)."""
        return -np.log(self.probabilities(windows)).mean(1)
