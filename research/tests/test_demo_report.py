"""The demo's stored table is what its stored runs give, and its figures are what plain Python makes of them."""

import csv
import json

import numpy as np
import pytest
from helpers import ROOT
from in_process import call

RUNS, BASELINE = ROOT / "results" / "demo" / "runs.csv", "gpt-mha-rope init=spectral"


def test_the_table_is_made_from_the_runs_that_are_kept(tmp_path):
    keys = "--by=model,init", f"--against={BASELINE}", f"--json={tmp_path / 'table.json'}"
    result = call("research/report.py", "table", RUNS, *keys)
    assert result.returncode == 0, result.stderr.decode()
    kept = json.loads((ROOT / "results" / "demo_variants.json").read_text(encoding="utf-8"))
    assert json.loads((tmp_path / "table.json").read_text())["groups"] == kept["groups"], "make the table again"


def test_its_means_and_differences():
    """Half an interval of three values is 4.30265 standard errors (Student, two degrees of freedom)."""
    groups = json.loads((ROOT / "results" / "demo_variants.json").read_text(encoding="utf-8"))["groups"]
    bits: dict[str, dict] = {}
    with open(RUNS, encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            by_seed = bits.setdefault(f"{row['model']} init={row['init']}", {})
            by_seed[int(row["seed"])] = float(row["val_bits_per_byte"])
    assert len(bits) == len(groups) == 6
    base = np.array([bits[BASELINE][seed] for seed in range(3)])
    for group in groups:
        values = np.array([bits[group["name"]][seed] for seed in range(3)])
        assert group["val_bits_per_byte"]["mean"] == pytest.approx(values.mean())
        assert group["val_bits_per_byte"]["ci95"] == pytest.approx(4.30265 * values.std(ddof=1) / np.sqrt(3), rel=1e-5)
        if group["name"] != BASELINE:
            less = values - base
            found = group["against"]
            assert found["mean"] == pytest.approx(less.mean())
            assert found["ci95"] == pytest.approx(4.30265 * less.std(ddof=1) / np.sqrt(3), rel=1e-5)
