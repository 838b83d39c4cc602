"""Register rebinding: follow assignments and swaps, and say what a register holds at the end.

The task suits a state that is rewritten, because every assignment replaces a value.

    python data/registers/prepare.py                          # 4 registers, 8 operations
    python data/registers/prepare.py --registers=8 --operations=16 --out=data/registers_8
    python train.py config/registers_cpu.py

A sequence begins with an assignment to every register, in random order. Then come --operations
operations: with probability --swap_probability a swap of two different registers, otherwise an
assignment of a new value to a register. Registers and values are uniform. Every assignment has
three ids, `set register value`, and so has every swap, `swap register register`. The sequence ends
with a question, `ask register`. The answer at the last position is the value that this register
holds. Only this position is scored. By default it is also the only one that is trained on, which
makes learning slow; with --trained=operations, the last id of every operation has a target, too: the
value that the first of its registers holds after it.

A model that knows nothing has accuracy 1 / values and loss ln(values), which is called chance here.
The optimum is loss 0 and accuracy 1. A model that overlooks swaps, and answers with the last value
that was assigned to the register, has accuracy 0.50 with the defaults.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from data import tasks


def main() -> None:
    tasks.main(__doc__, __file__, tasks.Registers)


if __name__ == "__main__":
    main()
