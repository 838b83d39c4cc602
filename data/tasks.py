"""What the scripts of the synthetic tasks share.

A task draws sequences of token ids, with a label at some positions, from a seed. In the shards, a
sequence is the end-of-text token, its ids, and as many labels: one for each of these tokens, 0
where there is none. Ids start at 1, and end-of-text has the largest id. `data/sequences.py` reads
such shards.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from configurator import collect_options, option
from data import preparation
from data.documents import Documents, Rows
from data.preparation import PreparationOptions, Stage
from data.shards import MAX_UINT16_VOCAB
from utils import errors

# one of every 8 possible sequences is for validation, chosen by a hash of its ids
VAL_DIVISOR = 8
ROWS = 256  # sequences that are drawn at once
# how many times sequences are drawn until enough of them are different
MAX_DRAWS = 1000


@dataclass(frozen=True)
class CorpusOptions:
    """Options of the corpus of every task."""

    sequences: int = option(
        100_000,
        "number of training sequences",
        low=1,
        high=2**40,
    )
    val_sequences: int = option(
        1000,
        "number of validation sequences, none of which is in the training split",
        low=1,
        high=2**40,
    )
    seed: int = option(
        0,
        "random seed for the sequences",
        low=0,
        high=2**60,
    )


@dataclass(frozen=True)
class Task:
    """One synthetic task at one difficulty.

    A subclass declares its options as fields. Besides `draw` and `about` it has the attributes

        name        name of its folder in data/
        positions   number of ids per sequence, without end-of-text
        vocab_size  number of ids, including 0 and end-of-text
    """

    tokenizer = "ids"

    # what to do if there are too few different sequences for two splits
    advice = "choose a greater difficulty"

    def draw(self, rng: np.random.Generator, count: int) -> tuple[np.ndarray, ...]:
        """Return ids and labels of random sequences, int64 (count, positions) each."""
        raise NotImplementedError

    def about(self) -> dict:
        """Return what meta.json says of the task: the keys of data/sequences.py, chance, optimum."""
        raise NotImplementedError

    @property
    def sequence_tokens(self) -> int:
        """Return the number of tokens per sequence in the shards."""
        return 2 * (self.positions + 1)

    def check(self) -> None:
        """Raise ValueError if options contradict each other, or need more ids than shards hold."""
        if self.vocab_size > MAX_UINT16_VOCAB:
            raise ValueError(
                f"{self} needs {self.vocab_size:,} ids, but a task has at most 65,536; "
                "choose a smaller vocabulary"
            )

    def source(self, seed: int) -> str:
        """Return a name that distinguishes the sequences of this task and seed from all others."""
        return f"{self}, seed {seed}"

    def texts(self, ids: np.ndarray, labels: np.ndarray) -> list[str]:
        """Return sequences as the tokenizer reads them, without the end-of-text that it prepends.

        Args:
            ids, labels: int64 (count, positions)
        """
        end_of_text_labels = np.zeros_like(ids[:, :1])
        sequences = np.hstack([ids, end_of_text_labels, labels])
        return [" ".join(map(str, sequence)) for sequence in sequences.tolist()]

    def describe_labels(self, chance: dict, first_scored: int = 1) -> dict:
        """Return `about()` of a task with labels.

        Args:
            chance: loss and accuracy of a model that guesses
            first_scored: the first position whose answer is scored; position 0 is end-of-text
        """
        return {
            "difficulty": vars(self),
            "window_tokens": self.sequence_tokens,
            "labels": True,
            "scored": [[first_scored, self.positions + 1]],
            "chance": chance,
            "optimum": {"loss": 0.0, "accuracy": 1.0},
        }


def uniform_guess(num_answers: int) -> dict:
    """Return the loss in nats and the accuracy of a uniform guess among this many answers."""
    return {"loss": math.log(num_answers), "accuracy": 1 / num_answers}


def generate(task: Task, count: int, seed: int, split: str) -> Documents:
    """Return `count` sequences of a task; sequence i is a function of (task, seed, split, i)."""

    def draw_rows() -> Iterator[dict]:
        for first in range(0, count, ROWS):
            texts = task.texts(*draw_block(task, seed, split, first))
            yield from ({"text": text} for text in texts[: count - first])

    return Documents(
        open=lambda: Rows([draw_rows]),
        identity={"source": task.source(seed), "count": count, "split": split},
        num_bytes=count * task.sequence_tokens,  # a token counts as one byte
    )


def draw_block(task: Task, seed: int, split: str, first: int) -> tuple[np.ndarray, ...]:
    """Return what a task draws for ROWS sequences of a split, from number `first` on.

    There are always ROWS of them, so that a sequence does not depend on their number.

    Raises:
        ValueError: hardly any sequence belongs to the split, because the task has too few
            different ones
    """
    is_validation_split = split == "val"
    rng = np.random.default_rng([seed, int(is_validation_split), first])
    accepted: list[list[np.ndarray]] = []
    num_missing = ROWS
    # Rejection sampling: each split is uniform over the sequences that belong to it.
    for _ in range(MAX_DRAWS):
        arrays = task.draw(rng, ROWS)
        is_in_split = belongs_to_validation(arrays[0]) == is_validation_split
        accepted.append([array[is_in_split] for array in arrays])
        num_missing -= is_in_split.sum()
        if num_missing <= 0:
            return tuple(np.concatenate(parts)[:ROWS] for parts in zip(*accepted))
    raise ValueError(
        f"{task}: there are too few different sequences for both splits; {task.advice}"
    )


def belongs_to_validation(ids: np.ndarray) -> np.ndarray:
    """Return which sequences belong to the validation split, by a hash of all their ids.

    The others belong to the training split.

    Args:
        ids: int64 (count, positions)

    Returns:
        bool (count,)
    """
    state = np.zeros(len(ids), dtype=np.uint64)
    for ids_at_position in ids.T.astype(np.uint64):
        state = (state ^ ids_at_position) * np.uint64(0x9E3779B97F4A7C15)
        state ^= state >> np.uint64(29)
    return state % np.uint64(VAL_DIVISOR) == 0


def main(doc: str, script: str, task_class: type[Task]) -> None:
    """Run the script of a task: read and check the options, and prepare the shards.

    Args:
        doc: the script's docstring, which --help prints
        script: path of the script, in whose folder the shards are put by default
    """
    # the task decides on its tokens
    fixed = {
        "tokenizer": task_class.tokenizer,
        "tokenizer_bytes": 1,
        "eot_token": None,
        "val_tokens": None,
        "vocab_size": None,
    }
    args = preparation.read_options(
        doc, Path(script).parent, PreparationOptions, CorpusOptions, task_class, fixed=fixed
    )
    with errors.one_line_errors():
        task = task_class(**{name: getattr(args, name) for name in collect_options(task_class)})
        task.check()
        args.vocab_size = task.vocab_size
        val = generate(task, args.val_sequences, args.seed, "val")
        train = generate(task, args.sequences, args.seed, "train")
        # Draw a block of each, so that a task with too few sequences fails before anything is
        # written.
        for split in ("val", "train"):
            draw_block(task, args.seed, split, first=0)
        plan = [Stage("val", val, None), Stage("train", train, None)]
        preparation.prepare(args, task.name, plan, task.about())
