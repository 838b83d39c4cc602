"""Look inside models.

    python research/analyze.py rank RUN [RUN ...] [--windows=16]
    python research/analyze.py gates RUN [RUN ...] [--windows=32] [--edits=all]
    python research/analyze.py spectrum RUN [RUN ...] [--windows=16] [--tokens=32]
    python research/analyze.py lens RUN [RUN ...] [--windows=16] [--text="a text"]
    python research/analyze.py causality RUN_OR_FILE [RUN_OR_FILE ...] [--tokens=24]
    python research/analyze.py mup [--models=DDL-gpt-mha-rope-CC,...] [--widths=64,128,256,512]
    python research/analyze.py transfer [--model=DDL-gpt-mha-rope-CC] [--widths=64,128,256,512]

rank measures the effective rank and size of the hidden states, and gradient norms, over depth.
gates measures what every site writes and erases, and the loss when part of a site is
fixed or removed (research/docs/gates.md). spectrum measures what happens to a token's state from end to end,
and lens what the model would predict after each site (research/docs/analysis.md). causality finds whether
and where a later token changes what is computed before it, in a run or in the file of a variant
(research/docs/analysis.md). mup finds whether training changes wide models as much as narrow ones, and
transfer whether the best learning rate stays the same; rerun the command to resume them
(research/docs/mup.md). All commands except causality store their figures as JSON (--json=FILE) and draw them
beside it.
"""

import argparse
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

# Each module has a docstring, whose first line is the help of its command, and run(args). It may have
# add_options(parser) for options of its own.
OVER_RUNS = {"gates": gates, "lens": lens, "rank": rank, "spectrum": spectrum}
OVER_WIDTHS = {"mup": coordinates, "transfer": transfer}
COMMANDS = {**OVER_RUNS, "causality": causality, **OVER_WIDTHS}


def numbers(text: str) -> list[int]:
    """Parse --widths; its name is what argparse calls a wrong value."""
    return [int(part) for part in text.split(",")]


def optimizers(text: str) -> list[str]:
    """Parse --optimizers; its name is what argparse calls a wrong value."""
    names = text.split(",")
    if not set(names) <= {"adamw", "muon"}:
        raise ValueError(text)
    return names


def add_width_options(parser: argparse.ArgumentParser, name: str) -> None:
    """Add the options of a command that compares models of several widths.

    name: default name of its JSON file, without the suffix
    """
    parser.add_argument(
        "--widths",
        type=numbers,
        default="64,128,256,512",
        help="widths to compare, as increasing multiples of 32, separated by commas (default: "
        "%(default)s)",
    )
    parser.add_argument(
        "--optimizers",
        type=optimizers,
        default="adamw,muon",
        help="adamw, muon or both, separated by a comma (default: %(default)s)",
    )
    parser.add_argument(
        "--json",
        type=Path,
        default=Path(f"runs/{name}.json"),
        help="file to store the figures in; figures that it already contains are not measured "
        "again, and a picture is drawn beside it (default: %(default)s)",
    )


def check_counts(args: argparse.Namespace) -> None:
    """Raise ValueError if a count is below 1."""
    for name, value in vars(args).items():
        if type(value) is int and value < 1:
            raise ValueError(f"--{name}={value}: give 1 or more")


def check_widths(widths: list[int]) -> None:
    """Raise ValueError if the widths are not two or more rising multiples of 32, the size of a head."""
    are_multiples = all(width >= 32 and width % 32 == 0 for width in widths)
    are_rising = widths == sorted(set(widths))
    if len(widths) < 2 or not are_multiples or not are_rising:
        raise ValueError(
            f"--widths={','.join(map(str, widths))}: give two or more multiples of 32 in "
            "increasing order, separated by commas"
        )


def main() -> None:
    parser = configurator.Parser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, module in COMMANDS.items():
        summary = module.__doc__.partition("\n")[0].partition(": ")[2]
        command = commands.add_parser(name, help=summary, description=module.__doc__)
        if name in OVER_RUNS:
            common.add_arguments(command, name)
        elif name in OVER_WIDTHS:
            add_width_options(command, module.FILE)
        if hasattr(module, "add_options"):
            module.add_options(command)
    args = parser.parse_args()
    with errors.one_line_errors():
        check_counts(args)
        if args.command in OVER_WIDTHS:
            check_widths(args.widths)
        COMMANDS[args.command].run(args)


if __name__ == "__main__":
    main()
