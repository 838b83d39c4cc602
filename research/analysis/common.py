"""What the analyses of trained models share: options, validation sequences, storing and drawing."""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from configurator import argument, option
from data import loader
from data.loader import IGNORED_TARGET, ValidationBatches
from data.shards import Corpus
from model.gpt import GPT
from model_folder import ModelFolder, describe, find_run_folder
from research import plots
from utils import processes
from utils.provenance import collect_provenance, store_figures
from utils.units import format_duration

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PROGRESS_INTERVAL = 20.0  # seconds between two lines of progress


FIGURES_HELP = (
    "file to store the figures in; figures that it already contains are not measured again, and a "
    "picture is drawn beside it"
)


@dataclass(frozen=True)
class RunOptions:
    """What is measured, and where the figures are stored."""

    runs: tuple[str, ...] = argument("run, checkpoint or exported folders")
    dataset: str | None = option(
        None,
        "folder of token shards (default: the one that the run was trained on)",
    )
    windows: int = option(16, "number of validation sequences", low=1)
    rows: int = option(8, "number of sequences per forward pass", low=1)
    device: Literal["auto", "cuda", "cpu"] = option(
        "auto",
        "device to compute on; auto uses the GPU if there is one",
    )
    json: str | None = option(
        None,
        "file to store the figures in; pictures are drawn beside it (default: COMMAND.json in the "
        "run folder, or in the folder that contains all runs)",
    )


def find_folders(args: SimpleNamespace) -> list[ModelFolder]:
    """Return the folders of args.runs.

    Raises:
        ValueError: there is no such run, or its corpus is missing
    """
    folders = [describe(path) for path in args.runs]
    for folder in folders:
        folder.open_corpus(args.dataset or "", option="--dataset")
    return folders


def find_common_folder(paths: list[str]) -> Path:
    """Return the folder of a single run, or the folder that contains all runs."""
    runs = {find_run_folder(Path(path)) for path in paths}
    if len(runs) == 1:
        return runs.pop()
    return Path(os.path.commonpath([run.parent for run in runs]))


def prepare_output_file(args: SimpleNamespace, name: str) -> Path:
    """Return the path of a command's JSON file, and create its folder."""
    out = find_common_folder(args.runs) / f"{name}.json"
    if args.json:
        out = Path(args.json)
    out.parent.mkdir(parents=True, exist_ok=True)
    return out


def describe_run(folder: ModelFolder, model: GPT) -> dict:
    """Return what every stored row says of its run: label, model, layers, step and seed."""
    return {
        "label": folder.label,
        "model": folder.model,
        "layers": model.config.num_hidden_layers,
        "step": folder.state.get("step"),
        "seed": folder.state.get("run_config", {}).get("seed"),
    }


# ---- validation sequences ----


def open_validation_batches(model: GPT, corpus: Corpus) -> ValidationBatches:
    """Return the validation split of a corpus in sequences of the model's block_size."""
    return loader.open_validation_batches(corpus, model.config.block_size)


def select_sequences(batches: ValidationBatches, count: int) -> list[int]:
    """Return the indices of `count` sequences, or of all, spread evenly over the split.

    A last sequence that is shorter than the others is never selected.

    Raises:
        ValueError: there is no sequence of full length
    """
    num_full_sequences = batches.num_full_sequences
    if num_full_sequences < 1:
        raise ValueError(
            f"the validation split has no sequence of block_size={batches.seq_len} tokens; prepare "
            "a larger one, or give another corpus with --dataset"
        )
    spread = np.linspace(0, num_full_sequences - 1, min(count, num_full_sequences))
    return sorted(set(spread.round().astype(int).tolist()))


def count_targets(batches: ValidationBatches, sequences: list[int]) -> torch.Tensor:
    """Return how many targets of each sequence count in the loss, int64 (len(sequences),).

    In some tasks, documents have different numbers of labels.
    """
    _, targets = batches.get(sequences, len(sequences))
    return (targets != IGNORED_TARGET).sum(1)


def iterate_batches(
    batches: ValidationBatches,
    sequences: list[int],
    batch_size: int,
    device: torch.device,
    progress: Callable[[int], None] | None = None,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield ids and targets, int64 (batch_size or fewer, seq_len), of all sequences in turn.

    Args:
        sequences: indices of sequences of the split
        progress: called with the number of sequences so far after each batch has been used
    """
    for start in range(0, len(sequences), batch_size):
        indices = sequences[start : start + batch_size]
        ids, targets = batches.get(indices, len(indices))
        yield ids.to(device), targets.to(device)
        if progress is not None:
            progress(start + len(indices))


# ---- models ----


def get_device(model: GPT) -> torch.device:
    """Return the device of the model's parameters."""
    return model.transformer.wte.weight.device


def list_site_names(model: GPT) -> list[str]:
    """Return a name for each site in order: "0 attn", "0 mlp", "1 attn", and so on."""
    return [f"{site.layer} {site.name}" for block in model.transformer.h for site in block.sites]


# ---- commands ----


class Progress:
    """Print now and then how many of `total` units are finished, and an estimate of the rest."""

    def __init__(self, label: str, total: int, unit: str = "sequences"):
        self.label = label
        self.total = total
        self.unit = unit
        self.start_time = time.monotonic()
        self.last_print_time = self.start_time

    def __call__(self, num_finished: int) -> None:
        current_time = time.monotonic()
        if current_time - self.last_print_time <= PROGRESS_INTERVAL:
            return
        self.last_print_time = current_time
        seconds_per_unit = (current_time - self.start_time) / num_finished
        remaining = format_duration(seconds_per_unit * (self.total - num_finished))
        print(
            f"{self.label}: {num_finished} of {self.total} {self.unit}, {remaining} left",
            flush=True,
        )


def analyze_runs(
    args: SimpleNamespace,
    name: str,
    measure: Callable[..., dict],
    summarize: Callable[[dict], str],
    format_table: Callable[[list[dict]], str],
    draw: Callable[[list[dict]], "Figure"],
) -> None:
    """Measure every run and store its row; then print the table and draw the figure beside it.

    Args:
        name: that of the command
        measure: measure(model, encoding, batches, sequences, args, progress) -> figures of a row
        summarize: returns the line that is printed of a row
        format_table: returns the Markdown table of all rows
        draw: returns the figure of all rows

    Raises:
        ValueError: there is no such run, or its corpus is missing
    """
    origin = collect_provenance()
    device = processes.pick_device(args.device)
    rows = []
    # entered first, because a missing package should be noticed before anything is measured
    with plots.use_print_style():
        folders = find_folders(args)
        out = prepare_output_file(args, name)
        for folder in folders:
            model, encoding = folder.load(device)
            corpus = folder.open_corpus(args.dataset or "", option="--dataset")
            batches = open_validation_batches(model, corpus)
            sequences = select_sequences(batches, args.windows)
            progress = Progress(folder.label, len(sequences))
            row = {
                **describe_run(folder, model),
                "sequences": len(sequences),
                **measure(model, encoding, batches, sequences, args, progress),
            }
            rows.append(row)
            print(f"{folder.label}: {summarize(row)}", flush=True)
            store_figures(out, {"rows": rows}, origin)
        print(format_table(rows))
        picture = out.with_suffix(".png")
        plots.save(draw(rows), picture)
    print(f"wrote {out}, drew {picture}")
