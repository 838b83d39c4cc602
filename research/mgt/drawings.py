"""The figures of the MGT experiments: a line, or a band, for every arm; colours that all eyes tell apart."""

from pathlib import Path

import numpy as np

from research.mgt.findings import groups
from research.mgt.measures import SHARES
from research.plots import COLORS, STYLES, pyplot

ARMS = "standard", "full", "additive", "mhc", "ddl"
LOSS = "validation loss (nats per token)"


def style(arm: str) -> dict:
    index = ARMS.index(arm)
    return {"color": COLORS[index], "linestyle": STYLES[index % len(STYLES)]}


def mean_and_range(panel, x, rows: list[list[float]], **how) -> None:
    """The mean over seeds as a line, from the lowest to the highest as a band."""
    values = np.array(rows)
    panel.plot(x, values.mean(axis=0), **how)
    panel.fill_between(
        x, values.min(axis=0), values.max(axis=0), color=how["color"], alpha=0.15, linewidth=0
    )


def finished(figure, panels, out: Path, legend: bool = True) -> None:
    for panel in panels:
        panel.grid(alpha=0.3)
        if legend and panel.get_legend_handles_labels()[0]:
            panel.legend(fontsize="small")
    figure.savefig(out, dpi=100)
    pyplot().close(figure)


def rank(rows: list[dict], out: Path) -> None:
    """A panel for each depth, the rank over it, trained and untrained; below, gradients. One legend beside them all."""
    depths = sorted({row["layers"] for row in rows})
    figure, axes = pyplot().subplots(
        2, max(len(depths), 2), figsize=(15, 7), layout="constrained", squeeze=False
    )
    for (layers, arm), group in groups(rows, "layers", "arm"):
        top, bottom = axes[:, depths.index(layers)]
        x = range(layers + 1)
        mean_and_range(top, x, [row["rank"] for row in group], label=arm, **style(arm))
        untrained = np.mean([row["initial_rank"] for row in group], axis=0)
        top.plot(x, untrained, linewidth=0.7, label=f"{arm}, untrained", **style(arm))
        mean_and_range(bottom, x, [row["gradient_state"] for row in group], **style(arm))
        top.set(
            title=f"{layers} blocks", xlabel="depth (blocks)", ylabel="effective rank", ylim=(0, 1)
        )
        bottom.set(xlabel="depth (blocks)", ylabel="gradient norm of the state", yscale="log")
        for panel in (top, bottom):
            panel.xaxis.get_major_locator().set_params(integer=True)
    entries = zip(*axes[0, 0].get_legend_handles_labels())
    handles, labels = zip(*sorted(entries, key=lambda entry: "untrained" in entry[1]))
    title = "lines: mean over seeds\nbands: lowest to highest"
    figure.legend(
        handles,
        labels,
        loc="outside right upper",
        fontsize="small",
        title=title,
        title_fontsize="small",
    )
    finished(figure, axes.flat, out, legend=False)


def losses(rows: list[dict], out: Path) -> None:
    """The final validation loss of every run, by arm."""
    figure, panel = pyplot().subplots(figsize=(7, 4.5), layout="constrained")
    for number, ((arm,), group) in enumerate(groups(rows, "arm")):
        values, color = [row["val_loss"] for row in group], style(arm)["color"]
        panel.plot([number] * len(values), values, "o", color=color)
        panel.plot([number - 0.2, number + 0.2], [np.mean(values)] * 2, color=color)
    arms = [arm for (arm,), _ in groups(rows, "arm")]
    panel.set(
        xlabel="arm (points: seeds; lines: their mean)",
        ylabel=LOSS,
        xticks=range(len(arms)),
        xticklabels=arms,
    )
    finished(figure, [panel], out)


def beta(rows: list[dict], out: Path) -> None:
    """Mean, variance and share below 0 over depth, a line for each moment of training."""
    figure, axes = pyplot().subplots(1, 3, figsize=(15, 4.5), layout="constrained")
    names = {
        "mean": "mean of beta",
        "variance": "variance of beta",
        "negative": "share of beta below 0",
    }
    for panel, (key, label) in zip(axes, names.items()):
        for (share,), group in groups(rows, "share"):
            index = SHARES.index(share)
            how = {
                "color": COLORS[index],
                "linestyle": STYLES[index],
                "label": f"{share:.0%} of training",
            }
            mean_and_range(
                panel, range(1, group[0]["layers"] + 1), [row[key] for row in group], **how
            )
        panel.set(xlabel="depth (blocks)", ylabel=label)
    finished(figure, axes, out)


def depth(rows: list[dict], out: Path) -> None:
    """Final loss, and epochs to the target, over the number of blocks at one size."""
    figure, axes = pyplot().subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    for panel, key, label in zip(
        axes, ("val_loss", "epochs_to_target"), (LOSS, "epochs to the target loss")
    ):
        for (arm,), group in groups(rows, "arm"):
            points = [
                (layers, [row[key] for row in each]) for (layers,), each in groups(group, "layers")
            ]
            x, values = zip(*sorted(points))
            panel.plot(x, [np.mean(each) for each in values], label=arm, **style(arm))
            for layers, each in zip(x, values):
                panel.plot([layers] * len(each), each, "o", color=style(arm)["color"], markersize=4)
        panel.set(xlabel="blocks", ylabel=label)
    finished(figure, axes, out)


def curves(rows: list[dict], out: Path) -> None:
    """Training loss (thin) and validation loss over steps."""
    figure, panel = pyplot().subplots(figsize=(8, 5), layout="constrained")
    for number, row in enumerate(rows):
        first = row["arm"] not in [other["arm"] for other in rows[:number]]
        if "training" in row:
            panel.plot(
                *zip(*row["training"]), color=style(row["arm"])["color"], alpha=0.25, linewidth=0.8
            )
        x, y = zip(*[(point[0], point[-1]) for point in row["evaluations"]])
        panel.plot(
            x, y, marker="o", markersize=3, label=row["arm"] if first else None, **style(row["arm"])
        )
    panel.set(xlabel="optimizer step", ylabel="loss (nats per token)")
    finished(figure, [panel], out)
