"""Draw figures of runs in one style: curves with bands, metrics over settings, quantities over depth.

A figure is WIDTH inches wide, as is the text of a printed page, and has one legend below its
panels. The baseline is black.
"""

import itertools
import math
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from research.compare import (
    CONFIDENCE_LEVEL,
    Group,
    import_stats,
    shorten,
)
from research.runs import AXES, import_polars, read_curves
from utils import errors, files

if TYPE_CHECKING:
    import polars as pl
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The colors of Okabe and Ito can be told apart with any color vision. Black is the baseline's.
COLORS = "#0072B2 #D55E00 #009E73 #CC79A7 #E69F00 #56B4E9 #000000 #F0E442".split()
BASELINE_COLOR = COLORS[6]
PALETTE = (*COLORS[:6], "#7F7F7F")
STYLES = ("-", "--", ":", "-.")
MARKERS = "osD^vPXph"

BASELINE_MODEL = "gpt-mha-rope"

# in inches
WIDTH = 7.0
LEGEND_LINE_HEIGHT = 0.17
CHARACTER_WIDTH = 0.068

PRINT_STYLE = {
    "font.size": 8,
    "axes.labelsize": 8,
    "axes.titlesize": 8,
    "legend.fontsize": 8,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "axes.linewidth": 0.6,
    "grid.alpha": 0.3,
    "lines.linewidth": 1.2,
    "lines.markersize": 3.5,
    "grid.linewidth": 0.5,
    "svg.hashsalt": "report",
    "text.parse_math": False,
    "axes.formatter.limits": (-3, 4),
}
SMOOTHED_FRACTION = 0.02  # of a run, over which its training loss is averaged
X_LABELS = {
    "steps": "optimizer step",
    "tokens": "tokens",
    "flops": "FLOPs",
    "seconds": "device-seconds after step 1",  # step 1 includes compilation
}


# ---- curves ----


@dataclass
class Line:
    """The curves of a group of runs, which are drawn in one color.

    style: Matplotlib's color and linestyle. training and evaluations: frames of
    `average_over_runs`.
    """

    name: str
    style: dict[str, str]
    num_runs: int
    training: "pl.DataFrame"
    evaluations: "pl.DataFrame"


def make_line(group: Group, style: dict[str, str]) -> Line:
    """Return the curves of a group of run folders."""
    frames = [read_curves(row) for row in group.rows]
    return Line(
        name=group.name,
        style=style,
        num_runs=len(frames),
        training=average_over_runs([smooth(select_curve(frame, "loss")) for frame in frames]),
        evaluations=average_over_runs([select_curve(frame, "val_loss") for frame in frames]),
    )


def select_curve(frame: "pl.DataFrame", column: str) -> "pl.DataFrame":
    """Return the axes of AXES, and a column of a run's curves as `value`, without rows that lack it."""
    pl = import_polars()
    value = pl.col(column) if column in frame.columns else pl.lit(None, pl.Float64)
    curve = frame.select(*AXES.values(), value.alias("value")).drop_nulls("value")
    return curve.unique("step", keep="last", maintain_order=True)


def smooth(curve: "pl.DataFrame") -> "pl.DataFrame":
    """Replace values by their centered moving average over 2% of the points, at least three."""
    pl = import_polars()
    window = 2 * max(int(curve.height * SMOOTHED_FRACTION / 2), 1) + 1
    average = pl.col("value").rolling_mean(window, min_samples=1, center=True)
    return curve.with_columns(average)


def average_over_runs(curves: list["pl.DataFrame"]) -> "pl.DataFrame":
    """Return the means of the axes and values over runs, at the steps that all of them have.

    `half_width` is half the 95% interval of Student's distribution; null for a single run.
    """
    pl = import_polars()
    num_runs = len(curves)
    quantile = math.nan
    if num_runs > 1:
        quantile = float(import_stats().t.ppf((1 + CONFIDENCE_LEVEL) / 2, num_runs - 1))
    standard_error = pl.col("value").std() / math.sqrt(num_runs)
    return (
        pl.concat(curves)
        .group_by("step", maintain_order=True)
        .agg(
            *(pl.col(axis).mean() for axis in AXES.values() if axis != "step"),
            pl.col("value").mean(),
            (quantile * standard_error).alias("half_width"),
            pl.len().alias("runs"),
        )
        .filter(pl.col("runs") == num_runs)
        .sort("step")
    )


# ---- elements that all figures share ----


def use_print_style() -> AbstractContextManager:
    """Return a context in which figures are made and saved in the style of a printed page."""
    return errors.import_optional("matplotlib", "a figure").rc_context(PRINT_STYLE)


def get_line_style(style_number: int) -> dict[str, str]:
    """Return Matplotlib's color and linestyle of a curve.

    The number 0 is the baseline's; other numbers differ from each other in color or in line style.
    """
    color = PALETTE[(style_number - 1) % len(PALETTE)] if style_number else BASELINE_COLOR
    return {"color": color, "linestyle": STYLES[style_number % len(STYLES)]}


def choose_styles(model_names: list[str | None]) -> list[dict[str, str]]:
    """Return the style of each curve: the baseline's if exactly one curve is of its model."""
    baseline_index = None
    if model_names.count(BASELINE_MODEL) == 1:
        baseline_index = model_names.index(BASELINE_MODEL)
    next_number = itertools.count(1)
    return [
        get_line_style(0 if index == baseline_index else next(next_number))
        for index in range(len(model_names))
    ]


def make_panels(
    num_rows: int, num_columns: int, row_height: float, legend_labels: list[str]
) -> tuple["Figure", np.ndarray]:
    """Return a figure and its axes (num_rows, num_columns), with space for a legend below.

    Args:
        row_height: in inches
        legend_labels: the labels of the legend, without which no space is reserved
    """
    matplotlib_figure = errors.import_optional("matplotlib.figure", "a figure")
    num_legend_lines = 0
    if legend_labels:
        num_legend_lines = math.ceil(len(legend_labels) / count_legend_columns(legend_labels))
    height = num_rows * row_height + num_legend_lines * LEGEND_LINE_HEIGHT + 0.1
    figure = matplotlib_figure.Figure(figsize=(WIDTH, height), layout="constrained")
    axes = figure.subplots(num_rows, num_columns, squeeze=False)
    for axis in axes.flat:
        axis.grid()
    return figure, axes


def count_legend_columns(labels: list[str]) -> int:
    """Return how many columns of a legend fit beside each other, at least 1."""
    longest = max(map(len, labels))
    return max(int(WIDTH / (longest * CHARACTER_WIDTH + 0.5)), 1)


def add_legend(figure: "Figure", artists: dict[str, "Artist"]) -> None:
    """Add one legend for all panels below them; `artists` maps a label to what it explains."""
    if artists:
        figure.legend(
            artists.values(),
            artists.keys(),
            loc="outside lower center",
            ncols=count_legend_columns(list(artists)),
            frameon=False,
        )


def save(figure: "Figure", out: Path) -> None:
    """Write a figure in the format of its suffix; at no time is an incomplete file at the path."""
    with files.atomic_path(out) as temporary:
        figure.savefig(temporary, dpi=200, format=out.suffix[1:])


def plot_over_depth(
    rows: list[dict], quantities: dict[str, str], x_label: str
) -> tuple["Figure", np.ndarray]:
    """Draw a panel for each quantity and in it a line for each run; a model has one color.

    Args:
        rows: a dict for each run with its "label", its "model" and a list for each quantity; all
            lists end at the last depth
        quantities: the title of the panel by the key in a row

    Returns:
        the figure and its axes, flat
    """
    models = [row["model"] for row in rows]
    distinct_models = list(dict.fromkeys(models))
    style_by_model = dict(zip(distinct_models, choose_styles(distinct_models)))
    styles = []
    for index, model in enumerate(models):
        style = dict(style_by_model[model])
        if models.count(model) > 1:
            style["linestyle"] = STYLES[models[:index].count(model) % len(STYLES)]
        styles.append(style)
    ticker = errors.import_optional("matplotlib.ticker", "a figure")
    num_rows = math.ceil(len(quantities) / 2)
    figure, axes = make_panels(num_rows, 2, 1.9, [row["label"] for row in rows])
    axes = axes.flatten()
    artists = {}
    for axis, (key, title) in zip(axes, quantities.items()):
        for style, row in zip(styles, rows):
            last_depth = max(len(row[quantity]) for quantity in quantities) - 1
            depths = range(last_depth + 1 - len(row[key]), last_depth + 1)
            (artists[row["label"]],) = axis.plot(depths, row[key], **style)
        axis.set(xlabel=x_label)
        axis.set_title(title, loc="left")
        axis.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    for axis in axes[len(quantities) :]:
        axis.axis("off")
    add_legend(figure, artists)
    return figure, axes


# ---- report.py curves ----


def make_legend_labels(lines: list[Line]) -> list[str]:
    """Return each line's name with the number of its runs and its last validation loss."""
    names = [shorten(line.name) for line in lines]
    if len(set(names)) < len(names):  # the lines differ only in the middle of their names
        names = [line.name for line in lines]
    labels = []
    for line, name in zip(lines, names):
        parts = [name]
        if line.num_runs > 1:
            parts.append(f"{line.num_runs} runs")
        if line.evaluations.height:
            parts.append(f"validation {line.evaluations['value'][-1]:.3f}")
        labels.append(", ".join(parts))
    return labels


def plot_losses(lines: list[Line], x_axis: str, out: Path, title: str) -> None:
    """Write losses as PNG, SVG or PDF: training as lines, validation as points of the same color."""
    column = AXES[x_axis]
    with use_print_style():
        legend_labels = make_legend_labels(lines)
        # the legend has two more labels, which explain lines and points
        figure, axes = make_panels(1, 1, 3.6, [*legend_labels, "", ""])
        axis = axes[0, 0]
        artists = {}
        for line, legend_label in zip(lines, legend_labels):
            artists[legend_label] = draw_line(axis, line, column)
        curves = [curve for line in lines for curve in (line.training, line.evaluations)]
        lowest = min(curve["value"].min() for curve in curves if curve.height)
        first = max(curve["value"][0] for curve in curves if curve.height)
        margin = 0.05 * (first - lowest) or 0.1
        axis.set(
            xlabel=X_LABELS[x_axis],
            ylabel="loss (nats per token; lower is better)",
            ylim=(lowest - margin, first + margin),
        )
        axis.set_title(title)
        (artists["training, smoothed"],) = axis.plot([], [], color="0.5")
        (artists["validation"],) = axis.plot([], [], "o", color="0.5")
        add_legend(figure, artists)
        save(figure, out)


def draw_line(axis: "Axes", line: Line, column: str) -> "Artist":
    """Draw a line's training and validation loss, and return the artist for the legend."""
    curve = line.training
    points = line.evaluations
    (artist,) = axis.plot(curve[column], curve["value"], **line.style)
    if line.num_runs > 1:
        axis.fill_between(
            curve[column],
            curve["value"] - curve["half_width"],
            curve["value"] + curve["half_width"],
            color=line.style["color"],
            alpha=0.18,
            linewidth=0,
        )
    axis.errorbar(
        points[column],
        points["value"],
        yerr=points["half_width"] if line.num_runs > 1 else None,
        fmt="o",
        color=line.style["color"],
        capsize=2,
    )
    return artist
