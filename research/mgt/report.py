"""Reports of the MGT experiments: JSON, a page and a figure of each, from the runs that are finished."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from research import compare, plots, runs, sweep
from research.benchmarks.figures import Figures
from research.mgt import findings, measures
from research.mgt.findings import groups_of
from training import distributed
from training.provenance import compute_digest
from utils import files, tables

# Whose code the figures of a run that is not trained again depend on.
CODE = "model/*.py", "data/loader.py", "research/mgt/measures.py"
CODE += "research/analysis/common.py", "research/analysis/rank.py"
# What a page says that every run shares.
SHOWN = "dataset block_size hidden_size num_attention_heads num_hidden_layers max_steps"
SHOWN += " global_batch_size optimizer learning_rate warmup_steps schedule weight_decay dtype"
SEEDS = "Figures are means over seeds ± half their 95% interval (number of seeds)."
RANKS = (
    f"Ranks are those of {measures.WINDOWS} validation sequences (eq. 8), after the last block where "
    "nothing else is said; untrained: before the first step. In the figure, bands go from the "
    "lowest to the highest seed, and thin lines are untrained models."
)
GATES = "beta is taken over tokens, features and both sites of a block. At 0% its bias alone sets its mean."

# ---- figures ----

ARMS = ["standard", "full", "additive", "mhc", "ddl"]
VALIDATION = "validation loss\n(nats per token)"


def style(arm: str) -> dict:
    return {"color": plots.COLORS[ARMS.index(arm)], "linestyle": plots.STYLES[ARMS.index(arm) % 4]}


def mean_and_range(panel, x, rows: list[list[float]], **how):
    """The mean over seeds as a line, from the lowest to the highest as a band."""
    values = np.array(rows)
    band = {"color": how["color"], "alpha": 0.15, "linewidth": 0}
    panel.fill_between(x, values.min(axis=0), values.max(axis=0), **band)
    return panel.plot(x, values.mean(axis=0), **how)[0]


def draw_rank(rows: list[dict]):
    """A panel for each depth, the rank over it, trained and untrained; below, gradients."""
    depths, entries = sorted({row["layers"] for row in rows}), {}
    names = [f"{arm}{kind}" for arm in ARMS[:3] for kind in ("", ", untrained")]
    figure, axes = plots.make_panels(2, len(depths), 1.8, names, sharex="col", sharey="row")
    for (layers, arm), group in groups_of(rows, "layers", "arm"):
        top, bottom = axes[:, depths.index(layers)]
        x, how = range(layers + 1), style(arm)
        entries[arm] = mean_and_range(top, x, [row["rank"] for row in group], **how)
        untrained = np.mean([row["initial_rank"] for row in group], axis=0)
        (entries[f"{arm}, untrained"],) = top.plot(x, untrained, **{**how, "linewidth": 0.5})
        mean_and_range(bottom, x, [row["gradient_state"] for row in group], **how)
        top.set(title=f"{layers} blocks", ylim=(0, 1))
        bottom.set(xlabel="depth (blocks)", yscale="log")
    axes[0, 0].set_ylabel("effective rank")
    axes[1, 0].set_ylabel("gradient norm\nof the state")
    plots.use_plain_numbers(axes[1, 0].yaxis, label_minor_ticks=False)
    plots.add_legend(figure, dict(sorted(entries.items(), key=lambda each: "," in each[0])))
    return figure


def draw_losses(rows: list[dict]):
    """The final validation loss of every run, by arm: points are seeds, lines their mean."""
    figure, [[panel]] = plots.make_panels(1, 1, 2.4, [])
    arms = groups_of(rows, "arm")
    for number, ((arm,), group) in enumerate(arms):
        values, color = [row["val_loss"] for row in group], style(arm)["color"]
        panel.plot([number] * len(values), values, "o", color=color)
        panel.plot([number - 0.2, number + 0.2], [np.mean(values)] * 2, color=color)
    panel.set_xticks(range(len(arms)), [arm for (arm,), _ in arms])
    panel.set_ylabel(VALIDATION)
    return figure


def draw_beta(rows: list[dict]):
    """Mean, variance and share below 0 over depth, a line for each moment of training."""
    names = {"mean": "mean of beta", "variance": "variance", "negative": "share below 0"}
    labels, entries = [f"{share:.0%} of training" for share in measures.SHARES], {}
    figure, axes = plots.make_panels(1, 3, 2.2, labels)
    for panel, (key, title) in zip(axes[0], names.items()):
        for (share,), group in groups_of(rows, "share"):
            number, x = measures.SHARES.index(share), range(1, group[0]["layers"] + 1)
            how = {"color": plots.COLORS[number], "linestyle": plots.STYLES[number]}
            values = [row[key] for row in group]
            entries[labels[number]] = mean_and_range(panel, x, values, **how)
        panel.set(title=title, xlabel="depth (blocks)")
    plots.add_legend(figure, entries)
    return figure


def draw_depth(rows: list[dict]):
    """Final loss, and epochs to the target, over the number of blocks at one size."""
    shown = {"val_loss": VALIDATION, "epochs_to_target": "epochs to the target loss"}
    figure, axes = plots.make_panels(1, 2, 2.4, ARMS)
    entries = {}
    for panel, (key, label) in zip(axes[0], shown.items()):
        for (arm,), group in groups_of(rows, "arm"):
            of = {n: [row[key] for row in each] for (n,), each in groups_of(group, "layers")}
            points = [(n, np.mean(of[n])) for n in sorted(of)]
            (entries[arm],) = panel.plot(*zip(*points), **style(arm))
            for layers, values in of.items():
                panel.plot([layers] * len(values), values, "o", color=style(arm)["color"])
        panel.set(xlabel="blocks", ylabel=label, xticks=sorted({row["layers"] for row in rows}))
    plots.add_legend(figure, entries)
    return figure


def draw_curves(rows: list[dict]):
    """Training loss (thin) and validation loss over steps."""
    figure, [[panel]] = plots.make_panels(1, 1, 3.0, ARMS)
    entries = {}
    for row in rows:
        how = style(row["arm"])
        if "training" in row:
            panel.plot(*zip(*row["training"]), color=how["color"], alpha=0.25, linewidth=0.6)
        points = [(point[0], point[-1]) for point in row["evaluations"]]
        (entries[row["arm"]],) = panel.plot(*zip(*points), marker="o", **how)
    panel.set(xlabel="optimizer step", ylabel="loss (nats per token)")
    plots.add_legend(figure, entries)
    return figure


# experiment: (title, rows(cells, figures), find(rows) -> Findings, draw(rows) -> figure, a note)
KINDS = {
    "rank": (
        "Experiment 1: effective rank over depth",
        *(measures.measure_rank, findings.rank_findings, draw_rank, RANKS),
    ),
    "ablation": (
        "Experiment 2: ablation",
        *(measures.final_rows, findings.ablation_findings, draw_losses, ""),
    ),
    "beta": (
        "Experiment 3: the gate beta over depth and training",
        *(measures.measure_beta, findings.beta_findings, draw_beta, GATES),
    ),
    "depth": (
        "Experiment 4: depth at one size",
        *(measures.course_rows, findings.depth_findings, draw_depth),
        "The target is the highest final loss of any run of that depth.",
    ),
    "language": (
        "Experiment 5: language modelling",
        *(measures.course_rows, findings.language_findings, draw_curves, ""),
    ),
    "copy": (
        "The copy task of section 4.1",
        *(measures.copy_rows, findings.copy_findings, draw_curves, ""),
    ),
}

# ---- the report ----


def write(experiment: str, preset: str, cells: list[sweep.Cell], results: Path) -> None:
    """`<results>/<experiment>_<preset>.json`, .md and .png, rows of runs.csv.

    ValueError: no run is finished.
    """
    done = [cell for cell in cells if sweep.read_final_evaluation(cell)]
    if not done:
        where = f"in {cells[0].folder.parent}: nothing to report"
        raise ValueError(f"no run of {experiment} is finished {where}")
    results.mkdir(parents=True, exist_ok=True)
    title, rows_of, find, draw, note = KINDS[experiment]
    path, first = results / f"{experiment}_{preset}.json", done[0].settings
    same = (k for k in SHOWN.split() if all(cell.settings[k] == first[k] for cell in done))
    settings = {key: first[key] for key in same}
    about = {"experiment": experiment, "preset": preset, "settings": settings}
    device, code = distributed.pick_device("auto"), compute_digest(*CODE)[:12]
    figures = Figures(path, device, about, resume=True, code=code)
    rows = rows_of(done, figures)
    found = find(rows)
    left = [cell.title for cell in cells if cell not in done]
    figures.rows = [{**row, **figures.measured_on} for row in rows]
    figures.notes = {"groups": found.groups, "verdicts": found.verdicts, "unfinished": left}
    figures.store()
    titles = {cell.folder: f"{experiment}/{preset}/{cell.title}" for cell in done}
    loaded, _ = runs.load([str(cell.folder) for cell in done])
    named = [replace(run, name=titles[run.path]) for run in loaded]
    runs.write_csv(named, results / "runs.csv")
    picture, page = path.with_suffix(".png"), path.with_suffix(".md")
    with plots.use_print_style():
        plots.save(draw(rows), picture)
    shown = ", ".join(f"{key} {value}" for key, value in settings.items() if value is not None)
    parts = [
        f"# {title}, preset `{preset}`",
        f"{shown}. {SEEDS} {note}".strip(),
        tables.format_markdown(list(found.columns), found.table),
        verdict_table(found.verdicts),
        *([f"Not finished: {'; '.join(left)}."] if left else []),
        f"![{title}]({picture.name})",
        f"Made by `research/mgt/run.py {experiment} --preset={preset}`; figures: `{path.name}`.",
    ]
    files.write_text(page, "\n\n".join(parts) + "\n")
    print(page.read_text(encoding="utf-8"))
    print(f"wrote {path}, {page.name} and {picture.name}")


def verdict_table(verdicts: list[dict]) -> str:
    header, rows = ("hypothesis", "mean ± 95% (seeds)", "verdict"), []
    for each in verdicts:
        half = "" if each["ci95"] is None else f" ± {each['ci95']:.4f}"
        text = None if each["mean"] is None else f"{each['mean']:.4f}{half} ({each['n']})"
        rows.append([each["hypothesis"], text, f"**{each['verdict']}**"])
    return tables.format_markdown(header, rows)


def check() -> None:
    """ValueError: a package that a report needs is missing, which should not be found after the
    training."""
    plots.use_print_style()
    compare.import_special_functions()
