"""Synthetic tasks: sequences with answers, which are drawn during training.

`data/<task>/prepare.py` chooses the difficulty of a task and writes it into meta.json. There are no
shards: sequence i of a split is a function of the task, the seed, the split and i. A sequence is
token ids and, at each position, a target: an answer, or IGNORED_TARGET where nothing is trained on.

    copy_task   random symbols, then the same symbols again
    recall      key-value pairs, then the keys, whose values are the answers
    registers   assignments to registers and swaps of them, then a question
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple

import numpy as np

from configurator import collect_options, option, read_command_line
from data.tokenizer import IdTokenizer
from utils import errors, files

IGNORED_TARGET = -1  # as the loss expects it
SPLITS = ("train", "val")
VAL_SEQUENCES = 1000
# one of every 8 possible sequences is for validation, chosen by a hash of its ids
VAL_DIVISOR = 8
BLOCK = 256  # sequences that are drawn at once
# how many times sequences are drawn until enough of them are in a split
MAX_DRAWS = 1000


class Score(NamedTuple):
    """What a model reaches: the mean loss over all targets in nats, and the fraction of answers."""

    loss: float
    accuracy: float


@dataclass(frozen=True)
class Task:
    """One synthetic task at one difficulty.

    A subclass declares its options as fields. Besides `draw` it has the attributes

        name         name of its folder in data/
        seq_len      number of positions of a sequence, which is block_size
        vocab_size   number of ids
        first_answer position from which on targets are answers, which are counted
        chance       score of a model that guesses, as the docstring of its script says
        optimum      the best possible score

    All sequences have the same number of targets, so that all micro-batches weigh the same.
    """

    name: ClassVar[str]
    optimum: ClassVar[Score] = Score(loss=0.0, accuracy=1.0)

    def check(self) -> None:
        """Raise ValueError if options contradict each other."""

    def draw(self, rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return ids and targets of random sequences, int64 (count, seq_len) each."""
        raise NotImplementedError

    def draw_block(self, seed: int, split: str, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return ids and targets of the sequences from number * BLOCK on, int64 (BLOCK, seq_len) each.

        Each split is uniform over the sequences that belong to it, and no sequence is in both.

        Raises:
            ValueError: hardly any sequence belongs to the split, because the task has too few
                different ones
        """
        is_val = split == "val"
        rng = np.random.default_rng([seed, int(is_val), number])
        accepted = []
        num_missing = BLOCK
        for _ in range(MAX_DRAWS):
            ids, targets = self.draw(rng, BLOCK)
            is_in_split = belongs_to_validation(ids) == is_val
            accepted.append((ids[is_in_split], targets[is_in_split]))
            num_missing -= is_in_split.sum()
            if num_missing <= 0:
                ids, targets = map(np.concatenate, zip(*accepted))
                return ids[:BLOCK], targets[:BLOCK]
        raise ValueError(
            f"{self} has too few different sequences for both splits; choose a greater difficulty"
        )

    def describe(self) -> dict:
        """Return meta.json of the task."""
        return {
            "task": self.name,
            "difficulty": vars(self),
            "tokenizer": "ids",
            "vocab_size": self.vocab_size,
            "block_size": self.seq_len,
            "chance": self.chance._asdict(),
            "optimum": self.optimum._asdict(),
        }


def guess_uniformly(num_answers: int) -> Score:
    """Return the score of a uniform guess among this many answers."""
    return Score(loss=math.log(num_answers), accuracy=1 / num_answers)


def belongs_to_validation(ids: np.ndarray) -> np.ndarray:
    """Return which sequences belong to the validation split, by a hash of all their ids.

    The others belong to the training split.

    Args:
        ids: int64 (count, seq_len)

    Returns:
        bool (count,)
    """
    state = np.zeros(len(ids), dtype=np.uint64)
    for ids_at_position in ids.T.astype(np.uint64):
        state = (state ^ ids_at_position) * np.uint64(0x9E3779B97F4A7C15)
        state ^= state >> np.uint64(29)
    return state % np.uint64(VAL_DIVISOR) == 0


# ---- copying ----


@dataclass(frozen=True)
class Copy(Task):
    """The copy task of the Manifold-Geometric Transformer (section 4.1).

    A sequence is id 0, `half` random symbols, and the same symbols again, of which all but the last
    are read. Targets are the next ids, and the answers are the second half.
    """

    half: int = option(
        32,
        "number of symbols to copy, which sets the difficulty; block_size is twice this number",
        low=1,
        high=2**20,
    )
    symbols: int = option(
        16,
        "number of different symbols",
        low=2,
        high=2**15,
    )
    trained: Literal["all", "answers"] = option(
        "all",
        "positions that count in the training loss; answers is only the second half",
    )

    name = "copy_task"

    @property
    def seq_len(self) -> int:
        return 2 * self.half

    @property
    def vocab_size(self) -> int:
        return self.symbols + 1

    @property
    def first_answer(self) -> int:
        return self.half

    @property
    def chance(self) -> Score:
        return guess_uniformly(self.symbols)

    @property
    def optimum(self) -> Score:
        # the first half cannot be predicted
        loss = self.chance.loss / 2 if self.trained == "all" else 0.0
        return Score(loss=loss, accuracy=1.0)

    def draw(self, rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
        half = rng.integers(1, self.symbols + 1, (count, self.half))
        sequence = np.hstack([np.zeros((count, 1), dtype=np.int64), half, half])
        ids = sequence[:, :-1]
        targets = sequence[:, 1:].copy()
        if self.trained == "answers":
            targets[:, : self.half] = IGNORED_TARGET
        return ids, targets


# ---- recall ----

POWER = 0.01  # exponent of the power law of distances, as in the paper


@dataclass(frozen=True)
class Recall(Task):
    """Multi-query associative recall (Arora et al., arXiv 2312.04927, section 4)."""

    pairs: int = option(
        8,
        "number of key-value pairs to remember, which sets the difficulty",
        low=2,
        high=2**12,
    )
    positions: int = option(
        48,
        "number of positions per sequence, at least four per pair",
        low=8,
        high=2**15,
    )
    symbols: int = option(
        32,
        "number of different symbols, half of which are keys and half values",
        low=4,
        high=2**16,
    )

    name = "recall"
    first_answer = 0

    @property
    def seq_len(self) -> int:
        return self.positions

    @property
    def vocab_size(self) -> int:
        """Return the number of ids: 0 between the queries, keys, values."""
        return self.symbols + 1

    @property
    def chance(self) -> Score:
        return guess_uniformly(self.pairs)

    def check(self) -> None:
        if self.symbols % 2:
            raise ValueError(
                f"--symbols={self.symbols} is odd, but half of the symbols are keys and half are "
                "values; give an even number"
            )
        if self.positions < 4 * self.pairs:
            raise ValueError(
                f"--positions={self.positions} is too few for {self.pairs} pairs and their "
                f"queries; give {4 * self.pairs} or more"
            )
        if self.symbols < 2 * self.pairs:
            raise ValueError(
                f"--symbols={self.symbols} is too few for {self.pairs} pairs of a key and a "
                f"value; give {2 * self.pairs} or more"
            )

    def draw(self, rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
        num_keys = self.symbols // 2
        context = 2 * self.pairs

        # the places of the smallest random numbers are a draw without replacement
        keys = rng.random((count, num_keys)).argpartition(self.pairs - 1)[:, : self.pairs]
        values = rng.random((count, num_keys)).argpartition(self.pairs - 1)[:, : self.pairs]
        keys = rng.permuted(1 + keys, axis=1)
        values = rng.permuted(1 + num_keys + values, axis=1)

        ids = np.zeros((count, self.positions), dtype=np.int64)
        targets = np.full_like(ids, IGNORED_TARGET)
        ids[:, 0:context:2] = keys
        ids[:, 1:context:2] = values
        queries = context + 2 * self.draw_slots(rng, count)
        np.put_along_axis(ids, queries, keys, axis=1)
        np.put_along_axis(targets, queries, values, axis=1)
        return ids, targets

    def draw_slots(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """Return the slot of the query of each key, from 0, int64 (count, pairs).

        Slots are drawn by weight without replacement, and are in random order.
        """
        slots = np.arange(1, (self.positions - 2 * self.pairs) // 2 + 1)
        # Gumbel-top-k: the largest log(weight) + Gumbel noise are a draw without replacement
        noisy_log_weights = (POWER - 1) * np.log(slots) + rng.gumbel(size=(count, len(slots)))
        return rng.permuted(np.argsort(-noisy_log_weights, axis=1)[:, : self.pairs], axis=1)


# ---- registers ----


@dataclass(frozen=True)
class Registers(Task):
    """Register rebinding: what does a register hold after assignments and swaps?

    Ids are values, then registers, then `set`, `swap` and `ask`.
    """

    registers: int = option(
        4,
        "number of registers, which sets the difficulty together with --operations",
        low=2,
        high=2**12,
    )
    operations: int = option(
        8,
        "number of operations after the first assignment to every register",
        low=0,
        high=2**12,
    )
    values: int = option(
        8,
        "number of different values",
        low=2,
        high=2**12,
    )
    swap_probability: float = option(
        0.5,
        "probability that an operation is a swap and not an assignment",
        low=0.0,
        high=1.0,
    )
    trained: Literal["question", "operations"] = option(
        "question",
        "positions that count in the training loss; question is the end of the sequence only, "
        "operations adds what the first register of each operation holds after it",
    )

    name = "registers"

    @property
    def seq_len(self) -> int:
        return 3 * (self.registers + self.operations) + 2

    @property
    def vocab_size(self) -> int:
        return self.values + self.registers + 3

    @property
    def first_answer(self) -> int:
        return self.seq_len - 1

    @property
    def chance(self) -> Score:
        return guess_uniformly(self.values)

    def draw(self, rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
        set_id, swap_id, ask_id = self.values + self.registers + np.arange(3)
        rows = np.arange(count)
        ids = np.zeros((count, self.seq_len), dtype=np.int64)
        targets = np.full_like(ids, IGNORED_TARGET)
        contents = np.zeros((count, self.registers), dtype=np.int64)  # the value of each register
        order = rng.permuted(np.tile(np.arange(self.registers), (count, 1)), axis=1)
        for step in range(self.registers + self.operations):
            new_values = rng.integers(self.values, size=count)
            if step < self.registers:
                first = order[:, step]
                is_swap = np.zeros(count, dtype=bool)
            else:
                first = rng.integers(self.registers, size=count)
                is_swap = rng.random(count) < self.swap_probability
            # a nonzero step, modulo the number of registers, leads to another register
            second = (first + rng.integers(1, self.registers, count)) % self.registers

            position = 3 * step
            ids[:, position] = np.where(is_swap, swap_id, set_id)
            ids[:, position + 1] = self.values + first
            ids[:, position + 2] = np.where(is_swap, self.values + second, new_values)

            first_contents = contents[rows, first]
            second_contents = contents[rows, second]
            contents[rows, first] = np.where(is_swap, second_contents, new_values)
            contents[rows, second] = np.where(is_swap, first_contents, second_contents)
            if self.trained == "operations":
                targets[:, position + 2] = contents[rows, first]

        asked_registers = rng.integers(self.registers, size=count)
        ids[:, -2] = ask_id
        ids[:, -1] = self.values + asked_registers
        targets[:, -1] = contents[rows, asked_registers]
        return ids, targets


# ---- meta.json ----

TASKS = {task.name: task for task in (Copy, Recall, Registers)}


def from_meta(meta: dict) -> Task:
    """Return the task that meta.json describes."""
    return TASKS[meta["task"]](**meta["difficulty"])


@dataclass(frozen=True)
class OutputOptions:
    """Output."""

    out: str | None = option(
        None, "output folder for meta.json (default: the folder of the script)"
    )


def main(doc: str, script: str, task_class: type[Task]) -> None:
    """Run the script of a task: check its options, and write them into meta.json.

    Args:
        doc: the script's docstring, which --help prints
        script: path of the script, whose folder is the output folder by default
    """
    args = read_command_line(doc, task_class, OutputOptions)
    out = Path(args.out or Path(script).parent)
    with errors.one_line_errors():
        task = task_class(**{name: getattr(args, name) for name in collect_options(task_class)})
        task.check()
        for split in SPLITS:
            task.draw_block(0, split, 0)
        if list(out.glob("*.bin")):
            raise ValueError(f"{out} holds the shards of another corpus; give another --out")
        out.mkdir(parents=True, exist_ok=True)
        files.write_json(out / "tokenizer.json", IdTokenizer(task.vocab_size).to_json())
        files.write_json(out / "meta.json", task.describe())
    print(f"{files.show_path(out)}: {task}, block_size {task.seq_len}, {task.vocab_size:,} ids")
    print(f"chance: {task.chance}; optimum: {task.optimum}")
