"""Measure speed in turns in one process, so that other load on the machine affects all models alike.

    python research/bench.py --device=cpu                 # training steps of every model, a size for two CPU cores
    python research/bench.py --size=small --device=cuda   # one of the paper's sizes
    python research/bench.py --models=DDL-gpt-mha-rope-CC+ddl_value_channels=2,HC-gpt-mha-rope
    python research/bench.py kernels                      # bandwidth of the fused kernels against a copy

`step`, which is the default command, measures training steps (forward, backward, AdamW). Each model takes turns
with the baseline.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from research.benchmarks import kernels, step
from research.commands import Command, run_command

COMMANDS = {
    "step": Command(
        "measure training steps; the default command",
        step.Options,
        step.run,
    ),
    "kernels": Command(
        "measure the bandwidth of the fused kernels",
        kernels.Options,
        kernels.run,
    ),
}


def main() -> None:
    run_command(__doc__, COMMANDS, default="step")


if __name__ == "__main__":
    main()
