"""k-hop induction heads (Sanford, Hsu, Telgarsky, arXiv 2402.09268, section 4).

The task is to follow pointers, hop after hop.

    python data/k_hop/prepare.py                              # 1 to 4 hops, 4 symbols
    python data/k_hop/prepare.py --hops=8 --positions=128 --out=data/k_hop_8
    python train.py config/k_hop_cpu.py                       # block_size is positions + 1

One hop goes from a token to the token after the last earlier occurrence of the same symbol. The
first token of a sequence names a number of hops, and the label of a token is the symbol that this
many hops lead to. To compute it layer by layer, each layer must replace "where I am" with "where I
go next". The number of hops is uniform from --fewest to --hops.

As in the authors' code (chsanford/hop-induction-heads, tasks.py), the number of hops is drawn for
each sequence and named by its first token, symbols are uniform except that none follows itself, and
every position has its own label. There are two differences. Only the last half of a sequence is
trained on and scored, and sequences are drawn again until all positions of that half have enough
hops (the authors use a label for "there is no such token"). The defaults are 1 to 4 hops and 64
positions instead of 0 to 16 hops and 100 positions.

Symbols are interchangeable, so without looking at them every label is equally likely: chance is
accuracy 1 / symbols and loss ln(symbols). The last token says more: one hop never ends on the
symbol where it starts, which gives accuracy 1 / (symbols - 1), and in a long sequence two hops end
on it with probability 2 / symbols. For 1 to 4 hops and 4 symbols together, the accuracy from the
number of hops and the last token is 0.37. The optimum is loss 0 and accuracy 1.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from utils import errors

if __name__ == "__main__":
    errors.end_quietly_on_interrupt()  # before the slow imports

# isort: split
import numpy as np

from configurator import option
from data import tasks

NOWHERE = -1


@dataclass(frozen=True)
class Hops(tasks.Task):
    """k-hop induction heads."""

    hops: int = option(
        4,
        "largest number of hops to follow, which sets the difficulty",
        low=1,
        high=64,
    )
    fewest: int = option(
        1,
        "smallest number of hops to follow, at most --hops",
        low=1,
        high=64,
    )
    positions: int = option(
        64,
        "number of positions per sequence; the last half is scored",
        low=4,
        high=2**15,
    )
    symbols: int = option(
        4,
        "number of different symbols; a hop goes back about this many positions",
        low=3,
        high=2**12,
    )

    name = "k_hop"

    @property
    def vocab_size(self) -> int:
        """Return the number of ids, including 0 and end-of-text."""
        return self.symbols + self.hops + 2

    @property
    def first_scored(self) -> int:
        """Return the first position whose label counts, without end-of-text."""
        return self.positions - self.positions // 2

    def check(self) -> None:
        """Raise ValueError if options contradict each other."""
        if self.fewest > self.hops:
            raise ValueError(
                f"--fewest={self.fewest} is more than --hops={self.hops}; give 1 to {self.hops}"
            )
        super().check()

    def draw(self, rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return ids and labels of random sequences, int64 (count, positions) each.

        Raises:
            ValueError: sequences with enough hops are too rare
        """
        hops = rng.integers(self.fewest, self.hops + 1, count)
        ids, ends = self.draw_unfiltered(rng, hops)
        for _ in range(tasks.MAX_DRAWS):
            is_short_of_hops = (ends[:, self.first_scored :] == NOWHERE).any(1)
            if not is_short_of_hops.any():
                break
            new_ids, new_ends = self.draw_unfiltered(rng, hops[is_short_of_hops])
            ids[is_short_of_hops] = new_ids
            ends[is_short_of_hops] = new_ends
        else:
            raise ValueError(
                f"--hops={self.hops}: sequences of --positions={self.positions} with "
                f"--symbols={self.symbols} hardly ever have so many hops; give more positions, or "
                "fewer symbols or hops"
            )
        labels = np.take_along_axis(ids, np.maximum(ends, 0), axis=1)
        labels[:, : self.first_scored] = 0
        return ids, labels

    def draw_unfiltered(
        self, rng: np.random.Generator, hops: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return sequences, of which some may have too few hops.

        Args:
            hops: number of hops of each sequence, int64 (count,)

        Returns:
            ids: symbols + hops, then symbols from 1, none of which follows itself
            ends: the position where the hops from each position end, or NOWHERE;
                int64 (count, positions) each
        """
        count = len(hops)

        # a nonzero step, modulo the number of symbols, leads to another symbol
        steps = rng.integers(1, self.symbols, (count, self.positions))
        steps[:, 1] = rng.integers(0, self.symbols, count)
        steps[:, 0] = 0
        ids = 1 + steps.cumsum(1) % self.symbols
        ids[:, 0] = self.symbols + hops

        # where one hop from each position ends
        next_position = np.full_like(ids, NOWHERE)
        after_last_occurrence = np.full((count, self.vocab_size), NOWHERE)
        rows = np.arange(count)
        for position in range(self.positions):
            next_position[:, position] = after_last_occurrence[rows, ids[:, position]]
            after_last_occurrence[rows, ids[:, position]] = position + 1

        # where all hops from each position end
        ends = np.tile(np.arange(self.positions), (count, 1))
        for hop in range(self.hops):
            one_further = np.take_along_axis(next_position, np.maximum(ends, 0), axis=1)
            has_hops_left = hop < hops[:, None]
            ends = np.where(has_hops_left & (ends != NOWHERE), one_further, ends)
        return ids, ends

    def about(self) -> dict:
        """Return what meta.json says of the task: the keys of data/sequences.py, chance, optimum."""
        return self.describe_labels(
            chance=tasks.uniform_guess(self.symbols),
            first_scored=1 + self.first_scored,
        )


def main() -> None:
    tasks.main(__doc__, __file__, Hops)


if __name__ == "__main__":
    main()
