"""The synthetic copy task of the Manifold-Geometric Transformer (section 4.1).

    python data/copy_task/prepare.py                          # sequences of 2 x 32 random symbols
    python data/copy_task/prepare.py --half=128 --symbols=64 --out=data/copy_task_128
    python train.py config/copy_task_cpu.py                   # block_size is 2 * half

A sequence is `half` random symbols, and the same symbols again. Evaluation reports the fraction of
second halves in which every symbol is predicted correctly from the symbols before it
(`val_exact_match`), and the fraction of their symbols (`val_accuracy`). Chance is an accuracy of
1 / symbols. The first half cannot be predicted, so the lowest possible loss is ln(symbols) / 2 if
every position is trained on, and 0 with --trained=answers.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from data import tasks


def main() -> None:
    tasks.main(__doc__, __file__, tasks.Copy)


if __name__ == "__main__":
    main()
