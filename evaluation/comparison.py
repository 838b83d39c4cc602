"""Results beside the paper's (results/published.csv): for the screen and Markdown, for LaTeX
(booktabs), and as CSV.
"""

import math
from dataclasses import dataclass, field

from evaluation import tables
from evaluation.tasks import PAPER_METRICS

NOTE = "± is lm-eval's standard error over a task's items."
AVERAGE_NOTE = "The average's takes the tasks as independent."
PAPER_NOTE = (
    "The paper gives single runs and no standard errors: that of a difference is ours alone."
)


@dataclass
class Row:
    """A model's results: values {column: (value, standard error or None)}, beside the paper's
    {column: value}.

    said: a line under the tables, in what they deviate from each other, or why there are none of
    the paper's.
    """

    label: str
    values: dict[str, tuple[float, float | None]]
    paper: dict[str, float] = field(default_factory=dict)
    said: str = ""

    def difference(self, column: str) -> tuple[float, float | None] | None:
        if column not in self.values or column not in self.paper:
            return None
        value, error = self.values[column]
        return value - self.paper[column], error


@dataclass
class Table:
    """rows under columns {key: heading}; digits: of all numbers."""

    title: str
    columns: dict[str, str]
    rows: list[Row]
    digits: int = 2

    def lines(self) -> list[list[str | None]]:
        """Heading and rows as text, below each model the paper's row and the difference where there
        is one.
        """
        result = [["model", *self.columns.values()]]
        for row in self.rows:
            result.append([row.label, *(self.cell(row.values.get(c)) for c in self.columns)])
            if any(c in row.paper for c in self.columns):
                paper = [(row.paper[c], None) if c in row.paper else None for c in self.columns]
                result.append(["published", *map(self.cell, paper)])
                result.append(
                    ["difference", *(self.cell(row.difference(c), "+") for c in self.columns)]
                )
        return result

    def cell(self, value: tuple[float, float | None] | None, sign: str = "") -> str | None:
        if value is None:
            return None
        number = f"{value[0]:{sign}.{self.digits}f}"
        return number if value[1] is None else f"{number} ± {value[1]:.{self.digits}f}"


def average(values: dict[str, tuple[float, float | None]]) -> dict[str, tuple[float, float | None]]:
    """The mean over the paper's eight tasks under `average`; nothing where one is missing."""
    if not set(PAPER_METRICS) <= values.keys():
        return {}
    means, errors = zip(*(values[task] for task in PAPER_METRICS))
    error = None if None in errors else math.sqrt(sum(e * e for e in errors)) / len(errors)
    return {"average": (sum(means) / len(means), error)}


def of_tasks(
    title: str, metrics: dict[str, str], models: list[tuple[str, dict, dict, str]]
) -> Table:
    """models: (label, {task: (value, standard error)}, the paper's row, what is said of it);
    metrics: the one shown of each task.
    """
    rows = []
    for label, values, paper, said in models:
        comparable = values.keys() & PAPER_METRICS.keys()
        rows.append(Row(label, values | average(values), paper, said if comparable else ""))
    columns = {task: f"{task} ({metric})" for task, metric in metrics.items()}
    if set(PAPER_METRICS) <= columns.keys():
        columns["average"] = "average of the eight"
    return Table(title, columns, rows)


def of_validation(models: list[tuple[str, dict, dict, str]]) -> Table:
    """models: (label, record as in metrics.jsonl, the paper's row, what is said of it)."""
    columns = {
        "val_loss": "loss (nats/token)",
        "val_perplexity": "perplexity",
        "val_bits_per_byte": "bits per byte",
    }
    columns |= {"val_accuracy": "accuracy", "val_exact_match": "exact match"}  # of synthetic tasks
    columns = {
        key: title
        for key, title in columns.items()
        if any(key in record for _, record, *_ in models)
    }
    rows = []
    for label, record, paper, said in models:
        shown = {"val_loss": paper["val_loss"], "val_perplexity": paper["val_ppl"]} if paper else {}
        rows.append(Row(label, {c: (record[c], None) for c in columns if c in record}, shown, said))
    return Table("validation", columns, rows, 4)


def notes(results: list[Table]) -> list[str]:
    """What the numbers mean, as far as the tables have such, and what is said of their rows: a
    paragraph each.
    """
    rows = [row for table in results for row in table.rows]
    said = {
        NOTE: any(error is not None for row in rows for _, error in row.values.values()),
        AVERAGE_NOTE: any("average" in row.values for row in rows),
        PAPER_NOTE: any(row.paper for row in rows),
    }
    general = " ".join(text for text, fits in said.items() if fits)
    return [text for text in dict.fromkeys([general, *(row.said for row in rows)]) if text]


def markdown(results: list[Table]) -> str:
    parts = []
    for table in results:
        head, *body = table.lines()
        parts += [f"### {table.title}", "", tables.markdown(head, body), ""]
    return "\n".join([*parts, "\n\n".join(notes(results)), ""])


def screen(results: list[Table]) -> str:
    """The tables transposed, a line a task, which fits a terminal's width with several models."""
    parts = []
    for table in results:
        head, *body = zip(*table.lines())
        parts += ["", table.title, tables.markdown(head, body)]
    return "\n".join([*parts, "", *notes(results)])


def latex(results: list[Table]) -> str:
    parts = [
        "% needs \\usepackage{booktabs}",
        *(f"% {text.replace('±', '+-')}" for text in notes(results)),
    ]
    for table in results:
        head, *body = table.lines()
        parts += [
            "",
            f"% {table.title}",
            tables.latex(head, body, below=("published", "difference")),
        ]
    return "\n".join([*parts, ""])


def comma_separated(results: list[Table]) -> str:
    """One line a number: model, table, column, value, standard_error, published, difference."""
    rows = []
    for table in results:
        for row in table.rows:
            for column in [c for c in table.columns if c in row.values]:
                value, error = row.values[column]
                paper, difference = row.paper.get(column), row.difference(column)
                rows.append(
                    [
                        row.label,
                        table.title,
                        column,
                        value,
                        error,
                        paper,
                        difference and difference[0],
                    ]
                )
    header = ["model", "table", "column", "value", "standard_error", "published", "difference"]
    return tables.comma_separated(header, rows)
