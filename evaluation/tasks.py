"""Tasks of lm-evaluation-harness: the paper's eight, how they are run, and which metric is shown."""

import contextlib
import functools
import logging
import os
from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

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


class Result(NamedTuple):
    """The result of a task or a group that a table shows, and that eval.py stores as a dict."""

    task: str
    shots: int
    metric: str
    value: float  # in percent if the metric is a fraction
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
        if name in manager.all_tasks:
            continue
        suggestion = errors.suggest(name, manager.all_tasks)
        if include_path is None:
            raise ValueError(f"--tasks: lm-eval has no task {name}{suggestion}")
        # lm-eval skips a file that it cannot parse
        raise ValueError(
            f"--tasks: neither lm-eval nor a readable file in {include_path} has a task {name}{suggestion}"
        )
    return manager


@functools.cache
def find_connection_problem() -> str | None:
    """Return why the Hugging Face Hub cannot be reached; None if it responds or must not be asked.

    The answer holds for the whole process. If packets are lost, huggingface_hub itself needs minutes
    to find out, and again for every file.
    """
    # lm-eval's data come from there, so that the package is installed with it
    from huggingface_hub import constants, is_offline_mode
    from huggingface_hub.utils import get_session, httpx

    if is_offline_mode():
        return None
    try:
        # connecting is tried for each of the host's addresses
        get_session().head(constants.ENDPOINT, timeout=httpx.Timeout(10, connect=5))
    except (httpx.TransportError, OSError) as error:
        reason = str(error).strip().partition("\n")[0][:200]
        return f"{constants.ENDPOINT} cannot be reached ({type(error).__name__}: {reason})"
    return None


@contextlib.contextmanager
def reach_data() -> Iterator[str | None]:
    """Read datasets from the local cache (HF_HOME) alone if the Hub cannot be reached.

    Nothing waits for the Hub then, as with HF_HUB_OFFLINE=1. The value is the reason why it cannot
    be reached, or None.
    """
    from huggingface_hub import constants

    problem = find_connection_problem()
    was_offline = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = was_offline or problem is not None
    try:
        yield problem
    finally:
        constants.HF_HUB_OFFLINE = was_offline


def check_tasks(names: list[str], manager: "TaskManager") -> None:
    """Load the tasks, so that one that cannot be loaded is named before any work is done.

    Raises:
        ValueError: a task cannot be loaded
    """
    with reach_data() as problem:
        error = try_to_load(names, manager)
        if error is None:
            return
        # the task that is the cause; several can also contradict each other
        failures = {name: try_to_load([name], manager) for name in names}
    failed, error = next(
        ((name, failure) for name, failure in failures.items() if failure is not None),
        (",".join(names), error),
    )
    # what a mistake in a task file raises seldom says what it is without its type
    cause = str(error) if isinstance(error, ValueError | OSError) else repr(error)
    if problem:
        cause = f"{problem}, and the local cache lacks its data: {cause}"
    raise ValueError(f"--tasks={failed}: {cause}") from error


def try_to_load(names: list[str], manager: "TaskManager") -> Exception | None:
    """Load tasks; return the error if they cannot be loaded."""
    try:
        manager.load(names)
    except Exception as error:  # any error: a task file may contain expressions and code
        return error
    return None


def evaluate(
    language_model: "LM",
    names: list[str],
    manager: "TaskManager",
    num_fewshot: int | None,
    limit: int | None = None,
    log_samples: bool = False,
    bootstrap_iters: int = 100_000,
) -> dict:
    """Return what lm-eval's `simple_evaluate` returns.

    Args:
        num_fewshot: None for the number in the file of each task, or 0 if it has none
        limit: number of items of each task; None for all
        bootstrap_iters: of standard errors; 0 computes none

    Raises:
        ValueError: a task has a request that the model cannot answer, or too few examples
    """
    try:
        with reach_data():
            return import_lm_eval().simple_evaluate(
                language_model,
                tasks=names,
                num_fewshot=num_fewshot,
                task_manager=manager,
                limit=limit,
                log_samples=log_samples,
                bootstrap_iters=bootstrap_iters,
            )
    except ValueError as error:
        shots = "" if num_fewshot is None else f", {num_fewshot}-shot"
        raise ValueError(f"tasks {', '.join(names)}{shots}: {error}") from error


def choose_results(results: dict) -> list[Result]:
    """Return what tables show of each group, and of each task without a group's metric.

    A group whose tasks differ in their number of shots is shown by its tasks.

    results: what `evaluate` returns
    """
    groups = results["group_subtasks"]
    shots = results["n-shot"]
    metrics_by_name = {
        name: read_metrics(values) for name, values in results["results"].items() if name in shots
    }
    in_groups = {task for group in groups if metrics_by_name.get(group) for task in groups[group]}
    return [
        choose_result(name, shots[name], metrics)
        for name, metrics in metrics_by_name.items()
        if metrics and name not in in_groups
    ]


def read_metrics(values: dict) -> dict[str, tuple[float, float | None]]:
    """Return (value, standard error) by metric from lm-eval's results of a task.

    lm-eval's keys are "METRIC,FILTER" and "METRIC_stderr,FILTER", which may be "N/A". If a task has
    several filters, the first one counts.
    """
    metrics: dict[str, tuple[float, float | None]] = {}
    for key, value in values.items():
        name, comma, _ = key.partition(",")
        if comma and not name.endswith("_stderr") and isinstance(value, int | float):
            error = values.get(key.replace(",", "_stderr,", 1))
            is_number = isinstance(error, int | float)
            metrics.setdefault(name, (value, error if is_number else None))
    return metrics


def choose_result(task: str, shots: int, metrics: dict[str, tuple[float, float | None]]) -> Result:
    """Return the result that a table shows of a task, in percent if it is a fraction."""
    preferred = (PAPER_METRICS.get(task), *PREFERRED_METRICS, *metrics)
    metric = next(name for name in preferred if name in metrics)
    value, error = metrics[metric]
    if metric in PREFERRED_METRICS and abs(value) <= 1:  # SQuAD's are in percent already
        value = 100 * value
        error = None if error is None else 100 * error
    return Result(task, shots, metric, value, error)
