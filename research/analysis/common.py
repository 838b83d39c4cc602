"""What the analyses of trained models share: options, validation sequences, storing."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import numpy as np
import torch

from configurator import argument, option
from data import loader
from data.loader import ValidationBatches
from data.tokenizer import Tokenizer
from model.gpt import GPT
from model_folder import ModelFolder, describe, find_run_folder
from research import plots, runs
from research.storage import Figures
from utils import processes

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


@dataclass(frozen=True)
class LoadedRun:
    """A trained model, and the validation sequences on which it is measured.

    label: that of the run in tables and lines of progress. sequences: indices of sequences of the
    validation split.
    """

    label: str
    model: GPT
    encoding: Tokenizer
    batches: ValidationBatches
    sequences: list[int]

    @property
    def device(self) -> torch.device:
        return self.model.transformer.wte.weight.device

    def iterate_batches(self, batch_size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield ids and targets, int64 (batch_size or fewer, seq_len), of all sequences in turn.

        A long measurement prints a line now and then.
        """
        last_print_time = time.monotonic()
        for start in range(0, len(self.sequences), batch_size):
            if time.monotonic() - last_print_time > PROGRESS_INTERVAL:
                print(f"{self.label}: {start} of {len(self.sequences)} sequences", flush=True)
                last_print_time = time.monotonic()
            indices = self.sequences[start : start + batch_size]
            ids, targets = self.batches.get(indices, len(indices))
            yield ids.to(self.device), targets.to(self.device)


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


def prepare_output_file(args: SimpleNamespace, name: str) -> Path:
    """Return the path of a command's JSON file, and create its folder."""
    run_folders = [find_run_folder(Path(path)) for path in args.runs]
    out = Path(args.json or runs.find_common_folder(run_folders) / f"{name}.json")
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
            if key not in {*runs.HIDDEN_SETTINGS, "model", "seed"}
        },
    }


def analyze_runs(
    args: SimpleNamespace,
    measure: Callable[[LoadedRun, SimpleNamespace], dict],
    summarize: Callable[[dict], str],
    finish: Callable[[list[dict], Path], None],
) -> None:
    """Measure every run and store its row; then print and draw all rows.

    Args:
        measure: returns the figures of a row
        summarize: returns the line that is printed of a row
        finish: prints the rows, and draws them beside the JSON file

    Raises:
        ValueError: there is no such run, or its corpus is missing
    """
    device = processes.pick_device(args.device)
    # entered first, because a missing package should be noticed before anything is measured
    with plots.use_print_style():
        folders = [describe(path) for path in args.runs]
        corpora = [folder.open_corpus(args.dataset or "", option="--dataset") for folder in folders]
        out = prepare_output_file(args, args.command)
        figures = Figures(out)
        for folder, corpus in zip(folders, corpora):
            model, encoding = folder.load(device)
            batches = loader.open_validation_batches(corpus, model.config.block_size)
            sequences = select_sequences(batches, args.windows)
            run = LoadedRun(folder.label, model, encoding, batches, sequences)
            row = {
                **describe_run(folder, model),
                "sequences": len(sequences),
                **measure(run, args),
            }
            print(f"{folder.label}: {summarize(row)}", flush=True)
            figures.add(row)
        finish(figures.rows, out)
    print(f"wrote {out}, and drew its figures beside it")
