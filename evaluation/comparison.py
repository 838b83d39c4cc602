"""Tables of results beside the paper's (results/published.csv), for the terminal and for files."""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from evaluation.tasks import PAPER_METRICS
from utils import tables

STANDARD_ERROR_NOTE = "± is lm-eval's standard error over the items of a task."
AVERAGE_NOTE = "The standard error of the average assumes that the tasks are independent."
PAPER_NOTE = (
    "The paper reports single runs without standard errors, so the error of a difference includes "
    "only that of this evaluation."
)
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


@dataclass
class Table:
    """Rows under columns, which are keys of the rows' results with their headings."""

    title: str
    columns: dict[str, str]
    rows: list[Row]
    num_decimals: int = 2

    def format_rows(self) -> list[list[str | None]]:
        """Return header and rows as text.

        The paper's row and the difference follow below each model that the paper has results for.
        """
        formatted: list[list[str | None]] = [["model", *self.columns.values()]]
        for row in self.rows:
            formatted.append([row.label, *self.format_values(row.values)])
            if row.paper.keys() & self.columns.keys():
                paper = {column: Value(value) for column, value in row.paper.items()}
                differences = self.format_values(row.differences(), sign="+")
                formatted.append(["published", *self.format_values(paper)])
                formatted.append(["difference", *differences])
        return formatted

    def format_values(self, values: dict[str, Value], sign: str = "") -> list[str | None]:
        """Return a text for each column, None where there is no value."""
        texts = {}
        for column, (value, error) in values.items():
            texts[column] = f"{value:{sign}.{self.num_decimals}f}"
            if error is not None:
                texts[column] += f" ± {error:.{self.num_decimals}f}"
        return [texts.get(column) for column in self.columns]


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
    columns = {task: f"{task} ({metric})" for task, metric in metrics.items()}
    if PAPER_METRICS.keys() <= columns.keys():
        columns["average"] = "average of the eight"
    return Table(title, columns, rows)


def make_validation_row(label: str, record: dict, paper: dict[str, float], remark: str) -> Row:
    """Return the row of a model's results on the validation split.

    Args:
        record: as in metrics.jsonl
    """
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
    return Table(title, columns, rows, num_decimals=4)


def make_notes(results: list[Table]) -> list[str]:
    """Return paragraphs that explain the numbers in the tables, and the rows' remarks."""
    rows = [row for table in results for row in table.rows]
    explanations = []
    if any(error is not None for row in rows for _, error in row.values.values()):
        explanations.append(STANDARD_ERROR_NOTE)
    if any("average" in row.values for row in rows):
        explanations.append(AVERAGE_NOTE)
    if any(row.differences() for row in rows):
        explanations.append(PAPER_NOTE)
    paragraphs = [" ".join(explanations), *(row.remark for row in rows)]
    # a model may have the same remark in several tables
    return [paragraph for paragraph in dict.fromkeys(paragraphs) if paragraph]


def format_markdown(results: list[Table]) -> str:
    """Format tables and notes as Markdown."""
    parts = []
    for table in results:
        header, *rows = table.format_rows()
        parts += [f"### {table.title}", "", tables.format_markdown(header, rows), ""]
    return "\n".join([*parts, "\n\n".join(make_notes(results)), ""])


def format_for_terminal(results: list[Table]) -> str:
    """Format tables and notes for the terminal, with a line for each task.

    The tables are transposed, so that several models fit into the width of a terminal.
    """
    parts = []
    for table in results:
        header, *rows = zip(*table.format_rows(), strict=True)
        parts += ["", table.title, tables.format_markdown(header, rows)]
    return "\n".join([*parts, "", *make_notes(results)])


def format_latex(results: list[Table]) -> str:
    """Format tables for LaTeX, with the notes as comments."""
    parts = ["% needs \\usepackage{booktabs}"]
    parts += [f"% {note.replace('±', '+-')}" for note in make_notes(results)]
    for table in results:
        header, *rows = table.format_rows()
        tabular = tables.format_latex(header, rows, continuations=("published", "difference"))
        parts += ["", f"% {table.title}", tabular]
    return "\n".join([*parts, ""])


def format_csv(results: list[Table]) -> str:
    """Format tables as CSV, with a line for each number."""
    header = ["model", "table", "column", "value", "standard_error", "published", "difference"]
    lines = []
    for table in results:
        for row in table.rows:
            differences = row.differences()
            for column in table.columns:
                if column not in row.values:
                    continue
                value, error = row.values[column]
                difference, _ = differences.get(column, (None, None))
                paper = row.paper.get(column)
                lines.append([row.label, table.title, column, value, error, paper, difference])
    return tables.format_csv(header, lines)
