"""Figures and tables of finished or running runs.

    python research/report.py curves runs/demo_cpu [RUN ...] [--x=seconds] [--y=bits_per_byte]
    python research/report.py curves RUN RUN RUN ... --band     mean and 95% interval over seeds
    python research/report.py table runs/demo_cpu [RUN ...]     the last evaluation of each run
    python research/report.py table RUN RUN RUN ... --against=gpt-mha-rope     and differences
    python research/report.py paper RUN RUN RUN ... --out=report     a paper's tables and figures
    python research/report.py runs RUN RUN RUN ... --out=runs.csv    a row for each run

RUN is a run folder made by train.py, a folder that holds some, or a runs.csv. Runs that differ in
their seed alone are one row of a table: the mean, its 95% interval and how many they are. What
cannot be read is named and left out. research/docs/report.md says more.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from utils import errors

if __name__ == "__main__":
    errors.end_quietly_on_interrupt()  # before the slow imports

# isort: split
import configurator
from research import compare, paper, plots, runs, tables
from training import metrics
from training.provenance import store_figures

NAMED = 3  # runs that an error names
Y_LABELS = {"loss": "loss (nats per token)", "bits_per_byte": "bits per byte"}
SUFFIXES = (".png", ".svg", ".pdf", ".html")


def read(args) -> tuple[list[runs.Run], list[str]]:
    """(the runs of the command line, lines on what was left out). ValueError: there is none."""
    found, faults = runs.load(args.runs)
    if not found:
        more = [f"and {len(faults) - NAMED} more"] * (len(faults) > NAMED)
        raise ValueError("; ".join([*faults[:NAMED], *more]))
    found = compare.select(found, args.where)
    return found, [*faults, *(f"{run.name}: {note}" for run in found for note in run.notes)]


def print_notes(lines: list[str]) -> None:
    for line in lines:
        print(f"note: {' '.join(line.split())}", file=sys.stderr)


def beside(found: list[runs.Run], name: str) -> Path:
    """A file in the run's folder or, of several runs, in the folder that holds them."""
    paths = [run.path.resolve() for run in found]
    if len(paths) == 1 and not paths[0].is_file():
        return paths[0] / name
    return Path(os.path.commonpath([path.parent for path in paths])) / name


def draw_curves(args) -> None:
    if args.out and args.out.suffix not in SUFFIXES:
        raise ValueError(f"--out={args.out}: give a name that ends with {', '.join(SUFFIXES)}")
    found, notes = read(args)
    lines, more = lines_of(found, args)
    print_notes([*notes, *more])
    out = args.out or beside(found, "loss.png")
    out.parent.mkdir(parents=True, exist_ok=True)
    draw = plots.write_page if out.suffix == ".html" else plots.plot_losses
    title = compare.shortened(found[0].name) if len(found) == 1 else ""
    draw(lines, args.x, (plots.X_LABELS[args.x], Y_LABELS[args.y]), out, title)
    print(f"drew {out}")


def lines_of(found: list[runs.Run], args) -> tuple[list[plots.Line], list[str]]:
    """(a line for each run, or each setting with --band; notes). ValueError: nothing to draw."""
    found = sorted(found, key=paper.paper_order)
    if args.band:
        groups = compare.groups_of(found, same_step=False)
    else:
        labels = compare.labels_of(found) if len(found) > 1 else [found[0].stem or found[0].name]
        groups = [compare.group_of(label, [run]) for label, run in zip(labels, found)]
    numbers = plots.look_numbers([group.stem for group in groups])
    lines = [plots.line_of(group, number) for group, number in zip(groups, numbers)]
    notes = [f"{group.name}: {line}" for group in groups for line in group.cautions]
    for group, line in zip(groups, lines):
        if any(run.path.is_file() for run in group.runs):
            notes.append(f"{line.name}: a runs.csv has no curves: give its run folder")
        elif not line.curves:
            notes.append(f"{line.name}: no step with a loss that all its runs have")
        elif args.y == "bits_per_byte" and line.curves:
            in_bits_per_byte(line, group, notes)
    lines = [line for line in lines if line.curves]
    if not lines:
        raise ValueError("; ".join(notes) + ": nothing to draw")
    tokens = {compare.vocabulary(run): group.name for group in groups for run in group.runs}
    if args.y == "loss" and len(tokens) > 1:
        reason = "losses of different tokens are no comparison, --y=bits_per_byte may be"
        notes.append(f"{reason}: {' | '.join(tokens.values())}")
    return lines, notes


def in_bits_per_byte(line: plots.Line, group: compare.Group, notes: list[str]) -> None:
    """Take the curves over, or drop them where the size of a text is not known."""
    sizes = {run.bytes_per_token for run in group.runs}
    if None in sizes or len(sizes) > 1:
        notes.append(f"{line.name}: --y=bits_per_byte: its shards' text size is unknown")
        line.curves = {}
        return
    factor = metrics.compute_bits_per_byte(1.0, sizes.pop())
    training = line.curves.get("training")
    if training:
        mean, half = training.mean * factor, training.half * factor
        line.curves["training"] = plots.Curve(training.steps, training.x, mean, half)
    if line.raw:
        line.raw = plots.Series(line.raw.steps, line.raw.x, line.raw.values * factor)
    evaluations = [plots.series(r, r.evaluations, "val_bits_per_byte") for r in group.runs]
    line.curves |= {"validation": plots.validation_curve(evaluations)}
    line.curves = {kind: curve for kind, curve in line.curves.items() if curve}


def print_table(args) -> None:
    found, notes = read(args)
    evaluated = [run for run in found if run.final]
    notes += [f"{run.name} has no evaluation yet" for run in found if not run.final]
    if not evaluated:
        raise ValueError("; ".join(notes[-NAMED:]))
    groups = compare.groups_of(evaluated, keys_of(args))
    compared = []
    if args.against:
        compared = compare.compare(groups, compare.find_baseline(groups, args.against))
    table = tables.table_of_losses(groups, compared)
    print_notes([*notes, *tables.cautions(groups, compared)])
    if args.json:
        rows = [{"run": r.name, "model": r.stem, "seed": r.seed, **r.final} for r in evaluated]
        store_figures(args.json, {"rows": rows, "groups": table.figures})
    print(tables.tables.format_markdown(table.header, table.rows))
    if args.by_sequence:
        print_sequences(groups, args)


def print_sequences(groups: list[compare.Group], args) -> None:
    """Differences over the sequences of losses.npz, between the runs of one seed."""
    baseline = compare.find_baseline(groups, args.against)
    base = {run.seed: run for run in baseline.runs}
    rows = []
    for run in (run for group in groups if group is not baseline for run in group.runs):
        if run.seed in base:
            estimate = compare.paired_by_sequence(run, base[run.seed])
            rows.append([run.name, base[run.seed].name, estimate.text("+.4f")])
    header = ["run", "less", "nats per token, mean over sequences (their number)"]
    print(f"\n{tables.tables.format_markdown(header, rows)}")


def keys_of(args) -> list[str]:
    return [key for text in args.by for key in text.split(",")]


def make_paper(args) -> None:
    if args.out:
        paper.check_out(args.out)  # before minutes of reading
    found, notes = read(args)
    out = args.out or beside(found, "report")
    paper.check_out(out)
    print_notes([*notes, f"{len(found)} runs read"])
    paper.write(found, notes, keys_of(args), args.against, args.x, out)
    print(f"wrote {out / 'report.md'}")


def store_runs(args) -> None:
    found, notes = read(args)
    print_notes(notes)
    added, replaced = runs.write_csv(found, args.out)
    print(f"{args.out}: {added} runs added, {replaced} replaced")


def arguments():
    parser = configurator.Parser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, run, about: str):
        added = commands.add_parser(name, help=about)
        added.set_defaults(run=run)
        added.add_argument("runs", nargs="+", metavar="RUN")
        where = "only runs with this setting; several times: all of them"
        keys = {"action": "append", "default": [], "metavar": "KEY=VALUE[,VALUE]"}
        added.add_argument("--where", **keys, help=where)
        return added.add_argument

    def grouping(add, baseline: str) -> None:
        keys = {"action": "append", "default": [], "metavar": "KEY[,KEY]"}
        add("--by", **keys, help="what makes a row (default: all settings but the seed)")
        add("--against", help=baseline)

    axes = {"choices": runs.AXES, "help": "seconds: device-seconds after the first step"}
    add = command("curves", draw_curves, "loss curves as a picture or an interactive page")
    add("--x", default="steps", **axes)
    add("--y", choices=Y_LABELS, default="loss")
    add("--band", action="store_true", help="runs that differ in the seed: mean, 95%% interval")
    out = f"{', '.join(SUFFIXES)} (default: loss.png in the run, or beside the runs)"
    add("--out", type=Path, help=out)
    add = command("table", print_table, "the last evaluation of each run, as Markdown")
    grouping(add, "a baseline among the rows, its name or one of its runs: paired differences")
    pairs = "also differences over validation sequences, by the runs' losses.npz"
    add("--by_sequence", action="store_true", help=pairs)
    add("--json", type=Path, help="write the rows there as well, with commit, machine and date")
    add = command("paper", make_paper, "tables and figures of a paper, as one folder")
    grouping(add, f"a baseline in each size of models (default: {plots.BASELINE_STEM})")
    add("--x", default="tokens", **axes)
    folder = "a new folder, or an earlier report's (default: report, beside the runs)"
    add("--out", type=Path, help=folder)
    add = command("runs", store_runs, "a row for each run in a CSV file, which the others read")
    add("--out", type=Path, required=True, help="of rows it has, those of the same name go")
    args = parser.parse_args()
    if args.command == "table" and args.by_sequence and not args.against:
        parser.error("--by_sequence needs --against: name the baseline")
    return args


def main():
    args = arguments()
    with errors.one_line_errors():
        args.run(args)


if __name__ == "__main__":
    main()
