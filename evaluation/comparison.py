"""Results beside the paper's (results/published.csv), as tables for the screen and for files."""

import math
from dataclasses import dataclass, field

from evaluation import tables
from evaluation.tasks import PAPER_METRICS

Value = tuple[float, float | None]  # and its standard error, where it has one

NOTE = "± is lm-eval's standard error over a task's items."
AVERAGE_NOTE = "The average's takes the tasks as independent."
PAPER_NOTE = (
    "The paper gives single runs and no standard errors: that of a difference is ours alone."
)
VALIDATION = {
    "val_loss": "loss (nats/token)",
    "val_perplexity": "perplexity",
    "val_bits_per_byte": "bits per byte",
    "val_accuracy": "accuracy",  # of synthetic tasks, as the next
    "val_exact_match": "exact match",
}


@dataclass
class Row:
    """A model's values by column beside the paper's; remark: a line that goes under the tables."""

    label: str
    values: dict[str, Value]
    paper: dict[str, float] = field(default_factory=dict)
    remark: str = ""

    def differences(self) -> dict[str, Value]:
        """Value less the paper's, with the value's error, in the columns that both have."""
        both = {c: value for c, value in self.values.items() if c in self.paper}
        return {c: (value - self.paper[c], error) for c, (value, error) in both.items()}


@dataclass
class Table:
    """Rows under columns {key: heading}; digits: of all numbers."""

    title: str
    columns: dict[str, str]
    rows: list[Row]
    digits: int = 2

    def lines(self) -> list[list[str | None]]:
        """Heading and rows as text; below a model the paper's row and the difference, if any."""
        result = [["model", *self.columns.values()]]
        for row in self.rows:
            result.append([row.label, *self.cells(row.values)])
            if row.paper.keys() & self.columns.keys():
                paper = {column: (value, None) for column, value in row.paper.items()}
                result.append(["published", *self.cells(paper)])
                result.append(["difference", *self.cells(row.differences(), "+")])
        return result

    def cells(self, values: dict[str, Value], sign: str = "") -> list[str | None]:
        texts = {}
        for column, (value, error) in values.items():
            number = f"{value:{sign}.{self.digits}f}"
            texts[column] = number if error is None else f"{number} ± {error:.{self.digits}f}"
        return [texts.get(column) for column in self.columns]


def average(values: dict[str, Value]) -> dict[str, Value]:
    """The mean over the paper's eight tasks under `average`; nothing where one is missing."""
    if not PAPER_METRICS.keys() <= values.keys():
        return {}
    means, errors = zip(*(values[task] for task in PAPER_METRICS))
    error = None if None in errors else math.sqrt(sum(e * e for e in errors)) / len(errors)
    return {"average": (sum(means) / len(means), error)}


def of_tasks(title: str, metrics: dict[str, str], models: list[tuple]) -> Table:
    """models: (label, {task: (value, standard error)}, the paper's row, remark on it); metrics:
    which one is shown of each task.
    """
    rows = [
        Row(label, values | average(values), paper, remark if values.keys() & PAPER_METRICS else "")
        for label, values, paper, remark in models
    ]
    columns = {task: f"{task} ({metric})" for task, metric in metrics.items()}
    if PAPER_METRICS.keys() <= columns.keys():
        columns["average"] = "average of the eight"
    return Table(title, columns, rows)


def of_validation(models: list[tuple]) -> Table:
    """models: (label, record as in metrics.jsonl, the paper's row, remark on it)."""
    there = {key for _, record, *_ in models for key in record}
    columns = {key: heading for key, heading in VALIDATION.items() if key in there}
    rows = []
    for label, record, paper, remark in models:
        names = {"val_loss": "val_loss", "val_perplexity": "val_ppl"} if paper else {}
        published = {column: paper[name] for column, name in names.items()}
        values = {c: (record[c], None) for c in columns if c in record}
        rows.append(Row(label, values, published, remark))
    return Table("validation", columns, rows, 4)


def notes(results: list[Table]) -> list[str]:
    """Paragraphs: what the numbers mean, as far as the tables have such, and the rows' remarks."""
    rows = [row for table in results for row in table.rows]
    errors = [error for row in rows for _, error in row.values.values()]
    general = [NOTE] * any(error is not None for error in errors)
    general += [AVERAGE_NOTE] * any("average" in row.values for row in rows)
    general += [PAPER_NOTE] * any(row.paper for row in rows)
    texts = [" ".join(general), *(row.remark for row in rows)]
    return [text for text in dict.fromkeys(texts) if text]


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
    comments = [f"% {text.replace('±', '+-')}" for text in notes(results)]
    parts = ["% needs \\usepackage{booktabs}", *comments]
    for table in results:
        head, *body = table.lines()
        body = tables.latex(head, body, below=("published", "difference"))
        parts += ["", f"% {table.title}", body]
    return "\n".join([*parts, ""])


def comma_separated(results: list[Table]) -> str:
    """One line a number."""
    header = ["model", "table", "column", "value", "standard_error", "published", "difference"]
    rows = []
    for table in results:
        for row in table.rows:
            differences = row.differences()
            for column in [c for c in table.columns if c in row.values]:
                paper, (difference, _) = row.paper.get(column), differences.get(column, (None, 0))
                line = [row.label, table.title, column, *row.values[column], paper, difference]
                rows.append(line)
    return tables.comma_separated(header, rows)
