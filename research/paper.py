"""`report.py paper`: write the tables and figures of a paper from finished runs, in one folder."""

import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from evaluation import published
from research import compare, plots, tables
from research.compare import METRIC_LABELS, Group, to_display_unit
from research.runs import Run
from research.tables import Size
from utils.provenance import store_figures
from utils.tables import format_csv

if TYPE_CHECKING:
    from matplotlib.figure import Figure

REPORT = "report.json"
FIGURE_PATTERN = r"figures(/(curves|costs|differences|final|residual_\w*)\.(png|svg))?"
# the files that this module writes
REPORT_FILES = re.compile(
    rf"report\.(json|md)|tables\.tex|{FIGURE_PATTERN}"
    r"|(curves|validation|differences|costs|accuracy_\w+|runs)\.csv"
)
UNKNOWN_SIZE = "unknown size"
BANDS = (
    "Lines are means over runs; bands are their 95% intervals, which a single run does not have."
)
CAPTIONS = {
    "curves": "Training loss (above, smoothed over 2% of each run) and validation loss (below) of the "
    f"models of each size, and of their variants. {BANDS} Early losses may lie above the "
    "plotted range.",
    "costs": f"Validation loss against steps, tokens, FLOPs and device-seconds. {BANDS}",
    "differences": "Difference to the baseline at every evaluation, run by run of the same seed. "
    "Bands: 95% intervals.",
    "final": "Final differences to the baseline with their 95% intervals, the number of pairs or runs "
    "in brackets, and the verdicts that they allow, corrected for the number of comparisons.",
    "residual": "Statistics of the sites of each block, means over tokens and runs.",
}


def name_size(run: Run) -> str:
    """Return "small" or "medium" for the paper's sizes, otherwise the layers and the width."""
    num_layers = run.settings.get("num_hidden_layers")
    width = run.settings.get("hidden_size")
    for name, config in published.SIZES.items():
        if (config["num_hidden_layers"], config["hidden_size"]) == (num_layers, width):
            return name
    return UNKNOWN_SIZE if num_layers is None else f"{num_layers} layers, width {width}"


def get_paper_position(group: Group | Run) -> tuple[bool, int]:
    """Return a sort key: the paper's models in its order, then all others in the given order."""
    model_names = list(published.CONFIG_NAMES)
    if group.model_name in model_names:
        return (False, model_names.index(group.model_name))
    return (True, 0)


def make_sizes(runs: list[Run], keys: list[str], against: str | None) -> list[Size]:
    """Group runs by size and setting, and compare the groups of each size with its baseline.

    Args:
        keys: the settings that make a group, by default all but the seed
        against: the name of the baseline, by default the additive model

    Raises:
        ValueError: no size has the baseline, or its name fits several groups
    """
    size_names = list(dict.fromkeys(map(name_size, runs)))
    has_several_sizes = len(set(size_names) - {UNKNOWN_SIZE}) > 1
    sizes = []
    for name in size_names:
        groups = compare.group_runs([run for run in runs if name_size(run) == name], keys)
        suffix = f", {name}" if has_several_sizes and name != UNKNOWN_SIZE else ""
        groups = [replace(group, name=group.name + suffix) for group in groups]
        sizes.append(Size(name, sorted(groups, key=get_paper_position)))
    error_lines = []
    for size in sizes:
        finished = [
            group for group in size.groups if not group.unfinished and group.step is not None
        ]
        try:
            size.baseline = compare.find_baseline(
                finished or size.groups, against or plots.BASELINE_MODEL
            )
        except ValueError as error:
            error_lines.append(str(error))
            size.notes.append(f"No comparison of {size.name}: {error}.")
            continue
        others = [group for group in size.groups if group is not size.baseline]
        size.groups = [size.baseline, *others]
    if against and len(error_lines) == len(sizes):
        raise ValueError(error_lines[0])
    compare_sizes([size for size in sizes if size.baseline])
    return sizes


def compare_sizes(sizes: list[Size]) -> None:
    """Compare the groups of each size with its baseline, in the metrics that all sizes share."""
    evaluated_by_size = [
        [group for group in size.groups if group.get_values("val_loss")] for size in sizes
    ]
    evaluated = [group for groups in evaluated_by_size for group in groups]
    metric = compare.choose_metric(evaluated)
    shared_metrics = [
        shared_metric
        for shared_metric in tables.DIFFERENCE_METRICS
        if all(group.get_values(shared_metric) for group in evaluated)
    ]
    for size, groups in zip(sizes, evaluated_by_size):
        if size.baseline not in groups:
            size.notes.append(f"No comparison: {size.baseline.name} was not evaluated.")
        elif len(groups) > 1:
            size.metric = metric
            for shared_metric in shared_metrics:
                size.differences[shared_metric] = compare.compare_groups(
                    groups, size.baseline, shared_metric
                )


def make_tables(sizes: list[Size]) -> list[tables.Table]:
    """Make the tables of a report, in the order of a paper."""
    groups = [group for size in sizes for group in size.groups]
    loss_table = tables.make_loss_table(groups)
    for size in sizes:
        loss_table.notes += size.notes
    report_tables = [loss_table]
    if any(size.comparisons for size in sizes):
        report_tables.append(tables.make_difference_table(sizes))
    report_tables.append(tables.make_cost_table(sizes))
    report_tables += tables.make_accuracy_tables(groups)
    report_tables.append(tables.make_run_table(groups))
    return report_tables


def make_lines(sizes: list[Size]) -> list[plots.Line]:
    """Make a line for each group; a model has one style in all sizes, the baseline the first."""
    groups = [group for size in sizes for group in size.groups]
    baseline_names = [size.get_short_name(size.baseline) for size in sizes if size.baseline]
    other_names = [size.get_short_name(group) for size in sizes for group in size.groups]
    names = list(dict.fromkeys([*baseline_names, *other_names]))
    first_number = 0 if baseline_names else 1  # style 0 is the baseline's
    published_by_group, _ = tables.get_published_results(groups, "")
    lines = []
    for size in sizes:
        comparison_by_group = {comparison.group.name: comparison for comparison in size.comparisons}
        for group in size.groups:
            # the star is at the end of training, so an unfinished group has none
            published_loss = None
            if not group.unfinished:
                published_loss = published_by_group.get(group.name, {}).get("val_loss")
            lines.append(
                plots.make_line(
                    group,
                    style_number=first_number + names.index(size.get_short_name(group)),
                    comparison=comparison_by_group.get(group.name),
                    size=size.name,
                    published_loss=published_loss,
                )
            )
    return lines


def make_figures(sizes: list[Size], lines: list[plots.Line], x_axis: str) -> dict[str, "Figure"]:
    """Make all figures that have something to show, by name, in the order of a paper."""
    baseline_names = {size.get_short_name(size.baseline) for size in sizes if size.baseline}
    baseline_name = baseline_names.pop() if len(baseline_names) == 1 else "the baseline"
    metric = next((size.metric for size in sizes if size.metric), "val_loss")
    unit = METRIC_LABELS[metric]
    if metric == "val_loss":
        unit += " (nats per token)"
    figures = {}
    if any(line.curves for line in lines):
        figures["curves"] = plots.plot_paper_curves(lines, x_axis)
    if any("validation" in line.curves for line in lines):
        figures["costs"] = plots.plot_costs(lines)
    if any("difference" in line.curves for line in lines):
        figures["differences"] = plots.plot_differences(lines, baseline_name, unit)
    line_by_name = {line.name: line for line in lines}
    final_rows = []
    for size in sizes:
        for comparison in size.comparisons:
            if comparison.estimate is not None:
                estimate = to_display_unit(comparison.estimate, comparison.metric)
                line = line_by_name[comparison.group.name]
                final_rows.append((line, estimate, comparison.verdict))
    if final_rows:
        figures["final"] = plots.plot_final(final_rows, baseline_name, unit)
    for name, residual_lines in plots.group_lines_by_statistics(lines).items():
        figures[name] = plots.plot_residual(residual_lines)
    return figures


def format_curves_csv(lines: list[plots.Line]) -> str:
    """Return every point of every curve as CSV."""
    axes = [axis for axis in plots.X_LABELS if axis != "steps"]
    rows = []
    for line in lines:
        for kind, curve in line.curves.items():
            missing = [float("nan")] * len(curve.steps)
            x_values = [curve.x_values.get(axis, missing) for axis in axes]
            for point in zip(curve.steps, *x_values, curve.mean, curve.half_width):
                numbers = [f"{value:.6g}" for value in point]
                rows.append([line.name, kind, *numbers, line.num_runs])
    return format_csv(["model", "curve", "step", *axes, "mean", "ci95", "runs"], rows)


# ---- the folder ----


def check_out(out: Path) -> None:
    """Raise ValueError if the folder contains files that no report has, which would be lost."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not (out / REPORT).is_file():
        raise ValueError(
            f"--out={out}: it exists and is not a report: give a new folder, or that of an earlier "
            "report"
        )
    for name in sorted(path.relative_to(out).as_posix() for path in out.rglob("*")):
        if not REPORT_FILES.fullmatch(name):
            raise ValueError(
                f"--out={out}: it contains {name}, which is not part of a report: move it, or give "
                "another --out"
            )


def write(
    runs: list[Run],
    omitted: list[str],
    keys: list[str],
    against: str | None,
    x_axis: str,
    out: Path,
) -> None:
    """Write the report; an earlier one stays in its place until the new one is complete.

    Args:
        omitted: lines on runs that could not be read
        keys: as for `make_sizes`
        against: as for `make_sizes`
        x_axis: the axis of the curves, one of `research.runs.AXES`
        out: the folder of the report
    """
    sizes = make_sizes(runs, keys, against)
    report_tables = make_tables(sizes)
    lines = make_lines(sizes)
    size_names = ", ".join(size.name for size in sizes)
    summary = f"{len(runs)} runs in {len(lines)} groups ({size_names})"
    if omitted:
        summary += "; what was left out is listed at the end"
    summary += "."
    new_folder = out.with_name(f".{out.name}.new")
    old_folder = out.with_name(f".{out.name}.old")
    shutil.rmtree(new_folder, ignore_errors=True)
    try:
        (new_folder / "figures").mkdir(parents=True)
        with plots.use_print_style():
            figures = make_figures(sizes, lines, x_axis)
            for name, figure in figures.items():
                for suffix, image in plots.render_images(figure).items():
                    (new_folder / "figures" / f"{name}.{suffix}").write_bytes(image)
        write_text_files(new_folder, summary, report_tables, list(figures), omitted)
        (new_folder / "curves.csv").write_text(format_curves_csv(lines), encoding="utf-8")
        stored_tables = {}
        for table in report_tables:
            stored_tables[table.name] = {
                "title": table.title,
                "rows": table.numbers,
                "notes": table.notes,
            }
        store_figures(
            new_folder / REPORT,
            {"summary": summary, "tables": stored_tables, "left_out": omitted},
        )
        shutil.rmtree(old_folder, ignore_errors=True)
        if out.exists():
            out.replace(old_folder)
        new_folder.replace(out)
    except OSError as error:
        raise ValueError(
            f"no report was written ({error.strerror}: {error.filename or new_folder})"
        ) from error
    finally:
        shutil.rmtree(new_folder, ignore_errors=True)
    shutil.rmtree(old_folder, ignore_errors=True)


def write_text_files(
    folder: Path,
    summary: str,
    report_tables: list[tables.Table],
    figure_names: list[str],
    omitted: list[str],
) -> None:
    """Write report.md, tables.tex and a CSV file for each table."""
    sections = ["# Report of runs", summary, *(table.to_markdown() for table in report_tables)]
    for name in figure_names:
        caption = CAPTIONS.get(name, CAPTIONS["residual"])
        sections.append(f"![{caption}](figures/{name}.png)")
    if omitted:
        sections += ["## Left out", "\n".join(f"- {line}" for line in omitted)]
    (folder / "report.md").write_text("\n\n".join(sections) + "\n", encoding="utf-8")
    latex_head = f"% {summary}\n% needs \\usepackage{{booktabs}}\n"
    latex = "\n".join([latex_head, *(table.to_latex() for table in report_tables)])
    (folder / "tables.tex").write_text(latex, encoding="utf-8")
    for table in report_tables:
        (folder / f"{table.name}.csv").write_text(table.to_csv(), encoding="utf-8")
