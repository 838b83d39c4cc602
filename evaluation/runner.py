"""Evaluate models, store each result as soon as it is computed, and reuse stored results."""

import datetime
import importlib.metadata
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from data.loader import ValidationBatches
from data.sequences import SequenceLayout
from data.shards import Corpus
from data.tokenizer import Tokenizer
from evaluation import tasks
from evaluation.subjects import Subject
from evaluation.tasks import LoadedTask
from model.gpt import GPT
from training import metrics
from training.distributed import World, computes_in_bfloat16
from training.provenance import collect_provenance
from training.validation import evaluate
from utils import files, units

if TYPE_CHECKING:
    from evaluation.language_model import LanguageModel  # needs lm-eval

MAX_VALIDATION_TOKENS = 2**14  # number of tokens per forward pass on the validation split
# The keys of an entry of results.json that identify it. An entry with the same values of these is
# reused, or replaced.
KEYS = ("weights", "task", "shots", "settings")


class Evaluation:
    """Runs the evaluations of one call of eval.py.

    Args:
        out: folder of results.json
        dtype: "auto", "float32" or "bfloat16"
        batch_size: maximum number of sequences per forward pass; None chooses one for the device
        shots: numbers of few-shot examples
        add_bos_token: begin every text with the end-of-text token
        limit: evaluate only this many items of each task; None evaluates all
        log_samples: write every item with its results to a file

    Attributes:
        entries: the entries of results.json at the start, and those that were added since
        failures: a message for each task whose evaluation failed
    """

    def __init__(
        self,
        world: World,
        out: Path,
        *,
        dtype: str,
        batch_size: int | None,
        shots: list[int],
        add_bos_token: bool,
        limit: int | None,
        log_samples: bool,
    ):
        self.world = world
        self.out = out
        self.shots = shots
        self.add_bos_token = add_bos_token
        self.limit = limit
        self.log_samples = log_samples
        self.is_bfloat16 = computes_in_bfloat16(dtype, world.device)
        self.autocast = torch.autocast(world.device.type, torch.bfloat16, enabled=self.is_bfloat16)
        self.batch_size = batch_size or (512 if world.device.type == "cuda" else 64)
        self.failures: list[str] = []
        self.entries = read_entries(out)
        # all processes must skip the same evaluations, so they use what the main process has read
        if world.world_size > 1:
            objects = [self.entries]
            torch.distributed.broadcast_object_list(objects)
            self.entries = objects[0]

    def start_entry(
        self, subject: Subject, task: str, shots: int | None, settings: dict
    ) -> tuple[dict, dict | None]:
        """Return a new entry, without results, and the stored entry that it would replace."""
        entry = {
            "weights": subject.identity,
            "task": task,
            "shots": shots,
            "settings": {
                "dtype": "bfloat16" if self.is_bfloat16 else "float32",
                "batch_size": self.batch_size,
                **settings,
            },
            "label": subject.label,
            "folder": str(subject.folder),
        }
        for stored_entry in self.entries:
            if has_same_key(stored_entry, entry):
                return entry, stored_entry
        return entry, None

    def store(self, entry: dict, results: dict, start: float, line: str) -> dict:
        """Add results and their provenance to an entry; the main process stores and reports it.

        Args:
            start: time.perf_counter() when the evaluation started
            line: the results in words
        """
        seconds = time.perf_counter() - start
        complete_entry = {**entry, **results, "seconds": seconds, **collect_provenance()}
        # Entries that another call has written to results.json meanwhile are not added, because
        # all processes must skip the same evaluations.
        self.entries = replace_entry(self.entries, complete_entry)
        if self.world.is_main:
            add_entry(self.out, complete_entry)
            duration = units.format_duration(seconds)
            print(f"{entry['label']}: {line} in {duration}", flush=True)
        return complete_entry

    def evaluate_validation(self, subject: Subject, model: GPT, corpus: Corpus) -> dict:
        """Return the entry of the whole validation split."""
        settings = {"corpus": corpus.identity}
        entry, stored_entry = self.start_entry(subject, "validation", None, settings)
        if stored_entry is not None:
            return relabel_entry(stored_entry, entry)
        start = time.perf_counter()
        block_size = model.config.block_size
        layout = SequenceLayout.from_meta(corpus.meta)
        batches = ValidationBatches(corpus.val, block_size, corpus.meta["vocab_size"], layout)
        num_sequences = batches.num_sequences
        micro_batch_size = max(min(self.batch_size, MAX_VALIDATION_TOKENS // block_size), 1)
        with torch.no_grad():
            scores = evaluate(
                model,
                batches,
                list(range(num_sequences)),
                micro_batch_size,
                self.world,
                self.autocast,
            )
        loss = scores.pop("loss")
        record = {
            **metrics.compute_validation_metrics(loss, corpus.bytes_per_token("val")),
            **{f"val_{key}": value for key, value in scores.items()},
        }
        # sequences of a stream overlap by one token; those of documents do not, and may be padded
        num_tokens = num_sequences * block_size if layout is not None else len(batches.tokens) - 1
        line = ", ".join(f"{key} {value:.4f}" for key, value in record.items())
        results = {"dataset": corpus.path.name, "tokens": num_tokens, "record": record}
        return self.store(entry, results, start, line)

    def evaluate_tasks(
        self, subject: Subject, model: GPT, tokenizer: Tokenizer, loaded_tasks: list[LoadedTask]
    ) -> list[dict]:
        """Return the entries of all tasks with each number of few-shot examples."""
        from evaluation.language_model import LanguageModel  # needs lm-eval

        language_model = LanguageModel(
            model,
            tokenizer,
            self.world,
            self.batch_size,
            autocast=self.autocast,
            add_bos_token=self.add_bos_token,
        )
        entries = []
        for num_shots in self.shots:
            for task in loaded_tasks:
                try:
                    entries.append(self.evaluate_task(subject, language_model, task, num_shots))
                # A full memory and a lost process end the evaluation.
                except (MemoryError, RuntimeError):
                    raise
                # The code and templates of a task may raise any other error. The other tasks are
                # evaluated nevertheless.
                except Exception as error:
                    # A full disk ends the evaluation as well. An OSError that the operating system
                    # has not raised has no number, such as that of a file missing on the Hub.
                    if isinstance(error, OSError) and error.errno is not None:
                        raise
                    cause = str(error)
                    if not isinstance(error, ValueError):
                        cause = f"{type(error).__name__}: {error}"
                    self.failures.append(
                        f"task {task.name}, {num_shots}-shot, of {subject.label} failed: {cause}"
                    )
        return entries

    def evaluate_task(
        self,
        subject: Subject,
        language_model: "LanguageModel",
        task: LoadedTask,
        num_shots: int,
    ) -> dict:
        """Return the entry of a task: the stored one if its requests have not changed."""
        settings = {
            "add_bos_token": self.add_bos_token,
            "limit": self.limit,
            "lm_eval": importlib.metadata.version("lm_eval"),
        }
        entry, stored_entry = self.start_entry(subject, task.name, num_shots, settings)
        if stored_entry is not None and (not self.log_samples or self.has_samples(stored_entry)):
            tasks.set_num_shots(task, num_shots)
            for each_task in task.tasks.values():
                each_task.build_all_requests(limit=self.limit)
            if stored_entry["digest"] == tasks.compute_digest(task):
                return relabel_entry(stored_entry, entry)
        start = time.perf_counter()
        language_model.pop_notes()  # of a task that failed
        results = tasks.evaluate(
            language_model,
            task,
            num_shots,
            log_samples=self.log_samples,
            limit=self.limit,
            standard_errors=self.world.is_main,
        )
        for note in (*tasks.describe_leaks(task), *language_model.pop_notes()):
            if self.world.is_main:
                print(f"note: {task.name}, {num_shots}-shot: {note}", flush=True)
        # file name of the samples; TASK stands for the name of each task
        samples_name = None
        if self.log_samples and self.world.is_main:
            # in the format of lm-eval's file names
            date = datetime.datetime.now().isoformat().replace(":", "-")
            samples_name = f"samples_TASK_{date}.jsonl"
            for name, samples in results["samples"].items():
                write_samples(self.out / samples_name.replace("TASK", name), samples)
        summary = tasks.summarize(task, results)
        metrics_in_words = "; ".join(
            f"{name} {metric.name} {metric.value:.2f}" for name, metric in summary["shown"].items()
        )
        return self.store(
            entry,
            {"samples": samples_name, "digest": tasks.compute_digest(task), **summary},
            start,
            f"{num_shots}-shot {metrics_in_words}",
        )

    def has_samples(self, entry: dict) -> bool:
        """Return whether the files with the samples of an entry exist."""
        samples_name = entry["samples"]
        if not samples_name:
            return False
        return all(
            (self.out / samples_name.replace("TASK", name)).exists() for name in entry["n-samples"]
        )


# ---- results.json ----


def read_entries(out: Path) -> list[dict]:
    """Return the entries of the results.json in a folder.

    Raises:
        ValueError: the file is damaged
    """
    path = out / "results.json"
    return files.read_json(path).get("entries", []) if path.exists() else []


def relabel_entry(stored_entry: dict, entry: dict) -> dict:
    """Return a stored entry under the label and folder that its model has now."""
    return {**stored_entry, "label": entry["label"], "folder": entry["folder"]}


def has_same_key(first: dict, second: dict) -> bool:
    """Return whether two entries are results of the same evaluation."""
    return all(first[key] == second[key] for key in KEYS)


def replace_entry(entries: list[dict], entry: dict) -> list[dict]:
    """Return the entries with a new one at the end, in place of any with the same key."""
    other_entries = [other for other in entries if not has_same_key(other, entry)]
    return [*other_entries, entry]


def add_entry(out: Path, entry: dict) -> None:
    """Add an entry to results.json, in place of any with the same key."""
    # another call may write to the same file, and the entries of both must stay
    with files.lock_file(out / ".lock", wait=True):
        entries = replace_entry(read_entries(out), entry)
        text = json.dumps({"entries": entries}, indent=1) + "\n"
        files.write_text(out / "results.json", text)


def write_samples(path: Path, samples: list[dict]) -> None:
    """Write items with their results, one JSON object per line, byte for byte as lm-eval does.

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
        lines.append(json.dumps(record, default=handle_non_serializable, ensure_ascii=False) + "\n")
    files.write_text(path, "".join(lines))
