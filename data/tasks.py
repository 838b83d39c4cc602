"""What the synthetic tasks share: windows of ids with a label at some positions, drawn by a seed.

A window of the shards is end-of-text and its ids, then as many labels: that of each of these
tokens, 0 for none. Ids begin at 1, end-of-text is the last. `data/windows.py` reads them.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path

import numpy as np

from data import preparation
from data.sources import ROWS, Batch
from utils import errors

VAL_SHARE = 8  # one in so many of all possible windows is for validation, by a hash of its ids
MOST_ROUNDS = 1000  # of drawing windows anew


def option(default, help: str, low: int = 0, high: int | str = 0, choices=None):
    """A field that is an option of the script: one of the choices, or a number from low to high,
    which may be the name of an option before it.
    """
    facts = {"help": help, "low": low, "high": high, "choices": choices}
    return field(default=default, metadata=facts)


@dataclass(frozen=True)
class Draws:
    """How many windows of a task a corpus has, and which."""

    sequences: int = option(100_000, "training windows", 1, 2**40)
    val_sequences: int = option(1000, "validation windows, none of them in training", 1, 2**40)
    seed: int = option(0, "of the draws", 0, 2**60)


@dataclass(frozen=True)
class Task:
    """One task at one difficulty. A subclass has its options as fields, and

    name             that of its folder
    positions        ids of a window, end-of-text aside
    vocab_size       ids with 0 and end-of-text
    draw(rng, count) ids and labels, int64 (count, positions) each
    about()          what meta.json says of the task: see data/windows.py; chance, optimum
    """

    tokenizer = "ids"
    fix = "give a greater difficulty"  # where there are too few different windows

    @property
    def window_tokens(self) -> int:
        return 2 * (self.positions + 1)

    def check(self) -> None:
        """ValueError: options that contradict each other, or more ids than a shard can hold."""
        if self.vocab_size > 2**16:
            needs = f"{self} needs {self.vocab_size:,} ids, a shard holds 65536"
            raise ValueError(f"{needs}: give fewer")

    def source(self, seed: int) -> str:
        """What tells the windows of this task and seed from all others."""
        return f"{self}, seed {seed}"

    def texts(self, ids: np.ndarray, labels: np.ndarray) -> list[str]:
        """A window of the shards each, as the tokenizer reads it, without the end-of-text that it
        puts first.
        """
        rows = np.hstack([ids, np.zeros_like(ids[:, :1]), labels])  # 0: the label of end-of-text
        return [" ".join(map(str, row)) for row in rows.tolist()]

    def labelled(self, chance: dict, first: int = 1) -> dict:
        """`about`, of a task with labels that is scored from a position on; end-of-text is 0."""
        form = {"difficulty": vars(self), "window_tokens": self.window_tokens, "labels": True}
        known = {"chance": chance, "optimum": {"loss": 0.0, "accuracy": 1.0}}
        return {**form, "scored": [[first, self.positions + 1]], **known}


def uniform(count: int) -> dict:
    """Loss in nats and accuracy of whoever takes so many answers for as likely."""
    return {"loss": math.log(count), "accuracy": 1 / count}


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
        return {"source": self.task.source(self.seed), "count": self.count, "split": self.split}

    def text_bytes(self) -> int:
        return self.count * self.task.window_tokens  # of which one counts as a byte

    def read(self, cursor: dict | None = None) -> Iterator[Batch]:
        for first in range(cursor["sequence"] if cursor else 0, self.count, ROWS):
            texts = self.task.texts(*self.block(first))
            yield Batch({"sequence": first}, texts[: self.count - first])

    def block(self, first: int) -> tuple[np.ndarray, ...]:
        """What the task draws, of ROWS sequences from `first` on: of windows that belong to the
        split by a hash of their ids.

        Always ROWS, so that a sequence does not depend on how many there are. ValueError: hardly
        any window belongs to the split, as the task has too few different ones.
        """
        rng = np.random.default_rng([self.seed, self.split == "val", first])
        found, missing = [], ROWS
        for _ in range(MOST_ROUNDS):
            arrays = self.task.draw(rng, ROWS)
            # Rejection: each split is uniform over the windows that are its own.
            own = for_validation(arrays[0]) == (self.split == "val")
            found.append([array[own] for array in arrays])
            missing -= own.sum()
            if missing <= 0:
                return tuple(np.concatenate(parts)[:ROWS] for parts in zip(*found))
        too_few = "too few different windows for both splits"
        raise ValueError(f"{self.task}: {too_few}: {self.task.fix}")


def for_validation(ids: np.ndarray) -> np.ndarray:
    """Which windows may be drawn for validation, and then not for training, bool (count,): a hash
    of all their ids.
    """
    state = np.zeros(len(ids), dtype=np.uint64)
    for column in ids.T.astype(np.uint64):
        state = (state ^ column) * np.uint64(0x9E3779B97F4A7C15)
        state ^= state >> np.uint64(29)
    return state % np.uint64(VAL_SHARE) == 0


def main(doc: str, script: str, kind: type[Task]) -> None:
    """The script of a task: its options, checked, and its shards."""
    fixed = {"tokenizer": kind.tokenizer, "tokenizer_bytes": 1, "val_tokens": None}
    parser = preparation.arguments(doc, Path(script).parent, fixed | {"vocab_size": None})
    options = (*fields(Draws), *fields(kind))
    for each in options:
        keys = {name: each.metadata[name] for name in ("help", "choices")}
        parser.add_argument(f"--{each.name}", type=each.type, default=each.default, **keys)
    args = parser.parse_args()
    with errors.one_line_errors():
        for name, facts in ((each.name, each.metadata) for each in options):
            value, low, high = getattr(args, name), facts["low"], facts["high"]
            high = getattr(args, high) if isinstance(high, str) else high
            if not facts["choices"] and not low <= value <= high:
                raise ValueError(f"--{name}={value}: give {low} to {high}")
        task = kind(**{each.name: getattr(args, each.name) for each in fields(kind)})
        task.check()
        args.vocab_size = task.vocab_size
        val = Sequences(task, args.val_sequences, args.seed, "val")
        train = Sequences(task, args.sequences, args.seed, "train")
        for windows in (val, train):
            windows.block(0)  # whether any can be drawn is known before anything is written
        plan = [("val", val, None), ("train", train, None)]
        preparation.prepare(args, task.name, plan, task.about())
