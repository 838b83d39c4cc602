"""Look inside models.

    python research/analyze.py rank RUN [RUN ...] [--windows=16]
    python research/analyze.py gates RUN [RUN ...] [--windows=32] [--edits=all]
    python research/analyze.py spectrum RUN [RUN ...] [--windows=16] [--tokens=32]
    python research/analyze.py lens RUN [RUN ...] [--windows=16] [--text="a text"]
    python research/analyze.py causality RUN_OR_FILE [RUN_OR_FILE ...] [--tokens=24]
    python research/analyze.py mup [--models=DDL-gpt-mha-rope-CC,...] [--widths=64,128,256,512]
    python research/analyze.py transfer [--model=DDL-gpt-mha-rope-CC] [--widths=64,128,256,512]

rank: effective rank of the hidden states, their size, and gradient norms, over depth (docs/mgt.md).
gates: what every site writes and erases, and the loss without a piece of one (docs/gates.md).
spectrum, lens: what becomes of a token's state end to end, what the model would say after each site
(docs/analysis.md). causality: whether a later token changes what is computed before it, and where
first, in a run or in the file of a stream (docs/analysis.md). mup, transfer: whether training changes
as much in wide models as in narrow ones, and whether the best learning rate stays; the same command
goes on where it was stopped (docs/mup.md). All but causality store their figures as JSON
(--json=FILE), and draw them beside it.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from utils import errors

if __name__ == "__main__":
    errors.end_quietly_on_interrupt()  # before the slow imports

# isort: split
import configurator
from research.analysis import (
    causality,
    common,
    coordinates,
    gates,
    lens,
    rank,
    spectrum,
    transfer,
)

# A module has a docstring, run(args) and, for options of its own, add_options(parser).
OVER_RUNS = {"gates": gates, "lens": lens, "rank": rank, "spectrum": spectrum}
OVER_WIDTHS = {"mup": coordinates, "transfer": transfer}
COMMANDS = {**OVER_RUNS, "causality": causality, **OVER_WIDTHS}


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def optimizers(text: str) -> list[str]:
    names = text.split(",")
    if not set(names) <= {"adamw", "muon"}:
        raise ValueError(text)
    return names


def check(args) -> None:
    """ValueError: a count below 1, or widths that are not two or more of heads of 32 features."""
    for name, value in vars(args).items():
        if type(value) is int and value < 1:
            raise ValueError(f"--{name}={value}: give 1 or more")
    widths = getattr(args, "widths", [32, 64])
    if len(widths) < 2 or any(w < 32 or w % 32 for w in widths) or sorted(set(widths)) != widths:
        fix = "give two or more multiples of 32, rising, separated by commas"
        raise ValueError(f"--widths={','.join(map(str, widths))}: {fix}")


def main():
    parser = configurator.Parser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, module in COMMANDS.items():
        first = module.__doc__.partition("\n")[0].partition(": ")[2]
        command = commands.add_parser(name, help=first, description=module.__doc__)
        if name in OVER_RUNS:
            common.add_arguments(command, name)
        elif name in OVER_WIDTHS:
            add, file = command.add_argument, Path(f"runs/{module.FILE}.json")
            shown = "multiples of 32 (default: %(default)s)"
            add("--widths", type=numbers, default="64,128,256,512", help=shown)
            shown = "(default: %(default)s)"
            add("--optimizers", type=optimizers, default="adamw,muon", help=shown)
            shown = "goes on from there; the figure is beside it (default: %(default)s)"
            add("--json", type=Path, default=file, help=shown)
        if hasattr(module, "add_options"):
            module.add_options(command)
    args = parser.parse_args()
    with errors.one_line_errors():
        check(args)
        COMMANDS[args.command].run(args)


if __name__ == "__main__":
    main()
