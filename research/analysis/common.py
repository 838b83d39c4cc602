"""What the analyses of trained models share: options, validation sequences, storing."""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from configurator import argument, option
from data import loader
from data.loader import IGNORED_TARGET, ValidationBatches
from data.shards import Corpus
from model.block import State
from model.gpt import GPT
from model_folder import ModelFolder, describe, find_run_folder
from research import plots
from research.runs import HIDDEN_SETTINGS
from research.storage import store_figures
from utils import processes
from utils.provenance import collect_provenance

PROGRESS_INTERVAL = 20.0  # seconds between two lines of progress


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


def prepare_output_file(args: SimpleNamespace, name: str) -> Path:
    """Return the path of a command's JSON file, and create its folder."""
    run_folders = {find_run_folder(Path(path)) for path in args.runs}
    if args.json:
        out = Path(args.json)
    elif len(run_folders) == 1:
        out = run_folders.pop() / f"{name}.json"
    else:
        out = Path(os.path.commonpath([run.parent for run in run_folders])) / f"{name}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    return out


def describe_run(folder: ModelFolder, model: GPT) -> dict:
    """Return what every stored row says of its run: label, model, layers, step, seed and settings."""
    run_config = folder.state.get("run_config", {})
    settings = {**run_config, **folder.state.get("model_config", {"folder": str(folder.path)})}
    return {
        "label": folder.label,
        "model": folder.model,
        "layers": model.config.num_hidden_layers,
        "step": folder.state.get("step"),
        "seed": run_config.get("seed"),
        "settings": {
            key: value
            for key, value in settings.items()
            if key not in {*HIDDEN_SETTINGS, "model", "seed"}
        },
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
    label: str = "",
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield ids and targets, int64 (batch_size or fewer, seq_len), of all sequences in turn.

    Args:
        sequences: indices of sequences of the split
        label: what is measured, for a line about a long measurement now and then
    """
    last_print_time = time.monotonic()
    for start in range(0, len(sequences), batch_size):
        if time.monotonic() - last_print_time > PROGRESS_INTERVAL:
            print(f"{label}: {start} of {len(sequences)} sequences", flush=True)
            last_print_time = time.monotonic()
        indices = sequences[start : start + batch_size]
        ids, targets = batches.get(indices, len(indices))
        yield ids.to(device), targets.to(device)


# ---- models ----


def get_device(model: GPT) -> torch.device:
    """Return the device of the model's parameters."""
    return model.transformer.wte.weight.device


def list_site_names(model: GPT) -> list[str]:
    """Return a name for each site in order: "0 attn", "0 mlp", "1 attn", and so on."""
    return [f"{site.layer} {site.name}" for block in model.transformer.h for site in block.sites]


def concatenate_state(state: State) -> torch.Tensor:
    """Return all numbers of each token side by side: (B, T, ...), or a tuple of such, -> (B, T, n)."""
    return torch.cat([part.flatten(2) for part in tree_leaves(state)], dim=-1)


# ---- commands ----


def analyze_runs(
    args: SimpleNamespace,
    name: str,
    measure: Callable[..., dict],
    summarize: Callable[[dict], str],
    finish: Callable[[list[dict], Path], None],
) -> None:
    """Measure every run and store its row; then print and draw all rows.

    Args:
        name: that of the command
        measure: measure(model, encoding, batches, sequences, args, label) -> figures of a row
        summarize: returns the line that is printed of a row
        finish: prints the rows, and draws them beside the JSON file

    Raises:
        ValueError: there is no such run, or its corpus is missing
    """
    origin = collect_provenance()
    device = processes.pick_device(args.device)
    rows = []
    # entered first, because a missing package should be noticed before anything is measured
    with plots.use_print_style():
        folders = [describe(path) for path in args.runs]
        corpora = [folder.open_corpus(args.dataset or "", option="--dataset") for folder in folders]
        out = prepare_output_file(args, name)
        for folder, corpus in zip(folders, corpora):
            model, encoding = folder.load(device)
            batches = open_validation_batches(model, corpus)
            sequences = select_sequences(batches, args.windows)
            row = {
                **describe_run(folder, model),
                "sequences": len(sequences),
                **measure(model, encoding, batches, sequences, args, folder.label),
            }
            rows.append(row)
            print(f"{folder.label}: {summarize(row)}", flush=True)
            store_figures(out, {"rows": rows}, origin)
        finish(rows, out)
    print(f"wrote {out}, and drew its figures beside it")
