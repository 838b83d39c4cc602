"""The synthetic copy task of the Manifold-Geometric Transformer (section 4.1): the second half
repeats the first.

    python data/copy_task/prepare.py   sequences of 2 x 32 random letters
    python data/copy_task/prepare.py --half=128 --symbols=64 --out=data/copy_task_128
    python train.py config/copy_task_cpu.py                                   block_size is 2 x half

A sequence is end-of-text, `half` characters, and the same again: a window of training holds exactly
one. Evaluation then gives the share of second halves that are right in every character, each given
what precedes it (`val_exact_match`), and of their characters (`val_accuracy`). A hash decides which
first halves are for validation, and these are never in training. Chance is 1 / symbols. The first
half cannot be foreseen: the least loss is ln(symbols) / 2 where every position is trained on, and 0
with --trained=answers.
"""

import string
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
import numpy as np

from data import tasks
from data.tasks import option

ALPHABET = np.frombuffer((string.ascii_letters + string.digits + "+/").encode(), dtype=np.uint8)


@dataclass(frozen=True)
class Copies(tasks.Task):
    """Text, and not ids with labels as the other tasks: targets are the next characters."""

    half: int = option(32, "characters to copy; block_size is twice that", 1, 2**20)
    symbols: int = option(16, "different characters, at most 64", 2, 64)
    trained: str = option(
        "all", "positions in the loss; answers: the second half", choices=("all", "answers")
    )

    name = "copy_task"
    tokenizer = "bytes"
    vocab_size = 257
    fix = "give a greater half, or more symbols"

    def __str__(self) -> str:
        return f"--half={self.half} --symbols={self.symbols}"

    def source(self, seed: int) -> str:
        # "split by a hash" keeps an unfinished preparation of before, split by its seed alone,
        # from being continued.
        task = f"copy task, {self.half} of {self.symbols} symbols, seed {seed}, split by a hash"
        return task + ", trained on its answers" * (self.trained == "answers")

    def draw(self, rng, count):
        """First halves, as bytes (count, half)."""
        return (rng.choice(ALPHABET[: self.symbols], (count, self.half)),)

    def texts(self, halves):
        return [bytes(half).decode() * 2 for half in halves]

    @property
    def window_tokens(self) -> int:
        return 2 * self.half + 1

    def about(self):
        answers, chance = [[self.half, 2 * self.half]], tasks.uniform(self.symbols)
        about = {"window_tokens": self.window_tokens, "scored": answers}
        about |= {"trained": answers} if self.trained == "answers" else {}
        least = chance["loss"] / 2 if self.trained == "all" else 0.0  # half of it is no answer
        return {**about, "chance": chance, "optimum": {"loss": least, "accuracy": 1.0}}


def main():
    tasks.main(__doc__, __file__, Copies)


if __name__ == "__main__":
    main()
