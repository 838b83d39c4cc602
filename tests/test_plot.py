"""The loss curve of a run, which `make train` leaves."""

import json
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
def saved_figures(monkeypatch) -> list:
    """The figures that are saved, as (figure, file), in place of the files."""
    figures = []
    monkeypatch.setattr(
        "matplotlib.figure.Figure.savefig", lambda self, file, **_: figures.append((self, file))
    )
    return figures


def test_the_picture_is_loss_png_in_the_run_folder(run_folder, saved_figures):
    assert plot.draw(run_folder) == run_folder / "loss.png"
    [(_, file)] = saved_figures
    assert file == run_folder / "loss.png"


def test_the_training_curve_has_a_mean_for_every_fiftieth_of_the_run(run_folder, saved_figures):
    plot.draw(run_folder)
    [(figure, _)] = saved_figures
    training, _ = figure.axes[0].lines
    assert training.get_xydata().tolist() == [[4 * n + 2.5, 4 * n + 2.5] for n in range(50)]
    assert training.get_label() == "training (mean over 4 steps)"


def test_the_validation_curve_has_every_evaluation(run_folder, saved_figures):
    plot.draw(run_folder)
    [(figure, _)] = saved_figures
    _, validation = figure.axes[0].lines
    assert validation.get_xydata().tolist() == [[100, 2.0], [200, 1.0]]


def test_the_loss_of_averaged_weights_has_a_curve(run_folder, saved_figures):
    with open(run_folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 300, "val_loss": 2.0, "ema_val_loss": 1.5}\n')
    plot.draw(run_folder)
    [(figure, _)] = saved_figures
    averaged = figure.axes[0].lines[-1]
    assert averaged.get_xydata().tolist() == [[300, 1.5]]
    assert averaged.get_label() == "validation, averaged weights"


def test_title_and_axes_say_what_is_shown(run_folder, saved_figures):
    plot.draw(run_folder)
    [(figure, _)] = saved_figures
    [axes] = figure.axes
    assert axes.get_title() == f"Training and validation loss of {run_folder.name}"
    assert axes.get_xlabel() == "step"
    assert axes.get_ylabel() == "loss (nats per token; lower is better)"


def test_a_run_without_evaluations_has_one_curve(tmp_path, saved_figures):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    plot.draw(tmp_path)
    [(figure, _)] = saved_figures
    assert [line.get_label() for line in figure.axes[0].lines] == ["training"]
    assert figure.axes[0].get_title() == f"Training loss of {tmp_path.name}"


def test_ticks_are_at_whole_steps(tmp_path, saved_figures):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.0}\n')
    plot.draw(tmp_path)
    [(figure, _)] = saved_figures
    assert all(tick.is_integer() for tick in figure.axes[0].get_xticks())


def test_a_folder_without_metrics_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"holds no metrics\.jsonl; give a run folder"):
        plot.draw(tmp_path)


def test_metrics_without_a_training_step_are_refused(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "val_loss": 2.0}\n')
    with pytest.raises(ValueError, match="holds no training step yet"):
        plot.draw(tmp_path)
