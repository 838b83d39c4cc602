"""Find and load tasks of lm-evaluation-harness, such as the paper's eight, and read their results."""

import functools
import json
import logging
import os
import random
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from data.hub import HubUnreachable, RetriesExhausted, import_hub, retry
from utils import errors, machine, processes
from utils.processes import World

if TYPE_CHECKING:
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
# For any other task, tables show the first of these metrics that it has, or else its first metric.
PREFERRED_METRICS = ("acc_norm", "acc", "exact_match", "f1")
# Metrics that tables show in percent.
PERCENT_METRICS = (*PREFERRED_METRICS, "acc_bytes", "acc_mutual_info", "em", "mcc")
# Tasks that already report percent; their values may be below 1.
TASKS_IN_PERCENT = ("squadv2",)
DEFAULT_RETRY_MINUTES = 10.0
FEWSHOT_SEED = 1234  # lm-eval's default


@dataclass(frozen=True)
class LoadedTask:
    """What lm-eval has loaded for a name of --tasks: a task, or a group or tag of several."""

    name: str

    # as lm-eval's TaskManager.load returns it
    content: dict

    # by task, the number of few-shot examples that its file sets; None if it sets none
    own_shots: dict[str, int | None]

    @property
    def tasks(self) -> dict[str, Any]:
        """lm-eval's tasks by name."""
        return self.content["tasks"]


class Metric(NamedTuple):
    """A metric of a task, as a table shows it. It is stored as a list."""

    name: str
    value: float
    standard_error: float | None


# ---- loading ----


def import_lm_eval() -> ModuleType:
    """Import lm-eval, and silence its progress bars and warnings.

    Raises:
        ValueError: the package is not installed
    """
    errors.import_optional("lm_eval.evaluator", "evaluation on tasks")
    import datasets
    import lm_eval
    from tqdm import tqdm

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()

    def show_progress(*args: object, **options: object) -> tqdm:
        return tqdm(*args, **{**options, "disable": True if machine.rank() else None})

    # lm-eval's progress bars are shown on a terminal, and by the first process
    lm_eval.api.task.tqdm = show_progress
    lm_eval.api.model.tqdm = show_progress
    # lm-eval warns about every default that a task file omits
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    return lm_eval


def load_tasks(
    names: list[str],
    include_path: str | None,
    world: World,
    retry_minutes: float | None = None,
    keys: tuple[str, str] = ("--tasks", "--include_path"),
) -> tuple[list[LoadedTask], list[str]]:
    """Load tasks on all processes.

    The main process downloads the data; the others then load the same tasks from the cache.

    Args:
        include_path: folder with the user's task files
        retry_minutes: how long to retry for a task while the Hub does not respond (default:
            DEFAULT_RETRY_MINUTES, or not at all if the Hub cannot be reached)
        keys: which give the names and the folder, for messages

    Returns:
        The tasks that could be loaded, and messages on the others.

    Raises:
        ValueError: there is no such task or folder, or lm-eval is not installed
    """
    manager = make_task_manager(names, include_path, *keys)
    if world.world_size == 1:
        return load(names, manager, retry_minutes)
    # a download may take longer than the timeout of the usual group
    group = processes.patient_group()
    messages: list[str] = []
    loaded_names = [names]
    if world.is_main:
        loaded, messages = load(names, manager, retry_minutes)
        loaded_names = [[task.name for task in loaded]]
    torch.distributed.broadcast_object_list(loaded_names, group=group)
    if not world.is_main:
        loaded, messages = load(loaded_names[0], manager, retry_minutes)
    torch.distributed.barrier(group)
    return loaded, messages


def make_task_manager(
    names: list[str],
    include_path: str | None,
    names_key: str = "--tasks",
    path_key: str = "--include_path",
) -> "TaskManager":
    """Return a task manager of lm-eval that knows the names.

    Raises:
        ValueError: there is no such task or folder, a file in the folder is damaged, or lm-eval is
            not installed
    """
    if include_path is not None and not os.path.isdir(include_path):
        raise ValueError(f"{path_key}={include_path}: there is no such folder")
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
            if include_path is None:
                raise ValueError(f"{names_key}: lm-eval has no task {name}{suggestion}")
            raise ValueError(
                f"{names_key}: neither lm-eval nor {path_key}={include_path} has a task "
                f"{name}{suggestion}{describe_damaged_file(include_path)}"
            )
    return manager


def describe_damaged_file(folder: str) -> str:
    """Return the end of an error message: which task file cannot be parsed, "" if all can be.

    lm-eval silently skips such a file.
    """
    from lm_eval.tasks._yaml_loader import load_yaml

    for file in sorted(Path(folder).rglob("*.yaml")):
        try:
            load_yaml(file, resolve_func=False)
        except Exception as error:  # those of the YAML parser, and of files that are included
            return f"; {file} cannot be read ({error})"
    return ""


def load(
    names: list[str], manager: "TaskManager", retry_minutes: float | None
) -> tuple[list[LoadedTask], list[str]]:
    """Return the tasks that can be loaded, and messages of one line on the others."""
    loaded = []
    messages = []
    unreachable_names = []
    for name in names:
        # Tasks may shuffle their items. These are the seeds of lm-eval's command line.
        random.seed(0)
        np.random.seed(FEWSHOT_SEED)
        torch.manual_seed(FEWSHOT_SEED)
        try:
            load_task = functools.partial(manager.load, [name])
            content = retry(load_task, f"task {name}", retry_minutes, DEFAULT_RETRY_MINUTES)
        except HubUnreachable as error:
            unreachable_names.append(name)
            problem = error
            continue
        # the hub, the network, the disk, the dataset and the task's code raise many types of errors
        except Exception as error:
            cause = " ".join(f"{type(error).__name__}: {error}".split())
            messages.append(f"task {name} cannot be loaded ({cause})")
            if isinstance(error, RetriesExhausted):
                retry_minutes = 0  # do not wait as long again for each of the others
            continue
        own_shots = {key: task.get_config("num_fewshot") for key, task in content["tasks"].items()}
        loaded.append(LoadedTask(name, content, own_shots))
    if unreachable_names:
        messages.append(
            f"tasks {', '.join(unreachable_names)} cannot be loaded: {problem}, and the local cache "
            f"{import_hub('constants').HF_HOME} (HF_HOME) lacks their data; copy the cache of a "
            "machine on which the same tasks were loaded (HF_HUB_OFFLINE=1 then uses it alone), or "
            f"run eval.py with --retry_minutes={DEFAULT_RETRY_MINUTES:g} to keep trying"
        )
    return loaded, messages


# ---- evaluation ----


def set_num_shots(task: LoadedTask, num_shots: int) -> None:
    """Set the number of few-shot examples, and the seed by which they are drawn.

    As in lm-eval, a task whose file says 0 stays 0-shot; any other number in a file is a default.

    Raises:
        ValueError: a task has fewer documents than that to draw examples from
    """
    for name, each_task in task.tasks.items():
        is_fixed = task.own_shots[name] == 0
        each_task.set_config(key="num_fewshot", value=0 if is_fixed else num_shots)
        each_task.set_fewshot_seed(seed=FEWSHOT_SEED)
        if is_fixed or num_shots == 0 or not hasattr(each_task, "sampler"):
            continue
        max_shots = len(each_task.sampler.fewshot_docs())
        if each_task.fewshot_cfg.split == each_task.config.test_split:
            max_shots -= 1  # the evaluated document is none of its examples
        if num_shots > max_shots:
            raise ValueError(
                f"--shots={num_shots}, but {name} has only {max_shots} documents to draw examples "
                f"from; give --shots={max_shots} or less"
            )


def describe_leaks(task: LoadedTask) -> list[str]:
    """Return a note for each task that may have the evaluated document among its own examples.

    lm-eval excludes it only if the file of the task says that examples come from the test split.
    """
    notes = []
    for name, each_task in task.tasks.items():
        if not each_task.config.num_fewshot or not hasattr(each_task, "sampler"):
            continue
        config = each_task.config
        split = each_task.fewshot_cfg.split
        if split == config.test_split or (split is None and each_task.fewshot_cfg.samples):
            continue
        pool = split or config.training_split or config.validation_split or config.test_split
        if pool == (config.test_split or config.validation_split):
            notes.append(
                f"the few-shot examples of {name} are drawn from the {pool} split, which is "
                "evaluated, so that a prompt may contain its own answer; give its file a "
                "fewshot_split"
            )
    return notes


def describe_config(task: Any) -> dict:
    """Return the settings of one of lm-eval's tasks as JSON, equal in every process."""
    text = json.dumps(task.dump_config(), default=str)
    # the address of an object differs between processes
    return json.loads(re.sub(r" at 0x[0-9a-f]+", "", text))


# ---- results ----


def choose_metrics(task: LoadedTask, results: dict[str, dict]) -> dict[str, Metric]:
    """Return the metric that tables show by name: of a group, or else of each of its tasks.

    Args:
        results: lm-eval's results by name of a task or group
    """
    names = [name for name in results if name in task.tasks]
    if read_metrics(results.get(task.name, {})):
        names = [task.name]
    return {
        name: choose_metric(name, results[name]) for name in names if read_metrics(results[name])
    }


def read_metrics(values: dict) -> dict[str, Metric]:
    """Return the metrics in lm-eval's results of a task; if it has several filters, of the first.

    lm-eval's keys are "METRIC,FILTER" and "METRIC_stderr,FILTER".
    """
    metrics: dict[str, Metric] = {}
    for key, value in values.items():
        name, comma, _ = key.partition(",")
        if comma and not name.endswith("_stderr") and isinstance(value, int | float):
            standard_error = values.get(key.replace(",", "_stderr,", 1))
            if not isinstance(standard_error, int | float):  # lm-eval writes "N/A"
                standard_error = None
            metrics.setdefault(name, Metric(name, value, standard_error))
    return metrics


def choose_metric(task_name: str, values: dict) -> Metric:
    """Return the metric that a table shows, in percent if it is a fraction.

    Args:
        values: lm-eval's results of the task
    """
    metrics = read_metrics(values)
    preferred = (PAPER_METRICS.get(task_name), *PREFERRED_METRICS, *metrics)
    metric = metrics[next(name for name in preferred if name in metrics)]
    is_percent = task_name in TASKS_IN_PERCENT or abs(metric.value) > 1
    if metric.name not in PERCENT_METRICS or is_percent:
        return metric
    standard_error = metric.standard_error
    if standard_error is not None:
        standard_error *= 100
    return Metric(metric.name, metric.value * 100, standard_error)
