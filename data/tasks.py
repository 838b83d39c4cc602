"""What the synthetic tasks share: windows of ids with a label at some positions, drawn by a seed.

A window of the shards is end-of-text and its ids, then as many labels: that of each of these
tokens, 0 for none. Ids begin at 1, end-of-text is the last. `data/windows.py` reads them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from configurator import Parser
from data import preparation
from data.sources import ROWS, Batch

VAL_SHARE = 8  # one in so many of all possible windows is for validation, by a hash of its ids
MOST_ROUNDS = 1000  # of drawing windows anew
RANGES = {"sequences": (1, 2**40), "val_sequences": (1, 2**40), "seed": (0, 2**60)}


@dataclass(frozen=True)
class Task(ABC):
    """One task at one difficulty: a subclass has `name`, that of its folder, its keys as fields,
    and among them `positions`, the ids of a window, end-of-text aside.
    """

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Ids with 0 and end-of-text."""

    @abstractmethod
    def draw(self, rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
        """ids and labels, int64 (count, positions)."""

    @abstractmethod
    def known(self) -> dict:
        """For meta.json: chance, optimum, and which positions are scored (end-of-text is position
        0).
        """

    def check(self) -> None:
        """ValueError: keys that contradict each other, or more ids than a shard can hold."""
        if self.vocab_size > 2**16:
            raise ValueError(
                f"{self} needs {self.vocab_size:,} ids, a shard holds 65536: give fewer"
            )

    def about(self) -> dict:
        """What meta.json says of the task."""
        windows = {
            "window_tokens": 2 * (self.positions + 1),
            "labels": True,
            "scored": [[1, self.positions + 1]],
        }
        return {"difficulty": vars(self), **windows, **self.known()}


@dataclass(frozen=True)
class Sequences:
    """`count` windows of a task as a source of documents; sequence i is a function of (task, seed,
    split, i).
    """

    task: Task
    count: int
    seed: int
    split: str

    def identity(self) -> dict:
        return {
            "source": f"{self.task}, seed {self.seed}",
            "count": self.count,
            "split": self.split,
        }

    def text_bytes(self) -> int:
        return self.count * 2 * (self.task.positions + 1)  # tokens, of which one counts as a byte

    def read(self, cursor: dict | None = None) -> Iterator[Batch]:
        for first in range(cursor["sequence"] if cursor else 0, self.count, ROWS):
            ids, labels = self.block(first)
            rows = np.hstack([ids, np.zeros_like(ids[:, :1]), labels])[: self.count - first]
            yield Batch({"sequence": first}, [" ".join(map(str, row)) for row in rows.tolist()])

    def block(self, first: int) -> tuple[np.ndarray, np.ndarray]:
        """ids and labels of ROWS sequences from `first` on, those whose hash belongs to the
        split.
        """
        rng = np.random.default_rng([self.seed, self.split == "val", first])
        return of_split(
            self.split, self.task.draw, rng, f"{self.task}", "give a greater difficulty"
        )


def of_split(split: str, draw: Callable, rng, task: str, fix: str) -> tuple[np.ndarray, ...]:
    """ROWS windows, drawn by `draw(rng, ROWS)` until as many belong to the split by their hash.

    A draw gives arrays of which the first holds the ids. ValueError: hardly any window belongs to
    the split, as the task has too few different ones; it names the task and the fix.
    """
    found, missing = [], ROWS
    for _ in range(MOST_ROUNDS):
        arrays = draw(rng, ROWS)
        own = for_validation(arrays[0]) == (split == "val")
        found.append(tuple(array[own] for array in arrays))
        missing -= own.sum()
        if missing <= 0:
            return tuple(np.concatenate(parts)[:ROWS] for parts in zip(*found))
    raise ValueError(f"{task}: too few different windows for both splits: {fix}")


def for_validation(ids: np.ndarray) -> np.ndarray:
    """Which windows may be drawn for validation, and then not for training, bool (count,): a hash
    of all their ids.
    """
    state = np.zeros(len(ids), dtype=np.uint64)
    for column in ids.T.astype(np.uint64):
        state = (state ^ column) * np.uint64(0x9E3779B97F4A7C15)
        state ^= state >> np.uint64(29)
    return state % np.uint64(VAL_SHARE) == 0


def arguments(doc: str, folder: Path) -> Parser:
    """A parser with the options of all tasks; the task's own come to it."""
    fixed = {"tokenizer": "ids", "tokenizer_bytes": 1, "val_tokens": None, "vocab_size": None}
    parser = preparation.arguments(doc, folder, fixed)
    parser.add_argument("--sequences", type=int, default=100_000, help="training windows")
    parser.add_argument(
        "--val_sequences",
        type=int,
        default=1000,
        help="validation windows, none of them in training",
    )
    parser.add_argument("--seed", type=int, default=0)
    return parser


def check_ranges(args, ranges: dict[str, tuple[int, int]]) -> None:
    """ValueError: an option outside (low, high)."""
    for name, (low, high) in (ranges | RANGES).items():
        if not low <= getattr(args, name) <= high:
            raise ValueError(f"--{name}={getattr(args, name)}: give {low} to {high}")


def prepare(args, task: Task) -> None:
    """Make the task's shards. ValueError: as `preparation.prepare`."""
    task.check()
    args.vocab_size = task.vocab_size
    plan = [
        (split, Sequences(task, count, args.seed, split), None)
        for split, count in (("val", args.val_sequences), ("train", args.sequences))
    ]
    for _, windows, _ in plan:
        windows.block(0)  # whether any can be drawn is known before anything is written
    preparation.prepare(args, task.name, plan, task.about())
