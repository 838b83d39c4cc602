"""The paper's eight tasks, any other of lm-evaluation-harness, and what to say of those whose data
cannot be had.
"""

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

import configurator
from data.hub import OutOfPatience, check_minutes, kinds, retried
from training import distributed

# What the paper reports of each task, in its tables' order.
PAPER_METRICS = {
    **dict.fromkeys(
        ("arc_challenge", "arc_easy", "hellaswag", "openbookqa", "piqa", "sciq"), "acc_norm"
    ),
    **dict.fromkeys(("social_iqa", "winogrande"), "acc"),
}
# Of other tasks the first of these that they have, else the first metric they report.
PREFERRED = ("acc_norm", "acc", "exact_match", "f1")
PERCENT = (*PREFERRED, "acc_bytes", "acc_mutual_info", "em", "mcc")
RETRY_MINUTES = 10.0
SEED = 1234  # of the few-shot examples: lm-eval's own default


@dataclass(frozen=True)
class Loaded:
    """One name of --tasks: a task, or a group or tag of several; `own_shots`: what their files fix,
    by task.
    """

    name: str
    content: dict
    own_shots: dict[str, int | None]

    @property
    def tasks(self) -> dict:
        return self.content["tasks"]


def import_lm_eval():
    """The package. ValueError: not installed."""
    try:
        import datasets
        import lm_eval.api.task
        import lm_eval.evaluator
        import lm_eval.tasks
        from tqdm import tqdm
    except ImportError as error:
        raise ValueError(
            f"evaluation on tasks needs lm-eval ({error}): pip install lm-eval"
        ) from error
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    # Its bar over the contexts has no switch: only where a person looks at it, and not once for
    # every process.
    lm_eval.api.task.tqdm = functools.partial(tqdm, disable=True if distributed.rank() else None)
    # it warns of every default that a task file leaves out
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    return lm_eval


def go_offline_where_the_hub_is_out_of_reach() -> None:
    """Ask once; what is not there is then known at once, instead of after 23 s of trying for every
    task.

    To be called before `datasets` is imported, which reads the setting then.
    """
    if os.environ.get("HF_HUB_OFFLINE") or os.environ.get("HF_DATASETS_OFFLINE"):
        return
    try:
        urllib.request.urlopen(
            os.environ.get("HF_ENDPOINT", "https://huggingface.co"), timeout=5
        ).close()
    except (urllib.error.HTTPError, ConnectionResetError):
        pass  # it answers, or somebody does
    except (OSError, ValueError):
        os.environ["HF_HUB_OFFLINE"] = "1"


def open_all(
    names: list[str], include_path: str | None, world, retry_minutes: float = RETRY_MINUTES
) -> tuple[list[Loaded], list[str]]:
    """The tasks that can be had, and a line for each that cannot.

    ValueError: an unknown name or folder, no lm-eval.

    Process 0 comes first, so that a data set is fetched once; what it has the others load. What the
    hub refuses for a while each asks for again.
    """
    check_minutes(retry_minutes)
    go_offline_where_the_hub_is_out_of_reach()
    if world.world_size == 1:
        return load(names, find(names, include_path), retry_minutes)
    waiting = distributed.patient_group()
    if world.is_main:
        loaded, missing = load(names, find(names, include_path), retry_minutes)
    had = [([task.name for task in loaded], missing) if world.is_main else None]
    torch.distributed.broadcast_object_list(had, group=waiting)
    if not world.is_main:
        names, missing = had[0]
        loaded, lacking = load(names, find(names, include_path), retry_minutes)
        missing = missing + lacking
    torch.distributed.barrier(waiting)
    return loaded, missing


def find(names: list[str], include_path: str | None):
    """lm-eval's task manager, which knows all names. ValueError: an unknown one, or no such folder.

    lm-eval's own files are read, which takes seconds, only where the folder does not have every
    name.
    """
    if include_path is not None and not os.path.isdir(include_path):
        raise ValueError(f"--include_path={include_path}: there is no such folder")
    new_manager = import_lm_eval().tasks.TaskManager
    if include_path is not None:
        manager = new_manager(include_path=include_path, include_defaults=False)
        if set(names) <= set(manager.all_tasks):
            return manager
    manager = new_manager(include_path=include_path)
    for name in names:
        if name not in manager.all_tasks:
            raise ValueError(
                "--tasks: lm-eval has no task "
                f"{name}{configurator.nearest(name, manager.all_tasks)}"
            )
    return manager


def load(names: list[str], manager, retry_minutes: float) -> tuple[list[Loaded], list[str]]:
    """The tasks that can be had, and one line for each that cannot."""
    loaded, missing = [], []
    for name in names:
        try:
            content = retried(
                lambda name=name: load_one(name, manager), f"task {name}", retry_minutes
            )
        # hub, network, file systems and data sets raise many kinds; the cause is named
        except Exception as error:
            missing.append(line_about(name, manager, error))
            if isinstance(error, OutOfPatience):
                retry_minutes = 0  # not as long again for each of the others
            continue
        shots = {key: task.get_config("num_fewshot") for key, task in content["tasks"].items()}
        loaded.append(Loaded(name, content, shots))
    return loaded, missing


def load_one(name: str, manager) -> dict:
    random.seed(0)  # tasks may shuffle; lm-eval's command line sets the same seeds
    np.random.seed(SEED)
    torch.manual_seed(SEED)
    return manager.load([name])


def line_about(name: str, manager, error: Exception) -> str:
    """What cannot be had, why, and what to do about that."""
    config = getattr(manager.task_index.get(name), "cfg", None) or {}
    data = " ".join(str(config[key]) for key in ("dataset_path", "dataset_name") if config.get(key))
    cause = " ".join(f"{type(error).__name__}: {error}".split())
    cause = cause if len(cause) < 160 else cause[:157] + "..."
    found = kinds(error)
    advice = "connect to the Hugging Face hub once, or set HF_HOME to a folder that has it"
    if isinstance(error, OutOfPatience):
        advice = "run the same command again later, which goes on with what is missing"
    elif found & {"RepositoryNotFoundError", "DatasetNotFoundError", "GatedRepoError"}:
        advice = "the hub knows no such data set, or it is private or gated: accept its terms, then `hf auth login`"
    return f"task {name} is left out: its data set {data or 'is not known and'} cannot be had ({cause}); {advice}"


def evaluate(
    language_model, task: Loaded, shots: int, log_samples: bool, limit: int | None, bootstrap: bool
):
    """lm-eval's results of a task, its own few-shot number where its file says 0, as lm-eval has
    it.
    """
    prepare(task, shots)
    return import_lm_eval().evaluator.evaluate(
        lm=language_model,
        task_dict=task.content,
        log_samples=log_samples,
        limit=limit,
        bootstrap_iters=100_000 if bootstrap else 0,
    )


def prepare(task: Loaded, shots: int) -> None:
    """Set the number of few-shot examples and the seed that draws them."""
    for name, each in task.tasks.items():
        each.set_config(key="num_fewshot", value=0 if task.own_shots[name] == 0 else shots)
        each.set_fewshot_seed(seed=SEED)


def described(value) -> str:
    """What a setting is, the same in every process: of a function its code, of an object what it
    calls itself.
    """
    if code := getattr(value, "__code__", None):
        constants = [each for each in code.co_consts if isinstance(each, str | int | float)]
        return f"{value.__qualname__} {code.co_code.hex()} {code.co_names} {constants}"
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))


def digest(task: Loaded) -> str:
    """SHA-256 over what was asked and what is right: the tasks' settings (right answers, metrics,
    filters), the requests that they have built, and their documents.
    """
    total = hashlib.sha256()
    for name, each in sorted(task.tasks.items()):
        total.update(f"{name} {each.VERSION}".encode())
        settings = each.config.to_dict(keep_callable=True)
        total.update(json.dumps(settings, sort_keys=True, default=described).encode())
        for request in each.instances:
            total.update(
                json.dumps([request.doc, request.args], sort_keys=True, default=str).encode()
            )
    return total.hexdigest()


def digest_of_prepared(task: Loaded, shots: int, limit: int | None) -> str:
    """The same before an evaluation."""
    prepare(task, shots)
    for each in task.tasks.values():
        each.build_all_requests(limit=limit)
    return digest(task)


def summary(task: Loaded, results: dict) -> dict:
    """What is stored of lm-eval's results; `shown`: (metric, value, standard error) by name.

    A group shows its own figure, where it has one, and anything else those of its tasks.
    """
    metrics = results["results"]
    names = (
        [task.name]
        if numbers(metrics.get(task.name, {}))
        else [name for name in metrics if name in task.tasks]
    )
    return {
        "shown": {name: metric_of(name, metrics[name]) for name in names if numbers(metrics[name])},
        "results": metrics,
        "versions": results["versions"],
        "n-shot": results["n-shot"],
        "n-samples": results["n-samples"],
    }


def numbers(values: dict) -> dict[str, tuple]:
    """{metric: (value, standard error)} of a task's or group's results; of several filters the
    first.
    """
    found: dict[str, tuple] = {}
    for key, value in values.items():
        metric, comma, _ = key.partition(",")
        if comma and not metric.endswith("_stderr") and isinstance(value, int | float):
            found.setdefault(metric, (value, values.get(key.replace(",", "_stderr,", 1))))
    return found


def metric_of(name: str, values: dict) -> tuple[str, float, float | None]:
    """(metric, value, standard error or None) that a table shows of results with numbers, shares in
    percent.
    """
    found = numbers(values)
    metric = next(m for m in (PAPER_METRICS.get(name), *PREFERRED, *found) if m in found)
    value, error = found[metric]
    # some tasks give percent themselves
    factor = 100 if metric in PERCENT and abs(value) <= 1 else 1
    return metric, value * factor, error * factor if isinstance(error, int | float) else None
