"""Tables of results beside the paper's (results/published.csv), for the terminal and for files."""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from evaluation.published import Published
from evaluation.tasks import PAPER_METRICS
from utils import files, tables
from utils.tables import Table

STANDARD_ERROR_NOTE = "± is lm-eval's standard error over the items of a task."
AVERAGE_NOTE = "The standard error of the average assumes that the tasks are independent."
PAPER_NOTE = (
    "The paper reports single runs without standard errors, so the error of a difference includes "
    "only that of this evaluation."
)
EXPLANATIONS = (STANDARD_ERROR_NOTE, AVERAGE_NOTE, PAPER_NOTE)
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
    # a line that goes under the tables
    remark: str = ""

    def differences(self) -> dict[str, Value]:
        """Return the model's results minus the paper's, in the columns that both have."""
        return {
            column: Value(value - self.paper[column], error)
            for column, (value, error) in self.values.items()
            if column in self.paper
        }


def make_table(
    name: str, title: str, columns: dict[str, str], rows: list[Row], num_decimals: int = 2
) -> Table:
    """Return a table in which the paper's row and the difference follow each model that the paper has.

    Args:
        columns: keys of the rows' results, with their headings
    """

    def format_values(label: str, values: dict[str, Value], sign: str = "") -> list[str | None]:
        texts = {}
        for column, (value, error) in values.items():
            texts[column] = f"{value:{sign}.{num_decimals}f}"
            if error is not None:
                texts[column] += f" ± {error:.{num_decimals}f}"
        return [label, *(texts.get(column) for column in columns)]

    cells = []
    numbers = []
    for row in rows:
        cells.append(format_values(row.label, row.values))
        differences = row.differences()
        if row.paper.keys() & columns.keys():
            paper = {column: Value(value) for column, value in row.paper.items()}
            cells.append(format_values("published", paper))
            cells.append(format_values("difference", differences, sign="+"))
        for column in columns:
            if column in row.values:
                value, error = row.values[column]
                numbers.append(
                    {
                        "model": row.label,
                        "table": title,
                        "column": column,
                        "value": value,
                        "standard_error": error,
                        "published": row.paper.get(column),
                        "difference": differences[column].value if column in differences else None,
                    }
                )
    return Table(
        name=name,
        title=title,
        header=["model", *columns.values()],
        rows=cells,
        notes=make_notes(rows),
        numbers=numbers,
        continuations=("published", "difference"),
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


def make_tables(records: list[dict], papers: dict[str, Published]) -> list[Table]:
    """Return a table for each title with a row for each record, those of validation splits last.

    Args:
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
            label = record["label"]
            published = papers[record["weights"]]
            if record["shots"] is None:
                paper, remark = published.beside_validation(label, record)
                rows.append(make_validation_row(label, record["record"], paper, remark))
                continue
            values = {}
            for name, (metric, value, error) in record["shown"].items():
                # the file of a task may set its own number of shots
                own_shots = record["n-shot"].get(name, record["shots"])
                metrics[name] = metric
                if own_shots != record["shots"]:
                    metrics[name] = f"{metric}, {own_shots}-shot"
                values[name] = Value(files.restore_nan(value), error)
            paper, remark = published.beside(label, record["shots"])
            rows.append(make_task_row(label, values, paper, remark))
        if metrics:
            results.append(make_task_table(title, metrics, rows))
        else:
            results.append(make_validation_table(title, rows))
    return results


def compute_average(values: dict[str, Value]) -> dict[str, Value]:
    """Return {"average": the mean over the paper's eight tasks}; {} if one of them is missing."""
    if not PAPER_METRICS.keys() <= values.keys():
        return {}
    task_values, task_errors = zip(*(values[task] for task in PAPER_METRICS), strict=True)
    num_tasks = len(task_values)
    error = None
    if None not in task_errors:
        error = math.sqrt(sum(task_error * task_error for task_error in task_errors)) / num_tasks
    return {"average": Value(sum(task_values) / num_tasks, error)}


def make_task_row(
    label: str, values: dict[str, Value], paper: dict[str, float], remark: str
) -> Row:
    """Return the row of a model whose results are by task; the average is added if it is missing.

    The remark is omitted if none of the tasks is one of the paper's.
    """
    if not values.keys() & PAPER_METRICS:
        remark = ""
    return Row(label, {**compute_average(values), **values}, paper, remark)


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


def make_validation_row(label: str, record: dict, paper: dict[str, float], remark: str) -> Row:
    """Return the row of a model's results on the validation split.

    Args:
        record: as in metrics.jsonl
    """
    record = files.restore_nan(record)
    values = {column: Value(record[column]) for column in VALIDATION_COLUMNS if column in record}
    published = {}
    if paper:
        published = {column: paper[name] for column, name in PAPER_VALIDATION_METRICS.items()}
    return Row(label, values, published, remark)


def make_validation_table(title: str, rows: list[Row]) -> Table:
    """Return a table of results on a validation split, with the columns that any row has."""
    columns = {
        column: heading
        for column, heading in VALIDATION_COLUMNS.items()
        if any(column in row.values for row in rows)
    }
    return make_table("validation", title, columns, rows, num_decimals=4)


def make_notes(rows: list[Row]) -> list[str]:
    """Return sentences that explain the numbers of a table, and the rows' remarks."""
    notes = []
    if any(error is not None for row in rows for _, error in row.values.values()):
        notes.append(STANDARD_ERROR_NOTE)
    if any("average" in row.values for row in rows):
        notes.append(AVERAGE_NOTE)
    if any(row.differences() for row in rows):
        notes.append(PAPER_NOTE)
    return notes + [row.remark for row in rows if row.remark]


def join_notes(results: list[Table]) -> list[str]:
    """Return the notes of several tables as paragraphs, each note once."""
    notes = list(dict.fromkeys(note for table in results for note in table.notes))
    explanations = [note for note in EXPLANATIONS if note in notes]
    remarks = [note for note in notes if note not in EXPLANATIONS]
    return [" ".join(explanations), *remarks] if explanations else remarks


def format_markdown(results: list[Table]) -> str:
    """Format tables and notes as Markdown."""
    parts = []
    for table in results:
        grid = tables.format_markdown(table.header, table.rows)
        parts += [f"### {table.title}", "", grid, ""]
    return "\n".join([*parts, "\n\n".join(join_notes(results)), ""])


def format_for_terminal(results: list[Table]) -> str:
    """Format tables and notes for the terminal, with a line for each task.

    The tables are transposed, so that several models fit into the width of a terminal.
    """
    parts = []
    for table in results:
        header, *rows = zip(table.header, *table.rows, strict=True)
        parts += ["", table.title, tables.format_markdown(header, rows)]
    return "\n".join([*parts, "", *join_notes(results)])


def format_latex(results: list[Table]) -> str:
    """Format tables for LaTeX, with the notes as comments."""
    parts = ["% needs \\usepackage{booktabs}"]
    parts += [f"% {note.replace('±', '+-')}" for note in join_notes(results)]
    for table in results:
        tabular = tables.format_latex(table.header, table.rows, table.continuations)
        parts += ["", f"% {table.title}", tabular]
    return "\n".join([*parts, ""])


def format_csv(results: list[Table]) -> str:
    """Format tables as CSV, with a line for each number."""
    numbers = [line for table in results for line in table.numbers]
    return Table("all", "all tables", header=[], rows=[], numbers=numbers).to_csv()
