"""Look inside models.

    python research/analyze.py mup [--models=DDL-gpt-mha-rope-CC,...] [--widths=64,128,256,512] [--json=FILE]
    python research/analyze.py transfer [--model=DDL-gpt-mha-rope-CC] [--widths=64,128,256,512] [--json=FILE]
    python research/analyze.py rank RUN [RUN ...] [--windows=16] [--json=FILE]
    python research/analyze.py gates RUN [RUN ...] [--windows=32] [--edits=all] [--json=FILE]
    python research/analyze.py spectrum RUN [RUN ...] [--windows=16] [--tokens=32] [--json=FILE]
    python research/analyze.py lens RUN [RUN ...] [--windows=16] [--text="a text"] [--json=FILE]

mup: the coordinate check, whether training changes as much in wide models as in narrow ones, parameter by parameter.
transfer: whether the best learning rate of a narrow model stays that of wide ones, with muP and without. Both store
each figure, and the same command goes on where it was stopped (docs/mup.md).
rank: effective rank of the hidden states, their size, and gradient norms, over the depth of models (docs/mgt.md).
gates: what every site writes and erases, and the loss where a piece of one is taken away (docs/gates.md).
spectrum, lens: what becomes of a token's state end to end, what the model would say after each site (docs/analysis.md).
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import configurator  # before all that is slow to import: it takes Ctrl+C

# isort: split
from model import STEMS
from research.analysis import common, gates, lens, rank, spectrum
from research.benchmarks import coordinates, transfer

OVER_RUNS = {"gates": gates, "lens": lens, "rank": rank, "spectrum": spectrum}


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def optimizers(text: str) -> list[str]:
    names = text.split(",")
    if not set(names) <= {"adamw", "muon"}:
        raise ValueError(text)
    return names


def check_positive(args, *names: str) -> None:
    """ValueError: one is below 1."""
    for name in names:
        if getattr(args, name) < 1:
            raise ValueError(f"--{name}={getattr(args, name)}: give 1 or more")


def check_widths(widths: list[int]) -> None:
    """ValueError: fewer than two, or not heads of 32 features."""
    if (
        len(widths) < 2
        or any(width < 32 or width % 32 for width in widths)
        or sorted(set(widths)) != widths
    ):
        given = ",".join(map(str, widths))
        raise ValueError(
            f"--widths={given}: give two or more multiples of 32, rising, separated by commas"
        )


def add_common(parser, name: str) -> None:
    add, file = parser.add_argument, Path(f"runs/{name}.json")
    add(
        "--widths",
        type=numbers,
        default="64,128,256,512",
        help="multiples of 32 (default: %(default)s)",
    )
    add("--optimizers", type=optimizers, default="adamw,muon", help="(default: %(default)s)")
    add(
        "--json",
        type=Path,
        default=file,
        help="goes on from there; the figure is beside it (default: %(default)s)",
    )


def main():
    parser = configurator.Parser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    mup = commands.add_parser(
        "mup", help="coordinate check over widths", description=coordinates.__doc__
    )
    add_common(mup, "mup")
    mup.add_argument(
        "--models",
        help="stems, or stem+key=value, with commas between (default: all, and their forms)",
    )
    mup.add_argument(
        "--seeds", type=int, default=3, help="models of each width (default: %(default)s)"
    )
    moves = commands.add_parser(
        "transfer", help="best learning rate over widths", description=transfer.__doc__
    )
    add_common(moves, "mup_transfer")
    add = moves.add_argument
    add("--model", choices=STEMS, default="DDL-gpt-mha-rope-CC")
    add("--dataset", default="python_stdlib", help="folder of token shards (default: %(default)s)")
    add(
        "--steps",
        type=int,
        default=100,
        help="optimizer steps, the first fifth warm-up (default: %(default)s)",
    )
    add("--layers", type=int, default=2, help="(default: %(default)s)")
    add("--block_size", type=int, default=64, help="tokens of a sequence (default: %(default)s)")
    add("--batch_size", type=int, default=4, help="sequences of a step (default: %(default)s)")
    add("--device", choices=("auto", "cuda", "cpu"), default="auto")
    over = commands.add_parser("rank", help="effective rank over depth", description=rank.__doc__)
    common.add_arguments(over, "rank")
    audit = commands.add_parser(
        "gates", help="gates, writes and what they are worth", description=gates.__doc__
    )
    common.add_arguments(audit, "gates", windows=32)
    audit.add_argument(
        "--edits",
        default="all",
        help="all, none, or names with commas between (default: %(default)s)",
    )
    shortcut = commands.add_parser(
        "spectrum", help="spectra of end-to-end shortcuts", description=spectrum.__doc__
    )
    common.add_arguments(shortcut, "spectrum")
    shortcut.add_argument(
        "--tokens", type=int, default=32, help="tokens of each sequence (default: %(default)s)"
    )
    logits = commands.add_parser("lens", help="logit lens over depth", description=lens.__doc__)
    common.add_arguments(logits, "lens")
    logits.set_defaults(rows=1)
    logits.add_argument(
        "--text", help="a table of one text as well: text, FILE:path, or - for standard input"
    )
    args = parser.parse_args()
    with configurator.one_line_errors():
        if args.command in OVER_RUNS:
            check_positive(
                args, *(name for name in ("windows", "rows", "tokens") if hasattr(args, name))
            )
            OVER_RUNS[args.command].run(args)
            return
        check_widths(args.widths)
        if args.command == "mup":
            check_positive(args, "seeds")
            coordinates.run(args)
        else:
            check_positive(args, "steps", "layers", "block_size", "batch_size")
            transfer.run(args)


if __name__ == "__main__":
    main()
