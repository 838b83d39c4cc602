"""Register rebinding: follow assignments and swaps, and say what a register holds at the end.

The task suits a state that is rewritten, because every assignment replaces a value.

    python data/registers/prepare.py                          # 4 registers, 8 operations
    python data/registers/prepare.py --registers=8 --operations=16 --out=data/registers_8
    python train.py config/registers_cpu.py                   # block_size is positions + 1

A sequence begins with an assignment to every register, in random order. Then come --operations
operations: with probability --swap_probability a swap of two different registers, otherwise an
assignment of a new value to a register. Registers and values are uniform. Every assignment has
three ids, `set register value`, and so has every swap, `swap register register`. The sequence ends
with a question, `ask register`. The label of the last position is the value that this register
holds. Only this position is scored. By default it is also the only one that is trained on, which
makes learning slow; with --trained=swaps, the label of the last id of every swap is the value that
the first of its two registers holds after the swap.

A model that knows nothing has accuracy 1 / values and loss ln(values), which is called chance here.
The optimum is loss 0 and accuracy 1. A model that overlooks swaps, and answers with the last value
that was assigned to the register, has accuracy 0.50 with the defaults.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np

from configurator import option
from data import tasks


@dataclass(frozen=True)
class Registers(tasks.Task):
    """Register rebinding."""

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

    trained: Literal["question", "swaps"] = option(
        "question",
        "positions that count in the training loss; question is the end of the sequence only, "
        "swaps adds the last id of every swap",
    )

    name = "registers"

    @property
    def positions(self) -> int:
        """Return the number of ids per sequence, without end-of-text."""
        return 3 * (self.registers + self.operations) + 2

    @property
    def vocab_size(self) -> int:
        """Return the number of ids: 0, values, registers, `set`, `swap`, `ask`, end-of-text."""
        return self.values + self.registers + 5

    @property
    def first_register(self) -> int:
        """Return the id of the first register; those of values begin at 1."""
        return self.values + 1

    @property
    def set_id(self) -> int:
        return self.values + self.registers + 1

    @property
    def swap_id(self) -> int:
        return self.set_id + 1

    @property
    def ask_id(self) -> int:
        return self.set_id + 2

    def draw(self, rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return ids and labels of random sequences, int64 (count, positions) each."""
        rows = np.arange(count)
        ids = np.zeros((count, self.positions), dtype=np.int64)
        labels = np.zeros_like(ids)
        contents = np.zeros((count, self.registers), dtype=np.int64)  # the value of each register
        order = rng.permuted(np.tile(np.arange(self.registers), (count, 1)), axis=1)
        for step in range(self.registers + self.operations):
            new_values = rng.integers(1, self.values + 1, count)
            if step < self.registers:
                first = order[:, step]
                is_swap = np.zeros(count, dtype=bool)
            else:
                first = rng.integers(self.registers, size=count)
                is_swap = rng.random(count) < self.swap_probability
            # a nonzero step, modulo the number of registers, leads to another register
            second = (first + rng.integers(1, self.registers, count)) % self.registers

            position = 3 * step
            ids[:, position] = np.where(is_swap, self.swap_id, self.set_id)
            ids[:, position + 1] = self.first_register + first
            ids[:, position + 2] = np.where(is_swap, self.first_register + second, new_values)

            first_contents = contents[rows, first]
            second_contents = contents[rows, second]
            contents[rows, first] = np.where(is_swap, second_contents, new_values)
            contents[rows, second] = np.where(is_swap, first_contents, second_contents)
            if self.trained == "swaps":
                labels[:, position + 2] = np.where(is_swap, second_contents, 0)

        asked_registers = rng.integers(self.registers, size=count)
        ids[:, -2] = self.ask_id
        ids[:, -1] = self.first_register + asked_registers
        labels[:, -1] = contents[rows, asked_registers]
        return ids, labels

    def about(self) -> dict:
        """Return what meta.json says of the task: the keys of data/sequences.py, chance, optimum."""
        return self.describe_labels(
            chance=tasks.uniform_guess(self.values),
            first_scored=self.positions,
        )


def main() -> None:
    tasks.main(__doc__, __file__, Registers)


if __name__ == "__main__":
    main()
