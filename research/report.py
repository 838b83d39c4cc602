"""Make figures and tables of finished or running runs.

    python research/report.py curves runs/demo_cpu [RUN ...] [--x=seconds]
    python research/report.py curves RUN RUN RUN ... --band     # mean and 95% interval over seeds
    python research/report.py table runs/demo_cpu [RUN ...]     # the last evaluation of each run
    python research/report.py table RUN RUN RUN ... --against=gpt-mha-rope     # and differences
    python research/report.py paper RUN RUN RUN ... --out=paper.md   # the paper's tables, and its results
    python research/report.py runs RUN RUN RUN ... --out=runs.csv    # a row for each run

RUN is a run folder made by train.py, a folder that contains some, or a runs.csv. Runs that differ
only in their seed are one row of a table, with the mean, its 95% interval and the number of runs.
Runs that cannot be read are named and left out. See research/docs/report.md for more.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from configurator import argument, option
from evaluation import published
from research import compare, plots, runs, tables
from research.commands import Command, run_command
from research.storage import store_figures
from utils import files

if TYPE_CHECKING:
    import polars as pl

SUFFIXES = (".png", ".svg", ".pdf")


def read_runs(args: SimpleNamespace) -> "pl.DataFrame":
    """Read the runs of the command line, and name those that cannot be read.

    Raises:
        ValueError: no run can be read
    """
    loaded, error_lines = runs.load(args.runs)
    if not loaded.height:
        raise ValueError("; ".join(error_lines))
    print_notes(error_lines)
    return loaded


def print_notes(notes: list[str]) -> None:
    """Print each note as one line on stderr."""
    for note in notes:
        print(f"note: {' '.join(note.split())}", file=sys.stderr)


# ---- curves ----


def draw_curves(args: SimpleNamespace) -> None:
    """Draw the curves of `report.py curves`."""
    if args.out and Path(args.out).suffix not in SUFFIXES:
        raise ValueError(f"--out={args.out}: give a name that ends with {', '.join(SUFFIXES)}")
    loaded = read_runs(args)
    out = Path(args.out or runs.find_common_folder(loaded["path"]) / "curves.png")
    for row in loaded.iter_rows(named=True):
        if Path(row["path"]).is_file():
            raise ValueError(
                f"{row['name']}: a row of a runs.csv has no curves: give its run folder"
            )
    out.parent.mkdir(parents=True, exist_ok=True)
    plots.plot_losses(
        make_lines(loaded, args),
        x_axis=args.x,
        out=out,
        title=compare.shorten(loaded["name"][0]) if loaded.height == 1 else "",
    )
    print(f"drew {out}")


def make_lines(loaded: "pl.DataFrame", args: SimpleNamespace) -> list[plots.Line]:
    """Make a line for each run, or for each setting with `--band`.

    Raises:
        ValueError: there is nothing to draw
    """
    if args.band:
        groups = compare.group_runs(loaded, same_step=False)
    else:
        names = compare.name_groups(loaded)
        groups = [compare.Group(name, loaded[index]) for index, name in enumerate(names)]
        groups = compare.make_names_unique(groups)
    groups.sort(key=get_paper_position)
    notes = [f"{group.name}: {caution}" for group in groups for caution in group.cautions]
    lines = []
    styles = plots.choose_styles([group.model_name for group in groups])
    for group, style in zip(groups, styles):
        line = plots.make_line(group, style)
        if line.training.height or line.evaluations.height:
            lines.append(line)
        else:
            notes.append(f"{line.name}: its runs have no common step with a loss")
    if not lines:
        raise ValueError("; ".join(notes) + ": nothing to draw")
    vocabularies = {compare.get_vocabulary(row) for row in loaded.to_dicts()}
    if len(vocabularies) > 1:
        notes.append(
            "losses per token cannot be compared between different tokenizers or vocabularies: "
            f"{' | '.join(group.name for group in groups)}"
        )
    print_notes(notes)
    return lines


def get_paper_position(group: compare.Group) -> tuple[bool, int]:
    """Return a sort key: the paper's models in its order, then all others in the given order."""
    model_names = list(published.CONFIG_NAMES)
    if group.model_name in model_names:
        return (False, model_names.index(group.model_name))
    return (True, 0)


# ---- tables ----


def print_table(args: SimpleNamespace) -> None:
    """Print the table of `report.py table`."""
    loaded = read_runs(args)
    evaluated = select_evaluated(loaded)
    groups = compare.group_runs(evaluated, list_group_keys(args))
    comparisons = []
    if args.against:
        baseline = compare.find_baseline(groups, args.against)
        comparisons = compare.compare_groups(groups, baseline)
    table = tables.make_loss_table(groups, comparisons)
    print_notes(tables.list_cautions(groups, comparisons))
    if args.json:
        store_figures(Path(args.json), {"groups": table.numbers})
    print(table.format())


def select_evaluated(loaded: "pl.DataFrame") -> "pl.DataFrame":
    """Return the runs that have an evaluation, and print a note for each of the others.

    Raises:
        ValueError: none has one
    """
    pl = runs.import_polars()
    steps = compare.get_column(loaded, "val_step")
    notes = [
        f"{name} has no evaluation yet" for name, step in zip(loaded["name"], steps) if step is None
    ]
    if len(notes) == loaded.height:
        raise ValueError("; ".join(notes))
    print_notes(notes)
    return loaded.filter(pl.col("val_step").is_not_null())


def list_group_keys(args: SimpleNamespace) -> list[str]:
    """Return the keys of `--by`, which can be repeated and can have several keys."""
    return [key for text in args.by for key in text.split(",")]


def write_paper(args: SimpleNamespace) -> None:
    """Print or write the tables of `report.py paper`: losses and accuracies beside the paper's."""
    loaded = read_runs(args)
    groups = compare.group_runs(loaded, list_group_keys(args))
    groups.sort(key=get_paper_position)
    all_tables = [tables.make_loss_table(groups), *tables.make_accuracy_tables(groups)]
    text = "\n\n".join(table.format_section() for table in all_tables)
    if args.out:
        files.write_text(Path(args.out), f"{text}\n")
        print(f"wrote {args.out}")
    else:
        print(text)


def store_runs(args: SimpleNamespace) -> None:
    """Write the file of `report.py runs`."""
    if not args.out:
        raise ValueError("--out is missing: give a CSV file, as in --out=runs.csv")
    loaded = read_runs(args)
    runs.write_csv(loaded, Path(args.out))
    print(f"wrote {args.out}: {loaded.height} runs")


# ---- the commands ----

BY_HELP = "KEY or KEY,KEY: settings that distinguish rows (default: all settings but the seed)"


@dataclass(frozen=True)
class RunOptions:
    """Which runs are read."""

    runs: tuple[str, ...] = argument("run folders, folders that contain run folders, or a runs.csv")


@dataclass(frozen=True)
class CurvesOptions(RunOptions):
    """What is drawn."""

    x: Literal["steps", "tokens", "flops", "seconds"] = option(
        "steps",
        "x axis; seconds are device-seconds after the first step",
    )
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
        "baseline of the differences: the name or the model of a row",
    )
    json: str | None = option(
        None,
        "also write the rows to this file, with commit, machine and date",
    )


@dataclass(frozen=True)
class PaperOptions(RunOptions):
    """What is printed."""

    by: tuple[str, ...] = option((), BY_HELP)
    out: str | None = option(None, "Markdown file to write instead")


@dataclass(frozen=True)
class StoreOptions(RunOptions):
    """Where the rows are stored."""

    out: str | None = option(None, "CSV file to write (required)")


COMMANDS = {
    "curves": Command("draw loss curves", CurvesOptions, draw_curves),
    "table": Command(
        "print the last evaluation of each run as Markdown", TableOptions, print_table
    ),
    "paper": Command(
        "print the paper's tables of losses and accuracies, with its results beside yours",
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
    run_command(__doc__, COMMANDS)


if __name__ == "__main__":
    main()
