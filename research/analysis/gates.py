"""`analyze.py gates`: what the writes of a trained model do at every site, and how the loss depends on them.

Over validation sequences, in float32, it measures the statistics that the write of a site reports, the size of the
change of the state, and how the direction of a write turns from site to site and from token to token. For DDL it also
measures how much is erased and written, and the fractions of tokens by what their gate does. Then it measures the loss
with the write of one site, or of all sites, replaced (edits.py).
"""

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves

from configurator import option
from model.block import Site, State, Stream
from model.ddl import DeltaRewrite, project_onto_k
from research import plots
from research.analysis import common, edits
from research.compare import Estimate, estimate_mean, judge_differences
from utils import tables

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_COLUMNS = 3  # panels side by side


# ---- what is collected at each site ----


class Audit(Stream):
    """Run the stream as it is, and collect what happens at each site.

    Args:
        values: (layer, site name) -> statistic -> numbers of tokens, to which those of this
            forward pass are appended
    """

    def __init__(self, values: dict[tuple[int, str], dict[str, list[torch.Tensor]]]):
        self.values = values
        self.previous_direction: torch.Tensor | None = None

    def write(
        self,
        site: Site,
        state: State,
        h: torch.Tensor,
        x_in: torch.Tensor | tuple,
        c: torch.Tensor,
        cache: dict | None,
    ) -> State:
        written = super().write(site, state, h, x_in, c, cache)
        by_name = {}
        direction = h
        if hasattr(site.write, "statistics"):
            by_name.update(site.write.statistics(state, h, x_in, c, written))
        if isinstance(site.write, DeltaRewrite):
            direction = site.write.direction(state, h, x_in, c)
            by_name.update(measure_delta_rewrite(site.write, by_name, direction, state, h, x_in, c))
        by_name.update(measure_change(state, written))
        by_name.update(measure_turns(direction, self.previous_direction))
        site_values = self.values.setdefault((site.layer, site.name), {})
        for name, numbers in by_name.items():
            site_values.setdefault(name, []).append(numbers.flatten().cpu())
        self.previous_direction = direction
        return written


def measure_delta_rewrite(
    write: DeltaRewrite,
    statistics: dict[str, torch.Tensor],
    k_hat: torch.Tensor,
    state: torch.Tensor,
    h: torch.Tensor,
    x_in: torch.Tensor,
    c: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """Return what a rewrite erases and writes of each token, (B, T).

    Args:
        statistics: of the write
        k_hat: sqrt(d) k, (B, T, d)

    Returns:
        `written` and `erased`, the norms of m beta k v^T and m beta k k^T X over that of X, where m
        is residual_branch_mult; `contraction`, the discrepancy after the write over that before, and
        `contraction_expected`, |1 - m beta|; and whether the gate skips (below 0.5), matches,
        over-relaxes (above 1.5) or reflects (1 - m beta is negative), 0 or 1. An update without an
        erase, or without a write, lacks what it does not do.
    """
    config = write.config
    beta = statistics["beta"]
    scale = config.branch_mult
    relative_k_norm = torch.linalg.vector_norm(k_hat, dim=-1) / math.sqrt(k_hat.shape[-1])
    relative_k_norm /= torch.linalg.vector_norm(state.flatten(2).to(k_hat.dtype), dim=-1)
    measured = {
        "skips": beta < 0.5,
        "matches": (beta >= 0.5) & (beta <= 1.5),
        "over-relaxes": beta > 1.5,
    }
    if config.ddl_update != "erase_only":
        value_norm = torch.linalg.vector_norm(write.value(h, x_in, c), dim=-1)
        measured["written"] = scale * beta * relative_k_norm * value_norm
    if config.erases:
        projection_norm = torch.linalg.vector_norm(project_onto_k(state, k_hat), dim=-1)
        measured["erased"] = scale * beta * relative_k_norm * projection_norm
        tiny = torch.finfo(k_hat.dtype).tiny
        old_discrepancy = statistics["discrepancy_before"].clamp_min(tiny)
        measured["contraction"] = statistics["discrepancy_after"] / old_discrepancy
        measured["contraction_expected"] = (1 - scale * beta).abs()
        measured["reflects"] = scale * beta > 1
    return {name: numbers.to(beta.dtype) for name, numbers in measured.items()}


def measure_change(state: State, written: State) -> dict[str, torch.Tensor]:
    """Return `write_size` (B, T), ||X' - X|| / ||X||, unless the state grows with depth."""
    if [part.shape for part in tree_leaves(state)] != [part.shape for part in tree_leaves(written)]:
        return {}
    old = concatenate_state(state)
    norm = old.norm(dim=-1).clamp_min(torch.finfo(old.dtype).tiny)
    return {"write_size": (concatenate_state(written) - old).norm(dim=-1) / norm}


def concatenate_state(state: State) -> torch.Tensor:
    """Return all numbers of each token side by side: (B, T, ...), or a tuple of such, -> (B, T, n)."""
    return torch.cat([part.flatten(2) for part in tree_leaves(state)], dim=-1)


def measure_turns(
    direction: torch.Tensor, previous_direction: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    """Return the cosines of a site's directions (B, T, d) with those of the token and the site before."""
    turns = {"cosine_tokens": F.cosine_similarity(direction[:, 1:], direction[:, :-1], dim=-1)}
    if previous_direction is not None:
        turns["cosine_sites"] = F.cosine_similarity(direction, previous_direction, dim=-1)
    return turns


def compute_mean(numbers: torch.Tensor) -> float:
    """Return the mean of numbers of tokens.

    Raises:
        ValueError: it is not finite
    """
    mean = numbers.double().mean().item()
    if not math.isfinite(mean):
        raise ValueError("a statistic is not finite: the model has diverged")
    return mean


# ---- a run ----


def measure_run(run: common.LoadedRun, args: SimpleNamespace) -> dict:
    """Return the statistics of each site over the sequences, and the effects of edits.

    Raises:
        ValueError: a number is not finite
    """
    values: dict[tuple[int, str], dict[str, list[torch.Tensor]]] = {}
    with torch.no_grad():
        for ids, _ in run.iterate_batches(args.rows):
            with run.model.through(Audit(values)):
                run.model.hidden(ids)
    sites = []
    for (layer, site_name), by_name in values.items():
        statistics = {name: compute_mean(torch.cat(numbers)) for name, numbers in by_name.items()}
        sites.append({"layer": layer, "site": site_name, "statistics": statistics})
    effects = edits.measure_effects(run, args.rows) if args.edits else []
    return {"sites": sites, "effects": effects}


# ---- groups of runs ----


@dataclass(frozen=True)
class Group:
    """Runs of one setting at one step: their rows, each with a seed of its own.

    In a group of one run, the interval of an edit's effect is over validation sequences: it covers
    the choice of the text. In a group of several runs it is over their means: it covers the seed.
    """

    label: str
    rows: list[dict]

    @property
    def site_names(self) -> list[str]:
        """The names of sites within a block."""
        return list(dict.fromkeys(site["site"] for site in self.rows[0]["sites"]))

    @property
    def statistics(self) -> list[str]:
        names = [name for site in self.rows[0]["sites"] for name in site["statistics"]]
        return list(dict.fromkeys(names))

    @property
    def edit_names(self) -> list[str]:
        return list(dict.fromkeys(effect["edit"] for effect in self.rows[0]["effects"]))

    def collect(self, name: str) -> dict[tuple[int, str], list[float]]:
        """Return {(layer, site): the mean of a statistic in each run}."""
        by_site: dict[tuple[int, str], list[float]] = {}
        for row in self.rows:
            for site in row["sites"]:
                if name in site["statistics"]:
                    means = by_site.setdefault((site["layer"], site["site"]), [])
                    means.append(site["statistics"][name])
        return by_site

    def judge_effects(self, edit: str) -> dict[tuple[int | None, str], tuple]:
        """Return {(layer, site): (the change of the loss by an edit, its verdict)}.

        The verdicts are corrected for the number of sites.
        """
        effects = {
            (layer, site): effect
            for (layer, site, name), effect in self.estimate_effects().items()
            if name == edit
        }
        verdicts = judge_differences(list(effects.values()))
        return {key: (effects[key], verdict) for key, verdict in zip(effects, verdicts)}

    def estimate_effects(self) -> dict[tuple[int | None, str, str], Estimate]:
        """Return {(layer, site, edit): the change of the loss}."""
        effects_by_key: dict[tuple[int | None, str, str], list[dict]] = {}
        for row in self.rows:
            for effect in row["effects"]:
                key = (effect["layer"], effect["site"], effect["edit"])
                effects_by_key.setdefault(key, []).append(effect)
        if len(self.rows) > 1:
            return {
                key: estimate_mean([effect["difference"] for effect in effects])
                for key, effects in effects_by_key.items()
            }
        return {
            key: Estimate(
                effect["difference"], effect["ci95"], effect["p_value"], effect["windows"]
            )
            for key, [effect] in effects_by_key.items()
        }


def group_rows(rows: list[dict]) -> list[Group]:
    """Group rows that differ only in their seed; a setting with a repeated seed has a group for each."""
    rows_by_setting: dict[str, list[dict]] = {}
    for row in rows:
        setting = json.dumps([row["model"], row["step"], row["settings"]], sort_keys=True)
        rows_by_setting.setdefault(setting, []).append(row)
    row_lists = []
    for members in rows_by_setting.values():
        if len({row["seed"] for row in members}) == len(members):
            row_lists.append(members)
        else:
            row_lists += [[row] for row in members]
    # a group has the name of its model, unless several have the same
    models = [members[0]["model"] for members in row_lists]
    return [
        Group(model if models.count(model) == 1 else members[0]["label"], members)
        for model, members in zip(models, row_lists)
    ]


# ---- the page ----


def format_statistics_table(group: Group) -> str:
    """Return the mean of each statistic over sites, and the sites with the lowest and highest mean."""
    rows = []
    for name in group.statistics:
        by_site = group.collect(name)
        means = {
            f"block {layer} {site}": np.mean(by_run) for (layer, site), by_run in by_site.items()
        }
        by_run = np.mean(list(by_site.values()), axis=0)
        low = min(means, key=means.get)
        high = max(means, key=means.get)
        extremes = f"{means[low]:.4g} ({low}) to {means[high]:.4g} ({high})"
        rows.append([name, estimate_mean(by_run.tolist()).format(".4g"), extremes])
    header = ["statistic", "mean over sites (runs)", "lowest to highest site"]
    return tables.format_markdown(header, rows)


def format_edit_table(group: Group) -> str:
    """Return the table of changes of the loss, with a row for each site and a column per edit."""
    judged_by_edit = {edit: group.judge_effects(edit) for edit in group.edit_names}
    keys = list(dict.fromkeys(key for judged in judged_by_edit.values() for key in judged))
    rows = []
    for layer, site in keys:
        row = ["all at once" if layer is None else f"block {layer} {site}"]
        for judged in judged_by_edit.values():
            cell = None
            if (layer, site) in judged:
                change, verdict = judged[layer, site]
                cell = change.format("+.4f").rpartition(" ")[0]
                cell = f"({cell})" if verdict == "undecided" else cell
            row.append(cell)
        rows.append(row)
    return tables.format_markdown(["site", *judged_by_edit], rows)


def format_page(groups: list[Group]) -> str:
    """Return the statistics and edits of each group in Markdown."""
    parts = ["# Gates and writes of trained models"]
    for group in groups:
        labels = "; ".join(row["label"] for row in group.rows)
        num_sequences = group.rows[0]["sequences"]
        parts += [f"## {group.label}", f"{labels}; {num_sequences} validation sequences."]
        parts.append(format_statistics_table(group))
        if group.edit_names:
            unit = f"{len(group.rows)} seeds" if len(group.rows) > 1 else "sequences"
            parts.append(
                f"Change of the loss, in nats per token, with its 95% interval over {unit}; brackets "
                "mark changes that do not differ from 0 after Holm's correction for the number of "
                "sites. An edit is not a retrained model."
            )
            parts.append(format_edit_table(group))
    return "\n\n".join(parts)


# ---- figures ----


def draw_group(group: Group, out: Path) -> None:
    """Draw the figures of a group as <out>_course.png and <out>_edits.png."""
    plots.save(draw_course(group), out.with_name(f"{out.name}_course.png"))
    if group.edit_names:
        plots.save(draw_edits(group), out.with_name(f"{out.name}_edits.png"))


def draw_panels(
    names: list[str],
    height: float,
    draw_panel: Callable[["Axes", str], dict[str, "Artist"]],
    labels: list[str],
) -> "Figure":
    """Return a figure with a panel over blocks for each name, and one legend for all.

    Args:
        height: of each row, in inches
        draw_panel: draws what has this name, and returns the artists of its labels in the legend
        labels: those of the legend, for which room is left
    """
    num_columns = min(MAX_COLUMNS, len(names))
    figure, axes = plots.make_panels(
        math.ceil(len(names) / num_columns), num_columns, height, labels
    )
    entries: dict[str, Artist] = {}
    for panel, name in itertools.zip_longest(axes.flat, names):
        if name is None:
            panel.axis("off")
            continue
        panel.xaxis.get_major_locator().set_params(integer=True)
        entries.update(draw_panel(panel, name))
    for panel in axes[-1]:
        panel.set_xlabel("block")
    plots.add_legend(figure, entries)
    return figure


def draw_course(group: Group) -> "Figure":
    """Draw the mean of every statistic over blocks.

    Each of several runs is drawn thin beside their mean, because none may be like it.
    """

    def draw_panel(panel: "Axes", name: str) -> dict[str, "Artist"]:
        artists = {}
        by_site = group.collect(name)
        for index, site_name in enumerate(group.site_names):
            by_layer = {
                layer: means for (layer, site), means in by_site.items() if site == site_name
            }
            if not by_layer:
                continue
            layers = list(by_layer)
            color = plots.COLORS[index]
            means = np.array(list(by_layer.values()))  # (blocks, runs)
            (artists[site_name],) = panel.plot(
                layers, means.mean(1), marker=plots.MARKERS[index], color=color
            )
            panel.plot(layers, means, linewidth=0.6, alpha=0.6, color=color)
        panel.set_title(name.replace("_", " "), loc="left")
        return artists

    return draw_panels(group.statistics, 1.6, draw_panel, group.site_names)


def draw_edits(group: Group) -> "Figure":
    """Draw the change of the loss by block, with a panel for each edit."""

    def draw_panel(panel: "Axes", edit: str) -> dict[str, "Artist"]:
        artists = {}
        judged = group.judge_effects(edit)
        for index, site_name in enumerate(group.site_names):
            changes = {
                layer: change for (layer, site), (change, _) in judged.items() if site == site_name
            }
            # points of one block stand side by side
            offset = 0.12 * (2 * index - len(group.site_names) + 1)
            artists[site_name] = panel.errorbar(
                [layer + offset for layer in changes],
                [change.mean for change in changes.values()],
                [change.half_width or 0 for change in changes.values()],
                fmt=plots.MARKERS[index],
                color=plots.COLORS[index],
                capsize=2,
            )
        title = edit
        if edits.ALL_SITES in judged:
            title += f" (all: {judged[edits.ALL_SITES][0].mean:+.3f})"
        panel.axhline(0, color="black", linewidth=0.8)
        panel.set_title(title, loc="left")
        if panel.get_subplotspec().is_first_col():
            panel.set_ylabel("change of loss\n(nats per token)")
        return artists

    return draw_panels(group.edit_names, 2.0, draw_panel, group.site_names)


# ---- the command ----


@dataclass(frozen=True)
class Options(common.RunOptions):
    """Edits of the model."""

    windows: int = option(32, "number of validation sequences", low=1)
    edits: bool = option(True, "measure the loss with edited writes, too, which takes longest")


def summarize(row: dict) -> str:
    """Return the line that is printed of a row."""
    return f"{len(row['sites'])} sites over {row['sequences']} sequences"


def finish(rows: list[dict], out: Path) -> None:
    """Print the page, and draw all groups beside the JSON file `out`."""
    groups = group_rows(rows)
    for group in groups:
        suffix = "" if len(groups) == 1 else f"_{group.label.replace('/', '_').replace(' ', '_')}"
        draw_group(group, out.with_name(out.stem + suffix))
    print(format_page(groups))
