"""The paper's eight tasks and any other of lm-evaluation-harness: finding, loading, evaluating."""

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

import numpy as np
import torch

from data.hub import RetriesExhausted, check_retry_minutes, is_not_found, retry
from training import distributed
from utils import errors, machine

# What the paper reports of each task, in its tables' order.
_ACC_NORM = ("arc_challenge", "arc_easy", "hellaswag", "openbookqa", "piqa", "sciq")
PAPER_METRICS = dict.fromkeys(_ACC_NORM, "acc_norm")
PAPER_METRICS |= dict.fromkeys(("social_iqa", "winogrande"), "acc")
# Of other tasks the first of these that they have, else the first metric they report.
PREFERRED = ("acc_norm", "acc", "exact_match", "f1")
PERCENT = (*PREFERRED, "acc_bytes", "acc_mutual_info", "em", "mcc")
RETRY_MINUTES = 10.0
SEED = 1234  # of the few-shot examples: lm-eval's own default


@dataclass(frozen=True)
class Loaded:
    """One name of --tasks with its data: a task, or a group or tag of several.

    tasks: lm-eval's, by name; own_shots: the number of examples that a task's file fixes.
    """

    name: str
    content: dict
    own_shots: dict[str, int | None]

    @property
    def tasks(self) -> dict:
        return self.content["tasks"]


def import_lm_eval():
    """The package, kept quiet. ValueError: it is not installed."""
    for module in ("api.task", "evaluator", "tasks"):
        errors.import_optional(f"lm_eval.{module}", "evaluation on tasks")
    import datasets
    import lm_eval
    from tqdm import tqdm

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    # Its bar over the contexts has no switch: a terminal alone gets one, and from one process.
    lm_eval.api.task.tqdm = functools.partial(tqdm, disable=True if machine.rank() else None)
    # It warns of every default that a task file leaves out.
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    return lm_eval


def go_offline_without_a_hub() -> None:
    """Ask the hub once. Where it is out of reach, `datasets` then looks at its cache alone.

    Otherwise it would try for 23 seconds for each task. It reads the setting when it is imported.
    """
    if os.environ.get("HF_HUB_OFFLINE") or os.environ.get("HF_DATASETS_OFFLINE"):
        return
    hub = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    try:
        urllib.request.urlopen(hub, timeout=5).close()
    except (urllib.error.HTTPError, ConnectionResetError):
        pass  # it is there, and has troubles that may pass
    except (OSError, ValueError):
        os.environ["HF_HUB_OFFLINE"] = "1"


def open_all(
    names: list[str], include_path: str | None, world, retry_minutes: float = RETRY_MINUTES
) -> tuple[list[Loaded], list[str]]:
    """The tasks that can be had, and a line about each that cannot.

    Process 0 comes first, so that data are fetched once; the others load what it has.
    ValueError: an unknown name or folder, no lm-eval.
    """
    check_retry_minutes(retry_minutes)
    go_offline_without_a_hub()
    waiting = distributed.patient_group() if world.world_size > 1 else None
    loaded, missing = [], []
    if world.is_main:
        loaded, missing = load(names, find(names, include_path), retry_minutes)
    if waiting:
        names_had = [[task.name for task in loaded]]
        torch.distributed.broadcast_object_list(names_had, group=waiting)
        if not world.is_main:
            loaded, missing = load(names_had[0], find(names, include_path), retry_minutes)
        torch.distributed.barrier(waiting)
    return loaded, missing


def find(names: list[str], include_path: str | None):
    """lm-eval's task manager, which knows all names.

    ValueError: an unknown name, or no such folder.
    """
    if include_path is not None and not os.path.isdir(include_path):
        raise ValueError(f"--include_path={include_path}: there is no such folder")
    new_manager = import_lm_eval().tasks.TaskManager
    if include_path is not None:  # lm-eval's own files take seconds to read: only where needed
        manager = new_manager(include_path=include_path, include_defaults=False)
        if set(names) <= set(manager.all_tasks):
            return manager
    manager = new_manager(include_path=include_path)
    for name in names:
        if name not in manager.all_tasks:
            near = errors.suggest(name, manager.all_tasks)
            raise ValueError(f"--tasks: lm-eval has no task {name}{near}")
    return manager


def load(names: list[str], manager, retry_minutes: float) -> tuple[list[Loaded], list[str]]:
    """The tasks that can be had, and one line about each that cannot."""
    loaded, missing = [], []
    for name in names:
        # Tasks may shuffle; lm-eval's command line sets the same seeds.
        random.seed(0)
        np.random.seed(SEED)
        torch.manual_seed(SEED)
        try:
            load_it = functools.partial(manager.load, [name])
            content = retry(load_it, f"task {name}", retry_minutes)
        # The hub, the network, the disk and the data set raise many kinds; the cause is named.
        except Exception as error:
            missing.append(line_about(name, manager, error))
            if isinstance(error, RetriesExhausted):
                retry_minutes = 0  # not as long again for each of the others
            continue
        shots = {key: task.get_config("num_fewshot") for key, task in content["tasks"].items()}
        loaded.append(Loaded(name, content, shots))
    return loaded, missing


def line_about(name: str, manager, error: Exception) -> str:
    """What cannot be had, why, and what to do about that."""
    config = getattr(manager.task_index.get(name), "cfg", None) or {}
    data = " ".join(str(config[key]) for key in ("dataset_path", "dataset_name") if config.get(key))
    cause = " ".join(f"{type(error).__name__}: {error}".split())
    cause = cause if len(cause) < 160 else cause[:157] + "..."
    advice = "connect to the Hugging Face hub once, or set HF_HOME to a folder that has it"
    if isinstance(error, RetriesExhausted):
        advice = "run the same command again later, which goes on with what is missing"
    elif is_not_found(error):
        advice = (
            "the hub knows no such data set, or it is private or gated: accept its terms, then "
            "`hf auth login`"
        )
    data = f"its data set {data or 'is not known and'} cannot be had ({cause})"
    return f"task {name} is left out: {data}; {advice}"


def prepare(task: Loaded, shots: int) -> None:
    """Set the number of few-shot examples, and the seed that draws them.

    A 0 in a task's file stays 0, as lm-eval has it; other numbers there are defaults.
    """
    for name, each in task.tasks.items():
        each.set_config(key="num_fewshot", value=0 if task.own_shots[name] == 0 else shots)
        each.set_fewshot_seed(seed=SEED)


def evaluate(
    language_model, task: Loaded, shots: int, samples: bool, limit: int | None, bootstrap: bool
) -> dict:
    """lm-eval's results of a task; samples: also every item's; bootstrap: with standard errors."""
    prepare(task, shots)
    return import_lm_eval().evaluator.evaluate(
        lm=language_model,
        task_dict=task.content,
        log_samples=samples,
        limit=limit,
        bootstrap_iters=100_000 if bootstrap else 0,
    )


def digest(task: Loaded) -> str:
    """SHA-256 over what is asked and what is right: the tasks' settings, and requests as built."""
    total = hashlib.sha256()
    for name, each in sorted(task.tasks.items()):
        total.update(f"{name} {each.VERSION}".encode())
        settings = each.config.to_dict(keep_callable=True)
        total.update(json.dumps(settings, sort_keys=True, default=described).encode())
        for request in each.instances:
            content = [request.doc, request.args]
            total.update(json.dumps(content, sort_keys=True, default=str).encode())
    return total.hexdigest()


def described(value) -> str:
    """A setting as text that is the same in every process: of a function its code."""
    if code := getattr(value, "__code__", None):
        constants = [each for each in code.co_consts if isinstance(each, str | int | float)]
        return f"{value.__qualname__} {code.co_code.hex()} {code.co_names} {constants}"
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))


def summary(task: Loaded, results: dict) -> dict:
    """What is stored of lm-eval's results; `shown`: (metric, value, standard error) by name.

    A group shows its own figure, where it has one, and anything else those of its tasks.
    """
    metrics = results["results"]
    names = [name for name in metrics if name in task.tasks]
    if numbers(metrics.get(task.name, {})):
        names = [task.name]
    shown = {name: metric_of(name, metrics[name]) for name in names if numbers(metrics[name])}
    same = {key: results[key] for key in ("versions", "n-shot", "n-samples")}
    return {"shown": shown, "results": metrics, **same}


def numbers(values: dict) -> dict[str, tuple]:
    """{metric: (value, standard error)} of a task's results; of several filters the first's."""
    result: dict[str, tuple] = {}
    for key, value in values.items():
        metric, comma, _ = key.partition(",")
        if comma and not metric.endswith("_stderr") and isinstance(value, int | float):
            result.setdefault(metric, (value, values.get(key.replace(",", "_stderr,", 1))))
    return result


def metric_of(name: str, values: dict) -> tuple[str, float, float | None]:
    """(metric, value, standard error or None) that a table shows, shares in percent."""
    by_metric = numbers(values)
    wanted = (PAPER_METRICS.get(name), *PREFERRED, *by_metric)
    metric = next(each for each in wanted if each in by_metric)
    value, error = by_metric[metric]
    factor = 100 if metric in PERCENT and abs(value) <= 1 else 1  # some tasks give percent
    return metric, value * factor, error * factor if isinstance(error, int | float) else None
