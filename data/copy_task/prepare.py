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

import math
import string
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
import numpy as np

import configurator
from data import preparation, tasks
from data.sources import ROWS, Batch

ALPHABET = np.frombuffer((string.ascii_letters + string.digits + "+/").encode(), dtype=np.uint8)


@dataclass
class Copies:
    """`count` sequences; sequence i is a function of (seed, split, i)."""

    count: int
    half: int
    symbols: int
    seed: int
    split: str
    trained: str = "all"

    def identity(self) -> dict:
        # "split by a hash" keeps an unfinished preparation of before, split by its seed alone,
        # from being continued.
        task = (
            f"copy task, {self.half} of {self.symbols} symbols, seed {self.seed}, split by a hash"
        )
        task += ", trained on its answers" * (self.trained == "answers")
        return {"source": task, "count": self.count, "split": self.split}

    def text_bytes(self) -> int:
        return self.count * (2 * self.half + 1)

    def read(self, cursor: dict | None = None) -> Iterator[Batch]:
        for first in range(cursor["sequence"] if cursor else 0, self.count, ROWS):
            halves = self.block(first)[: self.count - first]
            yield Batch({"sequence": first}, [bytes(half).decode() * 2 for half in halves])

    def block(self, first: int) -> np.ndarray:
        """First halves of ROWS sequences from `first` on, as bytes (ROWS, half).

        ValueError: there are too few for two splits.
        """
        rng = np.random.default_rng([self.seed, self.split == "val", first])
        task, fix = (
            f"--half={self.half} --symbols={self.symbols}",
            "give a greater half, or more symbols",
        )
        [halves] = tasks.of_split(self.split, self.draw, rng, task, fix)
        return halves

    def draw(self, rng: np.random.Generator, count: int) -> tuple[np.ndarray]:
        return (rng.choice(ALPHABET[: self.symbols], (count, self.half)),)


def about(args) -> dict:
    """What meta.json says of the task."""
    half, blind = args.half, math.log(args.symbols)
    answers = {"window_tokens": 2 * half + 1, "scored": [[half, 2 * half]]}
    if args.trained == "answers":
        answers["trained"] = answers["scored"]
    least = blind / 2 if args.trained == "all" else 0.0
    known = {
        "chance": {"loss": blind, "accuracy": 1 / args.symbols},
        "optimum": {"loss": least, "accuracy": 1.0},
    }
    return {**answers, **known}


def main():
    fixed = {"tokenizer": "bytes", "vocab_size": 257, "tokenizer_bytes": 1, "val_tokens": None}
    parser = preparation.arguments(__doc__, Path(__file__).parent, fixed)
    add = parser.add_argument
    add("--half", type=int, default=32, help="characters to copy; block_size is twice that")
    add("--symbols", type=int, default=16, help="different characters, at most 64")
    add("--sequences", type=int, default=100_000, help="training sequences")
    add("--val_sequences", type=int, default=1000, help="validation sequences")
    add("--seed", type=int, default=0)
    add(
        "--trained",
        choices=("all", "answers"),
        default="all",
        help="positions in the loss; answers: the second half",
    )
    args = parser.parse_args()
    with configurator.one_line_errors():
        for name, low, high in (
            *(("half", 1, 2**20), ("symbols", 2, 64), ("seed", 0, 2**60)),
            *(("sequences", 1, 2**40), ("val_sequences", 1, 2**40)),
        ):
            if not low <= getattr(args, name) <= high:
                raise ValueError(f"--{name}={getattr(args, name)}: give {low} to {high}")
        train, val = (
            Copies(count, args.half, args.symbols, args.seed, split, args.trained)
            for count, split in ((args.sequences, "train"), (args.val_sequences, "val"))
        )
        for copies in (train, val):
            copies.block(0)  # whether any can be drawn is known before anything is written
        preparation.prepare(
            args, "copy_task", [("val", val, None), ("train", train, None)], about(args)
        )


if __name__ == "__main__":
    main()
