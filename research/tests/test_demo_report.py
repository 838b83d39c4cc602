"""The demo's stored report is what its stored runs give, and its figures are what plain Python makes of them."""

import json
import re

import numpy as np
import pytest
from helpers import ROOT
from in_process import call

DEMO = ROOT / "results" / "demo"


@pytest.fixture(scope="module")
def runs() -> list[dict]:
    return list(map(json.loads, (DEMO / "runs.jsonl").read_text(encoding="utf-8").splitlines()))


def test_the_report_is_made_from_the_runs_that_are_kept(tmp_path):
    keys = "--by=model,init", "--against=gpt-mha-rope init=spectral"
    result = call("research/report.py", "paper", DEMO / "runs.jsonl", *keys, f"--out={tmp_path / 'report'}")
    assert result.returncode == 0, result.stderr.decode()
    for name in ("report.md", "tables.tex", "validation.csv", "differences.csv", "costs.csv", "runs.csv"):
        kept = (DEMO / "report" / name).read_text(encoding="utf-8")
        assert (tmp_path / "report" / name).read_text(encoding="utf-8") == kept, f"{name}: make the report again"


def test_its_means_and_differences(runs):
    """Half an interval of three values is 4.30265 standard errors (Student, two degrees of freedom)."""
    report = (DEMO / "report" / "report.md").read_text(encoding="utf-8")
    losses: dict[str, dict] = {}
    for run in runs:
        row = f"{run['stem']} init={run['settings']['init']}"
        losses.setdefault(row, {})[run["seed"]] = run["evaluations"]["val_loss"][-1]
    baseline = "gpt-mha-rope init=spectral"
    base = np.array([losses[baseline][seed] for seed in range(3)])
    for stem, by_seed in losses.items():
        values = np.array([by_seed[seed] for seed in range(3)])
        mean, half = values.mean(), 4.30265 * values.std(ddof=1) / np.sqrt(3)
        assert re.search(rf"\| {stem} +\| 3 .*\| {mean:.4f} ± {half:.4f} \(3\)", report)
        if stem != baseline:
            mean, half = (values - base).mean(), 4.30265 * (values - base).std(ddof=1) / np.sqrt(3)
            assert re.search(rf"\| {stem} +\| {baseline} \| {re.escape(f'{mean:+.4f}')} ± {half:.4f} ", report)
    assert len(losses) == 6
