"""Multi-query associative recall (MQAR; Arora et al., arXiv 2312.04927, section 4).

The task tests the capacity of a narrow state.

    python data/recall/prepare.py                             # 8 pairs in 48 positions
    python data/recall/prepare.py --pairs=16 --positions=96 --out=data/recall_16
    python train.py config/recall_cpu.py                      # block_size is positions + 1

A sequence is key value key value ..., followed by each key once more as a query, at distances that
follow a power law. The label of a query is the value that followed its key. Only queries are
trained on and scored.

As in the authors' generator (HazyResearch/zoology, multiquery_ar.py), keys come from one half of
the vocabulary and values from the other, drawn without replacement for each sequence. Queries are
in slots of two positions; slot g (from 1) has weight g^(0.01 - 1), and slots are drawn without
replacement. Only queries have labels. There are three differences. The order of the queries is
random; theirs is the order of the draws, so queries of earlier keys tend to be nearer, and
positions hint at keys. Id 0 fills the positions between queries, instead of random ids (their
random_non_queries=False). The default vocabulary has 32 symbols instead of 8192.

A model that knows which values a sequence holds, but not to which keys they belong, has accuracy
1 / pairs and loss ln(pairs), which is called chance here. A model that knows nothing has accuracy
2 / symbols. The optimum is loss 0 and accuracy 1.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np

from configurator import option
from data import tasks

POWER = 0.01  # exponent of the power law of distances, as in the paper


@dataclass(frozen=True)
class Recall(tasks.Task):
    """Multi-query associative recall."""

    pairs: int = option(
        8,
        "number of key-value pairs to remember, which sets the difficulty",
        low=2,
        high=2**12,
    )
    positions: int = option(
        48,
        "number of positions per sequence, at least four per pair",
        low=8,
        high=2**15,
    )
    symbols: int = option(
        32,
        "number of different symbols, half of which are keys and half values",
        low=4,
        high=2**16 - 2,
    )

    name = "recall"

    @property
    def vocab_size(self) -> int:
        """Return the number of ids, including 0 and end-of-text."""
        return self.symbols + 2

    def check(self) -> None:
        """Raise ValueError if options contradict each other."""
        if self.symbols % 2:
            raise ValueError(
                f"--symbols={self.symbols} is odd, but half of the symbols are keys and half are "
                "values; give an even number"
            )
        if self.positions < 4 * self.pairs:
            raise ValueError(
                f"--positions={self.positions} is too few for {self.pairs} pairs and their "
                f"queries; give {4 * self.pairs} or more"
            )
        if self.symbols < 2 * self.pairs:
            raise ValueError(
                f"--symbols={self.symbols} is too few for {self.pairs} pairs of a key and a "
                f"value; give {2 * self.pairs} or more"
            )
        super().check()

    def draw(self, rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return ids and labels of random sequences, int64 (count, positions) each."""
        num_keys = self.symbols // 2
        context = 2 * self.pairs

        # the places of the smallest random numbers are a draw without replacement
        keys = rng.random((count, num_keys)).argpartition(self.pairs - 1)[:, : self.pairs]
        values = rng.random((count, num_keys)).argpartition(self.pairs - 1)[:, : self.pairs]
        keys = rng.permuted(1 + keys, axis=1)
        values = rng.permuted(1 + num_keys + values, axis=1)

        ids = np.zeros((count, self.positions), dtype=np.int64)
        labels = np.zeros_like(ids)
        ids[:, 0:context:2] = keys
        ids[:, 1:context:2] = values
        queries = context + 2 * self.draw_slots(rng, count)
        np.put_along_axis(ids, queries, keys, axis=1)
        np.put_along_axis(labels, queries, values, axis=1)
        return ids, labels

    def draw_slots(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """Return the slot of the query of each key, from 0, int64 (count, pairs).

        Slots are drawn by weight without replacement, and are in random order.
        """
        slots = np.arange(1, (self.positions - 2 * self.pairs) // 2 + 1)
        # Gumbel-top-k: the largest log(weight) + Gumbel noise are a draw without replacement
        noisy_log_weights = (POWER - 1) * np.log(slots) + rng.gumbel(size=(count, len(slots)))
        return rng.permuted(np.argsort(-noisy_log_weights, axis=1)[:, : self.pairs], axis=1)

    def about(self) -> dict:
        """Return what meta.json says of the task: the keys of data/sequences.py, chance, optimum."""
        return self.describe_labels(chance=tasks.uniform_guess(self.pairs))


def main() -> None:
    tasks.main(__doc__, __file__, Recall)


if __name__ == "__main__":
    main()
