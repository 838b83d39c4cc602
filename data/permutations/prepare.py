"""The word problem of S_5 (Merrill, Petty, Sabharwal, arXiv 2404.08819, section 5).

The task is to compose permutations one by one.

    python data/permutations/prepare.py                       # 6 permutations of 4 elements
    python data/permutations/prepare.py --degree=5 --length=16 --out=data/permutations_16
    python train.py config/permutations_cpu.py                # block_size is length + 1

A sequence is `length` permutations, each drawn uniformly from all degree! of them. The label of a
permutation is the product of all permutations up to it. The word problem of S_5 is complete for
NC1; Transformers of a fixed depth are in TC0, and are believed not to solve it at every length.

As in the authors' code (jopetty/word-problem, generate_data.py), tokens are elements of the group,
drawn uniformly and independently, and every position is trained on, with the product so far as its
label. There are two differences. The first label is the first token itself, and is not scored. The
default is S_4, whose word problem is in TC0, because a small model does not learn the 14,400
products of S_5 (--degree=5) within a minute.

An id is 1 + the index of the permutation in the lexicographical order of (p(0), p(1), ...), so 1 is
the identity. In a product the later permutation acts first: (p q)(i) = p(q(i)).

A product of two or more permutations is uniform if one of them is unknown, so a model that misses
one has accuracy 1 / degree!, which is chance. The loss is a mean over all labels, of which the
first (one in `length`) needs no composing, so the loss at chance is (1 - 1 / length) ln(degree!).
The optimum is loss 0 and accuracy 1.
"""

import math
import sys
from dataclasses import dataclass
from functools import lru_cache
from itertools import permutations
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from utils import errors

if __name__ == "__main__":
    errors.end_quietly_on_interrupt()  # before the slow imports

# isort: split
import numpy as np

from configurator import option
from data import tasks


@lru_cache
def products(degree: int) -> np.ndarray:
    """Return the index of the product p q for the indices of p and q, int64 (degree!, degree!)."""
    elements = np.array(list(permutations(range(degree))))  # in lexicographical order
    digit_values = degree ** np.arange(degree)[::-1]
    codes = elements @ digit_values  # read as digits, elements are in the same order
    composed = elements[:, elements]  # (p, q, i): p(q(i))
    return np.searchsorted(codes, composed @ digit_values)


@dataclass(frozen=True)
class Words(tasks.Task):
    """The word problem of a symmetric group."""

    length: int = option(
        6,
        "number of permutations per sequence, which sets the difficulty",
        low=2,
        high=2**15,
    )
    degree: int = option(
        4,
        "number of elements that are permuted",
        low=2,
        high=6,
    )

    name = "permutations"

    @property
    def positions(self) -> int:
        """Return the number of ids per sequence, without end-of-text."""
        return self.length

    @property
    def vocab_size(self) -> int:
        """Return the number of ids, including 0 and end-of-text."""
        return math.factorial(self.degree) + 2

    def draw(self, rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return ids and labels of random sequences, int64 (count, positions) each."""
        table = products(self.degree)
        factors = rng.integers(0, len(table), (count, self.length))
        products_so_far = factors.copy()
        for position in range(1, self.length):
            previous = products_so_far[:, position - 1]
            products_so_far[:, position] = table[previous, factors[:, position]]
        return 1 + factors, 1 + products_so_far

    def about(self) -> dict:
        """Return what meta.json says of the task: the keys of data/sequences.py, chance, optimum."""
        chance = tasks.uniform_guess(math.factorial(self.degree))
        # the loss is a mean over all labels, and the first one needs no composing
        chance["loss"] *= 1 - 1 / self.length
        return self.describe_labels(chance=chance, first_scored=2)


def main() -> None:
    tasks.main(__doc__, __file__, Words)


if __name__ == "__main__":
    main()
