"""Reports of the MGT experiments: JSON, a page and a figure of each, from the runs that are finished."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from research import compare, plots, runs, sweep
from research.benchmarks.figures import Figures
from research.mgt import findings, measures
from research.mgt.findings import Findings, group_rows
from training import distributed
from training.provenance import compute_digest
from utils import files, tables

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Measured rows are kept as long as this code stays the same.
MEASURING_CODE = (
    "model/*.py",
    "data/loader.py",
    "research/mgt/measures.py",
    "research/analysis/common.py",
    "research/analysis/rank.py",
)
# settings that the page lists, if all runs share them
LISTED_SETTINGS = (
    "dataset",
    "block_size",
    "hidden_size",
    "num_attention_heads",
    "num_hidden_layers",
    "max_steps",
    "global_batch_size",
    "optimizer",
    "learning_rate",
    "warmup_steps",
    "schedule",
    "weight_decay",
    "dtype",
)
SEEDS_NOTE = (
    "Numbers are means over seeds ± half their 95% interval (number of seeds). Verdicts are not "
    "corrected for their number, and do not require that an arm beats a bigram model."
)
RANK_NOTE = (
    f"Ranks are those of {measures.NUM_SEQUENCES} validation sequences (eq. 8), after the last block "
    "unless the column says otherwise; untrained: before the first step. In the figure, bands go from "
    "the lowest to the highest seed, and thin lines are untrained models."
)
BETA_NOTE = (
    "beta is taken over tokens, features and both sites of a block. At 0%, only its bias "
    "determines its mean."
)
DEPTH_NOTE = "The target is the highest final loss of any run of that depth."

# ---- figures ----

ARMS = ["standard", "full", "additive", "mhc", "ddl"]
RANKED_ARMS = ["standard", "full", "additive"]
LOSS_LABEL = "validation loss\n(nats per token)"


def get_style(arm: str) -> dict[str, str]:
    """Return Matplotlib's color and linestyle of an arm."""
    number = ARMS.index(arm)
    return {"color": plots.COLORS[number], "linestyle": plots.STYLES[number % 4]}


def draw_mean_and_range(
    axis: "Axes", x: range, values: list[list[float]], style: dict[str, str]
) -> "Artist":
    """Draw the mean over seeds as a line, and a band from the lowest to the highest seed.

    values: (seeds, points)
    """
    values = np.array(values)
    axis.fill_between(
        x,
        values.min(axis=0),
        values.max(axis=0),
        color=style["color"],
        alpha=0.15,
        linewidth=0,
    )
    (line,) = axis.plot(x, values.mean(axis=0), **style)
    return line


def draw_rank(rows: list[dict]) -> "Figure":
    """Draw the rank over depth, trained and untrained, and below it gradients; a column per size."""
    depths = sorted({row["layers"] for row in rows})
    trained = {}
    untrained = {}
    labels = [*RANKED_ARMS, *(f"{arm}, untrained" for arm in RANKED_ARMS)]
    figure, axes = plots.make_panels(2, len(depths), 1.8, labels, sharex="col", sharey="row")
    for (layers, arm), group in group_rows(rows, "layers", "arm"):
        top, bottom = axes[:, depths.index(layers)]
        x = range(layers + 1)
        style = get_style(arm)
        trained[arm] = draw_mean_and_range(top, x, [row["rank"] for row in group], style)
        initial_rank = np.mean([row["initial_rank"] for row in group], axis=0)
        (line,) = top.plot(x, initial_rank, **style, linewidth=0.5)
        untrained[f"{arm}, untrained"] = line
        draw_mean_and_range(bottom, x, [row["gradient_state"] for row in group], style)
        top.set(title=f"{layers} blocks", ylim=(0, 1))
        bottom.set(xlabel="depth (blocks)", yscale="log")
    axes[0, 0].set_ylabel("effective rank")
    axes[1, 0].set_ylabel("gradient norm\nof the state")
    plots.use_plain_numbers(axes[1, 0].yaxis, label_minor_ticks=False)
    plots.add_legend(figure, {**trained, **untrained})
    return figure


def draw_losses(rows: list[dict]) -> "Figure":
    """Draw the final validation loss of every run by arm: points are seeds, lines their mean."""
    figure, [[axis]] = plots.make_panels(1, 1, 2.4, [])
    arms = []
    for position, ((arm,), group) in enumerate(group_rows(rows, "arm")):
        arms.append(arm)
        losses = [row["val_loss"] for row in group]
        mean = np.mean(losses)
        color = get_style(arm)["color"]
        axis.plot([position] * len(losses), losses, "o", color=color)
        axis.plot([position - 0.2, position + 0.2], [mean, mean], color=color)
    axis.set_xticks(range(len(arms)), arms)
    axis.set_ylabel(LOSS_LABEL)
    return figure


def draw_beta(rows: list[dict]) -> "Figure":
    """Draw statistics of beta over depth, a line for each fraction of the training."""
    titles = {"mean": "mean of beta", "variance": "variance", "negative": "share below 0"}
    labels = [f"{fraction:.0%} of training" for fraction in measures.TRAINING_FRACTIONS]
    lines = {}
    figure, axes = plots.make_panels(1, len(titles), 2.2, labels)
    for axis, (statistic, title) in zip(axes[0], titles.items()):
        for (fraction,), group in group_rows(rows, "training_fraction"):
            number = measures.TRAINING_FRACTIONS.index(fraction)
            lines[labels[number]] = draw_mean_and_range(
                axis,
                range(1, group[0]["layers"] + 1),
                [row[statistic] for row in group],
                {"color": plots.COLORS[number], "linestyle": plots.STYLES[number]},
            )
        axis.set(title=title, xlabel="depth (blocks)")
    plots.add_legend(figure, lines)
    return figure


def draw_depth(rows: list[dict]) -> "Figure":
    """Draw the final loss, and the epochs to the target loss, over the number of blocks."""
    labels = {"val_loss": LOSS_LABEL, "epochs_to_target": "epochs to the target loss"}
    depths = sorted({row["layers"] for row in rows})
    lines = {}
    figure, axes = plots.make_panels(1, len(labels), 2.4, ARMS)
    for axis, (key, label) in zip(axes[0], labels.items()):
        for (arm,), group in group_rows(rows, "arm"):
            style = get_style(arm)
            values_by_depth = {
                layers: [row[key] for row in depth_rows]
                for (layers,), depth_rows in group_rows(group, "layers")
            }
            arm_depths = sorted(values_by_depth)
            means = [np.mean(values_by_depth[layers]) for layers in arm_depths]
            (lines[arm],) = axis.plot(arm_depths, means, **style)
            for layers, values in values_by_depth.items():
                axis.plot([layers] * len(values), values, "o", color=style["color"])
        axis.set(xlabel="blocks", ylabel=label, xticks=depths)
    plots.add_legend(figure, lines)
    return figure


def draw_curves(rows: list[dict]) -> "Figure":
    """Draw the training loss (thin) and the validation loss over steps."""
    figure, [[axis]] = plots.make_panels(1, 1, 3.0, ARMS)
    lines = {}
    for row in rows:
        style = get_style(row["arm"])
        if row.get("training"):
            steps, losses = zip(*row["training"])
            axis.plot(steps, losses, color=style["color"], alpha=0.25, linewidth=0.6)
        steps = [step for step, _, _ in row["evaluations"]]
        losses = [loss for _, _, loss in row["evaluations"]]
        (lines[row["arm"]],) = axis.plot(steps, losses, marker="o", **style)
    axis.set(xlabel="optimizer step", ylabel="loss (nats per token)")
    plots.add_legend(figure, lines)
    return figure


# ---- the report ----


@dataclass(frozen=True)
class ReportKind:
    """How an experiment is reported.

    make_rows: returns a row for each finished run, or several. find_results: the findings of rows.
    draw: the figure of rows. note: what the page says beside its settings.
    """

    title: str
    make_rows: Callable[[list[sweep.Cell], Figures], list[dict]]
    find_results: Callable[[list[dict]], Findings]
    draw: Callable[[list[dict]], "Figure"]
    note: str = ""


REPORT_KINDS = {
    "rank": ReportKind(
        "Experiment 1: effective rank over depth",
        measures.measure_rank,
        findings.find_rank_results,
        draw_rank,
        RANK_NOTE,
    ),
    "ablation": ReportKind(
        "Experiment 2: ablation",
        measures.read_final_rows,
        findings.find_ablation_results,
        draw_losses,
    ),
    "beta": ReportKind(
        "Experiment 3: the gate beta over depth and training",
        measures.measure_beta,
        findings.find_beta_results,
        draw_beta,
        BETA_NOTE,
    ),
    "depth": ReportKind(
        "Experiment 4: depth at one size",
        measures.read_curve_rows,
        findings.find_depth_results,
        draw_depth,
        DEPTH_NOTE,
    ),
    "language": ReportKind(
        "Experiment 5: language modeling",
        measures.read_curve_rows,
        findings.find_language_results,
        draw_curves,
        DEPTH_NOTE,
    ),
    "copy": ReportKind(
        "The copy task of section 4.1",
        measures.read_copy_rows,
        findings.find_copy_results,
        draw_curves,
    ),
}


def write(experiment: str, preset: str, cells: list[sweep.Cell], folder: Path) -> None:
    """Write EXPERIMENT_PRESET.json, .md and .png and rows of runs.csv, and print the page.

    Raises:
        ValueError: no run is finished
    """
    finished = [cell for cell in cells if sweep.read_final_evaluation(cell)]
    if not finished:
        raise ValueError(
            f"no run of {experiment} is finished in {cells[0].folder.parent}: nothing to report"
        )
    folder.mkdir(parents=True, exist_ok=True)
    kind = REPORT_KINDS[experiment]
    json_path = folder / f"{experiment}_{preset}.json"
    page_path = json_path.with_suffix(".md")
    figure_path = json_path.with_suffix(".png")

    settings = select_shared_settings(finished)
    unfinished = [describe_cell(cell) for cell in cells if cell not in finished]
    figures = Figures(
        json_path,
        distributed.pick_device("auto"),
        {"experiment": experiment, "preset": preset, "settings": settings},
        resume=True,
        code=compute_digest(*MEASURING_CODE)[:12],
    )
    rows = kind.make_rows(finished, figures)
    results = kind.find_results(rows)
    figures.rows = [{**row, **figures.measured_on} for row in rows]
    figures.notes = {
        "groups": results.groups,
        "verdicts": results.verdicts,
        "unfinished": unfinished,
    }
    figures.store()
    write_runs_csv(finished, f"{experiment}/{preset}", folder / "runs.csv")
    with plots.use_print_style():
        plots.save(kind.draw(rows), figure_path)

    listed_settings = ", ".join(
        f"{key} {value}" for key, value in settings.items() if value is not None
    )
    paragraphs = [
        f"# {kind.title}, preset `{preset}`",
        f"{listed_settings}. {SEEDS_NOTE} {kind.note}".strip(),
        tables.format_markdown(list(results.columns), results.table),
        format_verdicts(results.verdicts),
    ]
    if unfinished:
        paragraphs.append(f"Not finished: {'; '.join(unfinished)}.")
    paragraphs.append(f"![{kind.title}]({figure_path.name})")
    paragraphs.append(
        f"Made by `research/mgt/run.py {experiment} --preset={preset}`; figures: "
        f"`{json_path.name}`."
    )
    page = "\n\n".join(paragraphs) + "\n"
    files.write_text(page_path, page)
    print(page)
    print(f"wrote {json_path}, {page_path.name} and {figure_path.name}")


def select_shared_settings(cells: list[sweep.Cell]) -> dict[str, object]:
    """Return the listed settings that have the same value in all cells."""
    first = cells[0].settings
    return {
        key: first[key]
        for key in LISTED_SETTINGS
        if all(cell.settings[key] == first[key] for cell in cells)
    }


def describe_cell(cell: sweep.Cell) -> str:
    """Return the arm, the depth and the seed, which tell a run from all others of an experiment."""
    keys = ("mgt_arm", "num_hidden_layers", "seed")
    return ",".join(f"{key}={cell.settings[key]}" for key in keys)


def write_runs_csv(cells: list[sweep.Cell], prefix: str, path: Path) -> None:
    """Add the runs to a table of runs, named PREFIX/ARM,LAYERS,SEED."""
    titles = {cell.folder: f"{prefix}/{describe_cell(cell)}" for cell in cells}
    loaded, _ = runs.load([str(cell.folder) for cell in cells])
    runs.write_csv([replace(run, name=titles[run.path]) for run in loaded], path)


def format_verdicts(verdicts: list[dict]) -> str:
    """Return the table of hypotheses, means and verdicts."""
    rows = []
    for verdict in verdicts:
        mean = None
        if verdict["mean"] is not None:
            half_width = "" if verdict["ci95"] is None else f" ± {verdict['ci95']:.4f}"
            mean = f"{verdict['mean']:.4f}{half_width} ({verdict['n']})"
        rows.append([verdict["hypothesis"], mean, f"**{verdict['verdict']}**"])
    return tables.format_markdown(("hypothesis", "mean ± 95% (seeds)", "verdict"), rows)


def check_packages() -> None:
    """Raise ValueError if a package that a report needs is missing, before hours of training."""
    plots.use_print_style()
    compare.import_special_functions()
