"""report.py runs: a row says what the run's folder says, digit for digit; tables are those of the folders."""

import csv
import json
import os

import pytest
from helpers import ROOT, one_line_error, sign
from hypothesis import given
from hypothesis import strategies as st
from in_process import call
from report_helpers import write_run

from research.reporting import paper, runs, runs_csv

FIELDS = "stem seed parameters corpus commit machine processes accuracy notes step totals first_seconds"


def test_a_row_says_what_the_folder_says(tmp_path):
    for seed in (0, 1):
        folder = write_run(tmp_path / f"seed={seed}", [9, 8, 7, 6], val=2 + seed / 7, seed=seed)
        path = folder / "checkpoints/step_00000004"
        state = json.loads((path / "state.json").read_text())
        trained_on = {"machine": "8 x H200", "torch": "2.13.0", "processes": 8}
        state |= {"commit": "1e5123456789", "trained_on": trained_on, "corpus": {**state["corpus"], "name": ""}}
        (path / "state.json").write_text(json.dumps(state))
        sign(path)
    out = tmp_path / "kept" / "runs.csv"
    printed = call("research/report.py", "runs", tmp_path, f"--out={out}")
    assert printed.stdout.decode() == f"{out}: 2 runs added, 0 replaced\n"
    before, (after, faults) = runs.load([str(tmp_path / "seed=0"), str(tmp_path / "seed=1")])[0], runs.load([str(out)])
    assert not faults
    for own, folder in zip(after, before, strict=True):
        assert own.settings == folder.settings | {"model": "gpt-mha-rope"}
        for name in (*FIELDS.split(), "finished"):
            assert getattr(own, name) == getattr(folder, name), name
        assert {key: own.final[key] for key in own.final} == {key: folder.final[key] for key in own.final}
        assert own.published.reasons == folder.published.reasons
    folders, arguments = [tmp_path / "seed=0", tmp_path / "seed=1"], ["--against=gpt-mha-rope"]
    tables = [call("research/report.py", "table", *where, *arguments).stdout for where in (folders, [out])]
    assert tables[0] == tables[1] != b""
    reports = [paper.make(*runs.load([str(path) for path in where]), [], None, "steps") for where in (folders, [out])]
    costs, stored = (next(t for t in report.tables if t.name == "costs") for report in reports)
    assert costs.figures == stored.figures
    assert [figure["name"] for figure in reports[1].figures] == []  # a row has no curve
    assert "has no curves" in one_line_error(call("research/report.py", "curves", out))


def test_rows_of_the_same_name_are_replaced(tmp_path):
    one, two = (write_run(tmp_path / name, [4, 3, 2, 1], val=2.0) for name in ("one", "two"))
    out = tmp_path / "runs.csv"
    call("research/report.py", "runs", one, f"--out={out}")
    write_run(tmp_path / "new/one", [4, 3, 2, 1], val=1.0)
    printed = call("research/report.py", "runs", tmp_path / "new/one", two, f"--out={out}")
    assert printed.stdout.decode() == f"{out}: 1 runs added, 1 replaced\n"
    assert [(run.name, run.final["val_loss"]) for run in runs.load([str(out)])[0]] == [("one", 1.0), ("two", 2.0)]
    assert sorted(os.listdir(tmp_path)) == ["new", "one", "runs.csv", "two"]


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", '{"step": 1}\n', "name,step\na,1\na,1\n"])
def test_another_file_is_refused_in_one_line(text, tmp_path):
    run, out = write_run(tmp_path / "run", [4, 3, 2, 1], val=2.0), tmp_path / "runs.csv"
    out.write_text(text)
    assert one_line_error(call("research/report.py", "table", out))
    assert one_line_error(call("research/report.py", "runs", run, f"--out={out}"))
    assert out.read_text() == text


JSON = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()


@given(JSON | st.lists(JSON, max_size=3))
def test_a_cell_reads_as_what_was_written(value):
    text = runs_csv.cell(value)
    assert text
    found = runs_csv.parsed(text)
    assert found == value
    assert type(found) is type(value)


def test_the_kept_rows_are_whole():
    """Every study's: each row has what a reader of the study needs."""
    for path in (ROOT / "results").rglob("*runs.csv"):
        with open(path, encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        assert all(row["commit"] and row["seed"] and row["model"] and row["step"] for row in rows), path
