"""The figures of a report for print, as matplotlib's: every one has its legend beside its panels, none over a curve."""

import math
import re
from dataclasses import dataclass, field

import numpy as np

import configurator
from research.intervals import Estimate
from research.reporting.bands import Curve
from research.reporting.curves import X_LABELS
from research.reporting.style import STYLES, line

WIDTH = 7.0  # inches: the text of a page of two columns
LINE = 0.17  # inches from line to line of a legend
CHARACTER = 0.068  # inches, the mean width
PRINT = {
    "font.size": 8, "axes.labelsize": 8, "axes.titlesize": 8, "xtick.labelsize": 8, "ytick.labelsize": 8,
    "legend.fontsize": 8, "axes.linewidth": 0.6, "lines.linewidth": 1.2, "lines.markersize": 3.5, "grid.alpha": 0.3,
    "grid.linewidth": 0.5, "svg.hashsalt": "report", "text.parse_math": False, "axes.formatter.limits": (-3, 4),
}  # fmt: skip
# Without the first step, which compiles the model: how long depends on what was compiled before.
AXES = X_LABELS | {"seconds": "device-seconds after step 1"}
LOGARITHMIC = 30  # the last value of an axis by the first, from which on it is
MARKERS = "osD^vPXph"
EXPANDED = "DDL-gpt-mha-rope"
PUBLISHED = "published (star in the colour of its row)"
BANDS = "Lines: means over runs; bands: their 95% intervals, none of a single run."
CURVES = (
    "Training loss (above, smoothed over 2% of each run) and validation loss (below) of the models of each size, "
    f"and of the ways to read and embed the model of several columns. {BANDS} What is early may lie above."
)
COSTS = f"Validation loss against steps, tokens, FLOPs and device-seconds, without the first step's. {BANDS}"
DIFFERENCES = "Difference to the baseline at every evaluation, run by run of the same seed. Bands: 95% intervals."
FOREST = (
    "Final differences to the baseline with their 95% intervals, the number of pairs or runs in brackets, and what "
    "they allow to say, corrected for the number of comparisons."
)
GAP = {"validation": "not evaluated", "training": "no step with a loss"}
RESIDUAL = "What the sites of each block say of themselves during training, means over tokens and runs."


@dataclass
class Drawn:
    """A group of runs as it is drawn: `number` settles its look, `size` the panel.

    curves: "training", "validation" and "difference" to the baseline, those that there are. bits: by kind of curve the
    bits per byte of each nat per token, where they are known. published: a loss, where the runs are comparable with it.
    residual: {site: {statistic: (steps (n,), values (n, blocks))}}.
    """

    name: str
    number: int
    size: str
    stem: str | None = None
    is_baseline: bool = False
    curves: dict[str, Curve] = field(default_factory=dict)
    bits: dict[str, float] = field(default_factory=dict)
    published: float | None = None
    residual: dict = field(default_factory=dict)

    @property
    def look(self) -> dict:
        return line(self.number)

    @property
    def marker(self) -> str:
        return MARKERS[self.number % len(MARKERS)]


def printed():
    """A context in which figures are made and saved as they are printed."""
    return configurator.optional("matplotlib", "a figure").rc_context(PRINT)


def panels(rows: int, columns: int, height: float, labels: list[str], titles: list[str] = (), **keys):
    """(figure, axes (rows, columns)) with room below for a legend of these labels; `height` in inches of a row."""
    figures = configurator.optional("matplotlib.figure", "a figure")
    legend_rows = math.ceil(len(labels) / legend_columns(labels)) if labels else 0
    size = WIDTH, rows * height + legend_rows * LINE + 0.1
    figure = figures.Figure(figsize=size, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **keys)
    for axis in axes.flat:
        axis.grid()
    for axis, title in zip(axes.flat, titles):
        axis.set_title(title)
    return figure, axes


def legend_columns(labels: list[str]) -> int:
    """As many as the width holds."""
    return max(int(WIDTH / (max(map(len, labels)) * CHARACTER + 0.5)), 1)


def legend(figure, entries: dict) -> None:
    """One for all panels, below them. entries: {label: artist}."""
    if entries:
        columns = legend_columns(list(entries))
        figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=columns, frameon=False)


def draw(axis, group: Drawn, kind: str, x: str, entries: dict) -> None:
    """A group's curve with its band; the entry of the legend goes into `entries`."""
    curve = group.curves.get(kind)
    if curve is None:
        return
    at, look = curve.x[x], dict(group.look)
    if len(at) <= 20:  # more markers hide each other
        look["marker"] = group.marker
    (drawn,) = axis.plot(at, curve.mean, label=group.name, **look)
    if np.isfinite(curve.half).any():
        low, high = curve.mean - curve.half, curve.mean + curve.half
        axis.fill_between(at, low, high, color=look["color"], alpha=0.18, linewidth=0)
    entries.setdefault(group.name, drawn)


def show_published(axis, group: Drawn, x: str, entries: dict) -> None:
    """The published loss at the end of training, a star in the group's colour."""
    curve = group.curves.get("validation")
    if group.published is None or curve is None or x not in ("steps", "tokens", "flops"):
        return  # of seconds the texts say nothing
    star = {"marker": "*", "markersize": 8, "markeredgecolor": "black", "markeredgewidth": 0.5, "linestyle": "none"}
    (point,) = axis.plot(curve.x[x][-1], group.published, color=group.look["color"], zorder=5, **star)
    entries.setdefault(PUBLISHED, point)


def limit(axis, groups: list[Drawn], kind: str) -> None:
    """The means of the last nine tenths of training: its beginning, and a band of two runs, would leave no room."""
    curves = [group.curves[kind] for group in groups if kind in group.curves]
    begin = 0.1 * max((curve.steps[-1] for curve in curves), default=0)
    means = [curve.mean[curve.steps >= begin] for curve in curves]
    values = np.concatenate([*means, [g.published for g in groups if g.published and kind == "validation"]])
    if len(values):
        margin = 0.08 * (values.max() - values.min()) or 0.1
        axis.set_ylim(values.min() - margin, values.max() + margin)


def scaled(axis, x: str, groups: list[Drawn], kind: str) -> None:
    """Label the axis below, logarithmic where a line would have nearly all of its points at its beginning."""
    ticker = configurator.optional("matplotlib.ticker", "a figure")
    curves = [group.curves[kind] for group in groups if kind in group.curves]
    ends = [(curve.x[x][0], curve.x[x][-1]) for curve in curves]
    axis.set_xlabel(AXES[x])
    if ends and 0 < min(ends)[0] * LOGARITHMIC < max(last for _, last in ends):
        axis.set_xscale("log")
        axis.xaxis.set_minor_formatter(ticker.NullFormatter())
    else:
        axis.xaxis.set_major_locator(ticker.MaxNLocator(4))
        limit(axis, groups, kind)
    axis.xaxis.set_major_formatter(lambda value, _: short(value, "KMGTPEZY" if x == "flops" else "KMBT"))


def short(value: float, letters: str) -> str:
    """1.5M, 20K."""
    power = min(int(math.log10(abs(value)) // 3), len(letters)) if abs(value) >= 1000 else 0
    return f"{value / 1000**power:g}{letters[power - 1] if power else ''}"


def columns_of(groups: list[Drawn]) -> list[tuple[str, list[Drawn]]]:
    """The paper's columns: for each size the baseline beside the main models, then for each size the baseline beside
    the ways to build the model of several columns, where there are such."""
    sizes = list(dict.fromkeys(group.size for group in groups))
    compared = [group for group in groups if group.is_baseline or is_expanded(group)]
    main = [(size, [g for g in groups if g.size == size and not is_variant(g)]) for size in sizes]
    variants = [(size, [g for g in compared if g.size == size]) for size in sizes]
    named = [(f"{size},\nDDL variants", each) for size, each in variants if any(is_variant(group) for group in each)]
    return [column for column in main + named if column[1]]


def is_expanded(group: Drawn) -> bool:
    """A DDL of several columns, however it is read and embedded."""
    return (group.stem or "").startswith(EXPANDED)


def is_variant(group: Drawn) -> bool:
    """In the last column alone."""
    return is_expanded(group) and group.stem != EXPANDED


def curves(groups: list[Drawn], x: str = "tokens"):
    """The paper's six panels: training above validation loss; a column for each size, then for its DDL variants."""
    columns, entries = columns_of(groups), {}
    labels = [group.name for group in groups]
    labels += [PUBLISHED] * any(group.published for group in groups)
    figure, axes = panels(2, len(columns), 1.9 if len(columns) > 1 else 2.4, labels, [title for title, _ in columns])
    for (_, members), (top, bottom) in zip(columns, axes.T):
        for axis, kind in ((bottom, "validation"), (top, "training")):
            for group in members:
                draw(axis, group, kind, x, entries)
            scaled(axis, x, [], kind)
            if not any(kind in group.curves for group in members):
                axis.text(0.5, 0.5, GAP[kind], transform=axis.transAxes, ha="center", va="center")
                axis.set(xticks=[], yticks=[])
            limit(axis, [group for group in groups if group.size == members[0].size], kind)
        top.set_xlabel("")
        for group in members:
            show_published(bottom, group, x, entries)
    axes[0, 0].set_ylabel("training loss\n(nats per token)")
    axes[1, 0].set_ylabel("validation loss\n(nats per token)")
    legend(figure, entries)
    return figure


def costs(groups: list[Drawn]):
    """Validation loss against steps, tokens, FLOPs and device-seconds, a row for each size."""
    groups = [group for group in groups if "validation" in group.curves]
    sizes, entries = list(dict.fromkeys(group.size for group in groups)), {}
    labels = [group.name for group in groups] + [PUBLISHED] * any(group.published for group in groups)
    figure, axes = panels(len(sizes), len(AXES), 2.1, labels, sharey="row")
    for size, row in zip(sizes, axes):
        members = [group for group in groups if group.size == size]
        for axis, x in zip(row, AXES):
            for group in members:
                draw(axis, group, "validation", x, entries)
                show_published(axis, group, x, entries)
            scaled(axis, x, members, "validation")
        row[0].set_ylabel("validation loss\n(nats per token)")
        row[0].set_title(size if len(sizes) > 1 else "", loc="left")
    legend(figure, entries)
    return figure


def differences(groups: list[Drawn], baseline: str, unit: str):
    """What separates each group from the baseline at every evaluation, seed by seed; a panel for each size."""
    members = [group for group in groups if "difference" in group.curves]
    sizes, entries = list(dict.fromkeys(group.size for group in members)), {}
    figure, axes = panels(1, len(sizes), 2.6, [group.name for group in members], sizes if len(sizes) > 1 else [])
    for size, axis in zip(sizes, axes[0]):
        for group in members:
            if group.size == size:
                draw(axis, group, "difference", "steps", entries)
        axis.axhline(0, color="black", linewidth=0.8)
        axis.set_xlabel(AXES["steps"])
    axes[0, 0].set_ylabel(f"{unit}\nless that of {baseline}")
    legend(figure, entries)
    return figure


def forest(rows: list[tuple[Drawn, Estimate, str]], baseline: str, unit: str):
    """Intervals of the final differences, and a word for each; a single pair has no interval."""
    figure, axes = panels(1, 1, 0.24 * len(rows) + 0.65, [])
    axis, places = axes[0, 0], np.arange(len(rows))[::-1]
    for place, (group, estimate, word) in zip(places, rows):
        half = estimate.half if estimate.n > 1 else None
        axis.errorbar(estimate.mean, place, xerr=half, fmt=group.marker, color=group.look["color"], capsize=3)
        said = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "va": "center"}
        axis.annotate(f"{estimate.text('+.4f')}  {word}", (1, place), xytext=(6, 0), **said)
    axis.axvline(0, color="black", linewidth=0.8)
    axis.set_yticks(places, [group.name for group, _, _ in rows])
    axis.set(ylim=(-0.6, len(rows) - 0.4), xlabel=f"{unit} less that of {baseline}")
    axis.grid(axis="y", visible=False)
    return figure


STATISTICS = {
    "beta": "gate β",
    "discrepancy_after": "rms discrepancy after",
    "discrepancy_before": "rms discrepancy before",
    "gate": "gate",
    "mix_kept": "share kept of itself",
    "effective_sources": "effective sources",
    "embedding_weight": "weight of embedding",
}
RESIDUAL_ROWS, ROW_LABEL = 6, 16  # groups in a figure; characters in a line of their names
SITES = {"attn": "attention", "mlp": "MLP"}


def shown_statistics(group: Drawn) -> list[str]:
    """Two at most, the telling ones first."""
    own = list(dict.fromkeys(name for each in group.residual.values() for name in each))
    return sorted(own, key=lambda name: (name not in STATISTICS, [*STATISTICS, name].index(name)))[:2]


def kinds_of(groups: list[Drawn]) -> dict[str, list[Drawn]]:
    """Groups whose sites say the same of themselves, by the first thing they say; a figure's worth of each."""
    kinds: dict[str, list[Drawn]] = {}
    for group in groups:
        kinds.setdefault("_".join(shown_statistics(group)), []).append(group)
    return {kind: members[:RESIDUAL_ROWS] for kind, members in kinds.items()}


def residual(groups: list[Drawn]):
    """Means over tokens of what the sites say of themselves, over training: a row for each group, a line a block."""
    colors = configurator.optional("matplotlib.colors", "a figure")
    mappable = configurator.optional("matplotlib.cm", "a figure").ScalarMappable
    columns = [(site, name) for name in shown_statistics(groups[0]) for site in groups[0].residual][:4]
    figure, axes = panels(len(groups), len(columns), 1.2, [], sharex=True, sharey="col")
    blocks = max(values.shape[1] for g in groups for each in g.residual.values() for _, values in each.values())
    shades = configurator.optional("matplotlib", "a figure").colormaps["viridis"](np.linspace(0, 0.85, blocks))
    scale = mappable(colors.BoundaryNorm(np.arange(blocks + 1) - 0.5, blocks), colors.ListedColormap(shades))
    for group, row in zip(groups, axes):
        for axis, (site, name) in zip(row, columns):
            steps, values = group.residual.get(site, {}).get(name, (np.empty(0), np.empty((0, 0))))
            for block, own in enumerate(values.T):
                axis.plot(steps, own, color=scale.to_rgba(block), linestyle=STYLES[block % 4])
        row[0].set_ylabel(wrapped(group.name))
    for axis, (site, name) in zip(axes[0], columns):
        axis.set_title(f"{STATISTICS.get(name, name.replace('_', ' '))},\n{SITES.get(site, site)}")
    for axis in axes[-1]:
        axis.set_xlabel(AXES["steps"])
    bar = figure.colorbar(scale, ax=axes, shrink=min(1.0, 2 / len(groups)), aspect=25, label="block")
    bar.set_ticks(np.unique(np.linspace(0, blocks - 1, min(blocks, 6)).round()))
    return figure


def wrapped(name: str) -> str:
    """In lines no longer than a row of panels is high."""
    lines = [""]
    for word in re.findall(r"[^-_= ]*[-_= ]?", name):
        lines = [*lines[:-1], lines[-1] + word] if len(lines[-1] + word) <= ROW_LABEL else [*lines, word]
    return "\n".join(line.strip()[:ROW_LABEL] for line in lines)
