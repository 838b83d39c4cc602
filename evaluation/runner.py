"""The evaluations of one call: each result is stored as soon as it is there, and a stored one is
not made again.
"""

import datetime
import fcntl
import importlib.metadata
import json
import time
from pathlib import Path

import torch

from data import tokenizer
from data.loader import ValidationBatches
from data.shards import open_corpus, read_json, write_json
from data.windows import Windows
from evaluation import tasks
from evaluation.tasks import Loaded
from training import metrics
from training.distributed import computes_in_bfloat16
from training.provenance import provenance
from training.validation import evaluate

VALIDATION_TOKENS = 2**14  # read at once


def open_corpus_of(subject, dataset: str):
    """The corpus for --val: `dataset`, or the run's own.

    ValueError: there is none, or it has other tokens.
    """
    if not dataset and subject.state is None:
        raise ValueError(f"{subject.folder} does not know its corpus: give --val=DATASET")
    corpus = open_corpus(dataset or subject.state["run_config"]["dataset"])
    if not tokenizer.same_tokens(tokenizer.describe(corpus.path), subject.tokenizer()):
        raise ValueError(
            f"{corpus.path} has other tokens than {subject.folder}: give its own corpus, "
            "--val=DATASET"
        )
    return corpus


class Evaluation:
    """What all evaluations of a call share."""

    def __init__(self, args, world, out: Path):
        self.args, self.world, self.out, device = args, world, out, world.device
        self.bf16 = computes_in_bfloat16(args.dtype, device)
        self.autocast = torch.autocast(device.type, torch.bfloat16, enabled=self.bf16)
        self.batch_size = args.batch_size or (512 if device.type == "cuda" else 64)
        self.settings = {
            "dtype": "bfloat16" if self.bf16 else "float32",
            "batch_size": self.batch_size,
        }
        self.store, self.failures = Store(out), []
        if world.world_size > 1:  # what process 0 knows, so that all of them do the same
            everyone = [self.store.entries]
            torch.distributed.broadcast_object_list(everyone)
            self.store.entries = everyone[0]

    def entry(self, subject, task: str, shots: int | None, **settings) -> dict:
        key = {
            "weights": subject.identity,
            "task": task,
            "shots": shots,
            "settings": {**self.settings, **settings},
        }
        return key | {"label": subject.label, "folder": str(subject.folder)}

    def keep(self, entry: dict, started: float, line: str) -> dict:
        entry |= {"seconds": time.perf_counter() - started, **provenance()}
        if self.world.is_main:
            self.store.add(entry)
            print(f"{entry['label']}: {line} in {metrics.duration(entry['seconds'])}", flush=True)
        return entry

    def validation(self, subject, model, corpus) -> dict:
        """The entry of the whole validation split."""
        entry = self.entry(subject, "validation", None, corpus=corpus.identity)
        if found := self.store.find(entry):
            return found
        started, length = time.perf_counter(), model.config.block_size
        documents = Windows.of(corpus.meta)
        batches = ValidationBatches(corpus.val, length, corpus.meta["vocab_size"], documents)
        rows = max(min(self.batch_size, VALIDATION_TOKENS // length), 1)
        with torch.no_grad():
            scores = evaluate(
                model, batches, list(range(batches.windows)), rows, self.world, self.autocast
            )
        entry["tokens"] = batches.windows * length if documents else len(batches.tokens) - 1
        entry["record"] = metrics.validation_record(
            scores.pop("loss"), corpus.bytes_per_token("val")
        )
        entry["record"] |= {f"val_{key}": value for key, value in scores.items()}
        return self.keep(
            entry,
            started,
            ", ".join(f"{key} {value:.4f}" for key, value in entry["record"].items()),
        )

    def tasks(self, subject, model, encoding, loaded: list[Loaded]) -> list[dict]:
        """The entries of all tasks with every number of shots."""
        from evaluation.language_model import LanguageModel  # needs lm-eval

        language_model = LanguageModel(
            model, encoding, self.world, self.batch_size, self.autocast, self.args.add_bos_token
        )
        entries = []
        for shots in self.args.shots:
            for task in loaded:
                try:
                    entries.append(self.task(subject, language_model, task, shots))
                except ValueError as error:  # of this task: the others have their results
                    self.failures.append(
                        f"task {task.name}, {shots}-shot, of {subject.label} failed: {error}"
                    )
        return entries

    def has_samples(self, entry: dict) -> bool:
        """Whether the records of an entry's items are there."""
        pattern = entry["samples"]
        return bool(pattern) and all(
            (self.out / pattern.replace("TASK", name)).exists() for name in entry["n-samples"]
        )

    def task(self, subject, language_model, task: Loaded, shots: int) -> dict:
        """The entry of one task; a stored one where the items are as they were."""
        args, version = self.args, importlib.metadata.version("lm_eval")
        settings = {"add_bos_token": args.add_bos_token, "limit": args.limit, "lm_eval": version}
        entry = self.entry(subject, task.name, shots, **settings)
        found = self.store.find(entry)
        complete = found and (not args.log_samples or self.has_samples(found))
        if complete and found["digest"] == tasks.digest_of_prepared(task, shots, args.limit):
            return found | {key: entry[key] for key in ("label", "folder")}
        started = time.perf_counter()
        results = tasks.evaluate(
            language_model, task, shots, args.log_samples, args.limit, self.world.is_main
        )
        entry |= {"samples": None, "digest": tasks.digest(task), **tasks.summary(task, results)}
        if args.log_samples and self.world.is_main:
            date = datetime.datetime.now().isoformat().replace(":", "-")  # as lm-eval has it
            entry["samples"] = f"samples_TASK_{date}.jsonl"
            for name, samples in results["samples"].items():
                write_samples(self.out / entry["samples"].replace("TASK", name), samples)
        shown = "; ".join(
            f"{name} {m} {value:.2f}" for name, (m, value, _) in entry["shown"].items()
        )
        return self.keep(entry, started, f"{shots}-shot {shown}")


class Store:
    """A folder's results.json: an entry for every checkpoint, task and setting, reused where all of
    `KEY` is as it was.

    ValueError: the file is damaged.
    """

    KEY = ("weights", "task", "shots", "settings")

    def __init__(self, folder: Path):
        self.folder, self.path = folder, folder / "results.json"
        self.entries: list[dict] = read_json(self.path).get("entries", [])

    def find(self, wanted: dict) -> dict | None:
        return next(
            (e for e in self.entries if all(e[key] == wanted[key] for key in self.KEY)), None
        )

    def add(self, entry: dict) -> None:
        """Write the entry, in the place of one of the same key, beside what other processes have
        written meanwhile.
        """
        with open(self.folder / ".lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            entries = read_json(self.path).get("entries", [])
            self.entries = [e for e in entries if any(e[key] != entry[key] for key in self.KEY)] + [
                entry
            ]
            write_json(self.path, {"entries": self.entries})


def write_text(path: Path, text: str) -> None:
    """Complete under its name, or as it was."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def write_samples(path: Path, samples: list[dict]) -> None:
    """Every item, one JSON object a line: the file that lm-eval's EvaluationTracker makes of
    them.
    """
    from lm_eval.utils import handle_non_serializable, sanitize_list

    lines = []
    for sample in samples:
        requests = enumerate(sample["arguments"])
        arguments = {
            f"gen_args_{i}": {f"arg_{j}": each for j, each in enumerate(args)}
            for i, args in requests
        }
        texts = {key: sanitize_list(sample[key]) for key in ("resps", "filtered_resps")}
        record = sample | texts | {"arguments": arguments, "target": str(sample["target"])}
        lines.append(json.dumps(record, default=handle_non_serializable, ensure_ascii=False) + "\n")
    write_text(path, "".join(lines))
