"""The loss curve of a run, which `make train` leaves."""

import json
from pathlib import Path

import pytest

from training import plot


def write_metrics(run_folder: Path, records: list[dict]) -> None:
    lines = [json.dumps(record) + "\n" for record in records]
    (run_folder / "metrics.jsonl").write_text("".join(lines))


def test_curves_are_means_of_training_losses_and_every_evaluation(tmp_path, monkeypatch):
    records = [
        *({"step": step, "loss": float(step)} for step in range(1, 201)),
        {"step": 100, "val_loss": 2.0},
        {"step": 200, "val_loss": 1.0, "ema_val_loss": 1.5},
    ]
    write_metrics(tmp_path, records)
    figures = []
    monkeypatch.setattr(
        "matplotlib.figure.Figure.savefig", lambda figure, file, **_: figures.append(figure)
    )
    assert plot.draw(tmp_path) == tmp_path / "loss.png"
    [axes] = figures[0].axes
    training, validation, averaged = axes.lines
    # a mean for every fiftieth of the run
    assert training.get_xydata().tolist() == [[4 * n + 2.5, 4 * n + 2.5] for n in range(50)]
    assert validation.get_xydata().tolist() == [[100, 2.0], [200, 1.0]]
    assert averaged.get_xydata().tolist() == [[200, 1.5]]
    assert axes.get_title() == f"Training and validation loss of {tmp_path.name}"


def test_metrics_without_a_training_step_are_refused(tmp_path):
    write_metrics(tmp_path, [{"step": 1, "val_loss": 2.0}])
    with pytest.raises(ValueError, match="holds no training step yet"):
        plot.draw(tmp_path)
