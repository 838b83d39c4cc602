"""Look inside models.

    python research/analyze.py rank RUN [RUN ...] [--windows=16]
    python research/analyze.py gates RUN [RUN ...] [--windows=32] [--edits=all]
    python research/analyze.py lens RUN [RUN ...] [--windows=16] [--text="a text"]

The commands store their figures as JSON (--json=FILE) and draw them beside it. See
research/docs/analysis.md.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from research.analysis import gates, lens, rank
from research.commands import Command, read_command
from utils import errors

# Each module has a docstring, which begins with the name of its command, a dataclass Options, and run().
MODULES = {
    "gates": gates,
    "lens": lens,
    "rank": rank,
}
COMMANDS = {
    name: Command(module.__doc__.partition(": ")[2], module.Options, module.run)
    for name, module in MODULES.items()
}


def main() -> None:
    args = read_command(__doc__, COMMANDS)
    with errors.one_line_errors():
        COMMANDS[args.command].run(args)


if __name__ == "__main__":
    main()
