"""The table of results beside the paper's (results/published.csv), for the terminal and reports."""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from evaluation.published import Published
from evaluation.tasks import PAPER_METRICS
from utils import tables
from utils.tables import Table

# Columns of the validation table, and the paper's names for those that it reports.
VALIDATION_COLUMNS = {
    "val_loss": "loss (nats/token)",
    "val_perplexity": "perplexity",
    "val_bits_per_byte": "bits per byte",
    # of synthetic tasks
    "val_accuracy": "accuracy",
    "val_exact_match": "exact match",
}
PAPER_VALIDATION_METRICS = {"val_loss": "val_loss", "val_perplexity": "val_ppl"}


class Value(NamedTuple):
    """A result."""

    value: float
    standard_error: float | None = None


@dataclass
class Row:
    """The results of a model, by column, beside the paper's."""

    label: str
    values: dict[str, Value]
    paper: dict[str, float] = field(default_factory=dict)
    # a line that goes under the table
    remark: str = ""


def make_table(
    name: str, title: str, columns: dict[str, str], rows: list[Row], num_decimals: int = 2
) -> Table:
    """Return a table in which the paper's row follows each model that the paper has.

    Args:
        columns: keys of the rows' results, with their headings
    """

    def format_value(value: float, error: float | None = None) -> str:
        text = f"{value:.{num_decimals}f}"
        return text if error is None else f"{text} ± {error:.{num_decimals}f}"

    cells = []
    numbers = []
    for row in rows:
        texts = {column: format_value(*value) for column, value in row.values.items()}
        cells.append([row.label, *map(texts.get, columns)])
        if row.paper.keys() & columns.keys():
            texts = {column: format_value(value) for column, value in row.paper.items()}
            cells.append(["published", *map(texts.get, columns)])
        for column in columns.keys() & row.values.keys():
            value, error = row.values[column]
            numbers.append(
                {
                    "model": row.label,
                    "table": title,
                    "column": column,
                    "value": value,
                    "standard_error": error,
                    "published": row.paper.get(column),
                }
            )
    return Table(
        name=name,
        title=title,
        header=["model", *columns.values()],
        rows=cells,
        notes=[row.remark for row in rows if row.remark],
        numbers=numbers,
        continuations=("published",),
    )


def make_title(record: dict) -> str:
    """Return the title of a record's table: the number of shots, and what else affects results.

    For a record of a validation split it is the dataset and the dtype.
    """
    settings = record["settings"]
    if record["shots"] is None:
        return f"validation, {record['dataset']}, {settings['dtype']}"
    parts = [f"{record['shots']}-shot", settings["dtype"]]
    if settings["add_bos_token"]:
        parts.append("texts begin with end-of-text")
    if settings["limit"]:
        parts.append(f"only the first {settings['limit']} items")
    return ", ".join(parts)


def compute_average(values: dict[str, Value]) -> dict[str, Value]:
    """Return {"average": the mean over the paper's eight tasks}; {} if one of them is missing.

    Its standard error assumes that the tasks are independent.
    """
    if not PAPER_METRICS.keys() <= values.keys():
        return {}
    results, errors = zip(*(values[task] for task in PAPER_METRICS), strict=True)
    error = None if None in errors else math.hypot(*errors) / len(errors)
    return {"average": Value(sum(results) / len(results), error)}


def make_task_row(
    label: str, values: dict[str, Value], paper: dict[str, float], remark: str
) -> Row:
    """Return the row of a model whose results are by task, with their average.

    The remark is omitted if none of the tasks is one of the paper's.
    """
    has_paper_task = bool(values.keys() & PAPER_METRICS)
    return Row(
        label, {**compute_average(values), **values}, paper, remark if has_paper_task else ""
    )


def make_task_table(title: str, metrics: dict[str, str], rows: list[Row]) -> Table:
    """Return a table of results on tasks.

    Args:
        metrics: the metric that is shown of each task
        rows: as `make_task_row` returns them
    """
    # the paper's tasks first, in its order
    tasks = [*(task for task in PAPER_METRICS if task in metrics), *metrics]
    columns = {task: f"{task} ({metrics[task]})" for task in tasks}
    if PAPER_METRICS.keys() <= columns.keys():
        columns["average"] = "average of the eight"
    return make_table("accuracy", title, columns, rows)


def make_validation_table(title: str, rows: list[Row]) -> Table:
    """Return a table of results on a validation split, with the columns that any row has."""
    columns = {
        column: heading
        for column, heading in VALIDATION_COLUMNS.items()
        if any(column in row.values for row in rows)
    }
    return make_table("validation", title, columns, rows, num_decimals=4)


def make_tables(records: list[dict], papers: dict[str, Published]) -> list[Table]:
    """Return a table for each number of shots and each corpus, with a row for each model.

    Args:
        records: of eval.py
        papers: the paper's results for each model, by the digest of its weights
    """
    records_by_title: dict[str, list[dict]] = {}
    for record in sorted(records, key=lambda record: record["shots"] is None):
        records_by_title.setdefault(make_title(record), []).append(record)
    results = []
    for title, records_of_title in records_by_title.items():
        metrics: dict[str, str] = {}
        rows = []
        for record in records_of_title:
            paper = papers[record["weights"]]
            if record["shots"] is None:
                rows.append(make_validation_row(record, paper))
                continue
            for name, (metric, _, _) in record["shown"].items():
                # the file of a task may set its own number of shots
                shots = record["n-shot"].get(name, record["shots"])
                metrics[name] = metric if shots == record["shots"] else f"{metric}, {shots}-shot"
            values = {name: Value(*value) for name, (_, *value) in record["shown"].items()}
            beside = paper.beside(record["label"], record["shots"])
            rows.append(make_task_row(record["label"], values, *beside))
        if metrics:
            results.append(make_task_table(title, metrics, rows))
        else:
            results.append(make_validation_table(title, rows))
    return results


def make_validation_row(record: dict, paper: Published) -> Row:
    """Return the row of a record of a validation split."""
    row, remark = paper.beside_validation(record["label"], record)
    values = {column: Value(value) for column, value in record["record"].items()}
    published = {}
    if row:
        published = {column: row[name] for column, name in PAPER_VALIDATION_METRICS.items()}
    return Row(record["label"], values, published, remark)


def format_markdown(results: list[Table]) -> str:
    """Format tables with a line for each task, so that several models fit a terminal's width."""
    parts = []
    for table in results:
        header, *rows = zip(table.header, *table.rows, strict=True)
        parts += [f"### {table.title}", tables.format_markdown(header, rows)]
    notes = [note for table in results for note in table.notes]
    return "\n\n".join([*parts, *dict.fromkeys(notes)]) + "\n"
