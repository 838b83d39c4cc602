"""The loss curve of a run, which `make train` leaves."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from training import plot


@pytest.fixture
def run_folder(tmp_path) -> Path:
    """A run of 200 steps, whose loss is the number of the step, and two evaluations."""
    records = [
        *({"step": step, "loss": float(step)} for step in range(1, 201)),
        {"step": 100, "val_loss": 2.0},
        {"step": 200, "val_loss": 1.0},
    ]
    lines = [json.dumps(record) + "\n" for record in records]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    return tmp_path


@pytest.fixture
def draw(monkeypatch) -> Callable:
    """Return a function that draws the picture of a run and returns it, in place of a file."""
    figures = []
    monkeypatch.setattr(
        "matplotlib.figure.Figure.savefig", lambda figure, file, **_: figures.append((figure, file))
    )

    def draw(run_folder: Path):
        assert plot.draw(run_folder) == run_folder / "loss.png"
        [(figure, file)] = figures
        assert file == run_folder / "loss.png"
        return figure

    return draw


def test_curves_are_means_of_training_losses_and_every_evaluation(run_folder, draw):
    with open(run_folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 300, "val_loss": 2.0, "ema_val_loss": 1.5}\n')
    [axes] = draw(run_folder).axes
    training, validation, averaged = axes.lines
    # a mean for every fiftieth of the run
    assert training.get_xydata().tolist() == [[4 * n + 2.5, 4 * n + 2.5] for n in range(50)]
    assert training.get_label() == "training (mean over 4 steps)"
    assert validation.get_xydata().tolist() == [[100, 2.0], [200, 1.0], [300, 2.0]]
    assert averaged.get_xydata().tolist() == [[300, 1.5]]
    assert averaged.get_label() == "validation, averaged weights"
    assert axes.get_title() == f"Training and validation loss of {run_folder.name}"
    assert axes.get_xlabel() == "step"
    assert axes.get_ylabel() == "loss (nats per token; lower is better)"


def test_a_run_without_evaluations_has_one_curve_over_whole_steps(tmp_path, draw):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.0}\n')
    [axes] = draw(tmp_path).axes
    assert [line.get_label() for line in axes.lines] == ["training"]
    assert axes.get_title() == f"Training loss of {tmp_path.name}"
    assert all(tick.is_integer() for tick in axes.get_xticks())


def test_a_folder_without_metrics_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"holds no metrics\.jsonl; give a run folder"):
        plot.draw(tmp_path)


def test_metrics_without_a_training_step_are_refused(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "val_loss": 2.0}\n')
    with pytest.raises(ValueError, match="holds no training step yet"):
        plot.draw(tmp_path)
