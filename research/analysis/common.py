"""What the analyses of trained models share: runs, their validation sequences in batches, a line now and then."""

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from data.loader import ValidationBatches
from data.windows import Windows
from evaluation import subjects
from evaluation.subjects import open_corpus_of
from training.metrics import duration

SAY_AFTER = 20.0  # seconds without a line


def add_arguments(parser, name: str, windows: int = 16) -> None:
    """The keys of every command over validation sequences of runs; `name` is that of its file."""
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", help="run, checkpoint or exported folders")
    add("--dataset", help="folder of token shards (default: the run's own)")
    add("--windows", type=int, default=windows, help="validation sequences (default: %(default)s)")
    add("--rows", type=int, default=8, help="sequences at once (default: %(default)s)")
    add("--device", choices=("auto", "cuda", "cpu"), default="auto")
    add(
        "--json",
        type=Path,
        help=f"figures are beside it (default: {name}.json in the run, or beside the runs)",
    )


def chosen(args) -> list[subjects.Subject]:
    """The subjects of args.runs, whose corpora are there. ValueError: one, or its corpus, is not."""
    found = subjects.find_all(args.runs)
    for subject in found:
        open_corpus_of(subject, args.dataset or "")
    return found


def output(args, name: str) -> Path:
    """The JSON file of a command's figures, in a folder that is there."""
    out = args.json or subjects.home(args.runs).parent / f"{name}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    return out


def about(subject, model, stem: str) -> dict:
    """What a stored row says of its run."""
    state = subject.state or {}
    row = {"label": subject.label, "model": stem, "layers": model.config.num_hidden_layers}
    return row | {"step": state.get("step"), "seed": state.get("run_config", {}).get("seed")}


def validation_batches(model, corpus) -> ValidationBatches:
    """The corpus's validation split, in sequences of the model's length."""
    documents = Windows.of(corpus.meta)
    return ValidationBatches(
        corpus.val, model.config.block_size, corpus.meta["vocab_size"], documents
    )


def whole_windows(batches: ValidationBatches, count: int) -> list[int]:
    """`count` windows, or all, evenly over the split; the last one is left out where it is short."""
    whole = (
        (len(batches.tokens) - 1) // batches.seq_len
        if batches.stride == batches.seq_len
        else batches.windows
    )
    if whole < 1:
        raise ValueError(
            f"the validation split has no whole sequence of block_size={batches.seq_len} tokens"
        )
    return sorted(set(np.linspace(0, whole - 1, min(count, whole)).round().astype(int).tolist()))


def in_batches(
    batches: ValidationBatches, windows: list[int], rows: int, device, progress=None
) -> Iterator[tuple]:
    """ids and targets, int64 (rows or fewer, seq_len), of all windows in turn; progress(done) is told of every batch
    that its receiver is finished with."""
    for first in range(0, len(windows), rows):
        chunk = windows[first : first + rows]
        yield tuple(tensor.to(device) for tensor in batches.get(chunk, len(chunk)))
        if progress:
            progress(first + len(chunk))


def device_of(model) -> torch.device:
    return model.transformer.wte.weight.device


class Progress:
    """Says now and then how many of `total` are done, and how long the rest will take at the pace so far."""

    def __init__(self, label: str, total: int, what: str = "sequences"):
        self.label, self.total, self.what = label, total, what
        self.started = self.said = time.monotonic()

    def __call__(self, done: int) -> None:
        now = time.monotonic()
        if now - self.said > SAY_AFTER:
            self.said = now
            left = duration((now - self.started) / done * (self.total - done))
            print(f"{self.label}: {done} of {self.total} {self.what}, {left} left", flush=True)
