"""The studies: their commands plan runs, and the table of losses is that of the stored rows."""

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from helpers import ROOT

from research import sweep

STUDIES = ROOT / "research" / "studies"
RESULTS = ROOT / "results"
stats = pytest.importorskip("scipy.stats")


def read_rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def list_sweeps() -> list[str]:
    """Return the sweep commands of all study pages."""
    commands = []
    for page in sorted(STUDIES.glob("*/README.md")):
        text = page.read_text(encoding="utf-8")
        commands += re.findall(r"^python research/sweep\.py .*", text, re.M)
    return commands


@pytest.mark.parametrize("command", list_sweeps())
def test_the_sweeps_of_the_study_pages_plan_their_cells(command, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    arguments = [word for word in shlex.split(command)[2:] if not word.startswith("--out=")]
    planned = sweep.read_arguments([*arguments, f"--out={tmp_path}"])
    cells = sweep.make_cells(*planned)
    assert len(cells) == np.prod([len(values) for values in planned.swept.values()])


def test_the_losses_of_the_controlled_comparison_are_those_of_its_rows():
    """The mean over seeds, and half the width of its 95% interval."""
    page = (STUDIES / "residual_streams" / "README.md").read_text(encoding="utf-8")
    rows = read_rows(RESULTS / "residual_streams" / "language.jsonl")
    table = re.findall(
        r"^\| `(\w+)` \|[^|]*\| ([\d.]+ ± [\d.]+) \| ([\d.]+ ± [\d.]+) \|", page, re.M
    )
    assert len(table) == 9
    for arm, *cells in table:
        for rung, cell in zip(("short", "long"), cells):
            losses = [
                np.mean(row["group_losses"])
                for row in rows
                if (row["arm"], row["rung"], row["phase"]) == (arm, rung, "report")
            ]
            half_width = stats.t.ppf(0.975, len(losses) - 1) * stats.sem(losses)
            assert f"{np.mean(losses):.3f} ± {half_width:.3f}" == cell, arm
