"""The evaluations of one call. Each result is stored as soon as it is there, and a stored one is
not made again.
"""

import datetime
import fcntl
import importlib.metadata
import json
import time
from pathlib import Path

import torch

from data.loader import ValidationBatches
from data.sequences import SequenceLayout
from data.shards import write_json
from evaluation import tasks
from evaluation.tasks import Loaded
from training import metrics
from training.distributed import computes_in_bfloat16
from training.provenance import collect_provenance
from training.validation import evaluate
from utils import files, units

VALIDATION_TOKENS = 2**14  # read at once
KEY = ("weights", "task", "shots", "settings")  # a stored result with all of these is taken


class Evaluation:
    """What all evaluations of a call share; args: those of eval.py, results go to `out`.

    entries: the content of results.json; failures: a line about each task that failed.
    """

    def __init__(self, args, world, out: Path):
        self.args, self.world, self.out = args, world, out
        self.bf16 = computes_in_bfloat16(args.dtype, world.device)
        self.autocast = torch.autocast(world.device.type, torch.bfloat16, enabled=self.bf16)
        self.batch_size = args.batch_size or (512 if world.device.type == "cuda" else 64)
        self.entries, self.failures = stored(out), []
        if world.world_size > 1:  # what process 0 knows, so that all of them do the same
            everyone = [self.entries]
            torch.distributed.broadcast_object_list(everyone)
            self.entries = everyone[0]

    def entry(self, subject, task: str, shots: int | None, **settings) -> tuple[dict, dict | None]:
        """(what an entry says before its evaluation, the stored entry of the same key)."""
        dtype = "bfloat16" if self.bf16 else "float32"
        settings = {"dtype": dtype, "batch_size": self.batch_size, **settings}
        entry = dict(zip(KEY, (subject.identity, task, shots, settings)))
        match = next((old for old in self.entries if same_key(old, entry)), None)
        return entry | {"label": subject.label, "folder": str(subject.folder)}, match

    def store(self, entry: dict, started: float, line: str) -> dict:
        """The finished entry, written and told about by process 0."""
        entry |= {"seconds": time.perf_counter() - started, **collect_provenance()}
        if self.world.is_main:
            self.entries = add(self.out, entry)
            print(
                f"{entry['label']}: {line} in {units.format_duration(entry['seconds'])}", flush=True
            )
        return entry

    def validation(self, subject, model, corpus) -> dict:
        """The entry of the whole validation split."""
        entry, match = self.entry(subject, "validation", None, corpus=corpus.identity)
        if match:
            return match
        started, length = time.perf_counter(), model.config.block_size
        layout = SequenceLayout.from_meta(corpus.meta)
        batches = ValidationBatches(corpus.val, length, corpus.meta["vocab_size"], layout)
        rows, windows = (
            max(min(self.batch_size, VALIDATION_TOKENS // length), 1),
            batches.num_sequences,
        )
        with torch.no_grad():
            scores = evaluate(model, batches, list(range(windows)), rows, self.world, self.autocast)
        record = metrics.compute_validation_metrics(
            scores.pop("loss"), corpus.bytes_per_token("val")
        )
        record |= {f"val_{key}": value for key, value in scores.items()}
        entry["tokens"] = windows * length if layout else len(batches.tokens) - 1
        entry["record"] = record
        line = ", ".join(f"{key} {value:.4f}" for key, value in record.items())
        return self.store(entry, started, line)

    def tasks(self, subject, model, encoding, loaded: list[Loaded]) -> list[dict]:
        """The entries of all tasks with every number of shots."""
        from evaluation.language_model import LanguageModel  # needs lm-eval

        language_model = LanguageModel(
            model, encoding, self.world, self.batch_size, self.autocast, self.args.add_bos_token
        )
        entries = []
        for shots, task in [(shots, task) for shots in self.args.shots for task in loaded]:
            try:
                entries.append(self.task(subject, language_model, task, shots))
            except ValueError as error:  # of this task: the others have their results
                what = f"task {task.name}, {shots}-shot, of {subject.label}"
                self.failures.append(f"{what} failed: {error}")
        return entries

    def task(self, subject, language_model, task: Loaded, shots: int) -> dict:
        """The entry of one task; the stored one where its prompts and answers are as they were."""
        args, version = self.args, importlib.metadata.version("lm_eval")
        settings = {"add_bos_token": args.add_bos_token, "limit": args.limit, "lm_eval": version}
        entry, match = self.entry(subject, task.name, shots, **settings)
        if match and (not args.log_samples or self.has_samples(match)):
            tasks.prepare(task, shots)
            for each in task.tasks.values():
                each.build_all_requests(limit=args.limit)
            if match["digest"] == tasks.digest(task):
                return match | {key: entry[key] for key in ("label", "folder")}
        started, main = time.perf_counter(), self.world.is_main
        results = tasks.evaluate(language_model, task, shots, args.log_samples, args.limit, main)
        entry |= {"samples": None, "digest": tasks.digest(task), **tasks.summary(task, results)}
        if args.log_samples and main:
            date = datetime.datetime.now().isoformat().replace(":", "-")  # as lm-eval has it
            entry["samples"] = f"samples_TASK_{date}.jsonl"
            for name, samples in results["samples"].items():
                write_samples(self.out / entry["samples"].replace("TASK", name), samples)
        shown = [f"{name} {m} {value:.2f}" for name, (m, value, _) in entry["shown"].items()]
        return self.store(entry, started, f"{shots}-shot {'; '.join(shown)}")

    def has_samples(self, entry: dict) -> bool:
        """Whether the files of an entry's items are there."""
        pattern = entry["samples"]
        return bool(pattern) and all(
            (self.out / pattern.replace("TASK", name)).exists() for name in entry["n-samples"]
        )


def stored(out: Path) -> list[dict]:
    """The entries of a folder's results.json. ValueError: the file is damaged."""
    path = out / "results.json"
    return files.read_json(path).get("entries", []) if path.exists() else []


def same_key(one: dict, other: dict) -> bool:
    return all(one[key] == other[key] for key in KEY)


def add(out: Path, entry: dict) -> list[dict]:
    """The entries of results.json after this one has taken the place of any of the same key.

    Another call may be writing to the same file: entries of both stay.
    """
    with open(out / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        entries = [old for old in stored(out) if not same_key(old, entry)] + [entry]
        write_json(out / "results.json", {"entries": entries})
    return entries


def write_samples(path: Path, samples: list[dict]) -> None:
    """Every item, one JSON object a line: the bytes of lm-eval's EvaluationTracker.

    That one takes a full disk for success.
    """
    from lm_eval.utils import handle_non_serializable, sanitize_list

    lines = []
    for sample in samples:
        arguments = {
            f"gen_args_{i}": {f"arg_{j}": each for j, each in enumerate(args)}
            for i, args in enumerate(sample["arguments"])
        }
        texts = {key: sanitize_list(sample[key]) for key in ("resps", "filtered_resps")}
        record = sample | texts | {"arguments": arguments, "target": str(sample["target"])}
        lines.append(json.dumps(record, default=handle_non_serializable, ensure_ascii=False) + "\n")
    files.write_text(path, "".join(lines))
