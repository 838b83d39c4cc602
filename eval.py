"""Evaluate models on the paper's eight tasks, on other lm-eval tasks, and by validation loss.

    python eval.py runs/ddl_dv4_small                        # the paper's tasks, 0-shot and 1-shot
    python eval.py runs/ddl_dv4_small runs/gpt_small --tasks=paper --val      # two runs compared
    python eval.py runs/demo_cpu --val                       # validation loss only
    python eval.py runs/NAME --tasks=my_task,lambada_openai --include_path=my_tasks

Results are lm-eval's own JSON, in eval/ in the run folder. If the paper reports results for the
variant and size of a model, the table shows them beside the model's own, with a line that lists the
settings in which the run differs from the paper's recipe.
"""

# ruff: noqa: E402 (one import has to wait)
import datetime
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Literal

from utils import machine

machine.limit_spinning()  # before torch is imported

import torch

from configurator import argument, option, read_command_line
from data.loader import open_validation_batches
from data.shards import Corpus
from data.tokenizer import Tokenizer
from data.tokenizer import read as read_tokenizer
from evaluation import comparison, published, tasks
from model import kernels
from model.gpt import GPT
from model_folder import ModelFolder, describe
from training import metrics, validation
from utils import errors, files, processes
from utils.provenance import collect_provenance
from utils.units import format_dtype

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

MAX_VALIDATION_TOKENS = 2**14  # of a forward pass on the validation split


def evaluates_tasks(args: "Options") -> bool:
    """Return whether tasks are evaluated: those of --tasks, or the paper's eight without --val."""
    return bool(args.tasks) or (args.tasks is None and not args.val)


@dataclass(frozen=True)
class Options:
    """What is evaluated, and how"""

    runs: tuple[str, ...] = argument(
        "run folders (their latest checkpoints are used), checkpoint folders, folders exported by "
        "export.py, or models released by the paper's authors"
    )
    tasks: str | None = option(
        None,
        "comma-separated names of tasks, groups or tags of lm-evaluation-harness; paper stands for "
        "the paper's eight tasks (default: paper, but no tasks if --val is given)",
    )
    shots: str | None = option(
        None,
        "comma-separated numbers of few-shot examples, such as 0,1; tasks that are defined as "
        "0-shot in their file stay 0-shot (default: 0,1 for the paper's tasks, otherwise the number in "
        "the file of each task, or 0)",
    )
    include_path: str | None = option(
        None,
        "folder with task files (YAML) of your own, as in lm-eval (default: lm-eval's tasks only)",
    )
    val: bool | str = option(
        False,
        "compute the loss on a validation split: --val for the dataset that the run was trained on, "
        "--val=DATASET for a folder with token shards or its name in data/",
    )
    batch_size: int | None = option(
        None,
        "maximum number of sequences per forward pass (default: 512 on a GPU, 64 on a CPU)",
        low=1,
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto", "compute dtype (autocast); auto is bfloat16 on a GPU and float32 on a CPU"
    )
    device: Literal["auto", "cuda", "cpu"] = option(
        "auto", "device to run on; auto uses the GPU if there is one"
    )
    limit: int | None = option(
        None,
        "evaluate only this many items of each task, for a quick test (default: all items)",
        low=1,
    )
    log_samples: bool = option(
        False, "also write every item with its results, as lm-eval's --log_samples does"
    )
    out: str | None = option(
        None, "folder for the results of all models (default: eval/ in each run folder)"
    )


def parse_shots(text: str | None, names: list[str]) -> list[int | None]:
    """Return the numbers that --shots gives, each once.

    Without them, they are the paper's for the paper's tasks, and [None] for others.
    """
    if text is None:
        return [0, 1] if names == list(tasks.PAPER_METRICS) else [None]
    numbers = text.split(",")
    if not all(number.isdecimal() for number in numbers):
        raise ValueError(f"--shots={text}: give whole numbers separated by commas, such as 0,1")
    return list(dict.fromkeys(map(int, numbers)))


def evaluate_validation(
    model: GPT, corpus: Corpus, settings: dict, device: torch.device, autocast: torch.autocast
) -> dict:
    """Return the record of the whole validation split: loss, perplexity and bits per byte."""
    block_size = model.config.block_size
    batches = open_validation_batches(corpus, block_size)
    with torch.no_grad():
        scores = validation.evaluate(
            model,
            batches,
            list(range(batches.num_sequences)),
            max(min(settings["batch_size"], MAX_VALIDATION_TOKENS // block_size), 1),
            processes.World(0, 1, device),
            autocast,
        )
    loss = scores.pop("loss")
    return {
        "dataset": corpus.path.name,
        "corpus": corpus.identity,
        "settings": settings,
        "validation": {
            **metrics.compute_validation_metrics(loss, corpus.bytes_per_token("val")),
            **{f"val_{key}": value for key, value in scores.items()},
        },
        "tokens": batches.num_targets,
    }


def evaluate_tasks(
    model: GPT,
    tokenizer: Tokenizer,
    names: list[str],
    manager: "TaskManager",
    num_shots: int | None,
    settings: dict,
    autocast: torch.autocast,
    log_samples: bool,
) -> dict:
    """Return lm-eval's results as a record, with its items as "samples"."""
    from evaluation.language_model import LanguageModel  # needs lm-eval

    language_model = LanguageModel(model, tokenizer, settings["batch_size"], autocast)
    results = tasks.evaluate(
        language_model, names, manager, num_shots, settings["limit"], log_samples
    )
    if language_model.num_cut:
        print(
            f"note: {language_model.num_cut:,} contexts were cut on the left to "
            f"block_size={language_model.max_length}"
        )
    shown = [result._asdict() for result in tasks.choose_results(results)]
    return {**results, "settings": settings, "shown": shown}


def evaluate_model(
    args: SimpleNamespace,
    folder: ModelFolder,
    corpus: Corpus | None,
    names: list[str],
    manager: "TaskManager | None",
    device: torch.device,
) -> tuple[list[dict], published.Published]:
    """Evaluate a model on a corpus, unless it is None, and on tasks; write and print each result.

    Returns:
        The records of the model, and what the paper reports for it.
    """
    model, tokenizer = folder.load(device)
    kernels.use(model, "auto", device)
    dtype = processes.get_compute_dtype(args.dtype, device)
    autocast = torch.autocast(device.type, dtype, enabled=dtype != torch.float32)
    settings = {
        "dtype": format_dtype(dtype),
        "batch_size": args.batch_size or (512 if device.type == "cuda" else 64),
        "limit": args.limit,
    }

    records = []
    if corpus is not None:
        records.append(evaluate_validation(model, corpus, settings, device, autocast))
        finish(args, folder, records[-1])
    for num_shots in parse_shots(args.shots, names) if names else []:
        records.append(
            evaluate_tasks(
                model, tokenizer, names, manager, num_shots, settings, autocast, args.log_samples
            )
        )
        finish(args, folder, records[-1])
    dataset = "" if corpus is None else corpus.path.name
    return records, published.find(folder.model, model.config, folder.state, dataset)


def finish(args: SimpleNamespace, folder: ModelFolder, record: dict) -> None:
    """Write the record of a model, and print it as one line."""
    record["weights"] = folder.identity
    record["label"] = folder.label
    write_record(record, get_output_folder(args, folder))
    if "shown" in record:
        results = [tasks.Result(**fields) for fields in record["shown"]]
        parts = [
            f"{each.task} {each.metric} {each.value:.2f} ({each.shots}-shot)" for each in results
        ]
    else:
        parts = [f"{key} {value:.4f}" for key, value in record["validation"].items()]
    print(f"{folder.label}: {', '.join(parts)}", flush=True)


def get_output_folder(args: SimpleNamespace, folder: ModelFolder) -> Path:
    """Return the folder of a model's results."""
    return Path(args.out) if args.out else folder.results_folder()


def write_record(record: dict, folder: Path) -> None:
    """Write results_DATE.json, and lm-eval's samples_TASK_DATE.jsonl if there are samples."""
    folder.mkdir(parents=True, exist_ok=True)
    samples = record.pop("samples", {})
    path = folder / f"results_{datetime.datetime.now().isoformat().replace(':', '-')}.json"
    text = files.to_json({**record, **collect_provenance()}, indent=1, default=str)
    files.write_text(path, text + "\n")
    if samples:
        from lm_eval.loggers import EvaluationTracker

        tracker = EvaluationTracker(output_path=str(path))
        tracker.date_id = path.stem.partition("_")[2]
        for name, items in samples.items():
            tracker.save_results_samples(name, items)


@processes.restored_state()
def main() -> None:
    args = read_command_line(__doc__, Options)
    with errors.one_line_errors(out_of_memory_advice="give a smaller --batch_size"):
        # mistakes in the command are reported before any work is done
        if machine.world_size() > 1:
            raise ValueError("eval.py runs as one process; start it without torchrun")
        names = tasks.parse_names(args.tasks or "paper") if evaluates_tasks(args) else []
        if not names and not args.val:
            raise ValueError("--tasks names no task; give at least one task, or --val")
        parse_shots(args.shots, names)
        device = processes.pick_device(args.device)
        folders = [describe(path) for path in args.runs]
        # --val stands for the dataset that a run was trained on
        dataset = "" if args.val is True else args.val
        corpora = [folder.open_corpus(dataset) if args.val else None for folder in folders]
        manager = None
        if names:
            check_tokens_are_text(folders)
            manager = tasks.make_task_manager(names, args.include_path)
            tasks.check_tasks(names, manager)
        records: list[dict] = []
        papers: dict[str, published.Published] = {}
        for folder, corpus in zip(folders, corpora, strict=True):
            new_records, papers[folder.identity] = evaluate_model(
                args, folder, corpus, names, manager, device
            )
            records += new_records
        text = comparison.format_table(records, papers)
        print(f"\n{text}")
        for output_folder in sorted({get_output_folder(args, folder) for folder in folders}):
            files.write_text(output_folder / "table.md", text)
            print(f"written to {output_folder}")


def check_tokens_are_text(folders: list[ModelFolder]) -> None:
    """Raise ValueError if the tokens of a model are ids of a synthetic corpus, and not text."""
    for folder in folders:
        if read_tokenizer(folder.path).name == "ids":
            raise ValueError(
                f"{folder.path}: the tokens of this model are ids, not text, so it cannot be "
                "evaluated on tasks; give --val without --tasks"
            )


if __name__ == "__main__":
    main()
