"""Evaluate models on the paper's eight tasks, on other lm-eval tasks, and by validation loss.

    python eval.py runs/ddl_dv4_small --shots=0,1            # the paper's tasks, 0-shot and 1-shot
    python eval.py runs/ddl_dv4_small runs/gpt_small --tasks=paper --val      # two runs compared
    python eval.py runs/demo_cpu --val                       # validation loss only
    python eval.py runs/NAME --tasks=my_task,lambada_openai --include_path=my_tasks
    torchrun --nproc_per_node=4 eval.py runs/NAME            # four GPUs, the same results

If the paper reports results for the variant and size of a model, the tables show them below the
model's own results, with a line that lists the settings in which the run differs from the paper's
recipe. Results are saved as JSON when a model is done with a number of shots. If an evaluation is
interrupted, rerun the command: it evaluates only what is not saved.

The exit code is 0 if everything was evaluated, 2 for a mistake in the command or in a task, and 3 if
some tasks could not be loaded; stderr then names them and the causes. (torchrun exits with code 1
instead of 2 or 3.)
"""

import itertools
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import torch

from configurator import argument, option, read_command_line
from data.shards import Corpus
from evaluation import comparison, published, subjects, tasks
from evaluation.runner import evaluate_tasks, evaluate_validation, read_other_records
from evaluation.tasks import DEFAULT_RETRY_MINUTES
from model import kernels
from model.decoding import round_matrices
from utils import errors, files, processes
from utils.processes import World
from utils.units import format_dtype

TABLE_FORMATS = {
    "md": comparison.format_markdown,
    "tex": comparison.format_latex,
    "csv": comparison.format_csv,
}


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
    shots: str = option(
        "0",
        "comma-separated numbers of few-shot examples, such as 0,1; tasks that are defined as "
        "0-shot in their file stay 0-shot",
    )
    include_path: str | None = option(
        None,
        "folder with task files (YAML) of your own, as in lm-eval (default: use lm-eval's tasks "
        "only)",
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
        "auto",
        "compute dtype (autocast); auto is bfloat16 on a GPU and float32 on a CPU",
    )
    device: Literal["auto", "cuda", "cpu"] = option(
        "auto",
        "device to run on; auto uses the GPU if there is one",
    )
    add_bos_token: bool = option(
        False,
        "put the end-of-text token before every text, as in training; by default there is none, as "
        "with lm-eval's hf model",
    )
    retry_minutes: float | None = option(
        None,
        "number of minutes to keep retrying for each task while the Hugging Face Hub does not respond "
        f"(default: {DEFAULT_RETRY_MINUTES:g}, but 0 if it cannot be reached at all)",
        low=0,
    )
    limit: int | None = option(
        None,
        "evaluate only this many items of each task, for a quick test (default: all items)",
        low=1,
    )
    log_samples: bool = option(
        False,
        "also write every item with its results to samples_TASK_DATE.jsonl, in lm-eval's format",
    )
    out: str | None = option(
        None,
        "folder for the results and the tables (default: eval/ in the run folder; for several runs, "
        "eval_A+B/ beside the runs A and B)",
    )


def parse_tasks(args: SimpleNamespace) -> list[str]:
    """Return the names that --tasks gives, each once, with `paper` replaced by its eight tasks.

    Raises:
        ValueError: there is none, and no --val
    """
    names: list[str] = []
    if evaluates_tasks(args):
        for name in (args.tasks or "paper").replace(" ", "").split(","):
            if name == "paper":
                names.extend(tasks.PAPER_METRICS)
            elif name:
                names.append(name)
    if not names and not args.val:
        raise ValueError("--tasks names no task; give at least one task, or --val")
    return list(dict.fromkeys(names))


def parse_shots(text: str) -> list[int]:
    """Return the numbers that --shots gives, each once."""
    numbers = text.split(",")
    if not all(number.isdecimal() for number in numbers):
        raise ValueError(f"--shots={text}: give whole numbers separated by commas, such as 0,1")
    return list(dict.fromkeys(map(int, numbers)))


def find_models(paths: list[str], has_tasks: bool) -> list[subjects.Subject]:
    """Find the models; if there are tasks, check that these can be evaluated on texts."""
    chosen_models = subjects.find_all(paths)
    if has_tasks:
        for subject in chosen_models:
            subjects.check_has_text(subject)
    return chosen_models


def open_corpora(chosen_models: list[subjects.Subject], val: bool | str) -> list[Corpus]:
    """Open the corpus of each model that --val gives; [] without the option."""
    if not val:
        return []
    # True stands for the dataset that a run was trained on
    dataset = "" if val is True else val
    return [subjects.open_corpus_of(subject, dataset) for subject in chosen_models]


def evaluate_model(
    args: SimpleNamespace,
    subject: subjects.Subject,
    corpus: Corpus | None,
    loaded_tasks: list[tasks.LoadedTask],
    shots: list[int],
    world: World,
    out: Path,
) -> tuple[list[dict], published.Published]:
    """Evaluate a model on a validation split, unless it is None, and then on the tasks.

    Returns:
        The records of the model, and what the paper reports for it.
    """
    device = world.device
    model, tokenizer, model_name = subject.load(device)
    kernels.use(model, "auto", device)
    dtype = processes.get_compute_dtype(args.dtype, device)
    # autocast would otherwise round the same weights again in every forward pass
    if dtype != torch.float32:
        round_matrices(model, dtype)
    paper = published.find(model_name, model.config, subject.state)
    settings = {
        "dtype": format_dtype(dtype),
        "batch_size": args.batch_size or (512 if device.type == "cuda" else 64),
    }
    records = []
    if corpus is not None:
        record = evaluate_validation(
            subject, model, corpus, world=world, settings=settings, out=out
        )
        records.append(record)
    if loaded_tasks:
        for num_shots in shots:
            record = evaluate_tasks(
                subject,
                model,
                tokenizer,
                loaded_tasks,
                num_shots=num_shots,
                world=world,
                settings={**settings, "add_bos_token": args.add_bos_token, "limit": args.limit},
                out=out,
                log_samples=args.log_samples,
            )
            records.append(record)
    return records, paper


def report(records: list[dict], papers: dict[str, published.Published], out: Path) -> None:
    """Print the tables of these records, and write those of everything that is stored to files."""
    if not records:
        print(f"nothing was evaluated; {out} is unchanged")
        return
    other_records = read_other_records(out, records)
    tables = comparison.make_tables([*records, *other_records], papers)
    for suffix, format_tables in TABLE_FORMATS.items():
        files.write_text(out / f"table.{suffix}", format_tables(tables), is_shared=True)
    print(comparison.format_for_terminal(comparison.make_tables(records, papers)))
    if other_records:
        print(f"\nwritten to {out}, where the tables include earlier results of these models")
    else:
        print(f"\nwritten to {out}")


def main() -> None:
    args = read_command_line(__doc__, Options)
    with errors.one_line_errors(out_of_memory_advice="give a smaller --batch_size"):
        # Mistakes in the command are reported before any work is done.
        task_names = parse_tasks(args)
        shots = parse_shots(args.shots)
        device = processes.pick_device(args.device)
        chosen_models = find_models(args.runs, bool(task_names))
        corpora = open_corpora(chosen_models, args.val)
        out = Path(args.out or subjects.default_out_folder(args.runs))

        world = processes.start(device)
        loaded_tasks: list[tasks.LoadedTask] = []
        missing_tasks: list[str] = []
        if task_names:
            loaded_tasks, missing_tasks = tasks.load_tasks(
                task_names, args.include_path, world, args.retry_minutes
            )
            for task in loaded_tasks:
                for num_shots in shots:
                    tasks.set_num_shots(task, num_shots)
        # processes with different tasks would wait for each other forever
        processes.check_agreement(
            world,
            {
                "the models": [subject.identity for subject in chosen_models],
                "the validation data": [corpus.identity for corpus in corpora],
                "the tasks that can be loaded": [task.name for task in loaded_tasks],
            },
        )
        records: list[dict] = []
        papers: dict[str, published.Published] = {}
        if loaded_tasks or corpora:
            out.mkdir(parents=True, exist_ok=True)
            # without --val, the corpus of each model is None
            for subject, corpus in itertools.zip_longest(chosen_models, corpora):
                new_records, papers[subject.identity] = evaluate_model(
                    args, subject, corpus, loaded_tasks, shots, world, out
                )
                records.extend(new_records)

        if world.is_main:
            report(records, papers, out)
            for message in missing_tasks:
                print(f"{Path(sys.argv[0]).name}: {message}; skipped", file=sys.stderr)
    processes.stop(world)
    sys.exit(3 if missing_tasks else 0)


if __name__ == "__main__":
    main()
