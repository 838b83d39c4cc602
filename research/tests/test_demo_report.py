"""The demo's stored table is what its stored runs give; its numbers are those of plain Python."""

import csv
import json

import numpy as np
import pytest
from helpers import ROOT
from in_process import call
from report_helpers import by_hand

RUNS = ROOT / "results" / "demo" / "runs.csv"
BASELINE = "gpt-mha-rope init=spectral"


def read_bits_per_byte() -> dict[str, np.ndarray]:
    """Return the bits per byte of seeds 0 to 2 by the name of the row."""
    by_name: dict[str, dict[int, float]] = {}
    with open(RUNS, encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            by_seed = by_name.setdefault(f"{row['model']} init={row['init']}", {})
            by_seed[int(row["seed"])] = float(row["val_bits_per_byte"])
    return {
        name: np.array([by_seed[seed] for seed in range(3)]) for name, by_seed in by_name.items()
    }


def test_the_table_is_made_from_the_stored_runs(tmp_path):
    result = call(
        "research/report.py",
        "table",
        RUNS,
        "--by=model,init",
        f"--against={BASELINE}",
        f"--json={tmp_path / 'table.json'}",
    )
    assert result.returncode == 0
    stored = json.loads((ROOT / "results" / "demo_variants.json").read_text(encoding="utf-8"))
    table = json.loads((tmp_path / "table.json").read_text())
    assert table["groups"] == stored["groups"], "make the table again"
    values = read_bits_per_byte()
    assert len(values) == len(table["groups"]) == 6
    for group in table["groups"]:
        mean, half_width = by_hand(values[group["model"]])
        assert group["val_bits_per_byte"] == pytest.approx(mean, rel=1e-5)
        assert group["val_bits_per_byte_ci95"] == pytest.approx(half_width, rel=1e-5)
        if group["model"] != BASELINE:
            mean, half_width = by_hand(values[group["model"]] - values[BASELINE])
            assert group["difference"] == pytest.approx(mean, rel=1e-5)
            assert group["difference_ci95"] == pytest.approx(half_width, rel=1e-5)
