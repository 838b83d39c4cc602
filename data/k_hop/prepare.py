"""k-hop induction heads (Sanford, Hsu, Telgarsky, arXiv 2402.09268, section 4): pointers to follow,
hop after hop.

    python data/k_hop/prepare.py   1 to 4 hops, 4 symbols
    python data/k_hop/prepare.py --hops=8 --positions=128 --out=data/k_hop_8
    python train.py config/k_hop_cpu.py   block_size is positions + 1

From a token, one hop goes to the token after the last earlier occurrence of its symbol; the label
is the symbol where so many hops end as the window's first token names: to compute it in layers,
each replaces "where I am" by "where I go next". That number is as likely each from --fewest to
--hops.

From the authors' code (chsanford/hop-induction-heads, tasks.py): the number of hops, drawn for each
window and named by its first token; four symbols, uniform, but none follows itself; every position
has its own label. Different: only the last half of a window is trained on and scored, and windows
are drawn anew until all of that has its hops (theirs has a label for "there is no such token"); 1
to 4 hops and 64 positions, not 0 to 16 and 100.

Known: symbols are interchangeable, so without looking at any of them every label is as likely:
chance is accuracy 1 / symbols, loss ln(symbols). The last token alone tells more: one hop never
ends on its own symbol, accuracy 1 / (symbols - 1); of two hops, in a long window, 2 / symbols do;
of 1 to 4 hops and 4 symbols together it has 0.37. The optimum is loss 0, accuracy 1.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
import numpy as np

from data import tasks
from data.tasks import option

NOWHERE = -1


@dataclass(frozen=True)
class Hops(tasks.Task):
    hops: int = option(4, "difficulty: most hops to follow", 1, 64)
    fewest: int = option(1, "fewest hops to follow", 1, "hops")
    positions: int = option(64, "of a window; the last half is scored", 4, 2**15)
    symbols: int = option(4, "different symbols; a hop goes back about as far", 3, 2**12)

    name = "k_hop"

    @property
    def vocab_size(self) -> int:
        return self.symbols + self.hops + 2

    @property
    def first_scored(self) -> int:
        return self.positions - self.positions // 2

    def draw(self, rng, count):
        hops = rng.integers(self.fewest, self.hops + 1, count)
        ids, ends = self.draw_any(rng, hops)
        for _ in range(tasks.MOST_ROUNDS):
            lost = (ends[:, self.first_scored :] == NOWHERE).any(1)
            if not lost.any():
                break
            ids[lost], ends[lost] = self.draw_any(rng, hops[lost])
        else:
            windows = f"windows of --positions={self.positions} with --symbols={self.symbols}"
            fix = "give more positions, fewer symbols or hops"
            raise ValueError(f"--hops={self.hops}: {windows} hardly ever have so many hops: {fix}")
        labels = np.take_along_axis(ids, np.maximum(ends, 0), axis=1)
        labels[:, : self.first_scored] = 0
        return ids, labels

    def draw_any(self, rng, hops: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """ids and where the hops from each position end, or NOWHERE, (len(hops), positions) each.

        ids: symbols + hops, then 1 to symbols, none after itself.
        """
        steps = rng.integers(1, self.symbols, (len(hops), self.positions))  # to another symbol
        steps[:, 1] = rng.integers(0, self.symbols, len(hops))
        steps[:, 0] = 0
        ids = 1 + steps.cumsum(1) % self.symbols
        ids[:, 0] = self.symbols + hops
        after = np.full((len(hops), self.vocab_size), NOWHERE)  # each id's last occurrence so far
        hop, rows = np.full_like(ids, NOWHERE), np.arange(len(hops))
        for position in range(self.positions):
            hop[:, position] = after[rows, ids[:, position]]
            after[rows, ids[:, position]] = position + 1
        ends = np.tile(np.arange(self.positions), (len(hops), 1))
        for done in range(self.hops):
            further = np.take_along_axis(hop, np.maximum(ends, 0), axis=1)
            ends = np.where((done < hops[:, None]) & (ends != NOWHERE), further, ends)
        return ids, ends

    def about(self):
        return self.labelled(tasks.uniform(self.symbols), 1 + self.first_scored)


def main():
    tasks.main(__doc__, __file__, Hops)


if __name__ == "__main__":
    main()
