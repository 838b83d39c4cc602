"""What analyses of trained models share: options, validation sequences, what is stored and drawn."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from data.loader import ValidationBatches
from data.sequences import SequenceLayout
from evaluation import subjects
from evaluation.subjects import open_corpus_of
from research import plots
from training import distributed
from training.provenance import collect_provenance, store_figures
from utils.units import format_duration

SAY_AFTER = 20.0  # seconds without a line


def add_arguments(parser, name: str) -> None:
    """The options of a command over validation sequences of runs; `name` is that of its file."""
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN", help="run, checkpoint or exported folders")
    add("--dataset", help="folder of token shards (default: the run's own)")
    add("--windows", type=int, default=16, help="validation sequences (default: %(default)s)")
    add("--rows", type=int, default=8, help="sequences at once (default: %(default)s)")
    add("--device", choices=("auto", "cuda", "cpu"), default="auto")
    where = f"figures are beside it (default: {name}.json in the run, or beside the runs)"
    add("--json", type=Path, help=where)


def chosen(args) -> list[subjects.Subject]:
    """The subjects of args.runs. ValueError: one, or its corpus, is not there."""
    found = subjects.find_all(args.runs)
    for subject in found:
        open_corpus_of(subject, args.dataset or "")
    return found


def output(args, name: str) -> Path:
    """The JSON file of a command's figures, in a folder that is there."""
    out = args.json or subjects.default_out_folder(args.runs).parent / f"{name}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    return out


def about(subject, model, stem: str) -> dict:
    """What a stored row says of its run."""
    state = subject.state or {}
    row = {"label": subject.label, "model": stem, "layers": model.config.num_hidden_layers}
    return row | {"step": state.get("step"), "seed": state.get("run_config", {}).get("seed")}


def validation_batches(model, corpus) -> ValidationBatches:
    """The corpus's validation split, in sequences of the model's length."""
    layout, length = SequenceLayout.from_meta(corpus.meta), model.config.block_size
    return ValidationBatches(corpus.val, length, corpus.meta["vocab_size"], layout)


def whole_windows(batches: ValidationBatches, count: int) -> list[int]:
    """`count` windows, or all, evenly over the split; without the last where it is short.

    ValueError: there is none.
    """
    length, whole = batches.seq_len, batches.num_sequences
    if batches.stride == length:
        whole = (len(batches.tokens) - 1) // length
    if whole < 1:
        raise ValueError(
            f"the validation split has no whole sequence of block_size={length} tokens"
        )
    return sorted(set(np.linspace(0, whole - 1, min(count, whole)).round().astype(int).tolist()))


def in_batches(
    batches: ValidationBatches, windows: list[int], rows: int, device, progress=None
) -> Iterator[tuple]:
    """ids and targets, int64 (rows or fewer, seq_len), of all windows in turn.

    progress(done) is told of every batch that its receiver is finished with.
    """
    for first in range(0, len(windows), rows):
        chunk = windows[first : first + rows]
        yield tuple(tensor.to(device) for tensor in batches.get(chunk, len(chunk)))
        if progress:
            progress(first + len(chunk))


def device_of(model) -> torch.device:
    return model.transformer.wte.weight.device


def site_names(model) -> list[str]:
    return [f"{site.layer} {site.name}" for block in model.transformer.h for site in block.sites]


class Progress:
    """Says now and then how many of `total` are done, and how long the rest will take."""

    def __init__(self, label: str, total: int, what: str = "sequences"):
        self.label, self.total, self.what = label, total, what
        self.started = self.said = time.monotonic()

    def __call__(self, done: int) -> None:
        now = time.monotonic()
        if now - self.said > SAY_AFTER:
            self.said = now
            left = format_duration((now - self.started) / done * (self.total - done))
            print(f"{self.label}: {done} of {self.total} {self.what}, {left} left", flush=True)


def over_runs(
    args, name: str, measure: Callable, say: Callable, table: Callable, draw: Callable
) -> None:
    """Measure every run, storing each row; then print the table and draw the figure beside it.

    measure(model, encoding, batches, windows, args, progress) -> figures of a row;
    say(row) -> a line; table(rows) -> Markdown; draw(rows) -> a figure. ValueError: a run or its
    corpus is not there.
    """
    origin, device, rows = collect_provenance(), distributed.pick_device(args.device), []
    with plots.use_print_style():  # a missing package is known before the work
        found, out = chosen(args), output(args, name)
        for subject in found:
            model, encoding, stem = subject.load(device)
            batches = validation_batches(model, open_corpus_of(subject, args.dataset or ""))
            windows = whole_windows(batches, args.windows)
            progress = Progress(subject.label, len(windows))
            row = about(subject, model, stem) | {"sequences": len(windows)}
            rows.append(row | measure(model, encoding, batches, windows, args, progress))
            print(f"{subject.label}: {say(rows[-1])}", flush=True)
            store_figures(out, {"rows": rows}, origin)
        print(table(rows))
        picture = out.with_suffix(".png")
        plots.save(draw(rows), picture)
    print(f"wrote {out}, drew {picture}")
