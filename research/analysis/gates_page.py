"""The page and the figures of `analyze.py gates`: tables of means over seeds, with intervals.

A group holds the runs of one setting at one step, each with a seed of its own. In a group of one
run, the interval of an edit's effect is over validation sequences: it covers the choice of the text.
In a group of several runs it is over their means: it covers the seed.
"""

import itertools
import json
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from model_folder import ModelFolder
from research import compare, plots
from research.compare import Estimate
from research.runs import HIDDEN_SETTINGS
from utils import errors, tables

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SiteKey = tuple[int, str]  # layer and name of a site
EditKey = tuple[int | None, str]  # a site, or ALL_SITES
Summaries = dict[SiteKey, list[dict]]  # what each run has of a statistic or detail, by site
Verdict = tuple[Estimate, str]  # a change of the loss, and whether it is better or worse
Key = TypeVar("Key", bound=Hashable)
Item = TypeVar("Item")

MAX_COLUMNS = 3  # panels side by side
NUM_HISTOGRAMS = 3  # statistics with histograms, in streams whose statistics have no intervals
# between which 90% of the tokens lie
LOW_QUANTILE = "0.05"
HIGH_QUANTILE = "0.95"
ALL_SITES: EditKey = (None, "all")  # layer and site of an edit at all sites at once


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
    def statistics(self) -> dict[str, Summaries]:
        """Return {statistic: {site: what each run has of it}}."""
        return self.collect("statistics")

    @cached_property
    def details(self) -> dict[str, Summaries]:
        """Return {detail: {site: what each run has of it}}."""
        return self.collect("details")

    def collect(self, part: str) -> dict[str, Summaries]:
        by_name: dict[str, Summaries] = {}
        for row in self.rows:
            for site in row["sites"]:
                for name, summary in site[part].items():
                    by_site = by_name.setdefault(name, {})
                    by_site.setdefault((site["layer"], site["site"]), []).append(summary)
        return by_name

    def get_intervals(self, name: str) -> dict[str, tuple[float, float]]:
        """Return the intervals of a statistic in which tokens are counted, {label: (low, high)}."""
        [first_run, *_] = next(iter(self.statistics[name].values()))
        return first_run.get("intervals", {})

    def average_over_sites(self, name: str, interval: str = "") -> list[float]:
        """Return the mean of a statistic over the sites of each run.

        interval: label of an interval; if given, average the fraction of tokens in it instead
        """
        values = [
            [run["shares"][interval] if interval else run["mean"] for run in runs]
            for runs in self.statistics[name].values()
        ]
        return np.mean(values, axis=0).tolist()

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

    @cached_property
    def verdicts(self) -> dict[str, dict[EditKey, Verdict]]:
        """Verdicts on the changes by each edit, at all sites at once and at each site that has it.

        They are corrected by Holm, over edits or over sites.
        """
        at_all_sites = judge({edit: self.get_effect(*ALL_SITES, edit) for edit in self.edit_names})
        by_edit: dict[str, dict[EditKey, Verdict]] = {edit: {} for edit in self.edit_names}
        for edit, verdicts in by_edit.items():
            if edit in at_all_sites:
                verdicts[ALL_SITES] = at_all_sites[edit]
            verdicts.update(judge({key: self.get_effect(*key, edit) for key in self.sites}))
        return by_edit

    @property
    def interval_source(self) -> str:
        """Say what the intervals of effects are over."""
        if len(self.rows) > 1:
            return f"{len(self.rows)} seeds"
        return f"{self.rows[0]['sequences']} sequences"

    def summarize(self) -> dict:
        """Return means over sites and runs, and effects, as they are stored in the JSON file."""
        effects = [
            {
                "edit": edit,
                "layer": layer,
                "site": site,
                "difference": change.mean,
                "ci95": change.half_width if np.isfinite(change.half_width) else None,
                "n": change.n,
            }
            for edit, verdicts in self.verdicts.items()
            for (layer, site), (change, _) in verdicts.items()
        ]
        return {
            "runs": [row["label"] for row in self.rows],
            "interval_over": self.interval_source,
            "over_sites": {
                name: compare.summarize(self.average_over_sites(name)) for name in self.statistics
            },
            "effects": effects,
        }


def judge(changes: dict[Key, Estimate | None]) -> dict[Key, Verdict]:
    """Return the verdict on each change that is not None, corrected for their number."""
    estimates = {key: change for key, change in changes.items() if change is not None}
    words = compare.judge_differences(list(estimates.values()))
    return {key: (estimate, word) for (key, estimate), word in zip(estimates.items(), words)}


# ---- groups ----


def group_runs(rows: list[dict], folders: list[ModelFolder]) -> list[Group]:
    """Group the rows by setting and step, in order of appearance.

    A run is a group by itself if its setting has a seed twice, or if its folder does not say its
    settings. Equal weights are counted once, and a note is printed.
    """
    rows_by_setting: dict[str, list[dict]] = {}
    counted_weights: set[str] = set()
    for row, folder in zip(rows, folders):
        if folder.identity in counted_weights:
            print(
                f"{folder.label}: another run has the same weights, which are counted once",
                flush=True,
            )
            continue
        counted_weights.add(folder.identity)
        rows_by_setting.setdefault(describe_setting(folder), []).append(
            {**row, "label": folder.label}
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


def describe_setting(folder: ModelFolder) -> str:
    """Return what the runs of one group have in common, as text."""
    if not folder.state:
        return folder.identity
    state = folder.state
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


def collect_means(group: Group, name: str) -> dict[SiteKey, list[float]]:
    """Return the mean of a statistic in each run, by site."""
    by_site = group.statistics[name]
    return {key: [run["mean"] for run in runs] for key, runs in by_site.items()}


def format_extremes(group: Group, name: str) -> str:
    """Return the lowest and the highest mean: "0.41 (block 0 attn) to 1.20 (block 3 mlp)"."""
    means = {key: np.mean(runs) for key, runs in collect_means(group, name).items()}
    low = min(means, key=means.get)
    high = max(means, key=means.get)
    return f"{means[low]:.4g} ({describe_site(low)}) to {means[high]:.4g} ({describe_site(high)})"


def format_widest_spread(group: Group, name: str) -> str:
    """Return the site at which runs differ most, and their lowest and highest mean there.

    A mean over runs hides it if they do different things at one site.
    """
    means = collect_means(group, name)
    widest = max(means, key=lambda key: max(means[key]) - min(means[key]))
    return f"{min(means[widest]):.4g} to {max(means[widest]):.4g} ({describe_site(widest)})"


def format_statistics_table(group: Group) -> str:
    header = ["statistic", "mean over sites (runs)", "lowest to highest site"]
    has_several_runs = len(group.rows) > 1
    if has_several_runs:
        header.append("lowest to highest run, at the site where runs differ most")
    rows = []
    for name in group.statistics:
        mean = compare.estimate_mean(group.average_over_sites(name)).format(".4g")
        row = [name, mean, format_extremes(group, name)]
        if has_several_runs:
            row.append(format_widest_spread(group, name))
        rows.append(row)
        for label, (low, high) in group.get_intervals(name).items():
            fraction = compare.estimate_mean(group.average_over_sites(name, label)).format(".3f")
            row = [f"share {label} ({low:g} to {high:g})", fraction]
            row += [None] * (len(header) - len(row))
            rows.append(row)
    return tables.format_markdown(header, rows)


def format_verdict(verdict: Verdict | None) -> str | None:
    """Return `+0.0123 ± 0.0045`, in brackets if it is undecided; None if there is no verdict."""
    if verdict is None:
        return None
    change, word = verdict
    text = change.format("+.4f").rpartition(" ")[0]
    return f"({text})" if word == "undecided" else text


def format_edit_table(group: Group) -> str:
    """Return the table of changes of the loss, with a row for each site and a column per edit."""
    rows = []
    for key in (ALL_SITES, *group.sites):
        cells = [format_verdict(verdicts.get(key)) for verdicts in group.verdicts.values()]
        rows.append(["all at once" if key == ALL_SITES else describe_site(key), *cells])
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


def draw_small_multiples(
    items: list[Item],
    num_columns: int,
    height: float,
    draw_panel: Callable[["Axes", Item], dict[str, "Artist"]],
    labels: Sequence[str] = (),
) -> "Figure":
    """Return a figure with a panel for each item, row by row, and one legend for all.

    Args:
        height: of each row, in inches
        draw_panel: draws an item, and returns the artists of its labels in the legend
        labels: those of the legend, for which room is left
    """
    num_rows = math.ceil(len(items) / num_columns)
    figure, axes = plots.make_panels(num_rows, num_columns, height, labels)
    entries: dict[str, Artist] = {}
    for panel, item in itertools.zip_longest(axes.flat, items):
        if item is None:
            panel.axis("off")
            continue
        panel.xaxis.get_major_locator().set_params(integer=True)
        for label, artist in draw_panel(panel, item).items():
            entries.setdefault(label, artist)
    plots.add_legend(figure, entries)
    return figure


def select_site(by_site: Summaries, site_name: str) -> dict[int, list[dict]]:
    """Return {layer: what each run has} for the sites of one name."""
    return {layer: runs for (layer, name), runs in by_site.items() if name == site_name}


def draw_course(group: Group) -> "Figure":
    """Draw every statistic over blocks, with NAME_before, NAME_after, NAME_expected in one panel.

    For one run, a band shows between which values 90% of its tokens lie. For several runs, each is
    drawn thin beside the mean, because runs may differ so much that none is like the mean.
    """
    names_by_panel: dict[str, list[str]] = {}
    for name in group.statistics:
        base = name.removesuffix("_before").removesuffix("_after").removesuffix("_expected")
        names_by_panel.setdefault(base, []).append(name)

    def draw_panel(panel: "Axes", base_name: str) -> dict[str, "Artist"]:
        names = names_by_panel[base_name]
        entries = {}
        for site_index, site_name in enumerate(group.site_names):
            for name, line_style in zip(names, plots.STYLES):
                line = plot_over_blocks(panel, group, site_name, name, site_index, line_style)
                entries[site_name] = line
        title = base_name.replace("_", " ")
        if len(names) > 1:
            suffixes = [name.removeprefix(base_name).strip("_") or "measured" for name in names]
            title += f" ({', '.join(suffixes)})"
            for suffix, line_style in zip(suffixes, plots.STYLES):
                [entries[suffix]] = panel.plot([], [], color="0.5", linestyle=line_style)
        panel.set_title(title, loc="left")
        if base_name in last_names:
            panel.set_xlabel("block")
        return entries

    labels = [*group.site_names, *["before, measured"] * 3]
    num_columns = min(MAX_COLUMNS, len(names_by_panel))
    last_names = list(names_by_panel)[-num_columns:]
    return draw_small_multiples(list(names_by_panel), num_columns, 1.6, draw_panel, labels)


def plot_over_blocks(
    panel: "Axes", group: Group, site_name: str, name: str, site_index: int, line_style: str
) -> "Artist":
    """Draw the mean of a statistic over blocks, with a band or the single runs.

    Args:
        site_index: chooses the color and the marker
        line_style: tells statistics in one panel apart

    Returns:
        The line of the mean.
    """
    style = {"color": plots.COLORS[site_index], "linestyle": line_style}
    by_layer = select_site(group.statistics[name], site_name)
    layers = list(by_layer)
    means = np.array([[run["mean"] for run in runs] for runs in by_layer.values()])
    [line] = panel.plot(layers, means.mean(1), marker=plots.MARKERS[site_index], **style)
    if len(group.rows) == 1:
        low = [runs[0]["quantiles"][LOW_QUANTILE] for runs in by_layer.values()]
        high = [runs[0]["quantiles"][HIGH_QUANTILE] for runs in by_layer.values()]
        panel.fill_between(layers, low, high, color=style["color"], alpha=0.1)
    else:
        panel.plot(layers, means, linewidth=0.6, alpha=0.6, marker="", **style)
    return line


def draw_histograms(group: Group) -> "Figure":
    """Draw, for each site of a block, layers by values, with the fraction of tokens as color.

    The histograms of all runs are added up if intervals give them the same bins; else only those
    of the first run are drawn. Colors are on the scale of a square root, so that a spike leaves the
    rest visible.
    """
    colors = errors.import_optional("matplotlib.colors", "a figure")

    def draw_panel(panel: "Axes", item: tuple[str, str]) -> dict[str, "Artist"]:
        name, site_name = item
        num_runs = len(group.rows) if group.get_intervals(name) else 1
        by_layer = select_site(group.statistics[name], site_name)
        if not by_layer:
            panel.axis("off")
            return {}
        counts = np.array(
            [
                np.sum([run["histogram"] for run in runs[:num_runs]], axis=0)
                for runs in by_layer.values()
            ]
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
        means = [np.mean([run["mean"] for run in runs[:num_runs]]) for runs in by_layer.values()]
        dot = {"color": "white", "markeredgecolor": "black", "markersize": 5}
        panel.plot(means, range(len(by_layer)), "o", **dot)
        panel.set(title=site_name, xlabel=f"{name} (dot: mean)", ylabel="block")
        panel.set_yticks(range(len(by_layer)), by_layer)
        panel.figure.colorbar(mesh, ax=panel, label="share of tokens")
        return {}

    names = [name for name in group.statistics if group.get_intervals(name)]
    names = names or list(group.statistics)[:NUM_HISTOGRAMS]
    items = list(itertools.product(names, group.site_names))
    return draw_small_multiples(items, len(group.site_names), 2.1, draw_panel)


def draw_edits(group: Group) -> "Figure | None":
    """Draw the change of the loss by layer, with a panel for each edit; None without edits."""
    if not group.edit_names:
        return None

    def draw_panel(panel: "Axes", edit: str) -> dict[str, "Artist"]:
        entries = {}
        for index, site_name in enumerate(group.site_names):
            changes = {
                layer: change
                for (layer, name), (change, _) in group.verdicts[edit].items()
                if name == site_name
            }
            half_widths = np.array([change.half_width for change in changes.values()])
            # points of one block stand side by side
            offset = 0.12 * (2 * index - len(group.site_names) + 1)
            entries[site_name] = panel.errorbar(
                [layer + offset for layer in changes],
                [change.mean for change in changes.values()],
                np.where(np.isfinite(half_widths), half_widths, 0),
                fmt=plots.MARKERS[index],
                color=plots.COLORS[index],
                capsize=2,
            )
        title = edit
        if ALL_SITES in group.verdicts[edit]:
            change, _ = group.verdicts[edit][ALL_SITES]
            title += f" (all: {change.mean:+.3f})"
        panel.axhline(0, color="black", linewidth=0.8)
        panel.set_title(title, loc="left")
        panel.set_xlabel("block")
        if panel.get_subplotspec().is_first_col():
            panel.set_ylabel("change of loss\n(nats per token)")
        return entries

    num_columns = min(MAX_COLUMNS, len(group.edit_names))
    return draw_small_multiples(group.edit_names, num_columns, 2.0, draw_panel, group.site_names)


def draw_details(group: Group) -> "Figure | None":
    """Draw means over tokens of vectors, layer by entry, and of matrices, those of all layers in a row.

    There is a panel for each site of a block. Only the first run is drawn, because value channels
    and features have no order that seeds share.

    Returns:
        None if no site has details.
    """
    if not group.details:
        return None

    def draw_panel(panel: "Axes", item: tuple[str, str]) -> dict[str, "Artist"]:
        name, site_name = item
        by_layer = select_site(group.details[name], site_name)
        layers = list(by_layer)
        means = [np.array(runs[0]["mean"], dtype=float) for runs in by_layer.values()]
        panel.grid(visible=False)
        if not means or means[0].ndim > 2:
            panel.axis("off")
            return {}
        panel.set_title(f"{site_name}: {name.replace('_', ' ')}", loc="left")
        longest = max(len(mean) for mean in means)
        if means[0].ndim == 1:
            # a shorter vector ends with nan
            rows = [
                np.pad(mean, (0, longest - len(mean)), constant_values=np.nan) for mean in means
            ]
            image = np.stack(rows)
            panel.set(xlabel="component", ylabel="block")
            panel.set_yticks(range(len(layers)), layers)
        else:
            # a column of nan follows each matrix
            gap = np.full((longest, 1), np.nan)
            image = np.hstack([part for mean in means for part in (mean, gap)])
            width = means[0].shape[1] + 1
            ticks = [width * index + (width - 2) / 2 for index in range(len(layers))]
            panel.set_xticks(ticks, layers)
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
        panel.figure.colorbar(drawn_image, ax=panel, format="%.4g")
        return {}

    items = list(itertools.product(group.details, group.site_names))
    return draw_small_multiples(items, len(group.site_names), 1.7, draw_panel)
