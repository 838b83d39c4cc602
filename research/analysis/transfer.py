"""`analyze.py transfer`: does the best learning rate of a narrow model stay that of a wide one? With and without muP.

For each optimizer and width a grid of learning rates, powers of two, is searched: five around the best one of the width
before, then further out until the best of them has a worse one on either side.
"""

import contextlib
import math
import time

import numpy as np
import torch

from data.loader import TrainBatches, ValidationBatches
from data.sequences import SequenceLayout
from data.shards import open_corpus
from model import MODEL_NAMES, build
from research import plots
from research.benchmarks.figures import Figures
from training import distributed, optimizer
from training.config import TrainConfig
from training.provenance import compute_digest
from training.validation import evaluate
from utils import tables
from utils.units import format_duration

CODE = (
    "model/*.py",
    "data/loader.py",
    "data/sequences.py",
    "training/optimizer.py",
)  # what a loss depends on
FIRST = -6  # log2 of the rate in the middle of the first grid
AROUND, MOST = 2, 14  # rates on either side of the middle; rates of a width, at most
VALIDATION_WINDOWS = 64


def trained_loss(settings: dict, row: dict, device: torch.device) -> float | None:
    """Validation loss in nats per token of the model of `row` after training; None: it is not finite."""
    corpus, size = open_corpus(settings["dataset"]), settings["block_size"]
    keys = {
        "optimizer": row["optimizer"],
        "learning_rate": row["learning_rate"],
        "max_steps": settings["steps"],
    }
    config = TrainConfig(
        **keys, warmup_steps=settings["steps"] // 5, global_batch_size=settings["batch_size"]
    )
    torch.manual_seed(config.seed)
    shape = {"hidden_size": row["width"], "num_attention_heads": row["width"] // 32, "head_dim": 32}
    shape |= {
        "num_hidden_layers": settings["layers"],
        "block_size": size,
        "vocab_size": corpus.meta["vocab_size"],
    }
    model = build(settings["model"], **shape, mup=row["mup"], hidden_size_base=settings["base"]).to(
        device
    )
    optimizers = optimizer.build_optimizers(model, config)
    known, layout = corpus.meta["vocab_size"], SequenceLayout.from_meta(corpus.meta)
    batches = TrainBatches(corpus.train, size, config.global_batch_size, config.seed, known, layout)
    for step in range(config.max_steps):
        optimizer.set_learning_rates(optimizers, step, config)
        ids, targets = batches.get(step, 0, config.global_batch_size)
        model(ids.to(device), targets.to(device))[1].backward()
        distributed.clip_grad_norm(model, config.grad_clip)
        for each in optimizers:
            each.step()
            each.zero_grad()
    validation = ValidationBatches(corpus.val, size, known, layout)
    windows, world = validation.spread(VALIDATION_WINDOWS), distributed.start(device)
    loss = evaluate(
        model, validation, windows, config.global_batch_size, world, contextlib.nullcontext()
    )["loss"]
    return loss if math.isfinite(loss) else None


class Search:
    """The searches of all optimizers and widths, with what the file of figures has of them."""

    def __init__(
        self, figures: Figures, device: torch.device, widths: list[int], optimizers: list[str]
    ):
        self.figures, self.device, self.widths, self.optimizers = (
            figures,
            device,
            widths,
            optimizers,
        )

    def lines(self) -> list[tuple[str, int, bool]]:
        """(optimizer, width, muP) of every grid; at the first width, the base, muP changes nothing: it has one."""
        return [
            (name, width, mup)
            for width in self.widths
            for name in self.optimizers
            for mup in (True, False)
            if mup or width != self.widths[0]
        ]

    def losses(self, name: str, width: int, mup: bool) -> dict[int, float]:
        """{log2 of the rate: loss} of what is known."""
        key = {"optimizer": name, "width": width, "mup": mup or width == self.widths[0]}
        rows = [row for row in self.figures.rows if key.items() <= row.items()]
        found = {round(math.log2(row["learning_rate"])): row["loss"] for row in rows}
        return {
            power: math.inf if found[power] is None else found[power] for power in sorted(found)
        }

    def next_power(self, name: str, width: int, mup: bool) -> int | None:
        """log2 of the rate to try next, None where the best one has a worse one on either side."""
        known, place = self.losses(name, width, mup), self.widths.index(width)
        before = self.losses(name, self.widths[place - 1], mup) if place else {}
        middle = min(before, key=before.get) if before else FIRST
        for power in range(middle - AROUND, middle + AROUND + 1):
            if power not in known:
                return power
        best = min(known, key=known.get)
        if len(known) >= MOST and best in (min(known), max(known)):
            print(
                f"note: {name}, d={width}: the best of {MOST} rates is the last that was tried",
                flush=True,
            )
        if len(known) >= MOST or min(known) < best < max(known):
            return None
        return best - 1 if best == min(known) else best + 1

    def seconds_left(self) -> float:
        """An estimate; a width that was not measured takes three times as long as the one before."""
        left, seconds = 0.0, dict.fromkeys(self.optimizers, 1.0)
        for name, width, mup in self.lines():
            key = {"optimizer": name, "width": width}
            known = [row["seconds"] for row in self.figures.rows if key.items() <= row.items()]
            if known:
                seconds[name] = sum(known) / len(known)
            elif mup:
                seconds[name] = (
                    3 * seconds[name] if width > self.widths[0] else max(seconds.values())
                )
            left += seconds[name] * max(2 * AROUND + 1 - len(self.losses(name, width, mup)), 0)
        return left

    def run(self) -> None:
        for name, width, mup in self.lines():
            while (power := self.next_power(name, width, mup)) is not None:
                row = {"optimizer": name, "width": width, "mup": mup, "learning_rate": 2.0**power}
                started = time.monotonic()
                loss = trained_loss(self.figures.settings, row, self.device)
                self.figures.add(
                    {**row, "loss": loss, "seconds": round(time.monotonic() - started, 1)}
                )
                said = f"{name} {'muP' if mup else 'plain'} d={width} rate 2^{power}: loss {loss}"
                print(f"{said}; about {format_duration(self.seconds_left())} left", flush=True)

    def best(self, name: str, mup: bool) -> list[float]:
        """The best rate of each width."""
        return [lowest(self.losses(name, width, mup)) for width in self.widths]


def lowest(losses: dict[int, float]) -> float:
    """The rate at the lowest point of the parabola through the best power of two and its neighbours."""
    power = min(losses, key=losses.get)
    left, middle, right = (losses.get(power + i, math.inf) for i in (-1, 0, 1))
    if math.isinf(left) or math.isinf(right):
        return 2.0**power
    return 2.0 ** (power + (left - right) / (2 * (left - 2 * middle + right)))


def drift(widths: list[int], rates: list[float]) -> float:
    """Least-squares slope of the logarithm of the best rate over that of the width: 0 where it stays."""
    return float(np.polyfit(np.log(widths), np.log(rates), 1)[0])


def markdown(search: Search) -> str:
    rows = []
    for name in search.optimizers:
        for mup in (True, False):
            rates = search.best(name, mup)
            cells = [f"{rate:.2g}" for rate in rates]
            rows.append(
                (name, "muP" if mup else "plain", *cells, f"{drift(search.widths, rates):+.2f}")
            )
    return tables.format_markdown(
        ("", "", *(f"d={width}" for width in search.widths), "slope"), rows
    )


def draw(search: Search):
    """A row an optimizer: loss over rate with muP and without, a line a width; the best rate over
    width."""
    names, widths, entries = search.optimizers, search.widths, {}
    labels = [f"d = {width}" for width in widths] + ["best rate, muP", "plain"]
    figure, axes = plots.make_panels(len(names), 3, 2.1, labels)
    for row, name in zip(axes, names):
        for panel, mup in zip(row, (True, False)):
            for color, (width, label) in zip(plots.COLORS, zip(widths, labels)):
                losses = search.losses(name, width, mup)
                at = {2.0**p: loss for p, loss in losses.items() if math.isfinite(loss)}
                (entries[label],) = panel.plot(list(at), list(at.values()), "o-", color=color)
                panel.axvline(lowest(losses), color=color, linestyle=":", alpha=0.6)
            panel.set_title(f"{name}, {'with muP' if mup else 'without'}", loc="left")
            panel.set(xlabel="learning rate", xscale="log")
            plots.use_plain_numbers(panel.xaxis, label_minor_ticks=False)
            rates, label = search.best(name, mup), labels[-2 if mup else -1]
            style = {"color": "black", "linestyle": "-" if mup else "--", "marker": "s"}
            (entries[label],) = row[2].plot(widths, rates, **style)
        row[1].sharey(row[0])
        row[0].set(ylabel="validation loss (nats)")
        slopes = [drift(widths, search.best(name, mup)) for mup in (True, False)]
        row[2].set_title("best rate: slopes {:+.2f}, {:+.2f}".format(*slopes), loc="left")
        row[2].set(xlabel="hidden_size", xscale="log", yscale="log")
        for axis in (row[2].xaxis, row[2].yaxis):
            plots.use_plain_numbers(axis)
        row[2].set_xticks(widths, map(str, widths))
        row[2].set_xticks([], minor=True)
    plots.add_legend(figure, entries)
    return figure


FILE = "mup_transfer"


def add_options(parser) -> None:
    add = parser.add_argument
    add("--model", choices=MODEL_NAMES, default="DDL-gpt-mha-rope-CC")
    add("--dataset", default="python_stdlib", help="folder of token shards (default: %(default)s)")
    steps = "optimizer steps, the first fifth warm-up (default: %(default)s)"
    add("--steps", type=int, default=100, help=steps)
    add("--layers", type=int, default=2, help="(default: %(default)s)")
    add("--block_size", type=int, default=64, help="tokens of a sequence (default: %(default)s)")
    add("--batch_size", type=int, default=4, help="sequences of a step (default: %(default)s)")
    add("--device", choices=("auto", "cuda", "cpu"), default="auto")


def run(args) -> None:
    """Measure what the file of figures lacks, storing each; then the table and the figure beside it."""
    plots.use_print_style()  # a missing package is known before the work
    device = distributed.pick_device(args.device)
    open_corpus(args.dataset)
    settings = {
        name: getattr(args, name)
        for name in ("model", "dataset", "steps", "layers", "block_size", "batch_size")
    }
    figures = Figures(
        args.json,
        device,
        {**settings, "base": args.widths[0]},
        resume=True,
        code=compute_digest(*CODE)[:12],
    )
    search = Search(figures, device, args.widths, args.optimizers)
    search.run()
    print(markdown(search))
    out = args.json.with_suffix(".png")
    with plots.use_print_style():
        plots.save(draw(search), out)
    print(f"wrote {args.json}, drew {out}")
