"""report.py pack: a run in a file says what its folder says; damaged lines, and names."""

import json
import statistics

import pytest
from helpers import one_line_error, sign
from in_process import call
from report_helpers import write_run
from runs_helpers import lines_of_a_run, naive_curve, write

from research.reporting import curves, packed, paper, runs


def same(packed_run, run):
    """All but the curve and numbers before the last evaluation, which are rounded."""
    names = "name stem settings seed parameters corpus commit machine processes published accuracy notes step totals"
    for name in (*names.split(), "first_seconds", "finished", "final"):
        assert getattr(packed_run, name) == getattr(run, name), name
    assert packed_run.evaluations.columns == run.evaluations.columns
    for name in run.evaluations.columns:
        values = run.evaluations[name].to_list()
        assert packed_run.evaluations[name].to_list() == [v and pytest.approx(v, rel=1e-5) for v in values]
    return True


def test_a_packed_run_says_what_its_folder_says(tmp_path):
    folders = [write_run(tmp_path / f"seed={seed}", [9, 8, 7, 6], val=2 + seed / 7, seed=seed) for seed in (0, 1)]
    for folder in folders:
        write(folder, lines_of_a_run(1000))
        path = folder / "checkpoints/step_00000004"
        state = json.loads((path / "state.json").read_text())
        trained_on = {"machine": "8 x H200", "torch": "2.13.0", "processes": 8}
        state |= {"commit": "abc", "trained_on": trained_on, "corpus": {**state["corpus"], "tokenizer": "gpt2"}}
        (path / "state.json").write_text(json.dumps(state))
        sign(path)
    out = tmp_path / "committed" / "runs.jsonl"
    printed = call("research/report.py", "pack", tmp_path, f"--out={out}", "--points=150")
    assert printed.stdout.decode() == f"{out}: 2 runs added, 0 replaced\n"
    before, (after, faults) = runs.load([str(tmp_path / "seed=0"), str(tmp_path / "seed=1")])[0], runs.load([str(out)])
    assert not faults
    assert all(same(each, run) for each, run in zip(after, before, strict=True))
    assert (after[0].processes, after[0].machine["torch"], after[0].commit) == (8, "2.13.0", "abc")
    assert after[0].published.reasons
    expected = naive_curve(lines_of_a_run(1000), 150)
    for row, by_hand in zip(after[0].training.to_dicts(), expected, strict=True):
        assert row == pytest.approx(by_hand, rel=1e-5)
    arguments = [f"--json={tmp_path / 'x.json'}", "--against=gpt-mha-rope"]
    tables = [call("research/report.py", "table", *where, *arguments).stdout for where in (folders, [out])]
    assert tables[0] == tables[1] != b""
    reports = [paper.make(*runs.load([str(path) for path in where]), [], None, "steps") for where in (folders, [out])]
    costs, packed_costs = (next(t for t in report.tables if t.name == "costs") for report in reports)
    assert costs.figures == packed_costs.figures  # digit for digit
    trained = [line for line in lines_of_a_run(1000) if "loss" in line]
    assert costs.figures[0] | {"model": ""} == {
        "model": "",
        "parameters": 7052,
        "flops_per_token": 10**15 / 8,
        "tokens_per_second": statistics.median(line["tokens_per_second"] for line in trained),
        "memory": max(line["memory"] for line in trained),
        "device_seconds": 8 * (trained[-1]["seconds"] - 7.5),
    }
    assert all(len(line) < 20_000 for line in out.read_text().splitlines())


def test_packing_again_adds_and_replaces_runs_of_the_same_name(tmp_path):
    one, two = (write_run(tmp_path / name, [4, 3, 2, 1], val=2.0) for name in ("one", "two"))
    out = tmp_path / "runs.jsonl"
    call("research/report.py", "pack", one, f"--out={out}")
    write_run(tmp_path / "new/one", [4, 3, 2, 1], val=1.0)
    printed = call("research/report.py", "pack", tmp_path / "new/one", two, f"--out={out}")
    assert printed.stdout.decode() == f"{out}: 1 runs added, 1 replaced\n"
    assert [(run.name, run.final["val_loss"]) for run in runs.load([str(out)])[0]] == [("one", 1.0), ("two", 2.0)]
    found, _ = runs.load([str(out), str(one)])  # told apart by what holds them
    assert [run.name for run in found] == ["runs/one", "two", f"{tmp_path.name}/one"]
    before = out.read_bytes()
    out.write_bytes(before + b'{"packed": 1')
    assert "is no JSON" in one_line_error(call("research/report.py", "pack", two, f"--out={out}"))
    out.write_bytes(before.replace(b'"training"', b'"trainings"', 1))
    found, faults = runs.load([str(out)])
    assert [run.name for run in found] == ["two"]
    assert faults[0].startswith("one: damaged: pack it again")
    assert "is no file of report.py pack: give its folder" in one_line_error(
        call("research/report.py", "table", one / "metrics.jsonl")
    )


def test_runs_of_the_same_name_in_folders_of_the_same_name_are_all_there(tmp_path, monkeypatch):
    for index, parent in enumerate(("c/p1/s", "c/p2/s", "c/p2/t")):
        write_run(tmp_path / parent / "r", [4, 3, 2, 1], val=float(index), seed=index)
    out = tmp_path / "runs.jsonl"
    printed = call("research/report.py", "pack", tmp_path / "c", f"--out={out}")
    assert printed.stdout.decode() == f"{out}: 3 runs added, 0 replaced\n"
    for paths in ([tmp_path / "c"], [out]):
        found, faults = runs.load([str(path) for path in paths])
        assert [(run.name, run.final["val_loss"]) for run in found] == [("p1/s/r", 0.0), ("p2/s/r", 1.0), ("t/r", 2.0)]
        assert not faults
    drawn = []
    monkeypatch.setattr(curves, "draw", lambda lines, *_: drawn.extend(lines))
    call("research/report.py", "curves", tmp_path / "c", f"--out={tmp_path / 'x.png'}")
    assert [line.validation.mean[-1] for line in drawn] == [0.0, 1.0, 2.0]
    line = out.read_text().splitlines()[0] + "\n"
    out.write_text(line * 2)
    assert "line 2 of" in one_line_error(call("research/report.py", "table", out))


def step_lines(**common):
    """A training step and an evaluation with these numbers alone beside their losses."""
    return [{"step": 4, "loss": 2.0, **common}, {"step": 4, "val_loss": 2.0, **common}]


@pytest.mark.parametrize("common", [{}, {"tokens": 0, "flops": 0, "seconds": 1.0}, {"tokens": 9, "flops": 9}])
def test_steps_without_tokens_or_seconds_are_gaps(tmp_path, common):
    folder = write(write_run(tmp_path / "run", [4, 3, 2, 1], seed=0), step_lines(**common))
    for command in (["table"], ["paper", f"--out={tmp_path / 'report'}"]):
        printed = call("research/report.py", command[0], folder, *command[1:])
        assert (printed.returncode, printed.stderr.decode().count("Traceback")) == (0, 0), printed.stderr
    assert call("research/report.py", "table", folder).stdout.decode().splitlines()[-1].split("|")[4].strip() == (
        "1" if "seconds" in common else "-"
    )


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((key, None) for key in ("settings", "corpus", "notes", "residual", "step", "name", "totals", "training")),
        ("evaluations", {}),
        ("evaluations", {"step": [None], "tokens": [1], "flops": [1], "seconds": [1], "val_loss": [2.0]}),
        ("accuracy", [{"task": "x"}]),
        ("accuracy", [3]),
        ("corpus", {"train": 5}),
        ("residual", [{"step": 1, "residual": {"attn.x_mean": 3.0}}]),
        ("residual", [7]),
        ("notes", [7]),
        ("totals", {"tokens": "many"}),
        ("published", {"stem": "x"}),
        ("more", 1),
    ],
)
def test_a_damaged_line_of_a_packed_file_is_one_line(tmp_path, key, value):
    out = tmp_path / "runs.jsonl"
    call("research/report.py", "pack", write_run(tmp_path / "run", [4, 3, 2, 1], seed=0), f"--out={out}")
    record = json.loads(out.read_text())
    out.write_text(json.dumps(record | {key: value}) + "\n")
    for command in (["table"], ["paper", f"--out={tmp_path / 'report'}"], ["curves", f"--out={tmp_path / 'x.png'}"]):
        assert "damaged: pack it again" in one_line_error(call("research/report.py", command[0], out, *command[1:]))


def test_numbers_keep_six_digits():
    value = {"a": [1.23456789, -1e-12 / 3, 12345678.9, 5, None], "b": {"c": 1e300 / 3, "d": True}}
    assert packed.rounded(value) == {
        "a": [1.23457, -3.33333e-13, 12345700, 5, None],
        "b": {"c": 3.33333e299, "d": True},
    }
