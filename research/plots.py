"""Draw figures of runs in one style: curves with bands, differences, costs, residual statistics.

A figure is WIDTH inches wide, as is the text of a printed page, and has one legend below its
panels. The baseline is black. A model has the same color and line style in all figures of a report.
"""

import io
import itertools
import math
import re
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from research.compare import (
    FRACTION_METRICS,
    METRIC_LABELS,
    SIGNIFICANCE_LEVEL,
    Comparison,
    Estimate,
    Group,
    import_special_functions,
    shorten,
)
from research.runs import AXES, Run
from utils import errors, files

if TYPE_CHECKING:
    import polars as pl
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

# The colors of Okabe and Ito can be told apart with any color vision. Black is the baseline's.
COLORS = "#0072B2 #D55E00 #009E73 #CC79A7 #E69F00 #56B4E9 #000000 #F0E442".split()
BASELINE_COLOR = COLORS[6]
PALETTE = (*COLORS[:6], "#7F7F7F")
STYLES = ("-", "--", ":", "-.")
PLOTLY_DASHES = {"-": "solid", "--": "dash", ":": "dot", "-.": "dashdot"}
MARKERS = "osD^vPXph"

BASELINE_MODEL = "gpt-mha-rope"
EXPANDED_MODEL = "DDL-gpt-mha-rope"

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
MAX_POINTS = 300  # per curve; a panel cannot show more
MIN_LOG_RATIO = 30  # an x axis is logarithmic if its last value is more than this times its first
MAX_MARKERS = 20  # points in a curve with markers; more markers would hide each other
X_LABELS = {
    "steps": "optimizer step",
    "tokens": "tokens",
    "flops": "FLOPs",
    "seconds": "device-seconds after step 1",  # step 1 includes compilation
}
PUBLISHED_LABEL = "published loss (star in the color of the curve)"


@dataclass(frozen=True)
class Series:
    """Values of one run over its steps, all float64.

    steps: increasing, (n,). x_values: the positions (n,) on the other axes, by the axis's name.
    values: (n,).
    """

    steps: np.ndarray
    x_values: dict[str, np.ndarray]
    values: np.ndarray


@dataclass(frozen=True)
class Curve:
    """The mean of several runs over their steps.

    half_width: half the width of the 95% interval (n,), NaN for a single run.
    """

    steps: np.ndarray
    x_values: dict[str, np.ndarray]
    mean: np.ndarray
    half_width: np.ndarray


@dataclass
class Line:
    """The curves of a group of runs, which are drawn in one color.

    style_number: selects color and line style; 0 is the baseline's. size: the name of the panel.
    curves: by kind, "training", "validation" and "difference" (to the baseline), as far as the runs
    have them. raw_training: the training loss of a single run without smoothing. published_loss: the
    paper's validation loss. residual_statistics: {site: {statistic: (steps (n,), values (n,
    num_blocks))}}.
    """

    name: str
    model_name: str | None
    style_number: int
    num_runs: int = 1
    size: str = ""
    curves: dict[str, Curve] = field(default_factory=dict)
    raw_training: Series | None = None
    published_loss: float | None = None
    residual_statistics: dict[str, dict[str, tuple[np.ndarray, np.ndarray]]] = field(
        default_factory=dict
    )

    @property
    def style(self) -> dict[str, str]:
        """Matplotlib's color and linestyle of the line."""
        return get_line_style(self.style_number)

    @property
    def marker(self) -> str:
        """Matplotlib's marker of the line."""
        return MARKERS[self.style_number % len(MARKERS)]


# ---- curves ----


def extract_series(run: Run, frame: "pl.DataFrame", column: str) -> Series:
    """Return a column of a frame over all axes that the frame has, without rows that lack it."""
    axes = [
        axis
        for axis, axis_column in AXES.items()
        if axis_column in frame.columns and frame[axis_column].null_count() < frame.height
    ]
    if column not in frame.columns or "step" not in frame.columns:
        frame = frame.clear()
    else:
        frame = frame.drop_nulls([*(AXES[axis] for axis in axes), column])
        frame = frame.unique("step", keep="last", maintain_order=True)
    x_values = {axis: run.get_x_values(frame, axis).to_numpy().astype(float) for axis in axes}
    if not frame.height:
        return Series(steps=np.empty(0), x_values=x_values, values=np.empty(0))
    return Series(
        steps=frame["step"].to_numpy().astype(float),
        x_values=x_values,
        values=frame[column].to_numpy().astype(float),
    )


def smooth(values: np.ndarray) -> np.ndarray:
    """Return the centered moving average of points (n,); the ends average fewer.

    A mean is over 2% of the points, and over at least three.
    """
    window = max(len(values) // 100, 1) * 2
    sums = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    low = np.maximum(index - window // 2, 0)
    high = np.minimum(index + window // 2 + 1, len(values))
    return (sums[high] - sums[low]) / (high - low)


def compute_mean_and_half_width(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean (n,) over runs of values (num_runs, n), and half its 95% interval (n,).

    The interval is that of Student's distribution; it is NaN for a single run.
    """
    num_runs = len(values)
    mean = values.mean(axis=0)
    if num_runs == 1:
        return mean, np.full(values.shape[1], np.nan)
    standard_error = values.std(axis=0, ddof=1) / np.sqrt(num_runs)
    quantile = import_special_functions().stdtrit(num_runs - 1, 1 - SIGNIFICANCE_LEVEL / 2)
    return mean, quantile * standard_error


def make_training_curve(runs: list[Series]) -> Curve | None:
    """Return the mean of the smoothed runs over the steps that all of them have.

    Values between the steps of a run are interpolated linearly. The result is None if the runs have
    no steps in common.
    """
    if not all(len(run.steps) for run in runs):
        return None
    first_step = max(run.steps[0] for run in runs)
    last_step = min(run.steps[-1] for run in runs)
    if first_step > last_step:
        return None
    if len(runs) == 1:
        grid = runs[0].steps
    else:
        grid = np.unique(np.linspace(first_step, last_step, MAX_POINTS).round())

    def interpolate(values_by_run: list[np.ndarray]) -> np.ndarray:
        rows = [np.interp(grid, run.steps, values) for run, values in zip(runs, values_by_run)]
        return np.stack(rows)  # (num_runs, n)

    x_values = {}
    for axis in list_shared_axes(runs):
        x_values[axis] = interpolate([run.x_values[axis] for run in runs]).mean(axis=0)
    smoothed = interpolate([smooth(run.values) for run in runs])
    mean, half_width = compute_mean_and_half_width(smoothed)
    return Curve(steps=grid, x_values=x_values, mean=mean, half_width=half_width)


def list_shared_axes(runs: list[Series]) -> list[str]:
    """Return the axes that all runs have."""
    return [axis for axis in runs[0].x_values if all(axis in run.x_values for run in runs)]


def make_validation_curve(runs: list[Series]) -> Curve | None:
    """Return the mean at the steps at which all runs were evaluated, or None without such steps."""
    shared_steps = runs[0].steps
    for run in runs[1:]:
        shared_steps = np.intersect1d(shared_steps, run.steps)
    if len(shared_steps) > MAX_POINTS:
        selection = np.linspace(0, len(shared_steps) - 1, MAX_POINTS).round().astype(int)
        shared_steps = shared_steps[selection]
    if not len(shared_steps):
        return None
    indices_by_run = [np.searchsorted(run.steps, shared_steps) for run in runs]
    x_values = {}
    for axis in list_shared_axes(runs):
        positions = [run.x_values[axis][indices] for run, indices in zip(runs, indices_by_run)]
        x_values[axis] = np.mean(positions, axis=0)
    values = np.stack([run.values[indices] for run, indices in zip(runs, indices_by_run)])
    mean, half_width = compute_mean_and_half_width(values)
    return Curve(steps=shared_steps, x_values=x_values, mean=mean, half_width=half_width)


def make_difference_curve(comparison: Comparison) -> Curve | None:
    """Return the group minus the baseline at every evaluation, paired by seed.

    Metrics that are stored as fractions are given in percent.
    """
    metric = comparison.metric
    factor = 100 if metric in FRACTION_METRICS else 1
    baseline_by_seed = {
        run.seed: extract_series(run, run.evaluations, metric) for run in comparison.baseline.runs
    }
    differences = []
    for run in comparison.group.runs:
        if run.seed not in baseline_by_seed:
            continue
        series = extract_series(run, run.evaluations, metric)
        baseline = baseline_by_seed[run.seed]
        steps, indices, baseline_indices = np.intersect1d(
            series.steps, baseline.steps, return_indices=True
        )
        differences.append(
            Series(
                steps=steps,
                x_values={axis: values[indices] for axis, values in series.x_values.items()},
                values=factor * (series.values[indices] - baseline.values[baseline_indices]),
            )
        )
    return make_validation_curve(differences)


def make_line(
    group: Group,
    style_number: int,
    comparison: Comparison | None = None,
    size: str = "",
    published_loss: float | None = None,
) -> Line:
    """Return the curves of a group, with the difference to a baseline if runs are paired with it.

    The axis of seconds does not count the first step, which compiles.
    """
    line = Line(
        name=group.name,
        model_name=group.model_name,
        style_number=style_number,
        num_runs=len(group.runs),
        size=size,
        published_loss=published_loss,
    )
    if not all(run.training.height for run in group.runs):
        return line  # a row of runs.csv has no curve
    training = [extract_series(run, run.training, "loss") for run in group.runs]
    evaluations = [extract_series(run, run.evaluations, "val_loss") for run in group.runs]
    curves = {
        "training": make_training_curve(training),
        "validation": make_validation_curve(evaluations),
    }
    is_paired = comparison is not None and comparison.paired
    if is_paired and all(run.training.height for run in comparison.baseline.runs):
        curves["difference"] = make_difference_curve(comparison)
    line.curves = {kind: curve for kind, curve in curves.items() if curve}
    if len(training) == 1:
        line.raw_training = training[0]
    line.residual_statistics = average_residual_statistics(group)
    return line


def average_residual_statistics(
    group: Group,
) -> dict[str, dict[str, tuple[np.ndarray, np.ndarray]]]:
    """Return the residual statistics, means over tokens, averaged over the runs of a group.

    Returns:
        {site: {statistic: (steps (n,) that all runs have, values (n, num_blocks))}}
    """
    records_by_run = [
        {record["step"]: record["residual"] for record in run.residual_records}
        for run in group.runs
    ]
    steps = sorted(set.intersection(*(set(records) for records in records_by_run)))
    averages: dict[str, dict[str, tuple[np.ndarray, np.ndarray]]] = {}
    for name in records_by_run[0][steps[0]] if steps else []:
        if not name.endswith("_mean"):
            continue
        values = [[records[step].get(name) for step in steps] for records in records_by_run]
        site, _, statistic = name.removesuffix("_mean").partition(".")
        try:
            mean = np.mean(np.array(values, dtype=float), axis=0)
        except (TypeError, ValueError):
            continue  # some records lack the statistic, or have it for fewer blocks
        if mean.ndim == 2 and np.isfinite(mean).all():
            averages.setdefault(site, {})[statistic] = (np.array(steps), mean)
    return averages


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


def assign_style_numbers(model_names: list[str | None]) -> list[int]:
    """Return a style number for each curve: 0 for the baseline if exactly one curve is its."""
    baseline_index = None
    if model_names.count(BASELINE_MODEL) == 1:
        baseline_index = model_names.index(BASELINE_MODEL)
    next_number = itertools.count(1)
    return [
        0 if index == baseline_index else next(next_number) for index in range(len(model_names))
    ]


def make_panels(
    num_rows: int, num_columns: int, row_height: float, legend_labels: list[str], **options
) -> tuple["Figure", np.ndarray]:
    """Return a figure and its axes (num_rows, num_columns), with space for a legend below.

    Args:
        row_height: in inches
        legend_labels: the labels of the legend, without which no space is reserved
        options: options of Matplotlib's `subplots`, for example sharey="row"
    """
    matplotlib_figure = errors.import_optional("matplotlib.figure", "a figure")
    num_legend_lines = 0
    if legend_labels:
        num_legend_lines = math.ceil(len(legend_labels) / count_legend_columns(legend_labels))
    height = num_rows * row_height + num_legend_lines * LEGEND_LINE_HEIGHT + 0.1
    figure = matplotlib_figure.Figure(figsize=(WIDTH, height), layout="constrained")
    axes = figure.subplots(num_rows, num_columns, squeeze=False, **options)
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


def render_images(figure: "Figure") -> dict[str, bytes]:
    """Return the figure as "png" and "svg"; the same numbers give the same bytes."""
    agg = errors.import_optional("matplotlib.backends.backend_agg", "a figure").FigureCanvasAgg
    svg = errors.import_optional("matplotlib.backends.backend_svg", "a figure").FigureCanvasSVG
    png_file = io.BytesIO()
    svg_file = io.BytesIO()
    figure.dpi = 200
    agg(figure).print_png(png_file, metadata={"Software": None})
    figure.set_layout_engine("none")  # otherwise the SVG would be laid out again
    svg(figure).print_svg(svg_file, metadata={"Date": None})
    return {"png": png_file.getvalue(), "svg": svg_file.getvalue()}


def save(figure: "Figure", out: Path) -> None:
    """Write a figure in the format of its suffix; at no time is an incomplete file at the path.

    A PNG file has a palette of 256 colors, which makes it a third as large.
    """
    with files.atomic_path(out) as temporary:
        figure.savefig(temporary, dpi=200, format=out.suffix[1:])
        if out.suffix == ".png":
            image_module = errors.import_optional("PIL.Image", "a figure")
            image = image_module.open(temporary).convert("RGB")
            palette_image = image.quantize(256, dither=image_module.Dither.NONE)
            palette_image.save(temporary, format="png", optimize=True)


def use_plain_numbers(axis: "Axis") -> None:
    """Label the ticks of a logarithmic axis by plain numbers: 0.01, 20, 3e-5.

    2 and 5 are labeled too if the axis spans less than two decades.
    """
    ticker = errors.import_optional("matplotlib.ticker", "a figure")
    is_logarithmic = axis.get_scale() == "log"
    if is_logarithmic:
        axis.set_major_locator(ticker.LogLocator(subs=(1.0,), numticks=8))
        axis.set_minor_locator(ticker.LogLocator(subs=(2.0, 5.0), numticks=8))
    low, high = axis.get_view_interval()
    has_minor_labels = is_logarithmic and high < 100 * low
    axis.set_major_formatter(lambda value, _: f"{value:.4g}")
    axis.set_minor_formatter(lambda value, _: f"{value:.4g}" if has_minor_labels else "")


def draw_curve(
    axis: "Axes", line: Line, kind: str, x_axis: str, artists: dict[str, "Artist"]
) -> None:
    """Draw a line's curve with its band, and add it to the artists of the legend."""
    curve = line.curves.get(kind)
    if curve is None or (x_axis != "steps" and x_axis not in curve.x_values):
        return
    positions = curve.steps if x_axis == "steps" else curve.x_values[x_axis]
    style = dict(line.style)
    if len(positions) <= MAX_MARKERS:
        style["marker"] = line.marker
    (artist,) = axis.plot(positions, curve.mean, **style)
    if np.isfinite(curve.half_width).any():
        draw_band(axis, positions, curve, style["color"])
    artists.setdefault(line.name, artist)


def draw_band(axis: "Axes", positions: np.ndarray, curve: Curve, color: str) -> None:
    """Fill the 95% interval of a curve."""
    axis.fill_between(
        positions,
        curve.mean - curve.half_width,
        curve.mean + curve.half_width,
        color=color,
        alpha=0.18,
        linewidth=0,
    )


def draw_published_loss(
    axis: "Axes", line: Line, x_axis: str, artists: dict[str, "Artist"]
) -> None:
    """Draw the published loss as a star at the end of training.

    On the axis of seconds there is no star, because no published time is known.
    """
    curve = line.curves.get("validation")
    if line.published_loss is None or curve is None or x_axis == "seconds":
        return
    (star,) = axis.plot(
        curve.x_values[x_axis][-1],
        line.published_loss,
        color=line.style["color"],
        zorder=5,
        marker="*",
        markersize=8,
        markeredgecolor="black",
        linestyle="none",
    )
    artists.setdefault(PUBLISHED_LABEL, star)


def set_y_limits(axis: "Axes", lines: list[Line], kind: str) -> None:
    """Limit the y axis to the means of the last nine tenths of training.

    The losses of the beginning are so large that the later ones could not be told apart.
    """
    curves = [line.curves[kind] for line in lines if kind in line.curves]
    last_step = max((curve.steps[-1] for curve in curves), default=0)
    means = [curve.mean[curve.steps >= 0.1 * last_step] for curve in curves]
    published_losses = []
    if kind == "validation":
        published_losses = [line.published_loss for line in lines if line.published_loss]
    values = np.concatenate([*means, published_losses])
    if len(values):
        margin = 0.08 * (values.max() - values.min()) or 0.1
        axis.set_ylim(values.min() - margin, values.max() + margin)


def format_x_axis(axis: "Axes", x_axis: str, lines: list[Line], kind: str) -> None:
    """Label the x axis with short numbers (20K, 1.5M).

    The axis is logarithmic where most points would otherwise lie at its beginning.
    """
    ticker = errors.import_optional("matplotlib.ticker", "a figure")
    first_positions = []
    last_positions = []
    for line in lines:
        if kind in line.curves:
            positions = line.curves[kind].x_values.get(x_axis)
            if positions is not None and len(positions):
                first_positions.append(positions[0])
                last_positions.append(positions[-1])
    axis.set_xlabel(X_LABELS[x_axis])
    if first_positions and 0 < min(first_positions) * MIN_LOG_RATIO < max(last_positions):
        axis.set_xscale("log")
        axis.xaxis.set_minor_formatter(ticker.NullFormatter())
    else:
        axis.xaxis.set_major_locator(ticker.MaxNLocator(4))
    letters = "KMGTPEZY" if x_axis == "flops" else "KMBT"
    axis.xaxis.set_major_formatter(lambda value, _: format_short_number(value, letters))


def format_short_number(value: float, letters: str) -> str:
    """Format a number as 20K or 1.5M, with the letters of the powers of 1,000 from 1,000 on."""
    power = 0
    if abs(value) >= 1000:
        power = min(int(math.log10(abs(value)) // 3), len(letters))
    letter = letters[power - 1] if power else ""
    return f"{value / 1000**power:g}{letter}"


def plot_over_depth(
    rows: list[dict], quantities: dict[str, tuple[str, str]], x_label: str
) -> tuple["Figure", np.ndarray]:
    """Draw a panel for each quantity and in it a line for each run; a model has one color.

    Args:
        rows: a dict for each run with its "label", its "model" and a list for each quantity; all
            lists end at the last depth
        quantities: the title and the scale of the panel ("linear", "log"), by the key in a row

    Returns:
        the figure and its axes, flat
    """
    models = [row["model"] for row in rows]
    distinct_models = list(dict.fromkeys(models))
    number_by_model = dict(zip(distinct_models, assign_style_numbers(distinct_models)))
    styles = []
    for index, model in enumerate(models):
        style = get_line_style(number_by_model[model])
        if models.count(model) > 1:
            style["linestyle"] = STYLES[models[:index].count(model) % len(STYLES)]
        styles.append(style)
    ticker = errors.import_optional("matplotlib.ticker", "a figure")
    num_rows = math.ceil(len(quantities) / 2)
    figure, axes = make_panels(num_rows, 2, 1.9, [row["label"] for row in rows])
    axes = axes.flatten()
    artists = {}
    for axis, (key, (title, scale)) in zip(axes, quantities.items()):
        for style, row in zip(styles, rows):
            last_depth = max(len(row[quantity]) for quantity in quantities) - 1
            depths = range(last_depth + 1 - len(row[key]), last_depth + 1)
            (artists[row["label"]],) = axis.plot(depths, row[key], **style)
        axis.set(xlabel=x_label, yscale=scale)
        axis.set_title(title, loc="left")
        axis.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
        if scale != "linear":
            use_plain_numbers(axis.yaxis)
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
        if "validation" in line.curves:
            parts.append(f"validation {line.curves['validation'].mean[-1]:.3f}")
        labels.append(", ".join(parts))
    return labels


def plot_losses(
    lines: list[Line], x_axis: str, x_label: str, y_label: str, out: Path, title: str
) -> None:
    """Write losses as PNG, SVG or PDF: training as lines, validation as points of the same color."""
    with use_print_style():
        legend_labels = make_legend_labels(lines)
        # the legend has two more labels, which explain lines and points
        figure, axes = make_panels(1, 1, 3.6, [*legend_labels, "", ""])
        axis = axes[0, 0]
        artists = {}
        for line, legend_label in zip(lines, legend_labels):
            # more unsmoothed losses would hide the curves
            if line.raw_training is not None and len(lines) <= len(PALETTE) + 1:
                draw_raw_training(axis, line, x_axis)
            artists[legend_label] = draw_losses(axis, line, x_axis)
        curves = [curve for line in lines for curve in line.curves.values()]
        lowest = min(curve.mean.min() for curve in curves)
        first = max(next(iter(line.curves.values())).mean[0] for line in lines)
        margin = 0.05 * (first - lowest) or 0.1
        axis.set(xlabel=x_label, ylabel=y_label, ylim=(lowest - margin, first + margin))
        axis.set_title(title)
        (artists["training, smoothed"],) = axis.plot([], [], color="0.5")
        (artists["validation"],) = axis.plot([], [], "o", color="0.5")
        add_legend(figure, artists)
        save(figure, out)


def draw_raw_training(axis: "Axes", line: Line, x_axis: str) -> None:
    """Draw the training loss without smoothing, pale behind the curves."""
    series = line.raw_training
    positions = series.x_values[x_axis]
    axis.plot(positions, series.values, color=line.style["color"], alpha=0.2, linewidth=0.6)


def draw_losses(axis: "Axes", line: Line, x_axis: str) -> "Artist":
    """Draw a line's training and validation loss and return the artist for the legend."""
    color = line.style["color"]
    legend_artist = None
    for kind, curve in line.curves.items():
        positions = curve.x_values[x_axis]
        if kind == "training":
            (legend_artist,) = axis.plot(positions, curve.mean, **line.style)
            if line.num_runs > 1:
                draw_band(axis, positions, curve, color)
            continue
        points = axis.errorbar(
            positions,
            curve.mean,
            yerr=curve.half_width if line.num_runs > 1 else None,
            fmt="o",
            color=color,
            capsize=2,
        )
        if legend_artist is None:
            legend_artist = points
    return legend_artist


def write_page(
    lines: list[Line], x_axis: str, x_label: str, y_label: str, out: Path, title: str
) -> None:
    """Write losses as one interactive HTML page, which plotly exports and which needs no network."""
    figure = errors.import_optional("plotly.graph_objects", "an interactive page").Figure()
    for line, label in zip(lines, make_legend_labels(lines)):
        name = escape(label)
        first_kind = next(iter(line.curves), None)
        for kind, curve in line.curves.items():
            half_widths = curve.half_width.tolist() if line.num_runs > 1 else None
            hover_text = "%{x:,.6g}: %{y:.4f}"
            if half_widths:
                hover_text += " ± %{customdata:.4f}"
            figure.add_scatter(
                x=curve.x_values[x_axis].tolist(),
                y=curve.mean.tolist(),
                mode="lines" if kind == "training" else "markers",
                name=name,
                legendgroup=name,
                line={
                    "color": line.style["color"],
                    "dash": PLOTLY_DASHES[line.style["linestyle"]],
                },
                customdata=half_widths,
                showlegend=kind == first_kind,
                hovertemplate=f"{hover_text}<extra>{kind}, {name}</extra>",
                error_y={
                    "type": "data",
                    "array": half_widths,
                    "visible": bool(half_widths) and kind == "validation",
                },
            )
    figure.update_layout(
        xaxis_title=x_label,
        yaxis_title=y_label,
        title=escape(title),
        template="plotly_white",
        legend={"orientation": "h", "y": -0.2},
    )
    files.write_text(out, figure.to_html(include_plotlyjs=True, full_html=True))


# ---- a metric over settings ----


def plot_metric(
    groups: list[Group], group_values: list[dict[str, Any]], metric: str, out: Path
) -> None:
    """Draw the metric against a swept key, with a line for each setting of the others.

    The key is the first with numbers, otherwise the first.

    Groups whose evaluations lack the metric are left out.

    Raises:
        ValueError: no group has the metric
    """
    estimates = [group.estimate(metric) for group in groups]
    if not any(estimates):
        raise ValueError(f"--metric={metric}: no final evaluation has it; omit it")
    group_values = [values for values, estimate in zip(group_values, estimates) if estimate]
    estimates = [estimate for estimate in estimates if estimate]

    keys = [key for key in group_values[0] if key != "seed"]
    numeric_keys = [
        key for key in keys if all(type(values[key]) in (int, float) for values in group_values)
    ]
    x_key = None
    if keys:
        x_key = numeric_keys[0] if numeric_keys else keys[0]
    points_by_name: dict[str, list[tuple]] = {}
    for values, estimate in zip(group_values, estimates):
        name = " ".join(f"{key}={values[key]}" for key in keys if key != x_key)
        x = values[x_key] if numeric_keys else str(values.get(x_key, "all"))
        half_width = estimate.half_width if estimate.n > 1 else math.nan
        points_by_name.setdefault(name, []).append((x, estimate.mean, half_width))
    with use_print_style():
        figure, axes = make_panels(1, 1, 3.0, list(points_by_name))
        axis = axes[0, 0]
        artists = {}
        for number, (name, points) in enumerate(points_by_name.items(), 1):
            x, mean, half_width = zip(*(sorted(points) if numeric_keys else points))
            artists[name or "mean over seeds"] = axis.errorbar(
                x,
                mean,
                yerr=half_width,
                marker="o",
                capsize=3,
                **get_line_style(number),
            )
        axis.set(
            xlabel=x_key or "",
            ylabel=METRIC_LABELS.get(metric, metric),
            title="error bars: 95% interval of the mean over seeds",
        )
        if numeric_keys:
            x_values = [values[x_key] for values in group_values]
            if min(x_values) > 0 and max(x_values) / min(x_values) >= 20:
                axis.set_xscale("log")  # for example of learning rates
        add_legend(figure, artists)
        save(figure, out)


# ---- the figures of a paper ----


def make_paper_legend_labels(lines: list[Line]) -> list[str]:
    """Return the names of the lines, and the label of the stars if a published loss is known."""
    labels = [line.name for line in lines]
    if any(line.published_loss for line in lines):
        labels.append(PUBLISHED_LABEL)
    return labels


def list_sizes(lines: list[Line]) -> list[str]:
    """Return the sizes of the lines, each once, in their order."""
    return list(dict.fromkeys(line.size for line in lines))


def choose_paper_columns(lines: list[Line]) -> dict[str, list[Line]]:
    """Return the lines of each column of the paper's figure by its title.

    Each size has a column without the DDL variants. After those, each size that has DDL variants
    has a second one: the baseline, the expanded-state DDL model and its variants.
    """
    columns = {}
    for size in list_sizes(lines):
        columns[size] = [line for line in lines if line.size == size and not is_ddl_variant(line)]
    for size in list_sizes(lines):
        of_this_size = [line for line in lines if line.size == size]
        if any(is_ddl_variant(line) for line in of_this_size):
            columns[f"{size},\nDDL variants"] = [
                line
                for line in of_this_size
                if not line.style_number or (line.model_name or "").startswith(EXPANDED_MODEL)
            ]
    return {title: column_lines for title, column_lines in columns.items() if column_lines}


def plot_paper_curves(lines: list[Line], x_axis: str) -> "Figure":
    """Draw training above validation loss, in the columns of `choose_paper_columns`."""
    columns = choose_paper_columns(lines)
    row_height = 1.9 if len(columns) > 1 else 2.4
    figure, axes = make_panels(2, len(columns), row_height, make_paper_legend_labels(lines))
    artists: dict[str, Artist] = {}
    for (title, column_lines), column_axes in zip(columns.items(), axes.T):
        training_axis, validation_axis = column_axes
        training_axis.set_title(title)
        for axis, kind in ((training_axis, "training"), (validation_axis, "validation")):
            for line in column_lines:
                draw_curve(axis, line, kind, x_axis, artists)
            format_x_axis(axis, x_axis, [], kind)
            # columns of one size have the same limits
            of_this_size = [line for line in lines if line.size == column_lines[0].size]
            set_y_limits(axis, of_this_size, kind)
            if not any(kind in line.curves for line in column_lines):
                axis.text(0.5, 0.5, "none", transform=axis.transAxes, ha="center", va="center")
                axis.set(xticks=[], yticks=[])
        training_axis.set_xlabel("")
        for line in column_lines:
            draw_published_loss(validation_axis, line, x_axis, artists)
    axes[0, 0].set_ylabel("training loss\n(nats per token)")
    axes[1, 0].set_ylabel("validation loss\n(nats per token)")
    add_legend(figure, artists)
    return figure


def is_ddl_variant(line: Line) -> bool:
    """Return whether an expanded-state DDL model reads or embeds differently from the main one."""
    model_name = line.model_name or ""
    return model_name.startswith(EXPANDED_MODEL) and model_name != EXPANDED_MODEL


def plot_costs(lines: list[Line]) -> "Figure":
    """Draw validation loss against steps, tokens, FLOPs and seconds, in a row for each size."""
    lines = [line for line in lines if "validation" in line.curves]
    sizes = list_sizes(lines)
    legend_labels = make_paper_legend_labels(lines)
    figure, axes = make_panels(len(sizes), len(X_LABELS), 2.1, legend_labels, sharey="row")
    artists: dict[str, Artist] = {}
    for size, row_axes in zip(sizes, axes):
        of_this_size = [line for line in lines if line.size == size]
        for axis, x_axis in zip(row_axes, X_LABELS):
            for line in of_this_size:
                draw_curve(axis, line, "validation", x_axis, artists)
                draw_published_loss(axis, line, x_axis, artists)
            format_x_axis(axis, x_axis, of_this_size, "validation")
            set_y_limits(axis, of_this_size, "validation")
        row_axes[0].set_ylabel("validation loss\n(nats per token)")
        row_axes[0].set_title(size if len(sizes) > 1 else "", loc="left")
    add_legend(figure, artists)
    return figure


def plot_differences(lines: list[Line], baseline_name: str, unit: str) -> "Figure":
    """Draw each group minus the baseline at every evaluation, in a panel for each size."""
    lines = [line for line in lines if "difference" in line.curves]
    sizes = list_sizes(lines)
    figure, axes = make_panels(1, len(sizes), 2.6, [line.name for line in lines])
    artists: dict[str, Artist] = {}
    for size, axis in zip(sizes, axes[0]):
        for line in lines:
            if line.size == size:
                draw_curve(axis, line, "difference", "steps", artists)
        axis.axhline(0, color="black", linewidth=0.8)
        axis.set_title(size if len(sizes) > 1 else "")
        format_x_axis(axis, "steps", [], "difference")
    axes[0, 0].set_ylabel(f"{unit}\nminus that of {baseline_name}")
    add_legend(figure, artists)
    return figure


def plot_final(rows: list[tuple[Line, Estimate, str]], baseline_name: str, unit: str) -> "Figure":
    """Draw the final differences with their intervals and verdicts.

    rows: (line, difference, verdict). A difference of a single pair has no interval.
    """
    figure, axes = make_panels(1, 1, 0.24 * len(rows) + 0.65, [])
    axis = axes[0, 0]
    positions = np.arange(len(rows))[::-1]
    for position, (line, estimate, verdict) in zip(positions, rows):
        axis.errorbar(
            estimate.mean,
            position,
            xerr=estimate.half_width if estimate.n > 1 else None,
            fmt=line.marker,
            color=line.style["color"],
            capsize=3,
        )
        axis.annotate(
            f"{estimate.format('+.4f')}  {verdict}",
            (1, position),
            xytext=(6, 0),
            va="center",
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
        )
    axis.axvline(0, color="black", linewidth=0.8)
    axis.set_yticks(positions, [line.name for line, _, _ in rows])
    axis.set(ylim=(-0.6, len(rows) - 0.4), xlabel=f"{unit} minus that of {baseline_name}")
    axis.grid(axis="y", visible=False)
    return figure


STATISTIC_LABELS = {  # in the order in which a figure prefers them
    "beta": "gate β",
    "discrepancy_after": "discrepancy after",
    "discrepancy_before": "discrepancy before",
    "gate": "gate",
    "mix_kept": "weight of a stream on itself",
    "effective_sources": "effective sources",
    "embedding_weight": "weight of embedding",
}
SITE_LABELS = {"attn": "attention", "mlp": "MLP"}
MAX_RESIDUAL_ROWS = 6  # groups in one figure
ROW_LABEL_LENGTH = 16  # characters


def choose_statistics(line: Line) -> list[str]:
    """Return the two statistics of a line that a figure shows."""
    names = []
    for statistics in line.residual_statistics.values():
        names += [name for name in statistics if name not in names]
    preference = [*STATISTIC_LABELS, *names]
    return sorted(names, key=preference.index)[:2]


def group_lines_by_statistics(lines: list[Line]) -> dict[str, list[Line]]:
    """Group lines that show the same residual statistics, by the file name of their figure.

    A figure shows at most MAX_RESIDUAL_ROWS of them. The names of further figures end with _2, ...
    """
    lines_by_name: dict[str, list[Line]] = {}
    for line in lines:
        if line.residual_statistics:
            name = "_".join(["residual", *choose_statistics(line)])
            name = re.sub(r"[^A-Za-z0-9_]+", "_", name)[:100]
            lines_by_name.setdefault(name, []).append(line)
    figures = {}
    for name, members in lines_by_name.items():
        for number, start in enumerate(range(0, len(members), MAX_RESIDUAL_ROWS), 1):
            figure_name = name if number == 1 else f"{name}_{number}"
            figures[figure_name] = members[start : start + MAX_RESIDUAL_ROWS]
    return figures


def plot_residual(lines: list[Line]) -> "Figure":
    """Draw residual statistics over training: a row for each line, a curve for each block."""
    colors = errors.import_optional("matplotlib.colors", "a figure")
    mappable = errors.import_optional("matplotlib.cm", "a figure").ScalarMappable
    palette = errors.import_optional("matplotlib", "a figure").colormaps["viridis"]
    columns = [
        (site, statistic)
        for statistic in choose_statistics(lines[0])
        for site in lines[0].residual_statistics
    ][:4]
    figure, axes = make_panels(len(lines), len(columns), 1.3, [], sharex=True, sharey="col")
    num_blocks = max(
        values.shape[1]
        for line in lines
        for statistics in line.residual_statistics.values()
        for _, values in statistics.values()
    )
    # the last shades of the palette are too pale on white
    shades = colors.ListedColormap(palette(np.linspace(0, 0.85, num_blocks)))
    scale = mappable(colors.BoundaryNorm(np.arange(num_blocks + 1) - 0.5, num_blocks), shades)
    for line, row_axes in zip(lines, axes):
        for axis, (site, statistic) in zip(row_axes, columns):
            statistics = line.residual_statistics.get(site, {})
            if statistic in statistics:
                steps, values = statistics[statistic]
                for block, block_values in enumerate(values.T):
                    color = scale.to_rgba(block)
                    axis.plot(steps, block_values, color=color, linestyle=STYLES[block % 4])
        row_axes[0].set_ylabel(wrap_name(line.name))
    for axis, (site, statistic) in zip(axes[0], columns):
        statistic_label = STATISTIC_LABELS.get(statistic, statistic.replace("_", " "))
        axis.set_title(f"{statistic_label},\n{SITE_LABELS.get(site, site)}")
    for axis in axes[-1]:
        format_x_axis(axis, "steps", [], "")
    shrink = min(1.0, 2 / len(lines))
    bar = figure.colorbar(scale, ax=axes, shrink=shrink, aspect=25, label="block")
    bar.set_ticks(np.unique(np.linspace(0, num_blocks - 1, min(num_blocks, 6)).round()))
    return figure


def wrap_name(name: str) -> str:
    """Break a name into lines of at most ROW_LABEL_LENGTH characters, so that it fits its row."""
    lines = [""]
    for word in re.findall(r"[^-_= ]*[-_= ]?", name):
        if len(lines[-1] + word) > ROW_LABEL_LENGTH:
            lines.append("")
        lines[-1] += word
    return "\n".join(line.strip()[:ROW_LABEL_LENGTH] for line in lines)
