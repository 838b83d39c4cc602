"""The demo's stored table is what its stored runs give; its numbers are those of plain Python."""

import csv
import json

import numpy as np
import pytest
from helpers import ROOT
from in_process import call
from report_helpers import by_hand

RUNS, BASELINE = ROOT / "results" / "demo" / "runs.csv", "gpt-mha-rope init=spectral"


def test_the_table_is_made_from_the_stored_runs(tmp_path):
    keys = ("--by=model,init", f"--against={BASELINE}", f"--json={tmp_path / 'table.json'}")
    assert call("research/report.py", "table", RUNS, *keys).returncode == 0
    stored = json.loads((ROOT / "results" / "demo_variants.json").read_text(encoding="utf-8"))
    made = json.loads((tmp_path / "table.json").read_text())
    assert made["groups"] == stored["groups"], "make the table again"
    bits: dict[str, dict] = {}
    with open(RUNS, encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            by_seed = bits.setdefault(f"{row['model']} init={row['init']}", {})
            by_seed[int(row["seed"])] = float(row["val_bits_per_byte"])
    values = {name: np.array([each[seed] for seed in range(3)]) for name, each in bits.items()}
    assert len(values) == len(made["groups"]) == 6
    for group in made["groups"]:
        own, key = values[group["model"]], "val_bits_per_byte"
        found = group[key], group[f"{key}_ci95"]
        assert found == pytest.approx(by_hand(own), rel=1e-5)
        if group["model"] != BASELINE:
            found = group["difference"], group["difference_ci95"]
            assert found == pytest.approx(by_hand(own - values[BASELINE]), rel=1e-5)
