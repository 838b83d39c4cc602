"""What `analyze.py gates` found, as tables and figures: means over seeds, with intervals.

A group is the runs of one setting and step, each with a seed of its own. Of one run, the interval
of an edit is over validation sequences: it covers the choice of the text. Of several, it is over
their means: it covers the seed.
"""

import json
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from research import compare, plots
from research.compare import Estimate
from research.runs import HIDDEN_SETTINGS
from utils import errors, tables

SHOWN = 3  # statistics in the heat maps of a stream whose statistics have no shares
THIN = {"linewidth": 0.6, "alpha": 0.6, "marker": ""}  # a run beside the mean over runs


@dataclass(frozen=True)
class Group:
    """Runs of one setting: their rows of statistics, each with its `effects`."""

    label: str
    rows: list[dict]

    @property
    def sites(self) -> list[tuple[int, str]]:
        return [(site["layer"], site["site"]) for site in self.rows[0]["sites"]]

    @property
    def kinds(self) -> list[str]:
        """Names of sites within a block."""
        return list(dict.fromkeys(name for _, name in self.sites))

    @cached_property
    def names(self) -> list[str]:
        """Of all statistics; those of the first sites come first."""
        return list(dict.fromkeys(n for site in self.rows[0]["sites"] for n in site["statistics"]))

    @cached_property
    def intervals(self) -> dict[str, dict[str, tuple[float, float]]]:
        """Of the statistics that have shares: {statistic: {label: (low, high)}}."""
        found = [each for site in self.rows[0]["sites"] for each in site["statistics"].items()]
        return {name: each["intervals"] for name, each in found if "intervals" in each}

    def found(self, key: tuple[int, str], part: str, name: str) -> list[dict]:
        """Of each run, what `part`, statistics or details, has of this name at the site."""
        at = [next(s for s in row["sites"] if (s["layer"], s["site"]) == key) for row in self.rows]
        return [site[part][name] for site in at if name in site[part]]

    def layers(self, kind: str, name: str, part: str = "statistics") -> dict[int, list[dict]]:
        """{layer: what each run has} of the sites of this kind that have the statistic."""
        found = {n: self.found((n, of), part, name) for n, of in self.sites if of == kind}
        return {layer: runs for layer, runs in found.items() if runs}

    def means(self, name: str) -> dict[tuple[int, str], list[float]]:
        """{site: the mean of each run} of the sites that have the statistic."""
        found = {key: self.found(key, "statistics", name) for key in self.sites}
        return {key: [run["mean"] for run in runs] for key, runs in found.items() if runs}

    def per_run(self, name: str, share: str = "") -> list[float]:
        """Of each run the mean over sites, of a statistic or of one of its shares."""
        runs = []
        for row in self.rows:
            at = [s["statistics"][name] for s in row["sites"] if name in s["statistics"]]
            values = [each["shares"][share] if share else each["mean"] for each in at]
            runs.append(float(np.mean(values)))
        return runs

    @cached_property
    def edits(self) -> list[str]:
        return list(dict.fromkeys(effect["edit"] for effect in self.rows[0]["effects"]))

    def effect(self, layer: int | None, site: str, edit: str) -> Estimate | None:
        """The change in loss: over the windows of one run, or the means of several."""
        key = {"layer": layer, "site": site, "edit": edit}.items()
        found = [each for row in self.rows for each in row["effects"] if key <= each.items()]
        if not found:
            return None
        if len(self.rows) > 1:
            return compare.estimate_mean([effect["difference"] for effect in found])
        n, error = found[0]["windows"], found[0]["standard_error"]
        return Estimate(found[0]["difference"], np.inf if error is None else error, n - 1, n)

    def verdicts(self, edit: str) -> dict[tuple[int, str], tuple[Estimate, str]]:
        """Of every site that has the edit the change and a word for it (Holm over sites)."""
        return worded({key: self.effect(*key, edit) for key in self.sites})

    @cached_property
    def at_once(self) -> dict[str, tuple[Estimate, str]]:
        """Of every edit at all sites at once the change and a word for it (Holm over edits)."""
        return worded({edit: self.effect(None, "all", edit) for edit in self.edits})

    @property
    def over(self) -> str:
        first, runs = self.rows[0], len(self.rows)
        return f"{runs} seeds" if runs > 1 else f"{first['sequences']} sequences"

    def stored(self) -> dict:
        """Means over sites and runs, and effects, as they go to the JSON file."""
        means = {name: compare.summarize(self.per_run(name)) for name in self.names}
        effects = []
        for edit in self.edits:
            found = {(None, "all"): self.at_once[edit]} if edit in self.at_once else {}
            for (layer, site), (change, _) in (found | self.verdicts(edit)).items():
                half = change.half_width if np.isfinite(change.half_width) else None
                about = {"edit": edit, "layer": layer, "site": site}
                effects.append({**about, "difference": change.mean, "ci95": half, "n": change.n})
        runs = [row["label"] for row in self.rows]
        return {"runs": runs, "interval_over": self.over, "over_sites": means, "effects": effects}


def worded(changes: dict) -> dict:
    """{key: (change, its word)} of the changes that there are, corrected for their number."""
    changes = {key: change for key, change in changes.items() if change is not None}
    return dict(
        zip(changes, zip(changes.values(), compare.judge_differences(list(changes.values()))))
    )


def groups(rows: list[dict], subjects: list) -> list[Group]:
    """The rows by setting and step, in the order in which they come up. By itself is each run of a
    setting that has a seed twice, and a folder without a run's settings. The same weights are
    counted once, which is said."""
    found: dict[str, list[dict]] = {}
    seen: set[str] = set()
    for row, subject in zip(rows, subjects):
        if subject.identity in seen:
            print(f"{subject.label}: these weights are there already: counted once", flush=True)
            continue
        seen.add(subject.identity)
        found.setdefault(setting_of(subject), []).append(row | {"label": subject.label})
    lists = []
    for members in found.values():
        independent = len({row["seed"] for row in members}) == len(members)
        lists += [members] if independent else [[row] for row in members]
    stems = [members[0]["model"] for members in lists]
    labels = [m[0]["model"] if stems.count(m[0]["model"]) == 1 else m[0]["label"] for m in lists]
    return [Group(label, members) for label, members in zip(labels, lists)]


def setting_of(subject) -> str:
    """What runs of one group have in common."""
    if subject.state is None:
        return subject.identity
    state = subject.state
    settings = {**state["run_config"], **state["model_config"]}
    unshown = {*HIDDEN_SETTINGS, "model", "seed"}
    same = {key: value for key, value in settings.items() if key not in unshown}
    return json.dumps([state["model"], state["step"], same], sort_keys=True)


# ---- the page ----


def place(key: tuple[int, str]) -> str:
    return f"block {key[0]} {key[1]}"


def extremes(group: Group, name: str) -> str:
    """ "0.41 (block 0 attn) to 1.20 (block 3 mlp)"."""
    means = {key: np.mean(runs) for key, runs in group.means(name).items()}
    low, high = min(means, key=means.get), max(means, key=means.get)
    return f"{means[low]:.4g} ({place(low)}) to {means[high]:.4g} ({place(high)})"


def apart(group: Group, name: str) -> str:
    """The site at which runs differ most, and between what; a mean over runs hides it where they
    do different things at one site."""
    means = group.means(name)
    most = max(means, key=lambda key: max(means[key]) - min(means[key]))
    return f"{min(means[most]):.4g} to {max(means[most]):.4g} ({place(most)})"


def table_of_statistics(group: Group) -> str:
    header = ["statistic", "mean over sites (runs)", "lowest to highest site"]
    if several := len(group.rows) > 1:
        header.append("lowest to highest run, at the site where runs differ most")
    rows = []
    for name in group.names:
        mean = compare.estimate_mean(group.per_run(name)).format(".4g")
        differ = [apart(group, name)] if several else []
        rows.append([name, mean, extremes(group, name), *differ])
        for label, (low, high) in group.intervals.get(name, {}).items():
            share = compare.estimate_mean(group.per_run(name, label)).format(".3f")
            rows.append(
                [f"share {label} ({low:g} to {high:g})", share, *[None] * (len(header) - 2)]
            )
    return tables.format_markdown(header, rows)


def signed(change: Estimate) -> str:
    """`+0.0123 ± 0.0045`."""
    return change.format("+.4f").rpartition(" ")[0]


def table_of_edits(group: Group) -> str:
    """Changes of the loss, in brackets where they are undecided."""
    found = {edit: group.verdicts(edit) for edit in group.edits}
    for edit, change in group.at_once.items():
        found[edit]["all at once"] = change

    def cell(edit, key):
        if key not in found[edit]:
            return None
        change, word = found[edit][key]
        return f"({signed(change)})" if word == "undecided" else signed(change)

    rows = []
    for key in ("all at once", *group.sites):
        name = key if isinstance(key, str) else place(key)
        rows.append([name, *(cell(edit, key) for edit in group.edits)])
    return tables.format_markdown(("site", *group.edits), rows)


def markdown(groups: list[Group], drawn: list[Path]) -> str:
    """The page: for each group its statistics and edits; then the figures."""
    parts = ["# Gates and writes of trained models\n"]
    for group in groups:
        runs, first = "; ".join(row["label"] for row in group.rows), group.rows[0]
        count = f"{first['sequences']} validation sequences, {first['tokens']:,} tokens"
        parts += [f"## {group.label}\n", f"{runs}; {count}.\n", table_of_statistics(group) + "\n"]
        if group.edits:
            parts.append(
                "Change of the loss, in nats a token, with its 95% interval over "
                f"{group.over}; in brackets where no difference is seen (Holm: at one site for the "
                "number of sites, at all at once for that of the edits). An edit is not a "
                "retrained model.\n"
            )
            parts.append(table_of_edits(group) + "\n")
    parts += [f"![{path.stem}]({path.name})" for path in drawn]
    return "\n".join(parts) + "\n"


# ---- figures ----


def draw(group: Group, out: Path, several: bool) -> list[Path]:
    """The files, named after `out` and, among `several` groups, the group."""
    name = out.stem
    if several:
        name += "_" + group.label.replace("/", "_").replace(" ", "_")
    kinds = {"course": course, "histograms": histograms, "edits": edits, "details": details}
    paths = []
    with plots.use_print_style():
        for kind, make in kinds.items():
            if (figure := make(group)) is not None:
                paths.append(out.with_name(f"{name}_{kind}.png"))
                plots.save(figure, paths[-1])
    return paths


def grid(count: int, columns: int, height: float, labels: list[str]):
    """A figure of `count` panels, and these."""
    figure, axes = plots.make_panels(math.ceil(count / columns), columns, height, labels)
    for axis in axes.flat[count:]:
        axis.axis("off")
    for axis in axes.flat[:count]:
        axis.xaxis.get_major_locator().set_params(integer=True)
    return figure, list(axes.flat[:count])


def course(group: Group):
    """Every statistic over blocks; NAME_before, NAME_after, NAME_expected are drawn with NAME.

    Runs' courses may differ: of several each is drawn thin beside the mean, which none may have.
    Of one run: between which values 90% of its tokens lie.
    """
    bases: dict[str, list[str]] = {}
    for name in group.names:
        base = name.removesuffix("_before").removesuffix("_after").removesuffix("_expected")
        bases.setdefault(base, []).append(name)
    columns, entries = min(3, len(bases)), {}
    figure, axes = grid(len(bases), columns, 1.6, [*group.kinds, *["before, measured"] * 3])
    for panel, (base, names) in zip(axes, bases.items()):
        for number, kind in enumerate(group.kinds):
            for name in names:
                found = group.layers(kind, name)
                style = {
                    "color": plots.COLORS[number],
                    "linestyle": plots.STYLES[names.index(name)],
                }
                means = [np.mean([run["mean"] for run in runs]) for runs in found.values()]
                (line,) = panel.plot(list(found), means, marker=plots.MARKERS[number], **style)
                if name == names[-1]:
                    entries.setdefault(kind, line)
                if len(group.rows) == 1:
                    ends = [[runs[0]["quantiles"][q] for runs in found.values()] for q in ENDS]
                    panel.fill_between(list(found), *ends, color=style["color"], alpha=0.1)
                    continue
                for runs in zip(*found.values()):
                    panel.plot(list(found), [run["mean"] for run in runs], **style | THIN)
        others = [name.removeprefix(base).strip("_") or "measured" for name in names]
        own = f" ({', '.join(others)})" if len(names) > 1 else ""
        panel.set_title(f"{base.replace('_', ' ')}{own}", loc="left")
        for name, label in zip(names, others if len(names) > 1 else ()):
            style = plots.STYLES[names.index(name)]
            entries.setdefault(label, panel.plot([], [], color="0.5", linestyle=style)[0])
    for panel in axes[-columns:]:
        panel.set_xlabel("block")
    plots.add_legend(figure, entries)
    return figure


ENDS = "0.05", "0.95"


def histograms(group: Group):
    """Layer by value, a panel for each kind of site: of all runs where shares give them the same
    bins, else of the first. The colours are a square root's: a spike leaves the rest visible."""
    colors = errors.import_optional("matplotlib.colors", "a figure")
    names = list(group.intervals) or group.names[:SHOWN]
    pairs = [(name, kind) for name in names for kind in group.kinds]
    figure, axes = grid(len(pairs), len(group.kinds), 2.1, [])
    for panel, (name, kind) in zip(axes, pairs):
        runs = len(group.rows) if name in group.intervals else 1
        found = group.layers(kind, name)
        if not found:
            panel.axis("off")
            continue
        sums = [np.sum([e["histogram"] for e in each[:runs]], axis=0) for each in found.values()]
        counts, edges = np.array(sums), group.rows[0]["edges"][name]
        share = counts / counts.sum(1, keepdims=True)
        norm = colors.PowerNorm(0.5, vmin=0, vmax=share.max())
        rows = np.arange(len(found) + 1) - 0.5
        mesh = panel.pcolormesh(edges, rows, share, cmap="cividis", norm=norm)
        panel.grid(visible=False)
        means = [np.mean([e["mean"] for e in each[:runs]]) for each in found.values()]
        dots = {"color": "white", "markeredgecolor": "black", "markersize": 5}
        panel.plot(means, range(len(found)), "o", **dots)
        panel.set(title=kind, xlabel=f"{name} (dot: mean)", ylabel="block")
        panel.set_yticks(range(len(found)), found)
        figure.colorbar(mesh, ax=panel, label="share of tokens")
    return figure


def edits(group: Group):
    """The change in loss by layer, a panel for each edit; None: none was tried."""
    if not group.edits:
        return None
    columns, entries = min(3, len(group.edits)), {}
    figure, axes = grid(len(group.edits), columns, 2.0, group.kinds)
    for panel, edit in zip(axes, group.edits):
        found = group.verdicts(edit)
        for number, kind in enumerate(group.kinds):
            at = {layer: change for (layer, name), (change, _) in found.items() if name == kind}
            halves = [
                change.half_width if np.isfinite(change.half_width) else 0 for change in at.values()
            ]
            places = [layer + 0.12 * (2 * number - len(group.kinds) + 1) for layer in at]
            style = {"fmt": plots.MARKERS[number], "color": plots.COLORS[number], "capsize": 2}
            means = [change.mean for change in at.values()]
            entries[kind] = panel.errorbar(places, means, halves, **style)
        every = f" (all: {group.at_once[edit][0].mean:+.3f})" if edit in group.at_once else ""
        panel.axhline(0, color="black", linewidth=0.8)
        panel.set_title(f"{edit}{every}", loc="left")
        panel.set_xlabel("block")
    for panel in axes[::columns]:
        panel.set_ylabel("change of loss\n(nats a token)")
    plots.add_legend(figure, entries)
    return figure


def details(group: Group):
    """Means over tokens of vectors, layer by entry, and of matrices, those of all layers in a row,
    a panel for each kind of site; None: there are none. Of the first run: columns and features
    have no order that seeds share."""
    names = list(dict.fromkeys(name for site in group.rows[0]["sites"] for name in site["details"]))
    if not names:
        return None
    pairs = [(name, kind) for name in names for kind in group.kinds]
    figure, axes = grid(len(pairs), len(group.kinds), 1.7, [])
    for panel, (name, kind) in zip(axes, pairs):
        found = group.layers(kind, name, "details")
        means = [np.array(runs[0]["mean"], dtype=float) for runs in found.values()]
        panel.grid(visible=False)
        if not means or means[0].ndim > 2:
            panel.axis("off")
            continue
        panel.set_title(f"{kind}: {name.replace('_', ' ')}", loc="left")
        if means[0].ndim == 1:
            image = np.full((len(means), max(map(len, means))), np.nan)
            for row, mean in zip(image, means):
                row[: len(mean)] = mean
            panel.set(xlabel="entry", ylabel="block")
            panel.set_yticks(range(len(found)), found)
        else:
            wide = means[0].shape[1] + 1  # with a gap
            gap = ((0, 0), (0, 1))
            image = np.concatenate([np.pad(m, gap, constant_values=np.nan) for m in means], 1)
            panel.set_xticks([wide * n + (wide - 2) / 2 for n in range(len(found))], found)
            panel.set(xlabel="block", yticks=[])
        most = np.nanmax(np.abs(image))
        scale = {"cmap": "cividis", "vmin": np.nanmin(image), "vmax": np.nanmax(image)}
        if np.nanmin(image) < 0:  # white is 0
            scale = {"cmap": "RdBu_r", "vmin": -most, "vmax": most}
        shown = panel.imshow(image, aspect="auto", interpolation="nearest", **scale)
        figure.colorbar(shown, ax=panel, format="%.4g")
    return figure
