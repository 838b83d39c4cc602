"""Look inside models.

    python research/analyze.py rank RUN [RUN ...] [--windows=16]
    python research/analyze.py gates RUN [RUN ...] [--windows=32] [--edits=False]
    python research/analyze.py lens RUN [RUN ...] [--windows=16] [--text="a text"]

The commands store their figures as JSON (--json=FILE) and draw them beside it. See
research/docs/analysis.md.
"""

import sys
from functools import partial
from pathlib import Path
from types import ModuleType

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from research.analysis import common, gates, lens, rank
from research.commands import Command, run_command


def make_command(module: ModuleType) -> Command:
    """Return the command of a module, whose docstring begins with the command's name."""
    run = partial(
        common.analyze_runs,
        measure=module.measure_run,
        summarize=module.summarize,
        finish=module.finish,
    )
    return Command(module.__doc__.partition(": ")[2], module.Options, run)


COMMANDS = {
    "gates": make_command(gates),
    "lens": make_command(lens),
    "rank": make_command(rank),
}


def main() -> None:
    run_command(__doc__, COMMANDS)


if __name__ == "__main__":
    main()
