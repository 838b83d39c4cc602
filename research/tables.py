"""Make the tables of a report: results of runs, beside the published ones and beside a baseline."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from research import runs
from research.compare import (
    METRICS,
    Comparison,
    Estimate,
    Group,
    describe_validation_data,
    estimate_mean,
    get_vocabulary,
    to_display_unit,
)
from utils.tables import format_markdown

INTERVAL_NOTE = "± is half the 95% interval of the mean over runs, (n) the number of runs."
ACCURACY_NOTE = (
    f"{INTERVAL_NOTE} For a single run, ± is lm-eval's standard error over a task's items."
)


@dataclass
class Table:
    """A table as cells of text and as numbers.

    rows: the text of each cell, None for an empty one. numbers: a dict for each row.
    """

    title: str
    header: list[str]
    rows: list[list[str | None]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    numbers: list[dict[str, Any]] = field(default_factory=list)

    def format(self) -> str:
        """Return the grid of cells as Markdown."""
        return format_markdown(self.header, self.rows)

    def format_section(self) -> str:
        """Return the title as a heading, the grid and the notes."""
        return "\n\n".join([f"## {self.title}", self.format(), *self.notes])


def format_steps(group: Group) -> str:
    """Return the step of a group's last evaluation: 800, or 25 of 800.

    Without an evaluation it is the step that all of its runs have reached.
    """
    reached_step = min(row["step"] for row in group.rows)
    step = reached_step if group.step is None else int(group.step)
    for row in group.rows:
        is_behind = runs.has_finished(row) is False or step < reached_step
        if row.get("max_steps") is not None and is_behind:
            return f"{step:,} of {row['max_steps']:,}"
    return f"{step:,}"


def format_estimate(estimate: Estimate | None, metric: str) -> str | None:
    """Return mean ± half the interval (number of runs), or the mean alone of a single run."""
    if estimate is None:
        return None
    number_format = f".{METRICS[metric].digits}f"
    if estimate.n == 1:
        return f"{estimate.mean:{number_format}}"
    return estimate.format(number_format)


# ---- losses ----


def make_loss_table(groups: list[Group], comparisons: Sequence[Comparison] = ()) -> Table:
    """Make the table of each group's last evaluation.

    It has columns for the published loss if one is known, and for the difference to a baseline if
    comparisons are given.
    """
    metrics = [metric for metric in METRICS if any(group.get_values(metric) for group in groups)]
    metrics = metrics or ["val_loss"]
    published_by_group, published_notes = find_published_rows(groups, "")
    comparison_by_group = {id(comparison.group): comparison for comparison in comparisons}
    header = ["model", "parameters", "runs", "steps", *(METRICS[key].label for key in metrics)]
    if published_by_group:
        header += ["published loss", "loss minus the published"]
    if comparisons:
        metric_label = METRICS[comparisons[0].metric].label
        header += [f"{metric_label} minus that of {comparisons[0].baseline.name}", "verdict"]
    notes = [INTERVAL_NOTE, *published_notes, *list_cautions(groups, comparisons)]
    table = Table("Validation", header, notes=notes)
    for group in groups:
        published = published_by_group.get(group.name, {})
        comparison = comparison_by_group.get(id(group))
        estimates = {}
        for metric in metrics:
            estimate = group.estimate(metric)
            if estimate is not None:
                estimates[metric] = estimate
        parameters = group.get_column("parameters")[0]
        cells = [format_estimate(estimates.get(metric), metric) for metric in metrics]
        if not estimates:
            cells[0] = "not evaluated"
        row = [
            group.name,
            f"{parameters:,}" if parameters else None,
            str(group.runs.height),
            format_steps(group),
            *cells,
        ]
        if published_by_group:
            row += make_published_cells(group, estimates, published.get("val_loss"))
        if comparison is not None:
            row += [format_difference(comparison), comparison.verdict or None]
        elif comparisons:
            row += [None, None]
        table.rows.append(row)
        numbers = {
            "model": group.name,
            "model_name": group.model_name,
            "parameters": parameters,
            "runs": group.get_column("name"),
            "seeds": group.seeds,
            "steps": format_steps(group),
        }
        for metric, estimate in estimates.items():
            numbers[metric] = estimate.mean
            numbers[f"{metric}_ci95"] = estimate.half_width
        for key, value in published.items():
            numbers[f"published_{key}"] = value
        if comparison is not None:
            numbers.update(make_comparison_numbers(comparison))
        table.numbers.append(numbers)
    return table


def make_published_cells(
    group: Group, estimates: dict[str, Estimate], published_loss: float | None
) -> list[str | None]:
    """Return the cells of the published loss and of the loss minus the published one."""
    if published_loss is None:
        return [None, None]
    difference = None
    if estimates and not group.unfinished:
        difference = f"{estimates['val_loss'].mean - published_loss:+.4f}"
    return [f"{published_loss:.4f}", difference]


def find_published_rows(
    groups: list[Group], shots: int | str
) -> tuple[dict[str, dict[str, float]], list[str]]:
    """Return the paper's row for each group by its name, and the lines that belong under a table."""
    rows: dict[str, dict] = {}
    names_by_line: dict[str, list[str]] = {}
    for group in groups:
        for run in group.rows:
            published = runs.find_published(run)
            line = "The settings of {} are not known, so the paper's results are not shown."
            if published is not None:
                line = published.remark("{}")
                if str(shots) in published.results:
                    rows[group.name] = published.results[str(shots)]
            names = names_by_line.setdefault(line, [])
            if group.name not in names:
                names.append(group.name)
    lines = [line.replace("{}", ", ".join(names)) for line, names in names_by_line.items() if line]
    return rows, lines


def list_cautions(groups: list[Group], comparisons: Sequence[Comparison] = ()) -> list[str]:
    """Return the reasons why the numbers of one column cannot be compared."""
    cautions = [f"{group.name}: {caution}." for group in groups for caution in group.cautions]
    # dicts, because a set would not keep the order of the names
    names_by_validation_data: dict[str, dict[str, bool]] = {}
    tokenizers: dict[str | None, bool] = {}
    for group in groups:
        for row in group.rows:
            validation_data = describe_validation_data(row)
            names_by_validation_data.setdefault(validation_data, {})[group.name] = True
            tokenizers[get_vocabulary(row)[0]] = True
    if len(names_by_validation_data) > 1:
        names = " | ".join(", ".join(names) for names in names_by_validation_data.values())
        tokenizer_names = ""
        if len(tokenizers) > 1:
            tokenizer_names = f" ({', '.join(map(str, tokenizers))})"
        cautions.append(
            "Losses cannot be compared between models that were validated on different texts or "
            f"tokens{tokenizer_names}: {names}."
        )
    for comparison in comparisons:
        if comparison.estimate is None:
            cautions.append(f"{comparison.group.name} is not compared: {comparison.reason}.")
        elif not comparison.paired:
            cautions.append(f"{comparison.group.name} is compared unpaired: {comparison.reason}.")
    return cautions


def format_difference(comparison: Comparison) -> str | None:
    """Return the difference ± half its interval; None if the groups are not comparable."""
    if comparison.estimate is None:
        return None
    estimate = to_display_unit(comparison.estimate, comparison.metric)
    digits = METRICS[comparison.metric].digits
    text = f"{estimate.mean:+.{digits}f}"
    if estimate.half_width is not None:
        text += f" ± {estimate.half_width:.{digits}f}"
    if not comparison.paired:
        return f"{text} unpaired"
    num_runs = max(comparison.group.runs.height, comparison.baseline.runs.height)
    if estimate.n == num_runs:
        return text
    return f"{text} ({estimate.n} pairs)" if estimate.n > 1 else f"{text} (1 pair)"


def make_comparison_numbers(comparison: Comparison) -> dict[str, Any]:
    """Return a comparison as files store it: with all digits, in the unit that tables show."""
    numbers = {
        "baseline": comparison.baseline.name,
        "metric": comparison.metric,
        "paired": comparison.paired,
        "verdict": comparison.verdict,
        "reason": comparison.reason,
    }
    if comparison.estimate is not None:
        estimate = to_display_unit(comparison.estimate, comparison.metric)
        numbers["n"] = estimate.n
        numbers["difference"] = estimate.mean
        numbers["difference_ci95"] = estimate.half_width
    return numbers


# ---- accuracy ----


def make_accuracy_tables(groups: list[Group]) -> list[Table]:
    """Make a table of the results of eval.py for each number of examples; none without results."""
    shots_by_title = {}
    for group in groups:
        for records in map(read_accuracy, group.rows):
            for record in records:
                for result in record.get("shown", ()):
                    title = make_accuracy_title(result["shots"], record["settings"])
                    shots_by_title[title] = result["shots"]
    ordered = sorted(shots_by_title, key=lambda title: (shots_by_title[title], title))
    return [make_accuracy_table(groups, title, shots_by_title[title]) for title in ordered]


def read_accuracy(row: runs.Row) -> list[dict]:
    """Return the records of eval.py of a run."""
    return json.loads(row.get("accuracy") or "[]")


def make_accuracy_title(shots: int, settings: dict) -> str:
    """Return the number of shots, and what else affects results."""
    items = f", only the first {settings['limit']} items" if settings["limit"] else ""
    return f"Accuracy in %, {shots}-shot, {settings['dtype']}{items}"


def make_accuracy_table(groups: list[Group], title: str, shots: int) -> Table:
    """Make the table of all results of eval.py with this title."""
    from evaluation.comparison import format_value  # the import takes a second
    from evaluation.tasks import PAPER_METRICS

    metric_by_task: dict[str, str] = {}
    values_by_group = []
    for group in groups:
        results = [select_task_results(row, title) for row in group.rows]
        values = {}
        for task in results[0]:
            if all(task in result for result in results):
                metric_by_task[task] = results[0][task].metric
                values[task] = average_results([result[task] for result in results])
        values_by_group.append(values)
    # the paper's tasks first, in its order
    tasks = dict.fromkeys([*PAPER_METRICS, "average", *metric_by_task])
    headings = {
        task: f"{task} ({metric_by_task[task]})" for task in tasks if task in metric_by_task
    }
    evaluated = [group for group, values in zip(groups, values_by_group) if values]
    published_by_group, published_notes = find_published_rows(evaluated, shots)
    table = Table(title, ["model", *headings.values()], notes=[ACCURACY_NOTE, *published_notes])
    for group, values in zip(groups, values_by_group):
        row = [format_value(*values.get(task, (None,))) for task in headings]
        if not values:
            row[0] = "not evaluated"
        table.rows.append([f"{group.name} ({group.runs.height})", *row])
        published = published_by_group.get(group.name, {})
        if published.keys() & headings.keys():
            row = [format_value(published.get(task)) for task in headings]
            table.rows.append(["published", *row])
    return table


def select_task_results(row: runs.Row, title: str) -> dict[str, Any]:
    """Return a run's results with this title by task, among them the average over the paper's tasks."""
    from evaluation.comparison import add_averages
    from evaluation.tasks import Result

    result_by_task = {}
    for record in read_accuracy(row):
        for result in record.get("shown", ()):
            if make_accuracy_title(result["shots"], record["settings"]) == title:
                result_by_task[result["task"]] = Result(**result)
    return {result.task: result for result in add_averages(list(result_by_task.values()))}


def average_results(results: list[Any]) -> tuple[float, float | None]:
    """Return the mean over runs and half its interval, or the result of a single run and its error."""
    if len(results) == 1:
        return results[0].value, results[0].standard_error
    estimate = estimate_mean([result.value for result in results])
    return estimate.mean, estimate.half_width
