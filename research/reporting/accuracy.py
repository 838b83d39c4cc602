"""The tables of accuracy: what eval.py stored of the runs, a row a group, beside the published rows."""

from eval import differences, title_of

from evaluation import comparison
from research import intervals
from research.reporting.results import Table, beside

ERRORS = (
    "± is half the 95% interval of the mean over runs, (n) the number of runs; of a single run it is lm-eval's "
    "standard error over a task's items."
)


def accuracy(groups: list) -> list[Table]:
    """A table for each number of examples and what else makes numbers differ; nothing where nothing was evaluated."""
    entries = [entry for group in groups for run in group.runs for entry in of_tasks(run)]
    kinds = {title_of(entry): entry for entry in entries}
    return [table_of(groups, *kind) for kind in sorted(kinds.items(), key=lambda kind: (kind[1]["shots"], kind[0]))]


def of_tasks(run) -> list[dict]:
    return [entry for entry in run.accuracy if entry["task"] != "validation"]


def table_of(groups: list, title: str, example: dict) -> Table:
    evaluated = [group for group in groups if any(title_of(e) == title for e in of_tasks(group.runs[0]))]
    reasons = differences(example["settings"])
    published, said = beside(evaluated, example["shots"], lambda group: reasons)
    metrics: dict[str, str] = {}
    models = []
    for group in groups:
        values = values_of(group, title, metrics)
        models.append((f"{group.name} ({len(group.runs)})", values, published.get(group.name, {}), ""))
    made = comparison.of_tasks(title, metrics, models)
    head, *rows = made.lines()
    for row in rows:
        if not any(row[1:]):  # no task in common, or none at all
            row[1] = "not evaluated"
    name = "accuracy_" + "_".join("".join(c if c.isalnum() else " " for c in title).split())
    return Table(name, f"Accuracy in %, {title}", head, rows, [ERRORS, *said], figures_of(made))


def values_of(group, title: str, metrics: dict[str, str]) -> dict[str, tuple[float, float | None]]:
    """{task: (value, error)} of the tasks that all runs of a group have; the names of their metrics go to `metrics`."""
    runs = []
    for run in group.runs:
        found = {}
        for entry in (entry for entry in of_tasks(run) if title_of(entry) == title):
            found |= entry["shown"]
        runs.append(found)
    names = [name for name in runs[0] if all(name in each for each in runs)]
    metrics |= {name: runs[0][name][0] for name in names}
    return {name: over([each[name] for each in runs]) for name in names}


def over(shown: list[tuple[str, float, float | None]]) -> tuple[float, float | None]:
    """(metric, value, standard error) of every run -> (mean, half its interval), of one run its own."""
    if len(shown) == 1:
        return shown[0][1], shown[0][2]
    estimate = intervals.interval([value for _, value, _ in shown])
    return estimate.mean, estimate.half


def figures_of(table: comparison.Table) -> list[dict]:
    return [
        {"model": row.label, "task": task, "accuracy": value, "error": error, "published": row.paper.get(task)}
        for row in table.rows
        for task, (value, error) in row.values.items()
    ]
