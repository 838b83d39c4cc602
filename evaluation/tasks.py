"""Tasks of lm-evaluation-harness: the paper's eight, how they are run, and which metric is shown."""

import contextlib
import logging
import os
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

from evaluation import hub
from utils import errors

if TYPE_CHECKING:
    from lm_eval.api.model import LM
    from lm_eval.tasks import TaskManager

# The metric that the paper reports for each task, in the order of its tables.
PAPER_METRICS = {
    "arc_challenge": "acc_norm",
    "arc_easy": "acc_norm",
    "hellaswag": "acc_norm",
    "openbookqa": "acc_norm",
    "piqa": "acc_norm",
    "sciq": "acc_norm",
    "social_iqa": "acc",
    "winogrande": "acc",
}
# For any other task, tables show the first of these that it has, in percent, or its first metric.
PREFERRED_METRICS = ("acc_norm", "acc", "exact_match", "f1")


class Metric(NamedTuple):
    """A metric of a task, as a table shows it. It is stored as a list."""

    name: str
    value: float
    standard_error: float | None


def parse_names(text: str) -> list[str]:
    """Return the names in a comma-separated list, each once; `paper` stands for its eight tasks."""
    names: list[str] = []
    for name in text.replace(" ", "").split(","):
        names += PAPER_METRICS if name == "paper" else [name]
    return list(dict.fromkeys(name for name in names if name))


def import_lm_eval() -> ModuleType:
    """Import lm-eval without its warnings of every default that a task file omits.

    Raises:
        ValueError: the package is not installed
    """
    errors.import_optional("lm_eval.evaluator", "evaluation on tasks")
    import lm_eval

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    return lm_eval


def make_task_manager(names: list[str], include_path: str | None) -> "TaskManager":
    """Return lm-eval's task manager, which knows the names.

    include_path: folder with the user's task files (YAML)

    Raises:
        ValueError: there is no such task or folder, or lm-eval is not installed
    """
    if include_path is not None and not os.path.isdir(include_path):
        raise ValueError(f"--include_path={include_path}: there is no such folder")
    task_manager_class = import_lm_eval().tasks.TaskManager
    # lm-eval's own task files take seconds to read, so they are only read if they are needed
    if include_path is not None:
        manager = task_manager_class(include_path=include_path, include_defaults=False)
        if set(names) <= set(manager.all_tasks):
            return manager
    manager = task_manager_class(include_path=include_path)
    for name in names:
        if name not in manager.all_tasks:
            suggestion = errors.suggest(name, manager.all_tasks)
            where = "lm-eval has no task"
            if include_path is not None:  # lm-eval skips a file that it cannot parse
                where = f"neither lm-eval nor a readable file in {include_path} has a task"
            raise ValueError(f"--tasks: {where} {name}{suggestion}")
    return manager


def evaluate(
    language_model: "LM",
    names: list[str],
    manager: "TaskManager",
    num_fewshot: int,
    limit: int | None = None,
    log_samples: bool = False,
    bootstrap_iters: int = 100_000,
) -> dict:
    """Return what lm-eval's `simple_evaluate` returns.

    Without a Hub, datasets are read from the local cache (HF_HOME), and nothing waits for it.

    Args:
        limit: number of items of each task; None for all
        bootstrap_iters: of standard errors; 0 computes none

    Raises:
        ValueError: a task cannot be loaded, or has a request that the model cannot answer
    """
    problem = hub.find_connection_problem()
    try:
        with hub.without_requests() if problem else contextlib.nullcontext():
            return import_lm_eval().simple_evaluate(
                language_model,
                tasks=names,
                num_fewshot=num_fewshot,
                task_manager=manager,
                limit=limit,
                log_samples=log_samples,
                bootstrap_iters=bootstrap_iters,
            )
    except (ValueError, OSError) as error:
        cause = f"{problem}, and the local cache lacks their data: {error}" if problem else error
        raise ValueError(f"tasks {', '.join(names)}, {num_fewshot}-shot: {cause}") from error


def choose_metrics(results: dict) -> dict[str, Metric]:
    """Return the metric that tables show of each group, and of each task without a group's metric.

    results: what `evaluate` returns
    """
    groups = results.get("group_subtasks", {})
    shown = {name: read_metrics(values) for name, values in results["results"].items()}
    in_groups = {task for group in groups if shown.get(group) for task in groups[group]}
    return {
        name: choose_metric(name, metrics)
        for name, metrics in shown.items()
        if metrics and name not in in_groups
    }


def read_metrics(values: dict) -> dict[str, Metric]:
    """Return the metrics in lm-eval's results of a task; if it has several filters, of the first.

    lm-eval's keys are "METRIC,FILTER" and "METRIC_stderr,FILTER", which may be "N/A".
    """
    metrics: dict[str, Metric] = {}
    for key, value in values.items():
        name, comma, _ = key.partition(",")
        if comma and not name.endswith("_stderr") and isinstance(value, int | float):
            error = values.get(key.replace(",", "_stderr,", 1))
            is_number = isinstance(error, int | float)
            metrics.setdefault(name, Metric(name, value, error if is_number else None))
    return metrics


def choose_metric(task_name: str, metrics: dict[str, Metric]) -> Metric:
    """Return the metric that a table shows, in percent if it is a fraction."""
    preferred = (PAPER_METRICS.get(task_name), *PREFERRED_METRICS, *metrics)
    metric = metrics[next(name for name in preferred if name in metrics)]
    if metric.name not in PREFERRED_METRICS or abs(metric.value) > 1:  # SQuAD's are in percent
        return metric
    error = None if metric.standard_error is None else 100 * metric.standard_error
    return Metric(metric.name, 100 * metric.value, error)
