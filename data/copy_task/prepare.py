"""The synthetic copy task of the Manifold-Geometric Transformer (section 4.1).

    python data/copy_task/prepare.py                          # sequences of 2 x 32 random characters
    python data/copy_task/prepare.py --half=128 --symbols=64 --out=data/copy_task_128
    python train.py config/copy_task_cpu.py                   # block_size is 2 * half

A sequence is the end-of-text token, `half` random characters, and the same characters again. A
training example holds exactly one sequence. Evaluation reports the fraction of second halves in
which every character is predicted correctly from the characters before it (`val_exact_match`), and
the fraction of their characters (`val_accuracy`). A hash decides which first halves are for
validation; these never occur in training. Chance is an accuracy of 1 / symbols. The first half
cannot be predicted, so the lowest possible loss is ln(symbols) / 2 if every position is trained on,
and 0 with --trained=answers.
"""

import string
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np

from configurator import option
from data import tasks

ALPHABET = np.frombuffer((string.ascii_letters + string.digits + "+/").encode(), dtype=np.uint8)


@dataclass(frozen=True)
class Copies(tasks.Task):
    """The copy task.

    Its shards are text, whose targets are the next characters, instead of ids with labels.
    """

    half: int = option(
        32,
        "number of characters to copy, which sets the difficulty; block_size is twice this number",
        low=1,
        high=2**20,
    )
    symbols: int = option(
        16,
        "number of different characters",
        low=2,
        high=64,
    )
    trained: Literal["all", "answers"] = option(
        "all",
        "positions that count in the training loss; answers is only the second half",
    )

    name = "copy_task"
    tokenizer = "bytes"
    vocab_size = 257
    advice = "give a larger half, or more symbols"

    def __str__(self) -> str:
        return f"--half={self.half} --symbols={self.symbols}"

    def source(self, seed: int) -> str:
        """Return a name that distinguishes the sequences of this task and seed from all others."""
        # "split by a hash" prevents an unfinished preparation by an earlier version, which split
        # by the seed alone, from being resumed.
        name = f"copy task, {self.half} of {self.symbols} symbols, seed {seed}, split by a hash"
        if self.trained == "answers":
            return f"{name}, trained on its answers"
        return name

    def draw(self, rng: np.random.Generator, count: int) -> tuple[np.ndarray]:
        """Return random first halves as bytes, uint8 (count, half)."""
        return (rng.choice(ALPHABET[: self.symbols], (count, self.half)),)

    def texts(self, halves: np.ndarray) -> list[str]:
        """Return sequences whose first halves are given, uint8 (count, half)."""
        return [bytes(half).decode() * 2 for half in halves]

    @property
    def sequence_tokens(self) -> int:
        """Return the number of tokens per sequence in the shards."""
        return 2 * self.half + 1

    def about(self) -> dict:
        """Return what meta.json says of the task: the keys of data/sequences.py, chance, optimum."""
        answers = [[self.half, 2 * self.half]]
        chance = tasks.uniform_guess(self.symbols)
        about = {"window_tokens": self.sequence_tokens, "scored": answers}
        if self.trained == "answers":
            about["trained"] = answers
            lowest_loss = 0.0
        else:
            # half of the positions that are trained on cannot be predicted
            lowest_loss = chance["loss"] / 2
        about["chance"] = chance
        about["optimum"] = {"loss": lowest_loss, "accuracy": 1.0}
        return about


def main() -> None:
    tasks.main(__doc__, __file__, Copies)


if __name__ == "__main__":
    main()
