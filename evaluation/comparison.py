"""The table of results beside the paper's (results/published.csv), as eval.py prints it."""

import math
from typing import NamedTuple

from evaluation.published import Published
from evaluation.tasks import PAPER_METRICS, Result
from utils import tables

# Metrics of a validation split, with the paper's names for those that it reports.
VALIDATION_METRICS = {
    "val_loss": "loss (nats/token)",
    "val_perplexity": "perplexity",
    "val_bits_per_byte": "bits per byte",
    # of synthetic tasks
    "val_accuracy": "accuracy",
    "val_exact_match": "exact match",
}
PAPER_VALIDATION_METRICS = {"val_loss": "val_loss", "val_perplexity": "val_ppl"}


class Cell(NamedTuple):
    """A number of a model, and where it stands in the table."""

    name: str  # of the task or metric
    shots: int | None  # None for a validation split
    text: str
    published: str | None  # the paper's number, if it has one


def compute_average(
    values: dict[str, tuple[float, float | None]],
) -> tuple[float, float | None] | None:
    """Return the mean over the paper's eight tasks, with its standard error; None if one is missing.

    The standard error assumes that the tasks are independent.

    Args:
        values: (value, standard error) by task
    """
    if not PAPER_METRICS.keys() <= values.keys():
        return None
    results, errors = zip(*(values[task] for task in PAPER_METRICS), strict=True)
    error = None if None in errors else math.hypot(*errors) / len(errors)
    return sum(results) / len(results), error


def add_averages(results: list[Result]) -> list[Result]:
    """Return the results and their averages, the paper's tasks first, for each number of shots."""
    results = list(results)
    for shots in {result.shots for result in results}:
        average = compute_average(
            {
                each.task: (each.value, each.standard_error)
                for each in results
                if each.shots == shots
            }
        )
        if average is not None:
            results.append(Result("average", shots, "of the eight", *average))
    order = [*PAPER_METRICS, "average"]
    return sorted(
        results,
        key=lambda each: (each.shots, order.index(each.task) if each.task in order else len(order)),
    )


def format_value(value: float | None, standard_error: float | None = None) -> str | None:
    """Format a result on a task with two decimals; None if there is none."""
    if value is None:
        return None
    return f"{value:.2f}" if standard_error is None else f"{value:.2f} ± {standard_error:.2f}"


def make_cells(record: dict, paper: Published) -> list[Cell]:
    """Return the numbers of a record that the table shows."""
    if "shown" in record:
        return [
            Cell(
                name=f"{result.task} ({result.metric})",
                shots=result.shots,
                text=format_value(result.value, result.standard_error),
                published=format_value(paper.results.get(str(result.shots), {}).get(result.task)),
            )
            for result in add_averages([Result(**fields) for fields in record["shown"]])
        ]
    cells = []
    for metric, name in VALIDATION_METRICS.items():
        if metric in record["validation"]:
            text = f"{record['validation'][metric]:.4f}"
            published = paper.results.get("", {}).get(PAPER_VALIDATION_METRICS.get(metric))
            published = None if published is None else f"{published:.4f}"
            cells.append(Cell(f"{name}, {record['dataset']}", None, text, published))
    return cells


def format_table(records: list[dict], papers: dict[str, Published]) -> str:
    """Return a Markdown table with a line for each task and number of shots, and notes below.

    Each model has a column, followed by one of the paper's results if it has any of them.

    Args:
        records: of one call of eval.py
        papers: the paper's results for each model, by the digest of its weights
    """
    lines: dict[tuple[str, int | None], dict[tuple[str, str], str | None]] = {}
    notes = [format_settings(records[0]["settings"])]
    for record in records:
        weights = record["weights"]
        for cell in make_cells(record, papers[weights]):
            line = lines.setdefault((cell.name, cell.shots), {})
            line[weights, record["label"]] = cell.text
            line[weights, "published"] = cell.published
        if any(line.get((weights, "published")) for line in lines.values()):
            notes.append(papers[weights].remark(record["label"]))
    columns = dict.fromkeys(column for line in lines.values() for column in line)
    columns = [name for name in columns if any(line.get(name) for line in lines.values())]
    # the losses come last
    order = sorted(lines, key=lambda line: (line[1] is None, line[1]))
    header = ["", "shots", *(label for _, label in columns)]
    rows = [[*line, *map(lines[line].get, columns)] for line in order]
    table = tables.format_markdown(header, rows)
    return "\n\n".join([table, *dict.fromkeys(filter(None, notes))]) + "\n"


def format_settings(settings: dict) -> str:
    """Return the line under a table that says how its numbers were computed."""
    limit = settings["limit"]
    items = f", on the first {limit} items of each task" if limit else ""
    return f"Computed in {settings['dtype']}{items}."
