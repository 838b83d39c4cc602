"""Plot the loss of a run: training and validation loss over steps, as loss.png in the run folder.

    python -m training.plot runs/demo_cpu

`research/report.py curves` compares several runs, follows runs while they train, and has other
x-axes.
"""

import sys
import textwrap
from pathlib import Path

from training import metrics
from utils import errors

# Each point of the training curve is the mean over this fraction of the steps.
SMOOTHING = 0.02


def draw(run_folder: Path) -> Path:
    """Draw loss.png in a run folder and return its path.

    Raises:
        ValueError: the folder has no metrics.jsonl, it has no training step, or matplotlib is not
            installed
    """
    matplotlib = errors.import_optional("matplotlib.figure", "the loss curve")
    metrics_file = run_folder / "metrics.jsonl"
    if not metrics_file.is_file():
        raise ValueError(f"{run_folder} holds no metrics.jsonl; give a run folder made by train.py")
    records = metrics.read(metrics_file)
    training = [(record["step"], record["loss"]) for record in records if "loss" in record]
    validation = [
        (record["step"], record["val_loss"]) for record in records if "val_loss" in record
    ]
    if not training:
        raise ValueError(f"{metrics_file} holds no training step yet; plot the run later")

    # Single steps are noisy, because each has the loss of a batch of its own.
    chunk_size = max(round(SMOOTHING * len(training)), 1)
    label = "training"
    if chunk_size > 1:
        label = f"training (mean over {chunk_size} steps)"
    curves = "Training and validation loss" if validation else "Training loss"
    figure = matplotlib.Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot(
        # resolved, because "." has no name; a long name, which has no spaces, needs several lines
        title=textwrap.fill(f"{curves} of {run_folder.resolve().name}", 70),
        xlabel="step",
        ylabel="loss (nats per token; lower is better)",
    )
    axes.plot(*zip(*average_chunks(training, chunk_size)), label=label)
    if validation:
        axes.plot(*zip(*validation), marker="o", markersize=4, label="validation")
    averaged = [
        (record["step"], record["ema_val_loss"]) for record in records if "ema_val_loss" in record
    ]
    if averaged:
        axes.plot(*zip(*averaged), marker="o", markersize=4, label="validation, averaged weights")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    axes.legend()
    loss_file = run_folder / "loss.png"
    figure.savefig(loss_file, dpi=150)
    return loss_file


def average_chunks(points: list[tuple[float, float]], chunk_size: int) -> list[tuple[float, float]]:
    """Replace every chunk_size points (x, y), and the rest at the end, by their mean."""
    averages = []
    for start in range(0, len(points), chunk_size):
        chunk = points[start : start + chunk_size]
        mean_x = sum(x for x, _ in chunk) / len(chunk)
        mean_y = sum(y for _, y in chunk) / len(chunk)
        averages.append((mean_x, mean_y))
    return averages


if __name__ == "__main__":
    with errors.one_line_errors():
        if len(sys.argv) != 2:
            raise ValueError("give one run folder: python -m training.plot runs/demo_cpu")
        print(f"drew {draw(Path(sys.argv[1]))}")
