"""`report.py curves`: loss curves of runs in one picture."""

import os
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from research.reporting import bands, groups, sizes, style
from research.reporting.bands import Curve, Series
from research.reporting.runs import Run
from training import metrics

X_LABELS = {"steps": "optimizer step", "tokens": "tokens", "flops": "FLOPs", "seconds": "device-seconds of training"}
Y_LABELS = {"loss": "loss (nats per token)", "bits_per_byte": "bits per byte"}
VALIDATION = {"loss": "val_loss", "bits_per_byte": "val_bits_per_byte"}
MOST_TRACES = 8  # curves; behind more of them the unsmoothed ones would hide them
WIDEST_OF_TWO = 50  # characters of a label where the legend has two columns
SUFFIXES = ".png", ".svg", ".pdf", ".html"


@dataclass(frozen=True)
class Line:
    """What is drawn in one colour. training is smoothed, `raw` before it was, None of several runs; None where there is
    nothing."""

    label: str
    stem: str | None
    training: Curve | None
    validation: Curve | None
    raw: Series | None = None
    runs: int = 1


def series(run: Run, x: str, y: str, first_step: bool = True) -> tuple[Series, Series]:
    """(training, validation). ValueError: the size of the training text is not known."""
    scale = 1.0
    if y == "bits_per_byte":
        if run.bytes_per_token is None:
            raise ValueError("--y=bits_per_byte: it was trained on shards whose text size is unknown")
        scale = metrics.bits_per_byte(1.0, run.bytes_per_token)
    training = bands.series(run, run.training, "loss", (x,), first_step)
    return replace(training, values=training.values * scale), bands.series(
        run, run.evaluations, VALIDATION[y], (x,), first_step
    )


def line_of(found: list[tuple[Series, Series]], label: str, stem: str | None) -> Line:
    """A run with all of its points, or the mean over several at the steps that all of them have."""
    training, validation = zip(*found)
    if len(found) > 1:
        curves = bands.training_curve(training), bands.validation_curve(validation)
        return Line(label, stem, *curves, runs=len(found))
    curves = alone(training[0], bands.smoothed), alone(validation[0], lambda run: run.values)
    return Line(label, stem, *curves, training[0])


def alone(run: Series, values_of) -> Curve | None:
    values = values_of(run)
    return Curve(run.steps, run.x, values, np.full(len(values), np.nan), 1) if len(values) else None


def lines_of(runs: list[Run], x: str, y: str, band: bool, first_step: bool) -> tuple[list[Line], list[str]]:
    """(a line for each run, or with `band` for each setting over its seeds, in the paper's order; notes on runs that
    cannot be drawn)."""
    runs = sorted(runs, key=sizes.order)
    drawn, notes = [], []
    labels = groups.labels_of(runs) if len(runs) > 1 else [runs[0].stem or ""]
    for run, label in zip(runs, labels):
        if run.path.is_file():
            notes.append(f"{run.name}: {run.path.name} has no curves: give its run folder (results/archive.csv)")
            continue
        try:
            found = series(run, x, y, first_step)
        except ValueError as error:
            notes.append(f"{run.name}: {error}")
            continue
        if any(len(each.steps) for each in found):
            drawn.append((run, label, found))
        else:
            notes.append(f"{run.name}: no step with a loss")
    if not drawn:
        raise ValueError("; ".join(notes) + ": nothing to draw")
    runs = [run for run, _, _ in drawn]
    lines = [line_of([found], label, run.stem) for run, label, found in drawn]
    if band:
        by_run = {id(run): found for run, _, found in drawn}
        made = groups.groups_of(runs, same_step=False)
        lines = [line_of([by_run[id(run)] for run in group.runs], group.name, group.stem) for group in made]
        notes += [f"{group.name}: {line}" for group in made for line in group.cautions]
        notes += [f"{line.label}: its runs have no step in common" for line in lines if not curves_in(line)]
        lines = [line for line in lines if curves_in(line)]
    if not lines:
        raise ValueError("; ".join(notes) + ": nothing to draw")
    return lines, notes + warnings(lines, runs, y)


def curves_in(line: Line) -> list[Curve]:
    return [curve for curve in (line.training, line.validation) if curve]


def warnings(drawn: list[Line], runs: list[Run], y: str) -> list[str]:
    """What a reader of the picture must know, a line each."""
    lines = []
    if len(drawn) > style.DISTINCT:
        lines.append(f"{len(drawn)} curves share {style.DISTINCT} colours and styles: give --band or --where")
    names: dict[str, list[str]] = {}
    for run in runs:
        names.setdefault(" ".join(map(str, groups.vocabulary(run))), []).append(run.name)
    if y == "loss" and len(names) > 1:
        tokens = " | ".join(f"{vocabulary}: {', '.join(each)}" for vocabulary, each in names.items())
        lines.append(f"losses per token of different tokens are no comparison, --y=bits_per_byte may be: {tokens}")
    return lines


def check_out(out: Path) -> None:
    """ValueError: a package is missing, or writes no such file."""
    if out.suffix not in SUFFIXES:
        raise ValueError(f"--out={out}: give a name that ends with {', '.join(SUFFIXES)}")
    style.pyplot()


def draw(lines: list[Line], x: str, labels: tuple[str, str], out: Path, title: str = "") -> None:
    """Training as lines, validation as points, one colour for both, and a legend below. The file is replaced whole.

    x: the axis of runs.AXES; labels: of it and of y.
    """
    plt = style.pyplot()
    columns = 2 if max(len(label_of(line)) for line in lines) <= WIDEST_OF_TWO else 1
    rows = -(-(len(lines) + 2) // columns)
    figure, axes = plt.subplots(figsize=(8, 4.6 + 0.2 * rows), layout="constrained")
    for number, line in zip(style.numbers([line.stem for line in lines]), lines):
        draw_one(axes, line, x, style.line(number), len(lines) <= MOST_TRACES)
    axes.set(xlabel=labels[0], ylabel=labels[1], ylim=limits(lines))
    axes.set_title(title, fontsize="medium")
    axes.grid(alpha=0.3)
    axes.plot([], [], color="0.5", label="training, smoothed")
    axes.plot([], [], "o", color="0.5", markersize=4, label="validation")
    figure.legend(loc="outside lower center", ncols=columns, fontsize="small", frameon=False)
    save(figure, out)
    plt.close(figure)


def label_of(line: Line) -> str:
    last = f"validation {line.validation.mean[-1]:.3f}" if line.validation else ""
    runs = f"{line.runs} runs" if line.runs > 1 else ""
    return ", ".join(filter(None, (groups.shortened(line.label), runs, last))) or "no evaluation yet"


def draw_one(axes, line: Line, x: str, look: dict, trace: bool) -> None:
    if trace and line.raw:
        axes.plot(line.raw.x[x], line.raw.values, color=look["color"], alpha=0.2, linewidth=0.8)
    curve, points = line.training, line.validation
    at, mean = (curve.x[x], curve.mean) if curve else ([], [])
    axes.plot(at, mean, label=label_of(line), **look)
    if curve and line.runs > 1:
        axes.fill_between(at, mean - curve.half, mean + curve.half, color=look["color"], alpha=0.2, linewidth=0)
    if points:
        half = points.half if line.runs > 1 else None
        axes.errorbar(points.x[x], points.mean, yerr=half, fmt="o", color=look["color"], markersize=4, capsize=3)


def limits(lines: list[Line]) -> tuple[float, float]:
    """From the lowest value to the highest beginning, whatever a run does between."""
    lowest = min(min(curve.mean) for line in lines for curve in curves_in(line))
    first = [curves_in(line)[0].mean[0] for line in lines]
    margin = 0.05 * (max(first) - lowest) or 0.1
    return lowest - margin, max(first) + margin


def save(figure, out: Path) -> None:
    """Write a figure that is whole under its name at any moment."""
    temporary = out.with_name(out.name + ".tmp")
    figure.savefig(temporary, dpi=120, format=out.suffix[1:])
    os.replace(temporary, out)


def beside(runs: list[Run], name: str) -> Path:
    """A file in the run's folder or, of several runs, in the folder that holds them."""
    return folder_of([run.path for run in runs]) / name


def folder_of(paths: list[Path]) -> Path:
    """The one folder, or what holds all of the paths."""
    paths = [path.resolve() for path in paths]
    if len(paths) == 1 and not paths[0].is_file():
        return paths[0]
    return Path(os.path.commonpath([path.parent for path in paths]))
