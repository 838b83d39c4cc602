"""Figures and tables of finished or running runs.

    python research/report.py curves runs/demo_cpu [RUN ...] [--x=seconds] [--y=bits_per_byte] [--out=FILE]
    python research/report.py curves RUN RUN RUN ... --band                mean and 95% interval over seeds
    python research/report.py table runs/demo_cpu [RUN ...] [--json=FILE]  the last evaluation of each run
    python research/report.py table RUN RUN RUN ... --against=gpt-mha-rope  means over seeds, differences
    python research/report.py paper RUN RUN RUN ... --out=report       tables and figures of a paper, in a folder
    python research/report.py runs RUN RUN RUN ... --out=runs.csv         a row for each run, to be committed

RUN is a run folder made by train.py, a folder that holds some, or a runs.csv. Runs that differ in their seed
alone are one row of a table: the mean, its 95% interval and how many they are. A difference is that of the same seeds.
What cannot be read is named and left out. research/docs/report.md says more.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import configurator  # before all that is slow to import: it takes Ctrl+C

# isort: split
from research.reporting import curves, groups, interactive, paper, runs, runs_csv, style, table
from training.provenance import store

NAMED = 3  # runs that an error names


def read(args) -> list[runs.Run]:
    """As `readable`, the lines on stderr."""
    found, lines = readable(args)
    note(lines)
    return found


def readable(args) -> tuple[list[runs.Run], list[str]]:
    """(the runs of the command line that can be read and fit --where, a line for each that cannot, and for what was
    left out of the others). ValueError: none can be read, or none fits."""
    found, faults = runs.load(args.runs)
    if not found:
        more = f"; and {len(faults) - NAMED} more" if len(faults) > NAMED else ""
        raise ValueError("; ".join(faults[:NAMED]) + more)
    found = groups.where(found, args.where)
    return found, [*faults, *(f"{run.name}: {line}" for run in found for line in run.notes)]


def note(lines: list[str]) -> None:
    for line in lines:
        print(f"note: {' '.join(line.split())}", file=sys.stderr)


def draw_curves(args) -> None:
    if args.skip_first_step and args.x != "seconds":
        raise ValueError("--skip_first_step is of seconds: give --x=seconds with it")
    if args.out:
        curves.check_out(args.out)
    found = read(args)
    out = args.out or curves.beside(found, "loss.png")
    out.parent.mkdir(parents=True, exist_ok=True)
    note(draw(args, out, found))
    print(f"drew {out}")


def draw(args, out: Path, found: list[runs.Run]) -> list[str]:
    """Draw the runs; notes on those that were not."""
    drawn, notes = curves.lines_of(found, args.x, args.y, args.band, not args.skip_first_step)
    xlabel = curves.X_LABELS[args.x]
    if args.x == "seconds" and args.skip_first_step:
        xlabel += ", without the first step"
    title = groups.shortened(found[0].name) if len(found) == 1 else ""
    draw_lines = interactive.draw if out.suffix == ".html" else curves.draw
    draw_lines(drawn, args.x, (xlabel, curves.Y_LABELS[args.y]), out, title)
    return notes


def print_table(args) -> None:
    found = read(args)
    without = [run for run in found if not run.final]
    if len(without) == len(found):
        raise ValueError("; ".join(f"{run.name} has no evaluation yet" for run in without[:NAMED]))
    note([f"{run.name} has no evaluation yet" for run in without])
    found = [run for run in found if run.final]
    by = [key for text in args.by for key in text.split(",")]
    made = groups.groups_of(found, by)
    compared = groups.compare(made, groups.find_baseline(made, args.against)) if args.against else []
    note(table.notes_on(made, compared))
    rows = table.rows_of(made, compared)
    if args.json:
        store(args.json, {"rows": [table.row_of(run) for run in found], "groups": rows})
    print(table.markdown(rows))


def make_paper(args) -> None:
    if args.out:
        paper.check(args.out)
    found, notes = readable(args)
    out = args.out or curves.beside(found, "report")
    paper.check(out)
    note([*notes, f"{len(found)} runs read"])
    by = [key for text in args.by for key in text.split(",")]
    paper.write(paper.make(found, notes, by, args.against, args.x), out)
    print(f"wrote {out / 'report.md'}")


def store_runs(args) -> None:
    added, replaced = runs_csv.write(read(args), args.out)
    print(f"{args.out}: {added} runs added, {replaced} replaced")


def add_runs(command) -> None:
    command.add_argument("runs", nargs="+", metavar="RUN")
    what = "only runs with this setting; several times: all of them"
    command.add_argument("--where", action="append", default=[], metavar="KEY=VALUE[,VALUE]", help=what)


def arguments():
    parser = configurator.Parser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("curves", help="loss curves as a PNG")
    command.set_defaults(run=draw_curves)
    add_runs(command)
    command.add_argument("--x", choices=runs.AXES, default="steps", help="seconds: device-seconds of training")
    command.add_argument("--y", choices=curves.Y_LABELS, default="loss")
    command.add_argument("--band", action="store_true", help="runs that differ in the seed alone: mean, 95%% interval")
    command.add_argument("--skip_first_step", action="store_true", help="seconds without the first, which compiles")
    command.add_argument(
        "--out", type=Path, help="PNG, SVG, PDF or HTML (default: loss.png in the run, or beside the runs)"
    )
    command = commands.add_parser("table", help="the last evaluation of each run, as Markdown")
    command.set_defaults(run=print_table)
    add_runs(command)
    command.add_argument("--by", action="append", default=[], metavar="KEY[,KEY]", help="what makes a row")
    command.add_argument("--against", help="a baseline among the rows, its name or one of its runs: paired differences")
    command.add_argument("--json", type=Path, help="write the rows there as well, with commit, machine and date")
    command = commands.add_parser("paper", help="tables and figures of a paper, as one folder")
    command.set_defaults(run=make_paper)
    add_runs(command)
    command.add_argument("--by", action="append", default=[], metavar="KEY[,KEY]", help="what makes a row")
    baseline = f"a baseline in each size of models, by name or by a run of it (default: {style.BASELINE_STEM})"
    command.add_argument("--against", help=baseline)
    command.add_argument("--x", choices=runs.AXES, default="tokens", help="of the curves; the figure of costs has all")
    command.add_argument(
        "--out", type=Path, help="a new folder, or an earlier report's (default: report, beside the runs)"
    )
    command = commands.add_parser("runs", help="a row for each run in one CSV file, which `table` and `paper` read")
    command.set_defaults(run=store_runs)
    add_runs(command)
    command.add_argument("--out", type=Path, required=True, help="a file; of what it has, runs of the same name go")
    return parser.parse_args()


def main():
    args = arguments()
    with configurator.one_line_errors():
        args.run(args)


if __name__ == "__main__":
    main()
