"""Figures of runs: curves with bands, differences, costs, statistics of the stream; one style.

A figure is WIDTH inches wide, the text of a printed page, and has one legend below its panels. The
baseline is black; a model has one colour and line in every figure of a report.
"""

import io
import itertools
import math
import re
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

import numpy as np

from research.compare import ERROR, SHARES, Comparison, Estimate, Group, shortened, student
from research.runs import AXES, Run
from utils import errors, files

# Okabe and Ito's colours, told apart with any colour vision; black is the baseline's.
COLORS = "#0072B2 #D55E00 #009E73 #CC79A7 #E69F00 #56B4E9 #000000 #F0E442".split()
BASELINE_COLOR, PALETTE = COLORS[6], (*COLORS[:6], "#7F7F7F")
STYLES = ("-", "--", ":", "-.")
DASHES = dict(zip(STYLES, ("solid", "dash", "dot", "dashdot")))  # as plotly names them
MARKERS = "osD^vPXph"
BASELINE_STEM, EXPANDED_STEM = "gpt-mha-rope", "DDL-gpt-mha-rope"
WIDTH, LEGEND_LINE, CHARACTER = 7.0, 0.17, 0.068  # inches
PRINT = dict.fromkeys(["font.size", "axes.labelsize", "axes.titlesize", "legend.fontsize"], 8)
PRINT |= {"xtick.labelsize": 8, "ytick.labelsize": 8, "axes.linewidth": 0.6, "grid.alpha": 0.3}
PRINT |= {"lines.linewidth": 1.2, "lines.markersize": 3.5, "grid.linewidth": 0.5}
PRINT |= {"svg.hashsalt": "report", "text.parse_math": False, "axes.formatter.limits": (-3, 4)}
POINTS = 300  # of a curve at most: more than a column of a page can show
LOGARITHMIC = 30  # the last value of an axis by the first, from which on it is
X_LABELS = {"steps": "optimizer step", "tokens": "tokens", "flops": "FLOPs"}
X_LABELS |= {"seconds": "device-seconds after step 1"}  # which compiles
PUBLISHED = "published (star in the colour of its row)"


@dataclass(frozen=True)
class Series:
    """Of one run: `steps` rising (n,), the other axes `x` by name, `values` (n,), all float64."""

    steps: np.ndarray
    x: dict[str, np.ndarray]
    values: np.ndarray


@dataclass(frozen=True)
class Curve:
    """Of several runs: steps, the other axes, mean and half its 95% interval (NaN of one run)."""

    steps: np.ndarray
    x: dict[str, np.ndarray]
    mean: np.ndarray
    half: np.ndarray


@dataclass
class Line:
    """What is drawn of a group in one colour.

    number: of its look, 0 is the baseline's. size: names its panel. curves: "training",
    "validation", "difference" (to the baseline), those that there are. raw: the unsmoothed training
    loss of a single run. residual: {site: {statistic: (steps (n,), values (n, blocks))}}.
    """

    name: str
    stem: str | None
    number: int
    runs: int = 1
    size: str = ""
    curves: dict[str, Curve] = field(default_factory=dict)
    raw: Series | None = None
    published: float | None = None
    residual: dict = field(default_factory=dict)

    @property
    def look(self) -> dict:
        return look(self.number)

    @property
    def marker(self) -> str:
        return MARKERS[self.number % len(MARKERS)]


# ---- curves ----


def series(run: Run, frame, column: str, first_step: bool = False) -> Series:
    """A column of a frame over all axes that it has; rows that lack the column are left out."""
    axes = [axis for axis, name in AXES.items() if name in frame.columns]
    names = [AXES[axis] for axis in axes if frame[AXES[axis]].null_count() < frame.height]
    if column not in frame.columns or "step" not in frame.columns:
        frame = frame.clear()
    else:
        frame = frame.drop_nulls([*names, column]).unique("step", keep="last", maintain_order=True)
    x = {a: run.x(frame, a, first_step).to_numpy().astype(float) for a in axes if AXES[a] in names}
    values = frame[column].to_numpy().astype(float) if frame.height else np.empty(0)
    steps = frame["step"].to_numpy().astype(float) if frame.height else np.empty(0)
    return Series(steps, x, values)


def smoothed(values: np.ndarray) -> np.ndarray:
    """Centred moving average over 2% of the points; at the ends over what is there."""
    window = max(len(values) // 100, 1) * 2
    sums, index = np.concatenate([[0.0], np.cumsum(values)]), np.arange(len(values))
    low, high = np.maximum(index - window // 2, 0), np.minimum(index + window // 2 + 1, len(values))
    return (sums[high] - sums[low]) / (high - low)


def band(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(runs, n) -> mean (n,), half of its 95% interval (n,), by Student's distribution."""
    runs = len(values)
    half = np.full(values.shape[1], np.nan)
    if runs > 1:
        spread = values.std(axis=0, ddof=1) / np.sqrt(runs)
        half = student().stdtrit(runs - 1, 1 - ERROR / 2) * spread
    return values.mean(axis=0), half


def training_curve(runs: list[Series]) -> Curve | None:
    """The smoothed mean over the steps that all runs have, straight between points."""
    if not all(len(run.steps) for run in runs):
        return None
    first, last = max(run.steps[0] for run in runs), min(run.steps[-1] for run in runs)
    if first > last:
        return None
    points = POINTS if len(runs) > 1 else max(len(runs[0].steps), 2)
    grid = np.unique(np.linspace(first, last, points).round()) if len(runs) > 1 else runs[0].steps

    def mean_of(rows):
        return np.stack([np.interp(grid, run.steps, row) for run, row in zip(runs, rows)])

    x = {name: mean_of([run.x[name] for run in runs]).mean(axis=0) for name in shared_axes(runs)}
    return Curve(grid, x, *band(mean_of([smoothed(run.values) for run in runs])))


def shared_axes(runs: list[Series]) -> list[str]:
    return [axis for axis in runs[0].x if all(axis in run.x for run in runs)]


def validation_curve(runs: list[Series]) -> Curve | None:
    """The mean at the steps at which all runs were evaluated."""
    shared = runs[0].steps
    for run in runs[1:]:
        shared = np.intersect1d(shared, run.steps)
    if len(shared) > POINTS:
        shared = shared[np.linspace(0, len(shared) - 1, POINTS).round().astype(int)]
    if not len(shared):
        return None
    rows = [np.searchsorted(run.steps, shared) for run in runs]
    axes = shared_axes(runs)
    x = {n: np.mean([run.x[n][row] for run, row in zip(runs, rows)], axis=0) for n in axes}
    return Curve(shared, x, *band(np.stack([run.values[row] for run, row in zip(runs, rows)])))


def difference_curve(compared: Comparison) -> Curve | None:
    """Own less the baseline's at every evaluation, seed by seed; of shares in percent."""
    factor = 100 if compared.metric in SHARES else 1
    base = {r.seed: series(r, r.evaluations, compared.metric) for r in compared.baseline.runs}
    pairs = []
    for run in compared.group.runs:
        if run.seed in base:
            own, other = series(run, run.evaluations, compared.metric), base[run.seed]
            steps, i, j = np.intersect1d(own.steps, other.steps, return_indices=True)
            values = factor * (own.values[i] - other.values[j])
            pairs.append(Series(steps, {axis: x[i] for axis, x in own.x.items()}, values))
    return validation_curve(pairs)


def line_of(group: Group, number: int, compared: Comparison | None = None, **about) -> Line:
    """about: fields of Line. The first step's seconds are left out of its axis of seconds."""
    line = Line(group.name, group.stem, number, len(group.runs), **about)
    if not all(run.training.height for run in group.runs):
        return line  # a row of runs.csv has no curve
    training = [series(run, run.training, "loss") for run in group.runs]
    evaluations = [series(run, run.evaluations, "val_loss") for run in group.runs]
    curves = {"training": training_curve(training), "validation": validation_curve(evaluations)}
    if compared and compared.paired and all(r.training.height for r in compared.baseline.runs):
        curves["difference"] = difference_curve(compared)
    line.curves = {kind: curve for kind, curve in curves.items() if curve}
    line.raw = training[0] if len(training) == 1 else None
    line.residual = residual_of(group)
    return line


def residual_of(group: Group) -> dict[str, dict[str, tuple[np.ndarray, np.ndarray]]]:
    """Means over tokens, and over the runs at the steps that all have."""
    records = [{record["step"]: record["residual"] for record in r.residual} for r in group.runs]
    steps = sorted(set.intersection(*(set(each) for each in records)))
    found: dict = {}
    for name in records[0][steps[0]] if steps else []:
        if name.endswith("_mean"):
            values = [[each[step].get(name) for step in steps] for each in records]
            site, _, statistic = name.removesuffix("_mean").partition(".")
            try:
                mean = np.mean(np.array(values, dtype=float), axis=0)
            except (TypeError, ValueError):  # a statistic that some records lack, or cut
                continue
            if mean.ndim == 2 and np.isfinite(mean).all():
                found.setdefault(site, {})[statistic] = np.array(steps), mean
    return found


# ---- what all figures share ----


def printing():
    """A context in which figures are made and saved as they are printed."""
    return errors.import_optional("matplotlib", "a figure").rc_context(PRINT)


def look(number: int) -> dict:
    """Colour and style of a curve: 0 is the baseline's; the others differ in one of the two."""
    color = PALETTE[(number - 1) % len(PALETTE)] if number else BASELINE_COLOR
    return {"color": color, "linestyle": STYLES[number % len(STYLES)]}


def look_numbers(stems: list[str | None]) -> list[int]:
    """For each curve the number of its look: 0 for the baseline, if just one is of its stem."""
    baseline = stems.index(BASELINE_STEM) if stems.count(BASELINE_STEM) == 1 else None
    others = itertools.count(1)
    return [0 if index == baseline else next(others) for index in range(len(stems))]


def panels(rows: int, columns: int, height: float, labels: list[str], **keys):
    """(figure, axes (rows, columns)), each row `height` inches high, with room for the legend."""
    figures = errors.import_optional("matplotlib.figure", "a figure")
    lines = math.ceil(len(labels) / legend_columns(labels)) if labels else 0
    size = (WIDTH, rows * height + lines * LEGEND_LINE + 0.1)
    figure = figures.Figure(figsize=size, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **keys)
    for axis in axes.flat:
        axis.grid()
    return figure, axes


def legend_columns(labels: list[str]) -> int:
    return max(int(WIDTH / (max(map(len, labels)) * CHARACTER + 0.5)), 1)


def add_legend(figure, entries: dict) -> None:
    """One for all panels, below them. entries: {label: artist}."""
    if entries:
        columns = legend_columns(list(entries))
        where = {"loc": "outside lower center", "ncols": columns, "frameon": False}
        figure.legend(entries.values(), entries.keys(), **where)


def images_of(figure) -> dict[str, bytes]:
    """{"png", "svg"}: the same bytes from the same numbers."""
    agg = errors.import_optional("matplotlib.backends.backend_agg", "a figure").FigureCanvasAgg
    svg = errors.import_optional("matplotlib.backends.backend_svg", "a figure").FigureCanvasSVG
    bitmap, drawing = io.BytesIO(), io.BytesIO()
    figure.dpi = 200
    agg(figure).print_png(bitmap, metadata={"Software": None})
    figure.set_layout_engine("none")  # it stays as it was laid out
    svg(figure).print_svg(drawing, metadata={"Date": None})
    return {"png": bitmap.getvalue(), "svg": drawing.getvalue()}


def save(figure, out: Path) -> None:
    """Write a figure, whole under its name at any moment."""
    with files.atomic_path(out) as temporary:
        figure.savefig(temporary, dpi=200, format=out.suffix[1:])


def plain_numbers(axis, minor: bool = True) -> None:
    """Of an axis of logarithms: 0.01, 20, 3e-5; minor: 2 and 5 as well where decades are few."""
    ticker = errors.import_optional("matplotlib.ticker", "a figure")
    for which, subs in ((axis.set_major_locator, (1.0,)), (axis.set_minor_locator, (2.0, 5.0))):
        if axis.get_scale() == "log":
            which(ticker.LogLocator(subs=subs, numticks=8))
    low, high = axis.get_view_interval()
    few = minor and axis.get_scale() == "log" and high < 100 * low
    axis.set_major_formatter(lambda value, _: f"{value:.4g}")
    axis.set_minor_formatter(lambda value, _: f"{value:.4g}" if few else "")


def draw_curve(axis, line: Line, kind: str, x: str, entries: dict) -> None:
    """A line's curve with its band; its entry of the legend goes into `entries`."""
    curve = line.curves.get(kind)
    if curve is None or (x != "steps" and x not in curve.x):
        return
    at, style = curve.steps if x == "steps" else curve.x[x], dict(line.look)
    if len(at) <= 20:  # more markers hide each other
        style["marker"] = line.marker
    (drawn,) = axis.plot(at, curve.mean, **style)
    if np.isfinite(curve.half).any():
        low, high = curve.mean - curve.half, curve.mean + curve.half
        axis.fill_between(at, low, high, color=style["color"], alpha=0.18, linewidth=0)
    entries.setdefault(line.name, drawn)


def draw_published(axis, line: Line, x: str, entries: dict) -> None:
    """The published loss at the end of training; the texts say nothing of seconds."""
    curve = line.curves.get("validation")
    if line.published is None or curve is None or x == "seconds":
        return
    star = {"marker": "*", "markersize": 8, "markeredgecolor": "black", "linestyle": "none"}
    color = line.look["color"]
    (point,) = axis.plot(curve.x[x][-1], line.published, color=color, zorder=5, **star)
    entries.setdefault(PUBLISHED, point)


def limit_y(axis, lines: list[Line], kind: str) -> None:
    """The means of the last nine tenths of training: its beginning would leave no room."""
    curves = [line.curves[kind] for line in lines if kind in line.curves]
    begin = 0.1 * max((curve.steps[-1] for curve in curves), default=0)
    means = [curve.mean[curve.steps >= begin] for curve in curves]
    stars = [line.published for line in lines if line.published and kind == "validation"]
    values = np.concatenate([*means, stars])
    if len(values):
        margin = 0.08 * (values.max() - values.min()) or 0.1
        axis.set_ylim(values.min() - margin, values.max() + margin)


def label_x(axis, x: str, lines: list[Line], kind: str) -> None:
    """Plain numbers (20K, 1.5M); logarithmic where most points would lie at the beginning."""
    ticker = errors.import_optional("matplotlib.ticker", "a figure")
    curves = [line.curves[kind].x.get(x) for line in lines if kind in line.curves]
    ends = [(each[0], each[-1]) for each in curves if each is not None and len(each)]
    axis.set_xlabel(X_LABELS[x])
    if ends and 0 < min(ends)[0] * LOGARITHMIC < max(last for _, last in ends):
        axis.set_xscale("log")
        axis.xaxis.set_minor_formatter(ticker.NullFormatter())
    else:
        axis.xaxis.set_major_locator(ticker.MaxNLocator(4))
    letters = "KMGTPEZY" if x == "flops" else "KMBT"
    axis.xaxis.set_major_formatter(lambda value, _: short_number(value, letters))


def short_number(value: float, letters: str) -> str:
    """1.5M, 20K."""
    power = min(int(math.log10(abs(value)) // 3), len(letters)) if abs(value) >= 1000 else 0
    return f"{value / 1000**power:g}{letters[power - 1] if power else ''}"


def plot_over_depth(rows: list[dict], shown: dict[str, tuple[str, str]], label: str):
    """A panel for each quantity {its key in a row: (label, scale)}, a line for each run: of one
    model all in one colour. Returns the figure and its axes.

    rows: "label", "model", and lists that end at the last depth.
    """
    models = [row["model"] for row in rows]
    numbers = dict(zip(dict.fromkeys(models), look_numbers(list(dict.fromkeys(models)))))
    styles = [look(numbers[model]) for model in models]
    for index, model in enumerate(models):
        if models.count(model) > 1:
            styles[index]["linestyle"] = STYLES[models[:index].count(model) % len(STYLES)]
    ticker = errors.import_optional("matplotlib.ticker", "a figure")
    figure, axes = panels(math.ceil(len(shown) / 2), 2, 1.9, [row["label"] for row in rows])
    entries, axes = {}, axes.flatten()
    for axis, (key, (name, scale)) in zip(axes, shown.items()):
        for style, row in zip(styles, rows):
            last = max(len(row[each]) for each in shown) - 1
            depths = range(last + 1 - len(row[key]), last + 1)
            (entries[row["label"]],) = axis.plot(depths, row[key], **style)
        axis.set(xlabel=label, yscale=scale)
        axis.set_title(name, loc="left")
        axis.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
        if scale != "linear":
            plain_numbers(axis.yaxis)
    for axis in axes[len(shown) :]:
        axis.axis("off")
    add_legend(figure, entries)
    return figure, axes


# ---- report.py curves ----


def label_of(line: Line) -> str:
    last = (
        f"validation {line.curves['validation'].mean[-1]:.3f}"
        if "validation" in line.curves
        else ""
    )
    runs = f"{line.runs} runs" if line.runs > 1 else ""
    return ", ".join(filter(None, (shortened(line.name), runs, last)))


def plot_losses(lines: list[Line], x: str, labels: tuple[str, str], out: Path, title: str) -> None:
    """Training as lines, validation as points, one colour for both, as PNG, SVG or PDF."""
    with printing():
        figure, axes = panels(1, 1, 3.6, [label_of(line) for line in lines] + ["", ""])
        axis, entries = axes[0, 0], {}
        for line in lines:
            trace, color = line.raw, line.look["color"]
            if trace is not None and len(lines) <= len(PALETTE) + 1:  # more would hide the curves
                at = trace.steps if x == "steps" else trace.x.get(x, trace.steps)
                axis.plot(at, trace.values, color=color, alpha=0.2, linewidth=0.6)
            drawn: dict = {}
            for kind, curve in line.curves.items():
                at, half = curve.x[x], curve.half if line.runs > 1 else None
                if kind == "training":
                    (drawn[line.name],) = axis.plot(at, curve.mean, **line.look)
                    if half is not None:
                        low, high = curve.mean - half, curve.mean + half
                        axis.fill_between(at, low, high, color=color, alpha=0.18, linewidth=0)
                else:
                    points = {"fmt": "o", "color": color, "capsize": 2}
                    drawn.setdefault(line.name, axis.errorbar(at, curve.mean, yerr=half, **points))
            entries[label_of(line)] = drawn[line.name]
        lowest = min(c.mean.min() for line in lines for c in line.curves.values())
        first = max(next(iter(line.curves.values())).mean[0] for line in lines)
        margin = 0.05 * (first - lowest) or 0.1
        axis.set(xlabel=labels[0], ylabel=labels[1], ylim=(lowest - margin, first + margin))
        axis.set_title(title)
        (entries["training, smoothed"],) = axis.plot([], [], color="0.5")
        (entries["validation"],) = axis.plot([], [], "o", color="0.5")
        add_legend(figure, entries)
        save(figure, out)


def write_page(lines: list[Line], x: str, labels: tuple[str, str], out: Path, title: str) -> None:
    """The same as one interactive page, which needs no network: plotly's own export."""
    figure = errors.import_optional("plotly.graph_objects", "an interactive page").Figure()
    for line in lines:
        style, name = line.look, escape(label_of(line))
        dash = {"color": style["color"], "dash": DASHES[style["linestyle"]]}
        for kind, curve in line.curves.items():
            half = curve.half.tolist() if line.runs > 1 else None
            bars = {"type": "data", "array": half, "visible": bool(half) and kind == "validation"}
            text = "%{x:,.6g}: %{y:.4f}" + (" ± %{customdata:.4f}" if half else "")
            about = {"name": name, "legendgroup": name, "line": dash, "customdata": half}
            about["showlegend"] = kind == next(iter(line.curves))
            about["hovertemplate"] = f"{text}<extra>{kind}, {name}</extra>"
            mode = "lines" if kind == "training" else "markers"
            points = {"x": curve.x[x].tolist(), "y": curve.mean.tolist(), "mode": mode}
            figure.add_scatter(**points, **about, error_y=bars)
    axes = {"xaxis_title": labels[0], "yaxis_title": labels[1], "title": escape(title)}
    figure.update_layout(**axes, template="plotly_white", legend={"orientation": "h", "y": -0.2})
    files.write_text(out, figure.to_html(include_plotlyjs=True, full_html=True))


# ---- the figures of a paper ----


def plot_paper_curves(lines: list[Line], x: str):
    """Training above validation loss: a column for each size, then for its DDL variants."""
    sizes = list(dict.fromkeys(line.size for line in lines))
    columns = {
        s: [line for line in lines if line.size == s and not is_variant(line)] for s in sizes
    }
    for size in sizes:
        own = [line for line in lines if line.size == size]
        if any(is_variant(line) for line in own):
            variants = [e for e in own if not e.number or (e.stem or "").startswith(EXPANDED_STEM)]
            columns[f"{size},\nDDL variants"] = variants
    columns = {title: members for title, members in columns.items() if members}
    labels = [line.name for line in lines] + [PUBLISHED] * any(line.published for line in lines)
    figure, axes = panels(2, len(columns), 1.9 if len(columns) > 1 else 2.4, labels)
    entries: dict = {}
    for (title, members), pair in zip(columns.items(), axes.T):
        pair[0].set_title(title)
        for axis, kind in zip(pair, ("training", "validation")):
            for line in members:
                draw_curve(axis, line, kind, x, entries)
            label_x(axis, x, [], kind)
            limit_y(axis, [line for line in lines if line.size == members[0].size], kind)
            if not any(kind in line.curves for line in members):
                axis.text(0.5, 0.5, "none", transform=axis.transAxes, ha="center", va="center")
                axis.set(xticks=[], yticks=[])
        pair[0].set_xlabel("")
        for line in members:
            draw_published(pair[1], line, x, entries)
    for axis, kind in zip(axes[:, 0], ("training", "validation")):
        axis.set_ylabel(f"{kind} loss\n(nats per token)")
    add_legend(figure, entries)
    return figure


def is_variant(line: Line) -> bool:
    """Of several columns, read or embedded in another way than the paper's main model."""
    return (line.stem or "").startswith(EXPANDED_STEM) and line.stem != EXPANDED_STEM


def plot_costs(lines: list[Line]):
    """Validation loss against steps, tokens, FLOPs and seconds, a row for each size."""
    lines = [line for line in lines if "validation" in line.curves]
    sizes, entries = list(dict.fromkeys(line.size for line in lines)), {}
    labels = [line.name for line in lines] + [PUBLISHED] * any(line.published for line in lines)
    figure, axes = panels(len(sizes), len(X_LABELS), 2.1, labels, sharey="row")
    for size, row in zip(sizes, axes):
        members = [line for line in lines if line.size == size]
        for axis, x in zip(row, X_LABELS):
            for line in members:
                draw_curve(axis, line, "validation", x, entries)
                draw_published(axis, line, x, entries)
            label_x(axis, x, members, "validation")
            limit_y(axis, members, "validation")
        row[0].set_ylabel("validation loss\n(nats per token)")
        row[0].set_title(size if len(sizes) > 1 else "", loc="left")
    add_legend(figure, entries)
    return figure


def plot_differences(lines: list[Line], baseline: str, unit: str):
    """What separates each group from the baseline at every evaluation, a panel for each size."""
    lines = [line for line in lines if "difference" in line.curves]
    sizes, entries = list(dict.fromkeys(line.size for line in lines)), {}
    figure, axes = panels(1, len(sizes), 2.6, [line.name for line in lines])
    for size, axis in zip(sizes, axes[0]):
        for line in lines:
            if line.size == size:
                draw_curve(axis, line, "difference", "steps", entries)
        axis.axhline(0, color="black", linewidth=0.8)
        axis.set_title(size if len(sizes) > 1 else "")
        label_x(axis, "steps", [], "difference")
    axes[0, 0].set_ylabel(f"{unit}\nless that of {baseline}")
    add_legend(figure, entries)
    return figure


def plot_final(rows: list[tuple[Line, Estimate, str]], baseline: str, unit: str):
    """Intervals of the final differences, and a word for each; a single pair has no interval."""
    figure, axes = panels(1, 1, 0.24 * len(rows) + 0.65, [])
    axis, places = axes[0, 0], np.arange(len(rows))[::-1]
    for place, (line, estimate, word) in zip(places, rows):
        half = estimate.half if estimate.n > 1 else None
        points = {"fmt": line.marker, "color": line.look["color"], "capsize": 3}
        axis.errorbar(estimate.mean, place, xerr=half, **points)
        beside = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
        text = f"{estimate.text('+.4f')}  {word}"
        axis.annotate(text, (1, place), xytext=(6, 0), va="center", **beside)
    axis.axvline(0, color="black", linewidth=0.8)
    axis.set_yticks(places, [line.name for line, _, _ in rows])
    axis.set(ylim=(-0.6, len(rows) - 0.4), xlabel=f"{unit} less that of {baseline}")
    axis.grid(axis="y", visible=False)
    return figure


STATISTICS = {  # the telling ones first
    "beta": "gate β",
    "beta_erase": "gate of the erase",
    "discrepancy_after": "discrepancy after",
    "discrepancy_before": "discrepancy before",
    "gate": "gate",
    "mix_kept": "share kept of itself",
    "effective_sources": "effective sources",
    "embedding_weight": "weight of embedding",
}
SITES = {"attn": "attention", "mlp": "MLP"}
RESIDUAL_ROWS, ROW_LABEL = 6, 16  # groups in a figure; characters in a line of their names


def shown_statistics(line: Line) -> list[str]:
    own = list(dict.fromkeys(name for each in line.residual.values() for name in each))
    order = [*STATISTICS, *own]
    return sorted(own, key=order.index)[:2]


def residual_figures(lines: list[Line]) -> dict[str, list[Line]]:
    """Lines whose sites have the same statistics, by the file name of their figure."""
    kinds: dict[str, list[Line]] = {}
    for line in lines:
        if line.residual:
            name = re.sub(r"[^A-Za-z0-9_]+", "_", "_".join(["residual", *shown_statistics(line)]))
            kinds.setdefault(name[:100], []).append(line)
    return {kind: members[:RESIDUAL_ROWS] for kind, members in kinds.items()}


def plot_residual(lines: list[Line]):
    """Means over tokens of what sites say, over training: a row for each line, a curve a block."""
    colors = errors.import_optional("matplotlib.colors", "a figure")
    mappable = errors.import_optional("matplotlib.cm", "a figure").ScalarMappable
    palette = errors.import_optional("matplotlib", "a figure").colormaps["viridis"]
    names = shown_statistics(lines[0])
    columns = [(site, name) for name in names for site in lines[0].residual][:4]
    figure, axes = panels(len(lines), len(columns), 1.3, [], sharex=True, sharey="col")
    every = [values for e in lines for site in e.residual.values() for _, values in site.values()]
    blocks = max(values.shape[1] for values in every)
    shades = colors.ListedColormap(palette(np.linspace(0, 0.85, blocks)))
    scale = mappable(colors.BoundaryNorm(np.arange(blocks + 1) - 0.5, blocks), shades)
    for line, row in zip(lines, axes):
        for axis, (site, name) in zip(row, columns):
            steps, values = line.residual.get(site, {}).get(name, ([], np.empty((0, 0))))
            for block, own in enumerate(values.T):
                axis.plot(steps, own, color=scale.to_rgba(block), linestyle=STYLES[block % 4])
        row[0].set_ylabel(wrapped(line.name))
    for axis, (site, name) in zip(axes[0], columns):
        axis.set_title(f"{STATISTICS.get(name, name.replace('_', ' '))},\n{SITES.get(site, site)}")
    for axis in axes[-1]:
        label_x(axis, "steps", [], "")
    bar = figure.colorbar(scale, ax=axes, shrink=min(1.0, 2 / len(lines)), aspect=25, label="block")
    bar.set_ticks(np.unique(np.linspace(0, blocks - 1, min(blocks, 6)).round()))
    return figure


def wrapped(name: str) -> str:
    """In lines no longer than a row of panels is high."""
    lines = [""]
    for word in re.findall(r"[^-_= ]*[-_= ]?", name):
        if len(lines[-1] + word) > ROW_LABEL:
            lines.append("")
        lines[-1] += word
    return "\n".join(line.strip()[:ROW_LABEL] for line in lines)
