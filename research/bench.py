"""Measure speed in turns in one process, so that other load on the machine affects all models alike.

    python research/bench.py --device=cpu                 # training steps of every model, a size for two CPU cores
    python research/bench.py --suite=paper --device=cuda  # the paper's small and medium sizes
    python research/bench.py --models=DDL-gpt-mha-rope-CC:2 --hidden_size=128 --num_hidden_layers=4
    python research/bench.py decode                       # tokens/s of generation, with and without cache
    python research/bench.py profile --device=cuda        # the kernels that a training step spends its time on
    python research/bench.py kernels                      # bandwidth of the fused kernels against a copy
    python research/bench.py costs                        # parameters, state and FLOPs of every model, counted

`step`, which is the default command, measures training steps (forward, backward, AdamW) and forward passes
without gradients. Each model takes turns with the baseline.
"""

import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from research.benchmarks import costs, decode, kernel_bandwidth, profile_step, step
from research.commands import Command, read_command
from utils import errors

COMMANDS = {
    "step": Command(
        "measure training steps and forward passes; the default command",
        step.Options,
        step.run,
    ),
    "profile": Command(
        "find the kernels that a training step spends its time on",
        profile_step.Options,
        profile_step.run,
    ),
    "kernels": Command(
        "measure the bandwidth of the fused kernels",
        kernel_bandwidth.Options,
        kernel_bandwidth.run,
    ),
    "decode": Command(
        "measure one-token decoding with and without a cache",
        decode.Options,
        decode.run,
    ),
    "costs": Command(
        "count parameters, state and FLOPs of every model",
        costs.Options,
        costs.run,
    ),
}


def parse_arguments(argv: list[str] | None = None) -> SimpleNamespace:
    """Parse a command line, by default that of the process; without a command it is that of `step`."""
    return read_command(__doc__, COMMANDS, default="step", argv=argv)


def main() -> None:
    """Run the command."""
    args = parse_arguments()
    with errors.one_line_errors():
        COMMANDS[args.command].run(args)


if __name__ == "__main__":
    main()
