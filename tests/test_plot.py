"""The picture of a run that `make train` leaves."""

import json

import pytest
from helpers import ROOT, one_line_error, script

from training import plot


def test_the_curve_of_a_run(tmp_path, monkeypatch):
    """Two hundred steps in fifty means of four each, and two evaluations, are what is drawn."""
    records = [{"step": step, "loss": float(step)} for step in range(1, 201)]
    records += [{"step": 100, "val_loss": 2.0}, {"step": 200, "val_loss": 1.0}]
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in records)
    )
    figures = []
    monkeypatch.setattr(
        "matplotlib.figure.Figure.savefig", lambda self, file, **_: figures.append((self, file))
    )
    assert plot.draw(tmp_path) == tmp_path / "loss.png"
    [(figure, file)] = figures
    assert file == tmp_path / "loss.png"
    training, validation = figure.axes[0].lines
    assert training.get_xydata().tolist() == [[4 * n + 2.5, 4 * n + 2.5] for n in range(50)]
    assert validation.get_xydata().tolist() == [[100, 2.0], [200, 1.0]]


def test_what_cannot_be_drawn_is_said(tmp_path):
    with pytest.raises(ValueError, match=r"holds no metrics\.jsonl: give a run folder"):
        plot.draw(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "val_loss": 2.0}\n')
    with pytest.raises(ValueError, match="holds no step yet"):
        plot.draw(tmp_path)


@pytest.mark.skipif(not (ROOT / "research").exists(), reason="research/ is not here")
@pytest.mark.parametrize("name", ["report", "sweep", "analyze", "bench"])
def test_old_paths_name_the_new_ones(name):
    line = one_line_error(script(f"{name}.py", "curves", "a run"))
    assert f"python research/{name}.py curves 'a run'" in line
