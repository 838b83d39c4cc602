"""`analyze.py transfer`: whether the best learning rate of a narrow model is best for a wide one, with or without muP.

For each optimizer and width, a grid of learning rates, which are powers of two, is searched: first five around the best
one of the previous width, then further ones until the best one has a worse one on either side.
"""

import contextlib
import math
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import torch

from configurator import option
from data.loader import TrainBatches, ValidationBatches
from data.sequences import SequenceLayout
from data.shards import open_corpus
from model import build, model_class
from research import plots
from research.analysis import common
from research.benchmarks.figures import Figures
from training import distributed, optimizer
from training.config import TrainConfig
from training.provenance import compute_digest
from training.validation import evaluate
from utils import tables
from utils.units import format_duration

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# the code that a loss depends on
CODE = (
    "model/*.py",
    "data/loader.py",
    "data/sequences.py",
    "training/config.py",
    "training/optimizer.py",
    "training/validation.py",
    "research/analysis/transfer.py",
)
FIRST_MIDDLE = -6  # log2 of the learning rate in the middle of the first grid
RATES_ON_EACH_SIDE = 2  # of the middle, at first
MAX_RATES = 14  # for one optimizer and width
HEAD_DIM = 32
NUM_VALIDATION_SEQUENCES = 64


def train_and_evaluate(settings: dict, row: dict, device: torch.device) -> float | None:
    """Train a model and return its validation loss, in nats per token; None if it is not finite.

    Args:
        settings: those of the command
        row: the optimizer, width, muP and learning rate
    """
    corpus = open_corpus(settings["dataset"])
    vocab_size = corpus.meta["vocab_size"]
    layout = SequenceLayout.from_meta(corpus.meta)
    config = TrainConfig(
        optimizer=row["optimizer"],
        learning_rate=row["learning_rate"],
        max_steps=settings["steps"],
        warmup_steps=settings["steps"] // 5,
        global_batch_size=settings["batch_size"],
    )
    torch.manual_seed(config.seed)
    # `build` would refuse hidden_size_base without muP, where it has no effect
    model_config = model_class(settings["model"]).Config(
        hidden_size=row["width"],
        num_attention_heads=row["width"] // HEAD_DIM,
        head_dim=HEAD_DIM,
        num_hidden_layers=settings["layers"],
        block_size=settings["block_size"],
        vocab_size=vocab_size,
        mup=row["mup"],
        hidden_size_base=settings["base"],
    )
    model = build(settings["model"], model_config).to(device)
    optimizers = optimizer.build_optimizers(model, config)
    train_batches = TrainBatches(
        corpus.train,
        settings["block_size"],
        config.global_batch_size,
        config.seed,
        vocab_size,
        layout,
    )
    for step in range(config.max_steps):
        optimizer.set_learning_rates(optimizers, step, config)
        ids, targets = train_batches.get(step, 0, config.global_batch_size)
        _, loss = model(ids.to(device), targets.to(device))
        loss.backward()
        distributed.clip_grad_norm(model, config.grad_clip)
        for stepped_optimizer in optimizers:
            stepped_optimizer.step()
            stepped_optimizer.zero_grad()
    validation_batches = ValidationBatches(corpus.val, settings["block_size"], vocab_size, layout)
    metrics = evaluate(
        model,
        validation_batches,
        validation_batches.spread(NUM_VALIDATION_SEQUENCES),
        config.global_batch_size,
        distributed.start(device),
        contextlib.nullcontext(),
    )
    return metrics["loss"] if math.isfinite(metrics["loss"]) else None


# ---- the search ----


class Grid(NamedTuple):
    """The learning rates of one optimizer and width, with muP or without."""

    optimizer: str
    width: int
    mup: bool


class Search:
    """The searches of all optimizers and widths, and what the file of figures has of them."""

    def __init__(
        self, figures: Figures, device: torch.device, widths: list[int], optimizers: list[str]
    ):
        """widths: rising; the first one is the base, at which muP changes nothing"""
        self.figures = figures
        self.device = device
        self.widths = widths
        self.optimizers = optimizers

    def list_grids(self) -> list[Grid]:
        """Return all grids in the order of the search.

        The first width has only one for each optimizer, because muP changes nothing there.
        """
        return [
            Grid(name, width, mup)
            for width in self.widths
            for name in self.optimizers
            for mup in (True, False)
            if mup or width != self.widths[0]
        ]

    def get_losses(self, grid: Grid) -> dict[int, float]:
        """Return the losses that were measured, by log2 of the learning rate; inf if not finite."""
        key = {
            "optimizer": grid.optimizer,
            "width": grid.width,
            "mup": grid.mup or grid.width == self.widths[0],
        }
        losses = {}
        for row in self.figures.rows:
            if key.items() <= row.items():
                power = round(math.log2(row["learning_rate"]))
                losses[power] = math.inf if row["loss"] is None else row["loss"]
        return dict(sorted(losses.items()))

    def choose_next_power(self, grid: Grid) -> int | None:
        """Return log2 of the learning rate to try next; None when the search has ended.

        It ends when the best learning rate has a worse one on either side, or after MAX_RATES.
        """
        losses = self.get_losses(grid)
        middle = FIRST_MIDDLE
        index = self.widths.index(grid.width)
        if index > 0:
            narrower_losses = self.get_losses(grid._replace(width=self.widths[index - 1]))
            if narrower_losses:
                middle = min(narrower_losses, key=narrower_losses.get)
        for power in range(middle - RATES_ON_EACH_SIDE, middle + RATES_ON_EACH_SIDE + 1):
            if power not in losses:
                return power
        best = min(losses, key=losses.get)
        lowest_power = min(losses)
        highest_power = max(losses)
        if lowest_power < best < highest_power:
            return None
        if len(losses) >= MAX_RATES:
            print(
                f"note: {grid.optimizer}, d={grid.width}: the best of {MAX_RATES} learning rates is "
                "at the end of the grid",
                flush=True,
            )
            return None
        return best - 1 if best == lowest_power else best + 1

    def estimate_seconds_left(self) -> float:
        """Estimate how long the first grids take that are left.

        A width that was not measured yet is taken to need three times as long as the one before.
        """
        seconds_left = 0.0
        seconds_per_rate = dict.fromkeys(self.optimizers, 1.0)
        for grid in self.list_grids():
            measured = [
                row["seconds"]
                for row in self.figures.rows
                if row["optimizer"] == grid.optimizer and row["width"] == grid.width
            ]
            if measured:
                seconds_per_rate[grid.optimizer] = sum(measured) / len(measured)
            elif grid.mup and grid.width > self.widths[0]:
                seconds_per_rate[grid.optimizer] *= 3
            elif grid.mup:
                seconds_per_rate[grid.optimizer] = max(seconds_per_rate.values())
            num_left = max(2 * RATES_ON_EACH_SIDE + 1 - len(self.get_losses(grid)), 0)
            seconds_left += seconds_per_rate[grid.optimizer] * num_left
        return seconds_left

    def run(self) -> None:
        """Search all grids, and store each loss."""
        for grid in self.list_grids():
            while (power := self.choose_next_power(grid)) is not None:
                self.measure(grid, power)

    def measure(self, grid: Grid, power: int) -> None:
        """Measure and store the loss at learning rate 2^power."""
        row = {
            "optimizer": grid.optimizer,
            "width": grid.width,
            "mup": grid.mup,
            "learning_rate": 2.0**power,
        }
        start_time = time.monotonic()
        loss = train_and_evaluate(self.figures.settings, row, self.device)
        seconds = round(time.monotonic() - start_time, 1)
        self.figures.add({**row, "loss": loss, "seconds": seconds})
        print(
            f"{grid.optimizer} {'muP' if grid.mup else 'plain'} d={grid.width} rate 2^{power}: "
            f"loss {loss}; about {format_duration(self.estimate_seconds_left())} left",
            flush=True,
        )

    def find_best_rates(self, optimizer_name: str, mup: bool) -> list[float]:
        """Return the best learning rate of each width."""
        return [
            find_lowest_point(self.get_losses(Grid(optimizer_name, width, mup)))
            for width in self.widths
        ]


def find_lowest_point(losses: dict[int, float]) -> float:
    """Return the learning rate at the lowest point of a parabola through three losses.

    They are those at the best power of two and at its neighbors. If a neighbor is missing or not
    finite, the best power of two itself is returned.

    losses: by log2 of the learning rate
    """
    power = min(losses, key=losses.get)
    lower_loss = losses.get(power - 1, math.inf)
    best_loss = losses[power]
    higher_loss = losses.get(power + 1, math.inf)
    if math.isinf(lower_loss) or math.isinf(higher_loss):
        return 2.0**power
    curvature = lower_loss - 2 * best_loss + higher_loss
    return 2.0 ** (power + (lower_loss - higher_loss) / (2 * curvature))


def fit_drift(widths: list[int], rates: list[float]) -> float:
    """Return the least-squares slope of the logarithm of the best learning rate over that of the width.

    It is 0 if the best learning rate does not depend on the width.
    """
    return float(np.polyfit(np.log(widths), np.log(rates), 1)[0])


# ---- the table and the figure ----


def format_table(search: Search) -> str:
    """Return a table of the best learning rates and their drift."""
    rows = []
    for optimizer_name in search.optimizers:
        for mup in (True, False):
            rates = search.find_best_rates(optimizer_name, mup)
            rows.append(
                (
                    optimizer_name,
                    "muP" if mup else "plain",
                    *(f"{rate:.2g}" for rate in rates),
                    f"{fit_drift(search.widths, rates):+.2f}",
                )
            )
    header = ("", "", *(f"d={width}" for width in search.widths), "slope")
    return tables.format_markdown(header, rows)


MUP_LABEL = "best rate, muP"
PLAIN_LABEL = "plain"


def draw(search: Search) -> "Figure":
    """Draw a row of panels for each optimizer.

    The first two show the loss over the learning rate with muP and without, with a line for each
    width; the third one shows the best learning rate over the width.
    """
    width_labels = {width: f"d = {width}" for width in search.widths}
    labels = [*width_labels.values(), MUP_LABEL, PLAIN_LABEL]
    figure, axes = plots.make_panels(len(search.optimizers), 3, 2.1, labels)
    entries = {}
    for panels, optimizer_name in zip(axes, search.optimizers):
        best_rate_panel = panels[2]
        drifts = []
        for panel, mup in zip(panels, (True, False)):
            for color, (width, label) in zip(plots.COLORS, width_labels.items()):
                losses = search.get_losses(Grid(optimizer_name, width, mup))
                finite = {2.0**power: loss for power, loss in losses.items() if math.isfinite(loss)}
                [entries[label]] = panel.plot(
                    list(finite), list(finite.values()), "o-", color=color
                )
                panel.axvline(find_lowest_point(losses), color=color, linestyle=":", alpha=0.6)
            panel.set_title(f"{optimizer_name}, {'with muP' if mup else 'without'}", loc="left")
            panel.set(xlabel="learning rate", xscale="log")
            plots.use_plain_numbers(panel.xaxis, label_minor_ticks=False)
            rates = search.find_best_rates(optimizer_name, mup)
            drifts.append(fit_drift(search.widths, rates))
            [entries[MUP_LABEL if mup else PLAIN_LABEL]] = best_rate_panel.plot(
                search.widths,
                rates,
                color="black",
                linestyle="-" if mup else "--",
                marker="s",
            )
        panels[1].sharey(panels[0])
        panels[0].set(ylabel="validation loss (nats)")
        best_rate_panel.set_title(
            f"best rate: slopes {drifts[0]:+.2f}, {drifts[1]:+.2f}", loc="left"
        )
        best_rate_panel.set(xlabel="hidden_size", xscale="log", yscale="log")
        for axis in (best_rate_panel.xaxis, best_rate_panel.yaxis):
            plots.use_plain_numbers(axis)
        best_rate_panel.set_xticks(search.widths, map(str, search.widths))
        best_rate_panel.set_xticks([], minor=True)
    plots.add_legend(figure, entries)
    return figure


# ---- the command ----


@dataclass(frozen=True)
class Options(common.WidthOptions):
    """Training, and where the figures are stored."""

    model: str = option("DDL-gpt-mha-rope-CC", "model variant to train")
    dataset: str = option("python_stdlib", "folder of token shards, or its name in data/")
    steps: int = option(100, "number of optimizer steps; the first fifth is warmup", low=1)
    layers: int = option(2, "number of blocks", low=1)
    block_size: int = option(64, "number of tokens per sequence", low=1)
    batch_size: int = option(4, "number of sequences per step", low=1)
    device: Literal["auto", "cuda", "cpu"] = option(
        "auto",
        "device to train on; auto uses the GPU if there is one",
    )
    json: str = option("runs/mup_transfer.json", common.FIGURES_HELP)


def run(args: SimpleNamespace) -> None:
    """Measure what is missing in the file of figures; then print the table and draw the figure."""
    plots.use_print_style()  # a missing package should be noticed before anything is measured
    json_file = Path(args.json)
    widths = common.parse_widths(args.widths)
    optimizers = common.parse_optimizers(args.optimizers)
    model_class(args.model)  # raises, and suggests others
    device = distributed.pick_device(args.device)
    settings = {
        "model": args.model,
        "dataset": args.dataset,
        "corpus": open_corpus(args.dataset).identity,
        "steps": args.steps,
        "layers": args.layers,
        "block_size": args.block_size,
        "batch_size": args.batch_size,
        "base": widths[0],
    }
    figures = Figures(json_file, device, settings, resume=True, code=compute_digest(*CODE)[:12])
    search = Search(figures, device, widths, optimizers)
    search.run()
    print(format_table(search))
    out = json_file.with_suffix(".png")
    with plots.use_print_style():
        plots.save(draw(search), out)
    print(f"wrote {json_file}, drew {out}")
