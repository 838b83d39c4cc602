"""The word problem of S_5 (Merrill, Petty, Sabharwal, arXiv 2404.08819, section 5): permutations
composed one by one.

    python data/permutations/prepare.py   6 permutations of 4 elements
    python data/permutations/prepare.py --degree=5 --length=16 --out=data/permutations_16
    python train.py config/permutations_cpu.py   block_size is length + 1

A window is `length` permutations, each of all degree! as likely; the label of each is the product
of all up to it. The word problem of S_5 is complete for NC1: transformers of a fixed depth, which
are in TC0, are believed not to solve it at every length.

From the authors' code (jopetty/word-problem, generate_data.py): tokens are elements of the group,
drawn uniformly and independently, and every position is trained on, with the product so far.
Different: the first label, which is the first token, is not scored; the default is S_4, whose word
problem is in TC0, because a small model has not learned the 14,400 products of S_5 (--degree=5)
after a minute.

An id is 1 + the permutation's place in lexicographical order of (p(0), p(1), ...), so 1 is the
identity. In a product the later permutation acts first: (p q)(i) = p(q(i)).

Known: a product of two or more is uniform whatever all tokens but one are, so whoever misses one is
right once in degree! (chance: accuracy 1 / degree!). The loss is the mean over all labels, of which
the first, once in `length`, is had without composing: chance is (1 - 1 / length) ln(degree!). The
optimum is loss 0, accuracy 1.
"""

import math
import sys
from dataclasses import dataclass
from functools import lru_cache
from itertools import permutations
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
import numpy as np

from data import tasks
from data.tasks import option


@lru_cache
def products(degree: int) -> np.ndarray:
    """The place of p q for the places of p and q, int64 (degree!, degree!)."""
    elements = np.array(list(permutations(range(degree))))  # in lexicographical order
    codes = elements @ degree ** np.arange(degree)[::-1]  # digits, so in the same order
    composed = elements[:, elements]  # (p, q, i): p(q(i))
    return np.searchsorted(codes, composed @ degree ** np.arange(degree)[::-1])


@dataclass(frozen=True)
class Words(tasks.Task):
    length: int = option(6, "difficulty: permutations of a window", 2, 2**15)
    degree: int = option(4, "elements that they permute", 2, 6)

    name = "permutations"

    @property
    def positions(self) -> int:
        return self.length

    @property
    def vocab_size(self) -> int:
        return math.factorial(self.degree) + 2

    def draw(self, rng, count):
        table = products(self.degree)
        factors = rng.integers(0, len(table), (count, self.length))
        so_far = factors.copy()
        for position in range(1, self.length):
            so_far[:, position] = table[so_far[:, position - 1], factors[:, position]]
        return 1 + factors, 1 + so_far

    def about(self):
        chance = tasks.uniform(math.factorial(self.degree))
        chance["loss"] *= 1 - 1 / self.length  # a mean over labels: the first needs no composing
        return self.labelled(chance, first=2)


def main():
    tasks.main(__doc__, __file__, Words)


if __name__ == "__main__":
    main()
