"""Evaluate a model on tasks or a validation split, and store the results as JSON.

A file of results belongs to one model and number of few-shot examples. It holds what lm-eval returns
for all tasks that were evaluated so, and is a row of a table (comparison.py).
"""

import datetime
import importlib.metadata
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from data.loader import ValidationBatches
from data.sequences import SequenceLayout
from data.shards import Corpus
from data.tokenizer import Tokenizer
from evaluation import comparison, tasks
from evaluation.subjects import Subject
from evaluation.tasks import LoadedTask
from model.gpt import GPT
from training import metrics
from training.validation import evaluate
from utils import files, units
from utils.processes import World
from utils.provenance import collect_provenance

if TYPE_CHECKING:
    from evaluation.language_model import LanguageModel

MAX_VALIDATION_TOKENS = 2**14  # number of tokens per forward pass on the validation split
# What a record has by name of a task or group: of lm-eval's results, and in addition.
LM_EVAL_KEYS = ("results", "versions", "n-shot", "n-samples")
RESULT_KEYS = (*LM_EVAL_KEYS, "tasks", "configs", "shown", "samples", "seconds")


def evaluate_validation(
    subject: Subject,
    model: GPT,
    corpus: Corpus,
    *,
    world: World,
    settings: dict,
    out: Path,
) -> dict:
    """Return the record of the whole validation split, which is computed unless it is stored.

    Args:
        settings: "dtype" and "batch_size"
        out: folder of the results
    """
    record = begin_record(subject, None, {**settings, "corpus": corpus.identity})
    record["dataset"] = corpus.path.name
    path = get_path(out, record)
    stored_record = read_record(path, world)
    if stored_record.get("settings", {}).get("corpus") == corpus.identity:
        return {**stored_record, "label": subject.label, "folder": str(subject.folder)}
    start = time.perf_counter()
    block_size = model.config.block_size
    layout = SequenceLayout.from_meta(corpus.meta)
    batches = ValidationBatches(corpus.val, block_size, corpus.meta["vocab_size"], layout)
    num_sequences = batches.num_sequences
    with torch.no_grad():
        scores = evaluate(
            model,
            batches,
            list(range(num_sequences)),
            max(min(settings["batch_size"], MAX_VALIDATION_TOKENS // block_size), 1),
            world,
            make_autocast(world, settings),
        )
    loss = scores.pop("loss")
    record["record"] = {
        **metrics.compute_validation_metrics(loss, corpus.bytes_per_token("val")),
        **{f"val_{key}": value for key, value in scores.items()},
    }
    # sequences of a stream overlap by one token; those of documents do not, and may be padded
    record["tokens"] = len(batches.tokens) - 1
    if layout is not None:
        record["tokens"] = num_sequences * block_size
    record["seconds"] = time.perf_counter() - start
    if world.is_main:
        line = ", ".join(f"{key} {value:.4f}" for key, value in record["record"].items())
        print_result(subject, line, record["seconds"])
        write_record(path, record)
    return record


def evaluate_tasks(
    subject: Subject,
    model: GPT,
    tokenizer: Tokenizer,
    loaded_tasks: list[LoadedTask],
    *,
    num_shots: int,
    world: World,
    settings: dict,
    out: Path,
    log_samples: bool,
) -> dict:
    """Return the record of a model with a number of shots, after evaluating the tasks that it lacks.

    Args:
        settings: "dtype", "batch_size", "add_bos_token" and "limit", the number of items of each
            task; None for all
        out: folder of the results
        log_samples: also write every item with its results

    Raises:
        ValueError: a task has a request that the model cannot answer
    """
    tasks.import_lm_eval()
    from evaluation.language_model import LanguageModel  # needs lm-eval

    language_model = LanguageModel(
        model,
        tokenizer,
        world,
        settings["batch_size"],
        autocast=make_autocast(world, settings),
        add_bos_token=settings["add_bos_token"],
    )
    record = begin_record(subject, num_shots, settings)
    path = get_path(out, record)
    stored_record = read_record(path, world)
    new_results: dict[str, dict] = {key: {} for key in RESULT_KEYS}
    date = datetime.datetime.now().isoformat().replace(":", "-")  # as in lm-eval's file names
    for task in loaded_tasks:
        tasks.set_num_shots(task, num_shots)
        if is_stored(stored_record, task, log_samples):
            continue
        sample_files = {}
        if log_samples:
            sample_files = {name: out / f"samples_{name}_{date}.jsonl" for name in task.tasks}
        results = evaluate_task(
            subject,
            language_model,
            task,
            num_shots=num_shots,
            limit=settings["limit"],
            sample_files=sample_files,
        )
        for key in RESULT_KEYS:
            new_results[key].update(results[key])
    return add_results(path, record, new_results, world)


def evaluate_task(
    subject: Subject,
    language_model: "LanguageModel",
    task: LoadedTask,
    *,
    num_shots: int,
    limit: int | None,
    sample_files: dict[str, Path],
) -> dict[str, dict]:
    """Evaluate a task and print its results.

    Args:
        sample_files: the files for the items of each task, by its name; {} writes none

    Returns:
        What a record has of the task, for each of RESULT_KEYS.
    """
    from lm_eval import evaluator

    is_main = language_model.world.is_main
    start = time.perf_counter()
    try:
        results = evaluator.evaluate(
            lm=language_model,
            task_dict=task.content,
            log_samples=bool(sample_files),
            limit=limit,
            # of standard errors, which only the main process reports
            bootstrap_iters=100_000 if is_main else 0,
        )
    except ValueError as error:
        raise ValueError(
            f"task {task.name}, {num_shots}-shot, of {subject.label}: {error}"
        ) from error
    seconds = time.perf_counter() - start
    shown = tasks.choose_metrics(task, results["results"])
    notes = [*tasks.describe_leaks(task), *language_model.pop_notes()]
    if is_main:
        for name, path in sample_files.items():
            write_samples(path, results["samples"][name])
        for note in notes:
            print(f"note: {task.name}, {num_shots}-shot: {note}", flush=True)
        metrics_in_words = "; ".join(
            f"{name} {metric.name} {metric.value:.2f}" for name, metric in shown.items()
        )
        print_result(subject, f"{num_shots}-shot {metrics_in_words}", seconds)
    return {
        **{key: results[key] for key in LM_EVAL_KEYS},
        "tasks": {task.name: list(task.tasks)},
        "configs": {name: tasks.describe_config(part) for name, part in task.tasks.items()},
        "shown": shown,
        "samples": {name: path.name for name, path in sample_files.items()},
        "seconds": {task.name: seconds},
    }


def add_results(path: Path, record: dict, new_results: dict[str, dict], world: World) -> dict:
    """Add results of tasks to those in a file; return the record of all."""
    # read only now, because another command may have added other tasks meanwhile
    stored_record = read_record(path, world)
    record = {**stored_record, **record}
    for key in RESULT_KEYS:
        record[key] = {**stored_record.get(key, {}), **new_results[key]}
    if new_results["tasks"] and world.is_main:
        record["lm_eval_version"] = importlib.metadata.version("lm_eval")
        write_record(path, record)
    return record


def begin_record(subject: Subject, num_shots: int | None, settings: dict) -> dict:
    """Return the entries with which the record of a model begins."""
    return {
        "weights": subject.identity,
        "label": subject.label,
        "folder": str(subject.folder),
        "shots": num_shots,
        "settings": settings,
    }


def is_stored(record: dict, task: LoadedTask, log_samples: bool) -> bool:
    """Return whether a record has the results of a task with the same settings, and its samples."""
    if task.name not in record.get("tasks", {}):
        return False
    for name, each_task in task.tasks.items():
        if record["configs"].get(name) != tasks.describe_config(each_task):
            return False
        if log_samples and name not in record["samples"]:
            return False
    return True


def make_autocast(world: World, settings: dict) -> torch.autocast:
    """Return the context of forward passes in the dtype of the settings."""
    dtype = getattr(torch, settings["dtype"])
    return torch.autocast(world.device.type, dtype, enabled=dtype != torch.float32)


def print_result(subject: Subject, line: str, seconds: float) -> None:
    """Print results in words."""
    print(f"{subject.label}: {line} in {units.format_duration(seconds)}", flush=True)


# ---- files ----


def get_path(out: Path, record: dict) -> Path:
    """Return the file of a record: a name with the title of its table and a digest of the weights."""
    title = re.sub(r"[^\w.-]+", "_", comparison.make_title(record))
    return out / f"results_{title}_{record['weights'][:8]}.json"


def read_record(path: Path, world: World) -> dict:
    """Return the record in a file, {} if there is none; every rank gets what the main one reads.

    Raises:
        ValueError: the file is damaged
    """
    record = {}
    if world.is_main and path.exists():
        record = files.read_json(path)
        # samples that were deleted are made again
        samples = record.get("samples", {})
        record["samples"] = {
            name: file for name, file in samples.items() if (path.parent / file).exists()
        }
    if world.world_size > 1:
        # ranks that skip different tasks would wait for each other forever
        records = [record]
        torch.distributed.broadcast_object_list(records)
        record = records[0]
    return record


def read_other_records(out: Path, records: list[dict]) -> list[dict]:
    """Return the other records of the same models in a folder, with the labels of these."""
    labels = {record["weights"]: record["label"] for record in records}
    names = {get_path(out, record).name for record in records}
    others = []
    for path in sorted(out.glob("results_*.json")):
        record = files.read_json(path)
        if path.name not in names and record.get("weights") in labels:
            others.append({**record, "label": labels[record["weights"]]})
    return others


def write_record(path: Path, record: dict) -> None:
    """Write a record with its provenance."""
    text = files.to_json({**record, **collect_provenance()}, indent=1)
    files.write_text(path, text + "\n", is_shared=True)


def write_samples(path: Path, samples: list[dict]) -> None:
    """Write items with their results, one JSON object per line, byte for byte as lm-eval does,
    except for numbers that are not finite.

    lm-eval's own EvaluationTracker does not report a full disk.
    """
    from lm_eval.utils import handle_non_serializable, sanitize_list

    lines = []
    for sample in samples:
        record = {
            **sample,
            "resps": sanitize_list(sample["resps"]),
            "filtered_resps": sanitize_list(sample["filtered_resps"]),
            "arguments": {
                f"gen_args_{index}": {
                    f"arg_{position}": argument for position, argument in enumerate(arguments)
                }
                for index, arguments in enumerate(sample["arguments"])
            },
            "target": str(sample["target"]),
        }
        lines.append(
            files.to_json(record, default=handle_non_serializable, ensure_ascii=False) + "\n"
        )
    files.write_text(path, "".join(lines), is_shared=True)
