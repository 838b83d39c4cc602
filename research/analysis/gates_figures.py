"""The figures of `analyze.py gates`: of each group of runs, means over them."""

import math
from pathlib import Path

import numpy as np

import configurator
from research.analysis.gates_summary import Group
from research.plots import COLORS, STYLES, pyplot

MARKERS = "o", "s", "^", "D"
THIN = {
    "linewidth": 0.7,
    "alpha": 0.6,
    "marker": "",
    "label": None,
}  # a run beside the mean over runs
SHOWN = 3  # statistics in the heat maps of a stream whose statistics have no shares


def draw(group: Group, out: Path, several: bool) -> list[Path]:
    """The files, named after `out` and, among `several` groups, the group."""
    name = f"{out.stem}_{group.label.replace('/', '_').replace(' ', '_')}" if several else out.stem
    kinds = {
        "histograms": histograms,
        "shares": shares,
        "course": course,
        "edits": edits,
        "details": details,
    }
    paths = []
    for kind, make in kinds.items():
        figure = make(group)
        if figure is not None:
            paths.append(out.with_name(f"{name}_{kind}.png"))
            figure.savefig(paths[-1], dpi=100)
            pyplot().close(figure)
    return paths


def grid(rows: int, columns: int, width: float, height: float, **keys):
    plt = pyplot()
    size = (width * columns, height * rows)
    return plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False, **keys)


def colors():
    return configurator.optional("matplotlib.colors", "a figure")


def layers_of(group: Group, kind: str) -> list[int]:
    return [layer for layer, name in group.sites if name == kind]


def histograms(group: Group):
    """Layer by value, a panel for each kind of site."""
    names = list(group.intervals) or group.names[:SHOWN]
    figure, axes = grid(len(names), len(group.kinds), 5.5, 3.2)
    for row, name in zip(axes, names):
        for panel, kind in zip(row, group.kinds):
            found = {
                layer: group.found((layer, kind), "statistics", name)
                for layer in layers_of(group, kind)
            }
            found = {layer: runs for layer, runs in found.items() if runs}
            if found:
                heat_map_of_values(figure, panel, group, name, kind, found)
            else:
                panel.axis("off")
    figure.suptitle("" if group.intervals or len(group.rows) == 1 else group.rows[0]["label"])
    return figure


def heat_map_of_values(
    figure, panel, group: Group, name: str, kind: str, found: dict[int, list[dict]]
) -> None:
    """found: of each layer the statistic of each run; all runs have the same bins where shares give them, else the
    first run is shown. The colours' scale is a square root's: a spike leaves the rest visible."""
    runs = len(group.rows) if name in group.intervals else 1
    counts = np.array(
        [np.sum([each["histogram"] for each in of[:runs]], axis=0) for of in found.values()]
    )
    share, edges = counts / counts.sum(1, keepdims=True), group.rows[0]["edges"][name]
    norm = colors().PowerNorm(0.5, vmin=0, vmax=share.max())
    mesh = panel.pcolormesh(
        edges, np.arange(len(found) + 1) - 0.5, share, cmap="cividis", norm=norm
    )
    means = [np.mean([each["mean"] for each in of[:runs]]) for of in found.values()]
    panel.plot(means, range(len(found)), "o", color="white", markeredgecolor="black", markersize=6)
    panel.set(title=kind, xlabel=f"{name} (dot: mean)", ylabel="block")
    panel.set_yticks(range(len(found)), found)
    figure.colorbar(mesh, ax=panel, label="share of tokens")


def stacked(intervals: dict[str, tuple]) -> list[str]:
    """The labels, in turn, whose intervals overlap none of those before."""
    chosen: list[str] = []
    for label, (low, high) in intervals.items():
        if all(high <= intervals[other][0] or low >= intervals[other][1] for other in chosen):
            chosen.append(label)
    return chosen


def shares(group: Group):
    """Shares of tokens by layer: what excludes each other as stacked bars, the rest as marks; None: there are none."""
    if not group.intervals:
        return None
    figure, axes = grid(len(group.intervals), len(group.kinds), 5.5, 3.6, sharey=True)
    for row, (name, intervals) in zip(axes, group.intervals.items()):
        bars = stacked(intervals)
        marks = [label for label in intervals if label not in bars]
        for panel, kind in zip(row, group.kinds):
            layers = [
                layer
                for layer in layers_of(group, kind)
                if group.found((layer, kind), "statistics", name)
            ]
            value = {
                b: [group.field((n, kind), name, "shares", b) for n in layers] for b in intervals
            }
            bottom = np.zeros(len(layers))
            for label, color in zip(bars, COLORS):
                panel.bar(
                    layers,
                    value[label],
                    bottom=bottom,
                    color=color,
                    alpha=0.75,
                    label=text_of(label, intervals),
                )
                bottom += value[label]
            for label, marker in zip(marks, MARKERS):
                style = {"markerfacecolor": "white", "markeredgecolor": "black", "markersize": 8}
                panel.plot(layers, value[label], marker, label=text_of(label, intervals), **style)
            panel.set(
                title=f"{kind}: {name}",
                xlabel="block",
                ylabel="share of tokens",
                ylim=(-0.03, 1.03),
                xticks=layers,
            )
        row[-1].legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.02, 1))
    return figure


def text_of(label: str, intervals: dict) -> str:
    low, high = intervals[label]
    return f"{label} ({low:g} to {high:g})"


def course(group: Group):
    """Every statistic over layers; NAME_before, NAME_after and NAME_expected are drawn with NAME.

    Runs' courses may differ: of several a mean alone would show one that no run has.
    """
    panels: dict[str, list[str]] = {}
    for name in group.names:
        base = name.removesuffix("_before").removesuffix("_after").removesuffix("_expected")
        panels.setdefault(base, []).append(name)
    columns = min(4, len(panels))
    figure, axes = grid(math.ceil(len(panels) / columns), columns, 4.2, 3.2)
    for panel, (base, names) in zip(axes.flat, panels.items()):
        lines = [(kind, name) for kind in group.kinds for name in names]
        for index, (kind, name) in enumerate(lines):
            color = COLORS[group.kinds.index(kind) % len(COLORS)]
            style = {"color": color, "linestyle": STYLES[names.index(name) % len(STYLES)]}
            label = (
                kind
                if len(names) == 1
                else f"{kind} {name.removeprefix(base).strip('_') or 'measured'}"
            )
            line_over_layers(
                panel,
                group,
                kind,
                name,
                style | {"marker": MARKERS[index % len(MARKERS)], "label": label},
            )
        panel.set(title=base.replace("_", " "), xlabel="block")
        panel.xaxis.get_major_locator().set_params(integer=True)
        panel.grid(alpha=0.3)
        legend_below(panel)
    for panel in axes.flat[len(panels) :]:
        panel.axis("off")
    return figure


def legend_below(panel) -> None:
    """Where it hides nothing."""
    panel.legend(
        fontsize="x-small", loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2, frameon=False
    )


def line_over_layers(panel, group: Group, kind: str, name: str, style: dict) -> None:
    """The mean; of one run also between which values 90% of its tokens lie, of several each run's mean, thin."""
    layers = [
        layer for layer in layers_of(group, kind) if group.found((layer, kind), "statistics", name)
    ]

    def values(*which):
        return [group.field((layer, kind), name, *which) for layer in layers]

    panel.plot(layers, values("mean"), markersize=4, **style)
    if len(group.rows) == 1:
        ends = values("quantiles", "0.05"), values("quantiles", "0.95")
        panel.fill_between(layers, *ends, color=style["color"], alpha=0.1, linewidth=0)
        return
    for runs in zip(*(group.found((layer, kind), "statistics", name) for layer in layers)):
        panel.plot(layers, [run["mean"] for run in runs], **{**style, **THIN})


def edits(group: Group):
    """The change in loss by layer, a panel for each edit; None: none was tried."""
    if not group.edits:
        return None
    columns = min(4, len(group.edits))
    figure, axes = grid(math.ceil(len(group.edits) / columns), columns, 4.4, 3.6)
    for panel, edit in zip(axes.flat, group.edits):
        found = group.verdicts(edit)
        for index, kind in enumerate(group.kinds):
            at = {layer: change for (layer, name), (change, _) in found.items() if name == kind}
            halves = [change.half if np.isfinite(change.half) else 0 for change in at.values()]
            style = {
                "color": COLORS[index],
                "marker": MARKERS[index],
                "linestyle": "none",
                "capsize": 3,
                "label": kind,
            }
            shift = 0.12 * (2 * index - len(group.kinds) + 1)
            panel.errorbar(
                [layer + shift for layer in at], [c.mean for c in at.values()], halves, **style
            )
        every = group.effect(None, "all", edit)
        all_sites = f"\nat all sites: {every.text('+.3f').rpartition(' ')[0]}" if every else ""
        panel.axhline(0, color="black", linewidth=0.8)
        panel.set(
            title=f"{edit}{all_sites}", xlabel="block", ylabel="change of loss (nats a token)"
        )
        panel.xaxis.get_major_locator().set_params(integer=True)
        panel.grid(alpha=0.3)
        legend_below(panel)
    for panel in axes.flat[len(group.edits) :]:
        panel.axis("off")
    return figure


def details(group: Group):
    """Means over tokens of vectors, layer by entry, and of matrices, one a site; None: there are none.

    Of the first run: columns and features have no order that seeds share.
    """
    names = list(dict.fromkeys(name for site in group.rows[0]["sites"] for name in site["details"]))
    if not names:
        return None
    layers = list(dict.fromkeys(layer for layer, _ in group.sites))
    shown = {name: means_of(group, name) for name in names}
    vectors = [name for name in names if next(iter(shown[name].values())).ndim == 1]
    matrices = [
        name for name in names if name not in vectors and next(iter(shown[name].values())).ndim == 2
    ]
    plt, width = pyplot(), max(len(layers), 2 * len(group.kinds))
    rows = len(vectors) + len(matrices) * len(group.kinds)
    figure = plt.figure(figsize=(min(2.2 * width, 24), 2.6 * rows), layout="constrained")
    figure.suptitle(group.rows[0]["label"])
    parts = np.atleast_1d(figure.subfigures(rows, 1))
    for part, name in zip(parts, vectors):
        draw_vectors(part, group, name, shown[name])
    pairs = [(name, kind) for name in matrices for kind in group.kinds]
    for part, (name, kind) in zip(parts[len(vectors) :], pairs):
        draw_matrices(
            part, name, kind, {n: shown[name][n, kind] for n in layers if (n, kind) in shown[name]}
        )
    return figure


def means_of(group: Group, name: str) -> dict[tuple[int, str], np.ndarray]:
    """Of each site that has the detail its mean over tokens."""
    found = {key: group.found(key, "details", name) for key in group.sites}
    return {key: np.array(runs[0]["mean"]) for key, runs in found.items() if runs}


def colours(arrays: list[np.ndarray]) -> dict:
    """One scale for all: from white both ways where there are negative numbers."""
    low, high = min(a.min() for a in arrays), max(a.max() for a in arrays)
    if low < 0:
        most = max(-low, high)
        return {"cmap": "RdBu_r", "vmin": -most, "vmax": most}
    return {"cmap": "cividis", "vmin": low, "vmax": high if high > low else low + 1}


def draw_vectors(part, group: Group, name: str, means: dict) -> None:
    panels = np.atleast_1d(part.subplots(1, len(group.kinds)))
    scale = colours(list(means.values()))
    for panel, kind in zip(panels, group.kinds):
        rows = {layer: mean for (layer, of), mean in means.items() if of == kind}
        table = np.full((len(rows), max((len(row) for row in rows.values()), default=1)), np.nan)
        for index, row in enumerate(rows.values()):
            table[index, : len(row)] = row
        image = panel.imshow(table, aspect="auto", interpolation="nearest", origin="lower", **scale)
        panel.set(title=f"{kind}: {name.replace('_', ' ')}", xlabel="entry", ylabel="block")
        panel.set_yticks(range(len(rows)), rows)
        panel.xaxis.get_major_locator().set_params(integer=True)
    part.colorbar(image, ax=panels)


def draw_matrices(part, name: str, kind: str, means: dict[int, np.ndarray]) -> None:
    panels = np.atleast_1d(part.subplots(1, max(len(means), 1)))
    scale = colours(list(means.values()))
    for panel, (layer, matrix) in zip(panels, means.items()):
        image = panel.imshow(matrix, interpolation="nearest", **scale)
        panel.set(
            title=f"block {layer}", xticks=range(matrix.shape[1]), yticks=range(matrix.shape[0])
        )
    part.suptitle(f"{kind}: {name.replace('_', ' ')}", fontsize="medium")
    part.colorbar(image, ax=panels)
