"""Find, load and evaluate tasks of lm-evaluation-harness, such as the paper's eight."""

import functools
import hashlib
import json
import logging
import os
import random
import re
import sys
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import jinja2
import numpy as np
import torch

from data import hub
from data.hub import RetriesExhausted, retry
from training import distributed
from training.distributed import World
from utils import errors, machine

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

    from evaluation.language_model import LanguageModel

# in which lm-eval does not look for task files
SKIPPED_FOLDERS = {"__pycache__", ".ipynb_checkpoints"}

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
# What a mistake in the templates or functions of a task file raises.
TEMPLATE_ERRORS = (jinja2.TemplateError, AttributeError, LookupError, NameError, TypeError)
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
    """A metric of a task, as a table shows it. It is stored as a list in results.json."""

    name: str
    value: float
    standard_error: float | None


# ---- loading ----


def import_lm_eval() -> ModuleType:
    """Import lm-eval, and silence its progress bars and warnings.

    Raises:
        ValueError: the package is not installed
    """
    for module in ("api.task", "evaluator", "tasks"):
        errors.import_optional(f"lm_eval.{module}", "evaluation on tasks")
    import datasets
    import lm_eval
    from tqdm import tqdm

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    # The progress bar of the contexts has no option to hide it. It is shown on a terminal, and by
    # the first process.
    lm_eval.api.task.tqdm = functools.partial(tqdm, disable=True if machine.rank() else None)
    # lm-eval warns about every default that a task file omits
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    return lm_eval


def go_offline_without_a_hub() -> bool:
    """Try to reach the Hugging Face Hub once; if it cannot be reached, use cached datasets only.

    Otherwise `datasets` would try for 23 seconds for each task. It must be called before `datasets`
    is imported, which then reads the environment variable.

    Returns:
        Whether the Hub cannot be reached; False if the user has forbidden to try.
    """
    if os.environ.get("HF_HUB_OFFLINE") or os.environ.get("HF_DATASETS_OFFLINE"):
        return False
    address = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    try:
        urllib.request.urlopen(address, timeout=5).close()
    except (urllib.error.HTTPError, ConnectionResetError):
        pass  # the hub responds; its failure may be temporary
    except (OSError, ValueError):
        os.environ["HF_HUB_OFFLINE"] = "1"
        return True
    return False


def load_all(
    names: list[str],
    include_path: str | None,
    world: World,
    retry_minutes: float = DEFAULT_RETRY_MINUTES,
) -> tuple[list[LoadedTask], list[str]]:
    """Load tasks on all processes.

    The main process downloads the data; the others then load the same tasks from the cache.

    Args:
        include_path: folder with the user's task files
        retry_minutes: how long to retry for a task if the hub does not respond

    Returns:
        The tasks that could be loaded, and a message for each of the others.

    Raises:
        ValueError: there is no such task or folder, or lm-eval is not installed
    """
    is_hub_missing = go_offline_without_a_hub()
    # a download may take longer than the timeout of the usual group
    group = distributed.patient_group() if world.world_size > 1 else None
    loaded: list[LoadedTask] = []
    messages: list[str] = []
    if world.is_main:
        task_manager = make_task_manager(names, include_path)
        if is_hub_missing:
            print(
                "note: the Hugging Face Hub cannot be reached, so only datasets in the local cache "
                "are used",
                file=sys.stderr,
            )
        loaded, messages = load(names, task_manager, retry_minutes)
    if group is not None:
        loaded_names = [[task.name for task in loaded]]
        torch.distributed.broadcast_object_list(loaded_names, group=group)
        if not world.is_main:
            task_manager = make_task_manager(names, include_path)
            loaded, messages = load(loaded_names[0], task_manager, retry_minutes)
        torch.distributed.barrier(group)
    return loaded, messages


def make_task_manager(names: list[str], include_path: str | None) -> "TaskManager":
    """Return a task manager of lm-eval that knows the names.

    Raises:
        ValueError: there is no such task or folder, a file in the folder is damaged, or lm-eval is
            not installed
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
            if include_path is None:
                raise ValueError(f"--tasks: lm-eval has no task {name}{suggestion}")
            raise ValueError(
                f"--tasks: neither lm-eval nor --include_path={include_path} has a task "
                f"{name}{suggestion}{describe_damaged_file(include_path)}"
            )
    return manager


def describe_damaged_file(folder: str) -> str:
    """Return the end of an error message: which task file cannot be parsed, "" if all can be.

    lm-eval silently skips such a file, and all files in some folders.
    """
    from lm_eval.tasks._yaml_loader import load_yaml

    for file in sorted(Path(folder).rglob("*.yaml")):
        if SKIPPED_FOLDERS & set(file.parts):
            continue
        try:
            load_yaml(file, resolve_func=False)
        except Exception as error:  # those of the YAML parser, and of files that are included
            return f"; {file} cannot be read ({error})"
    return ""


def load(
    names: list[str], manager: "TaskManager", retry_minutes: float
) -> tuple[list[LoadedTask], list[str]]:
    """Return the tasks that can be loaded, and a message of one line for each of the others."""
    loaded = []
    messages = []
    for name in names:
        # Tasks may shuffle their items. These are the seeds of lm-eval's command line.
        random.seed(0)
        np.random.seed(FEWSHOT_SEED)
        torch.manual_seed(FEWSHOT_SEED)
        try:
            load_task = functools.partial(manager.load, [name])
            content = retry(load_task, f"task {name}", retry_minutes)
        # the hub, the network, the disk and the dataset raise many types of errors
        except Exception as error:
            messages.append(describe_missing(name, manager, error))
            if isinstance(error, RetriesExhausted):
                retry_minutes = 0  # do not wait as long again for each of the others
            continue
        own_shots = {key: task.get_config("num_fewshot") for key, task in content["tasks"].items()}
        loaded.append(LoadedTask(name, content, own_shots))
    return loaded, messages


def describe_missing(name: str, manager: "TaskManager", error: Exception) -> str:
    """Say which task is skipped, why, and what to do about it, in one line."""
    cause = " ".join(f"{type(error).__name__}: {error}".split())
    short_cause = cause if len(cause) <= 160 else f"{cause[:157]}..."
    # lm-eval renders the first item when it loads a task
    if isinstance(error, TEMPLATE_ERRORS):
        return (
            f"task {name} is skipped: its file does not fit its dataset ({short_cause}); correct it"
        )
    # the end of the following two may say what to do, so they are not shortened
    if isinstance(error, ImportError):
        return f"task {name} is skipped: its code cannot be imported ({cause})"
    is_retried = isinstance(error, RetriesExhausted)
    if not (is_retried or is_not_found(error) or is_connection_error(error)):
        return f"task {name} is skipped: it cannot be loaded ({cause})"
    config = getattr(manager.task_index.get(name), "cfg", None) or {}
    dataset = " ".join(
        str(config[key]) for key in ("dataset_path", "dataset_name") if config.get(key)
    )
    advice = "connect to the Hugging Face Hub once, or set HF_HOME to a folder that has the dataset"
    if is_retried:
        advice = "rerun the same command later; it evaluates only what is missing"
    elif is_not_found(error):
        advice = (
            "the Hub has no such dataset, or it is private or gated; accept its terms, and run "
            "`hf auth login`"
        )
    return (
        f"task {name} is skipped: its dataset {dataset or '(unknown)'} cannot be loaded "
        f"({short_cause}); {advice}"
    )


def is_connection_error(error: Exception) -> bool:
    """Return whether a connection failed, or was not allowed although the cache lacks the dataset."""
    # `datasets` reports the latter in the text alone if it has cached a part of the dataset
    is_missing = "Couldn't find cache for" in str(error)
    return is_missing or any(hub.is_connection_error(cause) for cause in hub.causes(error))


def is_not_found(error: Exception) -> bool:
    """Return whether the Hub has no such dataset, or hides it from this account."""
    from datasets.exceptions import DatasetNotFoundError
    from huggingface_hub.errors import RepositoryNotFoundError

    # the error for a gated repository is a subclass of the second one
    error_types = (DatasetNotFoundError, RepositoryNotFoundError)
    return any(isinstance(cause, error_types) for cause in hub.causes(error))


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


def evaluate(
    language_model: "LanguageModel",
    task: LoadedTask,
    num_shots: int,
    *,
    log_samples: bool,
    limit: int | None,
    standard_errors: bool,
) -> dict:
    """Return lm-eval's results of a task.

    Args:
        log_samples: also return the result of every item
        limit: evaluate only this many items; None evaluates all
        standard_errors: estimate standard errors, which takes time if it needs bootstrapping
    """
    set_num_shots(task, num_shots)
    return import_lm_eval().evaluator.evaluate(
        lm=language_model,
        task_dict=task.content,
        log_samples=log_samples,
        limit=limit,
        bootstrap_iters=100_000 if standard_errors else 0,
    )


def compute_digest(task: LoadedTask) -> str:
    """Return a SHA-256 digest of the task settings, the prompts and the reference answers."""
    sha256 = hashlib.sha256()
    for name, each_task in sorted(task.tasks.items()):
        sha256.update(f"{name} {each_task.VERSION}".encode())
        settings = each_task.config.to_dict(keep_callable=True)
        sha256.update(json.dumps(settings, sort_keys=True, default=describe_setting).encode())
        for request in each_task.instances:
            content = [request.doc, request.args]
            sha256.update(json.dumps(content, sort_keys=True, default=str).encode())
    return sha256.hexdigest()


def describe_setting(value: object) -> str:
    """Return a setting as text that is the same in every process; for a function, its code."""
    code = getattr(value, "__code__", None)
    if code is not None:
        constants = [
            constant for constant in code.co_consts if isinstance(constant, str | int | float)
        ]
        return f"{value.__qualname__} {code.co_code.hex()} {code.co_names} {constants}"
    # the address of an object differs between processes
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))


# ---- results ----


def summarize(task: LoadedTask, results: dict) -> dict:
    """Return what results.json stores of lm-eval's results.

    "shown" has the metric that tables show, by name. For a group it is the group's own, if it has
    one, and otherwise those of its tasks.
    """
    metrics = results["results"]
    names = [name for name in metrics if name in task.tasks]
    if read_metrics(metrics.get(task.name, {})):
        names = [task.name]
    return {
        "shown": {
            name: choose_metric(name, metrics[name])
            for name in names
            if read_metrics(metrics[name])
        },
        "results": metrics,
        "versions": results["versions"],
        "n-shot": results["n-shot"],
        "n-samples": results["n-samples"],
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
