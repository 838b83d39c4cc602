"""The page and the figures of `analyze.py gates`: tables of means over seeds, with intervals.

A group holds the runs of one setting at one step, each with a seed of its own. In a group of one
run, the interval of an edit's effect is over validation sequences: it covers the choice of the text.
In a group of several runs it is over their means: it covers the seed.
"""

import json
import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from evaluation.subjects import Subject
from research import compare, plots
from research.compare import Estimate
from research.runs import HIDDEN_SETTINGS
from utils import errors, tables

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

SiteKey = tuple[int, str]  # layer and name of a site
Verdict = tuple[Estimate, str]  # a change of the loss, and whether it is better or worse
Key = TypeVar("Key", bound=Hashable)

MAX_COLUMNS = 3  # panels side by side
NUM_HISTOGRAMS = 3  # statistics with histograms, in streams whose statistics have no intervals
# between which 90% of the tokens lie
LOW_QUANTILE = "0.05"
HIGH_QUANTILE = "0.95"
ALL_SITES: tuple[None, str] = (None, "all")  # layer and site of an edit at all sites at once


@dataclass(frozen=True)
class Group:
    """Runs of one setting: their rows of statistics, each with its `effects`."""

    label: str
    rows: list[dict]

    @property
    def sites(self) -> list[SiteKey]:
        return [(site["layer"], site["site"]) for site in self.rows[0]["sites"]]

    @property
    def site_names(self) -> list[str]:
        """Names of sites within a block."""
        return list(dict.fromkeys(name for _, name in self.sites))

    @cached_property
    def statistic_names(self) -> list[str]:
        """Names of the statistics of all sites; those of the first sites come first."""
        return list(
            dict.fromkeys(name for site in self.rows[0]["sites"] for name in site["statistics"])
        )

    @cached_property
    def intervals(self) -> dict[str, dict[str, tuple[float, float]]]:
        """Intervals in which tokens are counted: {statistic: {label: (low, high)}}."""
        intervals = {}
        for site in self.rows[0]["sites"]:
            for name, statistic in site["statistics"].items():
                if "intervals" in statistic:
                    intervals[name] = statistic["intervals"]
        return intervals

    def get_summaries(self, key: SiteKey, name: str, part: str = "statistics") -> list[dict]:
        """Return what each run has of a statistic at a site; [] if the site does not have it.

        part: "statistics" or "details"
        """
        summaries = []
        for row in self.rows:
            for site in row["sites"]:
                if (site["layer"], site["site"]) == key and name in site[part]:
                    summaries.append(site[part][name])
        return summaries

    def get_summaries_by_layer(
        self, site_name: str, name: str, part: str = "statistics"
    ) -> dict[int, list[dict]]:
        """Return {layer: what each run has of a statistic} for the sites that have it."""
        by_layer = {}
        for layer, other_site_name in self.sites:
            if other_site_name == site_name:
                summaries = self.get_summaries((layer, site_name), name, part)
                if summaries:
                    by_layer[layer] = summaries
        return by_layer

    def get_means_by_site(self, name: str) -> dict[SiteKey, list[float]]:
        """Return {site: the mean of each run} for the sites that have the statistic."""
        means = {}
        for key in self.sites:
            summaries = self.get_summaries(key, name)
            if summaries:
                means[key] = [summary["mean"] for summary in summaries]
        return means

    def average_over_sites(self, name: str, interval: str = "") -> list[float]:
        """Return the mean of a statistic over the sites of each run.

        interval: label of an interval; if given, average the fraction of tokens in it instead
        """
        means = []
        for row in self.rows:
            values = []
            for site in row["sites"]:
                if name in site["statistics"]:
                    statistic = site["statistics"][name]
                    values.append(statistic["shares"][interval] if interval else statistic["mean"])
            means.append(float(np.mean(values)))
        return means

    @cached_property
    def edit_names(self) -> list[str]:
        return list(dict.fromkeys(effect["edit"] for effect in self.rows[0]["effects"]))

    def get_effect(self, layer: int | None, site: str, edit: str) -> Estimate | None:
        """Return the change of the loss over the sequences of one run, or the means of several.

        None if the site does not have the edit.
        """
        key = {"layer": layer, "site": site, "edit": edit}
        effects = [
            effect
            for row in self.rows
            for effect in row["effects"]
            if key.items() <= effect.items()
        ]
        if not effects:
            return None
        if len(self.rows) > 1:
            return compare.estimate_mean([effect["difference"] for effect in effects])
        [effect] = effects
        standard_error = effect["standard_error"]
        if standard_error is None:  # of one sequence
            standard_error = np.inf
        num_sequences = effect["windows"]
        return Estimate(effect["difference"], standard_error, num_sequences - 1, num_sequences)

    def judge_edit(self, edit: str) -> dict[SiteKey, Verdict]:
        """Return the verdict on an edit at each site that has it (corrected by Holm over sites)."""
        return judge({key: self.get_effect(*key, edit) for key in self.sites})

    @cached_property
    def verdicts_at_all_sites(self) -> dict[str, Verdict]:
        """Verdict on each edit at all sites at once (corrected by Holm over edits)."""
        return judge({edit: self.get_effect(*ALL_SITES, edit) for edit in self.edit_names})

    @property
    def interval_source(self) -> str:
        """Say what the intervals of effects are over."""
        if len(self.rows) > 1:
            return f"{len(self.rows)} seeds"
        return f"{self.rows[0]['sequences']} sequences"

    def summarize(self) -> dict:
        """Return means over sites and runs, and effects, as they are stored in the JSON file."""
        effects = []
        for edit in self.edit_names:
            verdicts: dict[tuple[int | None, str], Verdict] = {}
            if edit in self.verdicts_at_all_sites:
                verdicts[ALL_SITES] = self.verdicts_at_all_sites[edit]
            verdicts.update(self.judge_edit(edit))
            for (layer, site), (change, _) in verdicts.items():
                effects.append(
                    {
                        "edit": edit,
                        "layer": layer,
                        "site": site,
                        "difference": change.mean,
                        "ci95": change.half_width if np.isfinite(change.half_width) else None,
                        "n": change.n,
                    }
                )
        return {
            "runs": [row["label"] for row in self.rows],
            "interval_over": self.interval_source,
            "over_sites": {
                name: compare.summarize(self.average_over_sites(name))
                for name in self.statistic_names
            },
            "effects": effects,
        }


def judge(changes: dict[Key, Estimate | None]) -> dict[Key, Verdict]:
    """Return the verdict on each change that is not None, corrected for their number."""
    estimates = {key: change for key, change in changes.items() if change is not None}
    words = compare.judge_differences(list(estimates.values()))
    return {key: (estimate, word) for (key, estimate), word in zip(estimates.items(), words)}


# ---- groups ----


def group_runs(rows: list[dict], subjects: list[Subject]) -> list[Group]:
    """Group the rows by setting and step, in order of appearance.

    A run is a group by itself if its setting has a seed twice, or if its folder does not say its
    settings. Equal weights are counted once, and a note is printed.
    """
    rows_by_setting: dict[str, list[dict]] = {}
    counted_weights: set[str] = set()
    for row, subject in zip(rows, subjects):
        if subject.identity in counted_weights:
            print(
                f"{subject.label}: another run has the same weights, which are counted once",
                flush=True,
            )
            continue
        counted_weights.add(subject.identity)
        rows_by_setting.setdefault(describe_setting(subject), []).append(
            {**row, "label": subject.label}
        )
    row_lists = []
    for setting_rows in rows_by_setting.values():
        seeds = {row["seed"] for row in setting_rows}
        if len(seeds) == len(setting_rows):
            row_lists.append(setting_rows)
        else:
            row_lists += [[row] for row in setting_rows]
    # a group has the name of its model, unless several have the same
    model_names = [group_rows[0]["model"] for group_rows in row_lists]
    groups = []
    for model_name, group_rows in zip(model_names, row_lists):
        is_unique = model_names.count(model_name) == 1
        groups.append(Group(model_name if is_unique else group_rows[0]["label"], group_rows))
    return groups


def describe_setting(subject: Subject) -> str:
    """Return what the runs of one group have in common, as text."""
    if subject.state is None:
        return subject.identity
    state = subject.state
    ignored_keys = {*HIDDEN_SETTINGS, "model", "seed"}
    settings = {
        key: value
        for key, value in {**state["run_config"], **state["model_config"]}.items()
        if key not in ignored_keys
    }
    return json.dumps([state["model"], state["step"], settings], sort_keys=True)


# ---- the page ----


def describe_site(key: SiteKey) -> str:
    layer, name = key
    return f"block {layer} {name}"


def format_extremes(group: Group, name: str) -> str:
    """Return the lowest and the highest mean: "0.41 (block 0 attn) to 1.20 (block 3 mlp)"."""
    means = {key: np.mean(runs) for key, runs in group.get_means_by_site(name).items()}
    low = min(means, key=means.get)
    high = max(means, key=means.get)
    return f"{means[low]:.4g} ({describe_site(low)}) to {means[high]:.4g} ({describe_site(high)})"


def format_widest_spread(group: Group, name: str) -> str:
    """Return the site at which runs differ most, and their lowest and highest mean there.

    A mean over runs hides it if they do different things at one site.
    """
    means = group.get_means_by_site(name)
    widest = max(means, key=lambda key: max(means[key]) - min(means[key]))
    return f"{min(means[widest]):.4g} to {max(means[widest]):.4g} ({describe_site(widest)})"


def format_statistics_table(group: Group) -> str:
    header = ["statistic", "mean over sites (runs)", "lowest to highest site"]
    has_several_runs = len(group.rows) > 1
    if has_several_runs:
        header.append("lowest to highest run, at the site where runs differ most")
    rows = []
    for name in group.statistic_names:
        mean = compare.estimate_mean(group.average_over_sites(name)).format(".4g")
        row = [name, mean, format_extremes(group, name)]
        if has_several_runs:
            row.append(format_widest_spread(group, name))
        rows.append(row)
        for label, (low, high) in group.intervals.get(name, {}).items():
            fraction = compare.estimate_mean(group.average_over_sites(name, label)).format(".3f")
            row = [f"share {label} ({low:g} to {high:g})", fraction]
            row += [None] * (len(header) - len(row))
            rows.append(row)
    return tables.format_markdown(header, rows)


def format_change(change: Estimate) -> str:
    """Return `+0.0123 ± 0.0045`."""
    return change.format("+.4f").rpartition(" ")[0]


def format_verdict(verdict: Verdict | None) -> str | None:
    """Return a change of the loss, in brackets if it is undecided; None if there is none."""
    if verdict is None:
        return None
    change, word = verdict
    return f"({format_change(change)})" if word == "undecided" else format_change(change)


def format_edit_table(group: Group) -> str:
    """Return the table of changes of the loss, with a row for each site and a column per edit."""
    first_row = ["all at once"]
    for edit in group.edit_names:
        first_row.append(format_verdict(group.verdicts_at_all_sites.get(edit)))
    rows = [first_row]
    verdicts = {edit: group.judge_edit(edit) for edit in group.edit_names}
    for key in group.sites:
        cells = [format_verdict(verdicts[edit].get(key)) for edit in group.edit_names]
        rows.append([describe_site(key), *cells])
    return tables.format_markdown(("site", *group.edit_names), rows)


def format_page(groups: list[Group], pictures: list[Path]) -> str:
    """Return the page in Markdown: statistics and edits of each group, then the pictures."""
    parts = ["# Gates and writes of trained models\n"]
    for group in groups:
        runs = "; ".join(row["label"] for row in group.rows)
        num_sequences = group.rows[0]["sequences"]
        num_tokens = group.rows[0]["tokens"]
        parts.append(f"## {group.label}\n")
        parts.append(f"{runs}; {num_sequences} validation sequences, {num_tokens:,} tokens.\n")
        parts.append(format_statistics_table(group) + "\n")
        if group.edit_names:
            parts.append(
                "Change of the loss, in nats per token, with its 95% interval over "
                f"{group.interval_source}; brackets mark changes that do not differ from 0 after "
                "Holm's correction (at one site, for the number of sites; at all sites at once, "
                "for the number of edits). An edit is "
                "not a retrained model.\n"
            )
            parts.append(format_edit_table(group) + "\n")
    parts += [f"![{picture.stem}]({picture.name})" for picture in pictures]
    return "\n".join(parts) + "\n"


# ---- figures ----


def draw(group: Group, out: Path, in_several_groups: bool) -> list[Path]:
    """Draw the figures of a group and return their files.

    Args:
        out: the JSON file, after which they are named
        in_several_groups: add the label of the group to the names
    """
    name = out.stem
    if in_several_groups:
        name += "_" + group.label.replace("/", "_").replace(" ", "_")
    draw_functions: dict[str, Callable[[Group], Figure | None]] = {
        "course": draw_course,
        "histograms": draw_histograms,
        "edits": draw_edits,
        "details": draw_details,
    }
    pictures = []
    with plots.use_print_style():
        for kind, draw_figure in draw_functions.items():
            figure = draw_figure(group)
            if figure is not None:
                picture = out.with_name(f"{name}_{kind}.png")
                plots.save(figure, picture)
                pictures.append(picture)
    return pictures


def make_panels(
    num_panels: int, num_columns: int, height: float, labels: list[str]
) -> tuple["Figure", list["Axes"]]:
    """Return a figure and its panels, row by row.

    Args:
        height: of each row, in inches
        labels: those of the legend, for which room is left
    """
    num_rows = math.ceil(num_panels / num_columns)
    figure, axes = plots.make_panels(num_rows, num_columns, height, labels)
    panels = list(axes.flat[:num_panels])
    for unused_panel in axes.flat[num_panels:]:
        unused_panel.axis("off")
    for panel in panels:
        panel.xaxis.get_major_locator().set_params(integer=True)
    return figure, panels


def group_by_base_name(names: list[str]) -> dict[str, list[str]]:
    """Group NAME_before, NAME_after and NAME_expected with NAME."""
    groups: dict[str, list[str]] = {}
    for name in names:
        base = name.removesuffix("_before").removesuffix("_after").removesuffix("_expected")
        groups.setdefault(base, []).append(name)
    return groups


def draw_course(group: Group) -> "Figure":
    """Draw every statistic over blocks, with NAME_before, NAME_after, NAME_expected in one panel.

    For one run, a band shows between which values 90% of its tokens lie. For several runs, each is
    drawn thin beside the mean, because runs may differ so much that none is like the mean.
    """
    names_by_panel = group_by_base_name(group.statistic_names)
    num_columns = min(MAX_COLUMNS, len(names_by_panel))
    labels = [*group.site_names, *["before, measured"] * 3]
    figure, panels = make_panels(len(names_by_panel), num_columns, 1.6, labels)
    entries = {}
    for panel, (base_name, names) in zip(panels, names_by_panel.items()):
        for site_index, site_name in enumerate(group.site_names):
            for name, line_style in zip(names, plots.STYLES):
                line = plot_over_blocks(panel, group, site_name, name, site_index, line_style)
                if name == names[-1]:
                    entries.setdefault(site_name, line)
        title = base_name.replace("_", " ")
        if len(names) > 1:
            suffixes = [name.removeprefix(base_name).strip("_") or "measured" for name in names]
            title += f" ({', '.join(suffixes)})"
            for suffix, line_style in zip(suffixes, plots.STYLES):
                [line] = panel.plot([], [], color="0.5", linestyle=line_style)
                entries.setdefault(suffix, line)
        panel.set_title(title, loc="left")
    for panel in panels[-num_columns:]:
        panel.set_xlabel("block")
    plots.add_legend(figure, entries)
    return figure


def plot_over_blocks(
    panel: "Axes", group: Group, site_name: str, name: str, site_index: int, line_style: str
) -> "Line2D":
    """Draw the mean of a statistic over blocks, with a band or the single runs.

    Args:
        site_index: chooses the color and the marker
        line_style: tells statistics in one panel apart

    Returns:
        The line of the mean.
    """
    color = plots.COLORS[site_index]
    by_layer = group.get_summaries_by_layer(site_name, name)
    layers = list(by_layer)
    means = [np.mean([run["mean"] for run in runs]) for runs in by_layer.values()]
    [line] = panel.plot(
        layers, means, marker=plots.MARKERS[site_index], color=color, linestyle=line_style
    )
    if len(group.rows) == 1:
        low = [runs[0]["quantiles"][LOW_QUANTILE] for runs in by_layer.values()]
        high = [runs[0]["quantiles"][HIGH_QUANTILE] for runs in by_layer.values()]
        panel.fill_between(layers, low, high, color=color, alpha=0.1)
        return line
    for runs in zip(*by_layer.values()):
        panel.plot(
            layers,
            [run["mean"] for run in runs],
            color=color,
            linestyle=line_style,
            linewidth=0.6,
            alpha=0.6,
            marker="",
        )
    return line


def draw_histograms(group: Group) -> "Figure":
    """Draw, for each site of a block, layers by values, with the fraction of tokens as color.

    The histograms of all runs are added up if intervals give them the same bins; else only those
    of the first run are drawn. Colors are on the scale of a square root, so that a spike leaves the
    rest visible.
    """
    colors = errors.import_optional("matplotlib.colors", "a figure")
    names = list(group.intervals) or group.statistic_names[:NUM_HISTOGRAMS]
    pairs = [(name, site_name) for name in names for site_name in group.site_names]
    figure, panels = make_panels(len(pairs), len(group.site_names), 2.1, [])
    for panel, (name, site_name) in zip(panels, pairs):
        num_runs = len(group.rows) if name in group.intervals else 1
        by_layer = {
            layer: runs[:num_runs]
            for layer, runs in group.get_summaries_by_layer(site_name, name).items()
        }
        if not by_layer:
            panel.axis("off")
            continue
        counts = np.array(
            [np.sum([run["histogram"] for run in runs], axis=0) for runs in by_layer.values()]
        )
        fractions = counts / counts.sum(1, keepdims=True)
        mesh = panel.pcolormesh(
            group.rows[0]["edges"][name],
            np.arange(len(by_layer) + 1) - 0.5,
            fractions,
            cmap="cividis",
            norm=colors.PowerNorm(0.5, vmin=0, vmax=fractions.max()),
        )
        panel.grid(visible=False)
        means = [np.mean([run["mean"] for run in runs]) for runs in by_layer.values()]
        panel.plot(
            means,
            range(len(by_layer)),
            "o",
            color="white",
            markeredgecolor="black",
            markersize=5,
        )
        panel.set(title=site_name, xlabel=f"{name} (dot: mean)", ylabel="block")
        panel.set_yticks(range(len(by_layer)), by_layer)
        figure.colorbar(mesh, ax=panel, label="share of tokens")
    return figure


def draw_edits(group: Group) -> "Figure | None":
    """Draw the change of the loss by layer, with a panel for each edit; None without edits."""
    if not group.edit_names:
        return None
    num_columns = min(MAX_COLUMNS, len(group.edit_names))
    figure, panels = make_panels(len(group.edit_names), num_columns, 2.0, group.site_names)
    entries = {}
    for panel, edit in zip(panels, group.edit_names):
        verdicts = group.judge_edit(edit)
        for index, site_name in enumerate(group.site_names):
            changes = {
                layer: change
                for (layer, name), (change, _) in verdicts.items()
                if name == site_name
            }
            # points of one block stand side by side
            offset = 0.12 * (2 * index - len(group.site_names) + 1)
            entries[site_name] = panel.errorbar(
                [layer + offset for layer in changes],
                [change.mean for change in changes.values()],
                [
                    change.half_width if np.isfinite(change.half_width) else 0
                    for change in changes.values()
                ],
                fmt=plots.MARKERS[index],
                color=plots.COLORS[index],
                capsize=2,
            )
        title = edit
        if edit in group.verdicts_at_all_sites:
            change, _ = group.verdicts_at_all_sites[edit]
            title += f" (all: {change.mean:+.3f})"
        panel.axhline(0, color="black", linewidth=0.8)
        panel.set_title(title, loc="left")
        panel.set_xlabel("block")
    for panel in panels[::num_columns]:
        panel.set_ylabel("change of loss\n(nats per token)")
    plots.add_legend(figure, entries)
    return figure


def draw_details(group: Group) -> "Figure | None":
    """Draw means over tokens of vectors, layer by entry, and of matrices, those of all layers in a row.

    There is a panel for each site of a block. Only the first run is drawn, because value channels
    and features have no order that seeds share.

    Returns:
        None if no site has details.
    """
    names = list(dict.fromkeys(name for site in group.rows[0]["sites"] for name in site["details"]))
    if not names:
        return None
    pairs = [(name, site_name) for name in names for site_name in group.site_names]
    figure, panels = make_panels(len(pairs), len(group.site_names), 1.7, [])
    for panel, (name, site_name) in zip(panels, pairs):
        by_layer = group.get_summaries_by_layer(site_name, name, "details")
        layers = list(by_layer)
        means = [np.array(runs[0]["mean"], dtype=float) for runs in by_layer.values()]
        panel.grid(visible=False)
        if not means or means[0].ndim > 2:
            panel.axis("off")
            continue
        panel.set_title(f"{site_name}: {name.replace('_', ' ')}", loc="left")
        if means[0].ndim == 1:
            image = stack_vectors(means)
            panel.set(xlabel="entry", ylabel="block")
            panel.set_yticks(range(len(layers)), layers)
        else:
            image = join_matrices(means)
            width = means[0].shape[1] + 1
            panel.set_xticks(
                [width * index + (width - 2) / 2 for index in range(len(layers))], layers
            )
            panel.set(xlabel="block", yticks=[])
        low = np.nanmin(image)
        high = np.nanmax(image)
        color_map = "cividis"
        if low < 0:  # white is 0
            color_map = "RdBu_r"
            high = np.nanmax(np.abs(image))
            low = -high
        drawn_image = panel.imshow(
            image, aspect="auto", interpolation="nearest", cmap=color_map, vmin=low, vmax=high
        )
        figure.colorbar(drawn_image, ax=panel, format="%.4g")
    return figure


def stack_vectors(vectors: list[np.ndarray]) -> np.ndarray:
    """Return vectors as rows of a matrix; shorter ones end with nan."""
    rows = np.full((len(vectors), max(map(len, vectors))), np.nan)
    for row, vector in zip(rows, vectors):
        row[: len(vector)] = vector
    return rows


def join_matrices(matrices: list[np.ndarray]) -> np.ndarray:
    """Return matrices side by side, each followed by a column of nan as a gap."""
    gap = ((0, 0), (0, 1))
    padded = [np.pad(matrix, gap, constant_values=np.nan) for matrix in matrices]
    return np.concatenate(padded, axis=1)
