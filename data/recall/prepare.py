"""Multi-query associative recall (MQAR; Arora et al., arXiv 2312.04927, section 4): the capacity of
a narrow state.

    python data/recall/prepare.py   8 pairs in 48 positions
    python data/recall/prepare.py --pairs=16 --positions=96 --out=data/recall_16
    python train.py config/recall_cpu.py   block_size is positions + 1

A window is key value key value ..., then every key once more, at gaps that follow a power law; the
label of such a query is the value that followed its key. Only queries are trained on and scored.

From the authors' generator (HazyResearch/zoology, multiquery_ar.py): keys of one half of the
vocabulary and values of the other, each window's drawn without replacement; queries in slots of two
positions, slot g (from 1) with weight g^(0.01 - 1), without replacement; labels at queries alone.
Different: keys come again in any order (theirs in the order of the draws, earlier ones nearer,
which positions give away); between queries stands id 0 and not random ids (their
random_non_queries=False); the vocabulary is 32 and not 8192.

Known: whoever sees which values a window holds, and not whose they are, is right once in `pairs`
(chance: accuracy 1 / pairs, loss ln(pairs)); whoever sees nothing, once in symbols / 2. The optimum
is loss 0, accuracy 1.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
import numpy as np

from data import tasks
from data.tasks import option

POWER = 0.01  # of the law of gaps, as in the paper


@dataclass(frozen=True)
class Recall(tasks.Task):
    pairs: int = option(8, "difficulty: pairs to remember", 2, 2**12)
    positions: int = option(48, "of a window, four for each pair or more", 8, 2**15)
    symbols: int = option(32, "half of them keys, half values", 4, 2**16 - 2)

    name = "recall"

    @property
    def vocab_size(self) -> int:
        return self.symbols + 2

    def check(self) -> None:
        if self.symbols % 2:
            even = "give an even number, half of them are keys"
            raise ValueError(f"--symbols={self.symbols}: {even}")
        pairs = f"{self.pairs} pairs"
        if 4 * self.pairs > self.positions:
            need = f"{pairs} and their queries need {4 * self.pairs} or more"
            raise ValueError(f"--positions={self.positions}: {need}")
        if 2 * self.pairs > self.symbols:
            raise ValueError(f"--symbols={self.symbols}: {pairs} need {2 * self.pairs} or more")
        super().check()

    def draw(self, rng, count):
        half, context = self.symbols // 2, 2 * self.pairs
        keys = 1 + rng.random((count, half)).argpartition(self.pairs - 1)[:, : self.pairs]
        values = 1 + half + rng.random((count, half)).argpartition(self.pairs - 1)[:, : self.pairs]
        keys, values = rng.permuted(keys, axis=1), rng.permuted(values, axis=1)
        ids, labels = np.zeros((2, count, self.positions), dtype=np.int64)
        ids[:, 0:context:2], ids[:, 1:context:2] = keys, values
        queries = context + 2 * self.slots(rng, count)
        np.put_along_axis(ids, queries, keys, axis=1)
        np.put_along_axis(labels, queries, values, axis=1)
        return ids, labels

    def slots(self, rng, count: int) -> np.ndarray:
        """The slot of each key's query, from 0, (count, pairs): drawn by weight without
        replacement, in any order.

        The slots of the largest log(weight) + Gumbel noise are such draws.
        """
        slots = np.arange(1, (self.positions - 2 * self.pairs) // 2 + 1)
        noisy = (POWER - 1) * np.log(slots) + rng.gumbel(size=(count, len(slots)))
        return rng.permuted(np.argsort(-noisy, axis=1)[:, : self.pairs], axis=1)

    def about(self):
        return self.labelled(tasks.uniform(self.pairs))


def main():
    tasks.main(__doc__, __file__, Recall)


if __name__ == "__main__":
    main()
