"""Make figures and tables of finished or running runs.

    python research/report.py curves runs/demo_cpu [RUN ...] [--x=seconds] [--y=bits_per_byte]
    python research/report.py curves RUN RUN RUN ... --band     # mean and 95% interval over seeds
    python research/report.py table runs/demo_cpu [RUN ...]     # the last evaluation of each run
    python research/report.py table RUN RUN RUN ... --against=gpt-mha-rope     # and differences
    python research/report.py paper RUN RUN RUN ... --out=report     # a paper's tables and figures
    python research/report.py runs RUN RUN RUN ... --out=runs.csv    # a row for each run

RUN is a run folder made by train.py, a folder that contains some, or a runs.csv. Runs that differ
only in their seed are one row of a table, with the mean, its 95% interval and the number of runs.
Runs that cannot be read are named and left out. See research/docs/report.md for more.
"""

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from configurator import argument, option
from research import compare, paper, plots, runs, tables
from research.commands import Command, read_command
from training import metrics
from utils import errors
from utils.provenance import store_figures
from utils.tables import format_markdown

MAX_ERRORS = 3  # unreadable runs that an error message names
Y_LABELS = {
    "loss": "loss (nats per token; lower is better)",
    "bits_per_byte": "bits per byte (lower is better)",
}
SUFFIXES = (".png", ".svg", ".pdf", ".html")


def read_runs(args: SimpleNamespace) -> tuple[list[runs.Run], list[str]]:
    """Read the runs of the command line, and select those of `--where`.

    Returns:
        the runs, and notes on what was left out

    Raises:
        ValueError: no run can be read, or `--where` selects none
    """
    readable, error_lines = runs.load(args.runs)
    if not readable:
        message = "; ".join(error_lines[:MAX_ERRORS])
        if len(error_lines) > MAX_ERRORS:
            message += f"; and {len(error_lines) - MAX_ERRORS} more"
        raise ValueError(message)
    selected = compare.select_runs(readable, args.where)
    notes = list(error_lines)
    for run in selected:
        notes += [f"{run.name}: {note}" for note in run.notes]
    return selected, notes


def print_notes(notes: list[str]) -> None:
    """Print each note as one line on stderr."""
    for note in notes:
        print(f"note: {' '.join(note.split())}", file=sys.stderr)


def get_out(args: SimpleNamespace, loaded: list[runs.Run], name: str) -> Path:
    """Return --out; by default a path in the folder of a single run, or in that of several runs."""
    if args.out:
        return Path(args.out)
    paths = [run.path.resolve() for run in loaded]
    if len(paths) == 1 and not paths[0].is_file():
        return paths[0] / name
    return Path(os.path.commonpath([path.parent for path in paths])) / name


def draw_curves(args: SimpleNamespace) -> None:
    """Draw the loss curves of `report.py curves`."""
    if args.out and Path(args.out).suffix not in SUFFIXES:
        raise ValueError(f"--out={args.out}: give a name that ends with {', '.join(SUFFIXES)}")
    loaded, notes = read_runs(args)
    lines, line_notes = make_lines(loaded, args)
    print_notes([*notes, *line_notes])
    out = get_out(args, loaded, "curves.png")
    out.parent.mkdir(parents=True, exist_ok=True)
    draw = plots.write_page if out.suffix == ".html" else plots.plot_losses
    draw(
        lines,
        x_axis=args.x,
        x_label=plots.X_LABELS[args.x],
        y_label=Y_LABELS[args.y],
        out=out,
        title=compare.shorten(loaded[0].name) if len(loaded) == 1 else "",
    )
    print(f"drew {out}")


def make_lines(loaded: list[runs.Run], args: SimpleNamespace) -> tuple[list[plots.Line], list[str]]:
    """Make a line for each run, or for each setting with `--band`.

    Returns:
        the lines, and notes on what cannot be drawn or compared

    Raises:
        ValueError: there is nothing to draw
    """
    loaded = sorted(loaded, key=paper.get_paper_position)
    if args.band:
        groups = compare.group_runs(loaded, require_same_step=False)
    else:
        labels = [loaded[0].model_name or loaded[0].name]
        if len(loaded) > 1:
            labels = compare.make_labels(loaded)
        groups = [compare.make_group(label, [run]) for label, run in zip(labels, loaded)]
    notes = [f"{group.name}: {caution}" for group in groups for caution in group.cautions]
    style_numbers = plots.assign_style_numbers([group.model_name for group in groups])
    lines = []
    for group, style_number in zip(groups, style_numbers):
        line = plots.make_line(group, style_number)
        if any(run.path.is_file() for run in group.runs):
            notes.append(f"{line.name}: a row of a runs.csv has no curves: give its run folder")
        elif not line.curves:
            notes.append(f"{line.name}: its runs have no common step with a loss")
        elif args.y == "bits_per_byte":
            convert_to_bits_per_byte(line, group, notes)
        if line.curves:
            lines.append(line)
    if not lines:
        raise ValueError("; ".join(notes) + ": nothing to draw")
    name_by_vocabulary = {
        compare.get_vocabulary(run): group.name for group in groups for run in group.runs
    }
    if args.y == "loss" and len(name_by_vocabulary) > 1:
        notes.append(
            "losses per token cannot be compared between different tokenizers or vocabularies; try "
            f"--y=bits_per_byte: {' | '.join(name_by_vocabulary.values())}"
        )
    return lines, notes


def convert_to_bits_per_byte(line: plots.Line, group: compare.Group, notes: list[str]) -> None:
    """Convert the curves of a line, or remove them if the size of the text is not known."""
    bytes_per_token = {run.bytes_per_token for run in group.runs}
    if None in bytes_per_token or len(bytes_per_token) > 1:
        notes.append(f"{line.name}: --y=bits_per_byte: its shards' text size is unknown")
        line.curves = {}
        return
    factor = metrics.compute_bits_per_byte(1.0, bytes_per_token.pop())
    evaluations = [
        plots.extract_series(run, run.evaluations, "val_bits_per_byte") for run in group.runs
    ]
    curves = {"validation": plots.make_validation_curve(evaluations)}
    if "training" in line.curves:
        training = line.curves["training"]
        curves["training"] = replace(
            training, mean=training.mean * factor, half_width=training.half_width * factor
        )
    # training first, because its curve gives the legend its artist
    line.curves = {kind: curves[kind] for kind in ("training", "validation") if curves.get(kind)}
    if line.raw_training:
        values = line.raw_training.values * factor
        line.raw_training = replace(line.raw_training, values=values)


def print_table(args: SimpleNamespace) -> None:
    """Print the table of `report.py table`."""
    loaded, notes = read_runs(args)
    evaluated = [run for run in loaded if run.final_evaluation]
    notes += [f"{run.name} has no evaluation yet" for run in loaded if not run.final_evaluation]
    if not evaluated:
        raise ValueError("; ".join(notes[-MAX_ERRORS:]))
    groups = compare.group_runs(evaluated, list_group_keys(args))
    comparisons = []
    if args.against:
        baseline = compare.find_baseline(groups, args.against)
        comparisons = compare.compare_groups(groups, baseline)
    table = tables.make_loss_table(groups, comparisons)
    print_notes([*notes, *tables.list_cautions(groups, comparisons)])
    if args.json:
        rows = []
        for run in evaluated:
            rows.append(
                {
                    "run": run.name,
                    "model": run.model_name,
                    "seed": run.seed,
                    **run.final_evaluation,
                }
            )
        store_figures(Path(args.json), {"rows": rows, "groups": table.numbers})
    print(format_markdown(table.header, table.rows))


def list_group_keys(args: SimpleNamespace) -> list[str]:
    """Return the keys of `--by`, which can be repeated and can have several keys."""
    return [key for text in args.by for key in text.split(",")]


def write_paper(args: SimpleNamespace) -> None:
    """Write the folder of `report.py paper`."""
    if args.out:
        paper.check_out(Path(args.out))  # before the runs are read, which can take minutes
    loaded, notes = read_runs(args)
    out = get_out(args, loaded, "report")
    paper.check_out(out)
    print_notes([*notes, f"runs read: {len(loaded)}"])
    paper.write(
        loaded,
        omitted=notes,
        keys=list_group_keys(args),
        against=args.against,
        x_axis=args.x,
        out=out,
    )
    print(f"wrote {out / 'report.md'}")


def store_runs(args: SimpleNamespace) -> None:
    """Add rows to the file of `report.py runs`."""
    if not args.out:
        raise ValueError("--out is missing: give a CSV file, as in --out=runs.csv")
    loaded, notes = read_runs(args)
    print_notes(notes)
    num_added, num_replaced = runs.write_csv(loaded, Path(args.out))
    print(f"{args.out}: {num_added} runs added, {num_replaced} replaced")


# ---- the commands ----

AXIS_HELP = "x axis; seconds are device-seconds after the first step"
BY_HELP = "KEY or KEY,KEY: settings that distinguish rows (default: all settings but the seed)"


@dataclass(frozen=True)
class RunOptions:
    """Which runs are read."""

    runs: tuple[str, ...] = argument("run folders, folders that contain run folders, or a runs.csv")
    where: tuple[str, ...] = option(
        (),
        "KEY=VALUE or KEY=VALUE,VALUE: read only runs with this setting; repeat it to require "
        "several settings",
    )


@dataclass(frozen=True)
class CurvesOptions(RunOptions):
    """What is drawn."""

    x: Literal["steps", "tokens", "flops", "seconds"] = option("steps", AXIS_HELP)
    y: Literal["loss", "bits_per_byte"] = option("loss", "y axis")
    band: bool = option(
        False,
        "draw the mean and 95% interval of runs that differ only in their seed",
    )
    out: str | None = option(
        None,
        f"output file, {', '.join(SUFFIXES)} (default: curves.png in the run, or beside the runs)",
    )


@dataclass(frozen=True)
class TableOptions(RunOptions):
    """What is printed."""

    by: tuple[str, ...] = option((), BY_HELP)
    against: str | None = option(
        None,
        "baseline of the paired differences: the name of a row, or one of its runs",
    )
    json: str | None = option(
        None,
        "also write the rows to this file, with commit, machine and date",
    )


@dataclass(frozen=True)
class PaperOptions(RunOptions):
    """What is written."""

    by: tuple[str, ...] = option((), BY_HELP)
    against: str | None = option(
        None,
        f"baseline of each model size (default: {plots.BASELINE_MODEL})",
    )
    x: Literal["steps", "tokens", "flops", "seconds"] = option("tokens", AXIS_HELP)
    out: str | None = option(
        None,
        "a new folder, or that of an earlier report (default: report, in the run folder or beside "
        "the runs)",
    )


@dataclass(frozen=True)
class StoreOptions(RunOptions):
    """Where the rows are stored."""

    out: str | None = option(
        None,
        "CSV file (required); its rows with the names of these runs are replaced",
    )


COMMANDS = {
    "curves": Command(
        "draw loss curves as a picture or an interactive page",
        CurvesOptions,
        draw_curves,
    ),
    "table": Command(
        "print the last evaluation of each run as Markdown",
        TableOptions,
        print_table,
    ),
    "paper": Command(
        "write the tables and figures of a paper to one folder",
        PaperOptions,
        write_paper,
    ),
    "runs": Command(
        "store a row for each run in a CSV file, which the other commands read",
        StoreOptions,
        store_runs,
    ),
}


def main() -> None:
    """Run the command."""
    args = read_command(__doc__, COMMANDS)
    with errors.one_line_errors():
        COMMANDS[args.command].run(args)


if __name__ == "__main__":
    main()
