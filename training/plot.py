"""The curve of a run: training loss, smoothed, and validation loss over steps, as loss.png in the
run folder.

    python -m training.plot runs/demo_cpu

`research/report.py curves` compares runs, follows them while they train and knows other axes.
"""

import sys
from pathlib import Path

import configurator
from training import metrics

SMOOTHED = 0.02  # share of the run that a point of the training loss is the mean of


def draw(run: Path) -> Path:
    """Draw the run's loss.png and return its path.

    ValueError: no metrics.jsonl, no step in it, or no matplotlib.
    """
    matplotlib = configurator.optional("matplotlib.figure", "the curve")
    if not (run / "metrics.jsonl").is_file():
        raise ValueError(f"{run} holds no metrics.jsonl: give a run folder made by train.py")
    records = list(metrics.read(run / "metrics.jsonl"))
    losses = [(record["step"], record["loss"]) for record in records if "loss" in record]
    evaluated = [(record["step"], record["val_loss"]) for record in records if "val_loss" in record]
    if not losses:
        raise ValueError(f"{run}/metrics.jsonl holds no step yet")
    width = max(round(SMOOTHED * len(losses)), 1)
    parts = [losses[first : first + width] for first in range(0, len(losses), width)]
    means = [tuple(sum(column) / len(part) for column in zip(*part)) for part in parts]
    figure = matplotlib.Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="loss (nats per token)", title=run.name)
    axes.plot(*zip(*means), label="training, smoothed")
    if evaluated:
        axes.plot(*zip(*evaluated), marker="o", markersize=4, label="validation")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(run / "loss.png", dpi=150)
    return run / "loss.png"


if __name__ == "__main__":
    with configurator.one_line_errors():
        if len(sys.argv) != 2:
            raise ValueError("give one run folder: python -m training.plot runs/demo_cpu")
        print(f"drew {draw(Path(sys.argv[1]))}")
