"""The times and memory of the paper's runs, in docs/cluster.md and README.md, are what is predicted."""

import re
from pathlib import Path

import pytest
from helpers import ROOT

from research.benchmarks import planning
from training.memory import estimate_memory
from training.settings import configure
from utils.units import format_bytes

PAGE = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")


def read_row(page: str, path: str) -> list[str]:
    """Return the cells of a config's row in the first table of a page that has one."""
    line = re.search(rf"^\| `{Path(path).stem}` \|.*\|$", page, flags=re.M)[0]
    return [cell.strip() for cell in line.strip("|").split("|")]


def configure_silently(path: str):
    return configure([path], note=lambda _: None)


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=[pytest.mark.slow] if "medium" in path else [])
        for path in planning.CONFIGS
    ],
)
def test_a_row_of_the_table_is_computed(path):
    header, _, row = planning.make_table([[path]]).splitlines()
    lines = PAGE.splitlines()
    assert header in lines
    assert row in lines


@pytest.mark.parametrize("path", planning.CONFIGS)
def test_the_predicted_speed_of_a_row_is_computed(path):
    cells = planning.make_speed_cells(*configure_silently(path))
    assert read_row(PAGE, path)[-len(cells) :] == cells


@pytest.mark.parametrize("path", planning.CONFIGS)
def test_the_readme_shows_the_same_estimates(path):
    parameters, memory, time = read_row(README, path)[1:4]
    planned = read_row(PAGE, path)
    assert parameters == planned[1]
    gibibytes = float(memory.removeprefix("≈ ").removesuffix(" GiB"))
    assert gibibytes == pytest.approx(float(planned[2].removesuffix(" GiB")), abs=0.5)
    hours = planning.predict(*configure_silently(path)).compute_hours(4)
    assert time == f"≈ {hours:.0f} h"


def test_the_memory_of_a_sharded_model_is_that_on_eight_gpus():
    arguments = ["config/gpt_small.py", "--engine=fsdp"]
    row = planning.make_table([arguments]).splitlines()[-1]
    estimate = estimate_memory(*configure(arguments, note=lambda _: None), "cuda", 8)
    assert f"| {format_bytes(estimate.total)} |" in row


def test_help_is_printed(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["planning.py", "--help"])
    planning.main()
    assert "python -m research.benchmarks.planning" in capsys.readouterr().out


def test_a_small_model_has_the_stored_speed():
    prediction = planning.predict(*configure_silently("config/gpt_small.py"))
    assert prediction.mfu == 0.4693
    assert prediction.tokens_per_second == pytest.approx(542_984, rel=1e-3)


def test_hours_are_those_of_all_tokens():
    prediction = planning.Prediction(
        num_parameters=1, num_tokens=7200, mfu=0.5, tokens_per_second=1.0
    )
    assert prediction.compute_hours(1) == 2.0
    assert prediction.compute_hours(4) == 0.5


def test_a_model_without_a_prediction_is_refused():
    with pytest.raises(ValueError, match="model=mHC-gpt-mha-rope has no predicted speed"):
        planning.predict(*configure_silently("config/mhc_small.py"))
