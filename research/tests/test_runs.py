"""The frame of runs, whatever has happened to their files; runs.csv says the same, digit for digit."""

import hashlib
import json
import math
import os
import random

import pytest
from helpers import one_line_error
from hypothesis import given
from hypothesis import strategies as st
from in_process import call
from report_helpers import edit_state, load, write_checkpoint, write_lines, write_run

from research import runs
from training import checkpoint


def load_one(*paths) -> runs.Row:
    """Return the row of the only run."""
    return load(*paths).row(0, named=True)


def lines_of_a_run(steps):
    """Return lines of metrics.jsonl: training with skipped steps, evaluations, statistics."""
    generator = random.Random(0)
    lines = []
    for step in range(1, steps + 1):
        common = {"step": step, "tokens": 8 * step, "flops": 10**15 * step, "seconds": 0.5 * step}
        numbers = {
            k: generator.uniform(1, 9) for k in ("loss", "grad_norm", "lr", "tokens_per_second")
        }
        numbers["memory"] = generator.randrange(9**9)
        lines.append({**common, **({"skipped": True} if step % 17 == 0 else numbers)})
        if step % 50 == 0:
            lines.append({**common, "residual": {"attn.state_rms": [generator.random()]}})
        if step % 20 == 0:
            lines.append({**common, "val_loss": generator.uniform(1, 9), "val_sequences": 12})
    return lines


def test_curves_are_those_of_the_lines(tmp_path):
    lines = lines_of_a_run(903)
    row = load_one(write_lines(tmp_path / "run", [*lines, '{"step": 904, "lo']))
    trained = [line for line in lines if "loss" in line]
    evaluated = [line for line in lines if "val_loss" in line]
    assert (row["step"], row["first_seconds"], row["val_step"]) == (903, 0.5, 900)
    assert row["val_loss"] == evaluated[-1]["val_loss"]
    curves = runs.read_curves(row)
    assert curves["loss"].drop_nulls().to_list() == [line["loss"] for line in trained]
    assert curves["val_loss"].drop_nulls().to_list() == [line["val_loss"] for line in evaluated]


def test_a_run_before_its_first_checkpoint_has_no_settings(tmp_path):
    lines = [{"step": 1, "loss": 3.0}, {"step": 2, "loss": -math.inf}, {"step": 2, "val_loss": 1.0}]
    row = load_one(write_lines(tmp_path / "run", lines))
    assert (row["model"], row["parameters"], runs.has_finished(row)) == (None, None, None)
    assert runs.read_curves(row)["loss"].drop_nulls().to_list() == [3.0]


def test_what_cannot_be_read_is_named_and_the_rest_is_reported(tmp_path):
    sweep = tmp_path / "sweep"
    write_run(sweep / "good")
    write_lines(sweep / "empty", [])
    (sweep / "no_metrics/checkpoints").mkdir(parents=True)
    (sweep / "folder/metrics.jsonl").mkdir(parents=True)
    missing = tmp_path / "missing"
    other = tmp_path / "notes.txt"
    other.write_text("hello\n")
    loaded, error_lines = runs.load([sweep, missing, other])
    assert loaded["name"].to_list() == ["good"]
    assert error_lines == [
        "empty: metrics.jsonl has no step yet",
        "folder: metrics.jsonl is missing or unreadable (Is a directory)",
        "no_metrics: metrics.jsonl is missing or unreadable (No such file or directory)",
        f"{missing} has no metrics.jsonl: give a run folder made by train.py",
        f"{other} was not written by report.py runs: give a run folder, or a runs.csv",
    ]
    ended = call("research/report.py", "table", sweep, missing)
    assert (ended.returncode, len(ended.stderr.splitlines())) == (0, 4)


def test_the_newest_checkpoint_that_can_be_read_counts(tmp_path):
    run = write_run(tmp_path / "run", seed=3)
    [state] = run.glob("checkpoints/*/state.json")
    stored = json.loads(state.read_text())
    newer = run / "checkpoints/step_00000006"
    newer.mkdir()
    (newer / "state.json").write_text('{"step": 6')
    row = load_one(run)
    assert (row["seed"], row["model"], row["parameters"]) == (3, "gpt-mha-rope", 7052)
    for change in ({"model": "other-stem"}, {"model_config": {"layers": 1}}):  # of other code
        write_checkpoint(run, 6, **{k: v for k, v in (stored | change).items() if k != "step"})
        row = load_one(run)
        assert (row["parameters"], runs.find_published(row)) == (None, None)


def test_accuracy_is_that_of_the_runs_own_weights_from_all_evaluations(tmp_path):
    sweep = tmp_path / "sweep"
    folder = write_run(sweep / "a")
    sums = folder / "checkpoints/step_00000004" / checkpoint.CHECKSUMS
    weights = hashlib.sha256(sums.read_bytes()).hexdigest()
    dates = {"a/eval": "2026-01-02", "eval_a+b": "2026-01-03", "eval_a+c": "2026-01-01"}
    dates["../eval_a_of_two_sweeps"] = "2026-01-04"
    for path, date in dates.items():
        (sweep / path).mkdir()
        record = {"weights": weights, "shown": [], "date": date, "folder": "x"}
        (sweep / path / "results_0-shot.json").write_text(json.dumps(record))
    other = json.dumps({"weights": "other", "date": "2026-01-05"})
    (folder / "eval/results_other.json").write_text(other)
    row = load_one(folder)
    records = json.loads(row["accuracy"])
    # the newest comes last
    assert [record["date"] for record in records] == sorted(dates.values())
    assert records[0].keys() == {"weights", "shown", "date"}
    (folder / "eval/results_damaged.json").write_text('{"shown": [3')
    _, [error_line] = runs.load([folder])
    assert "results_damaged.json" in error_line


def test_runs_of_one_name_are_told_apart_by_their_folders(tmp_path):
    for name in ("a/x/run", "b/x/run", "b/other"):
        write_run(tmp_path / name)
    loaded = load(tmp_path, tmp_path / "b/other")  # each once
    assert loaded["name"].to_list() == ["a/x/run", "other", "b/x/run"]


# ---- runs.csv ----


def test_a_row_says_what_the_folder_says(tmp_path):
    """Also None of a key whose default is another value, and keys that only one of the models has."""
    folders = [tmp_path / f"seed={seed}" for seed in (0, 1)]
    for seed, folder in enumerate(folders):
        write_run(folder, seed=seed, val=2 + seed / 7)
        trained_on = {"machine": "8 x H200", "torch": "2.13.0", "processes": 8}
        edit_state(folder, commit="1e5123456789", trained_on=trained_on)
    config = {"block_size": 16, "ddl_state_conv_init": None}
    folders.append(write_run(tmp_path / "ddl", "DDL-gpt-mha-rope", config=config))
    out = tmp_path / "stored" / "runs.csv"
    printed = call("research/report.py", "runs", tmp_path, f"--out={out}")
    assert printed.stdout.decode() == f"wrote {out}: 3 runs\n"
    stored = {row["name"]: row for row in load(out).to_dicts()}
    for row in load(*folders).to_dicts():
        expected = {key: None if value == "[]" else value for key, value in row.items()}
        assert {**stored[row["name"]], "path": row["path"]} == expected
    assert "has no curves" in one_line_error(call("research/report.py", "curves", out))
    new = write_run(tmp_path / "new", seed=2, val=1.0)
    call("research/report.py", "runs", out, new, f"--out={out}")  # with the rows of before
    assert sorted(load(out)["val_loss"]) == [1.0, 2.0, 2.0, 2 + 1 / 7]
    assert os.listdir(out.parent) == ["runs.csv"]


@pytest.mark.parametrize("name", ["20260117", "1e-3", "true", "run"])
def test_a_name_is_a_text(tmp_path, name):
    out = tmp_path / "runs.csv"
    runs.write_csv(load(write_run(tmp_path / name)), out)
    assert load(out)["name"].to_list() == [name]


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", '{"step": 1}\n', "name,step\na,1\na,1\n"])
def test_another_file_is_refused_in_one_line(text, tmp_path):
    file = tmp_path / "runs.csv"
    file.write_text(text)
    assert one_line_error(call("research/report.py", "table", file))


@given(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text().filter(lambda text: text[:1] not in ("[", "{"))
)
def test_a_cell_reads_as_what_was_written(value):
    text = runs.format_cell(value)
    assert text
    assert runs.parse_cell(text) == value
    assert type(runs.parse_cell(text)) is type(value)


def test_flops_of_large_runs_fit_into_the_frame():
    frame = runs.make_frame([{"name": "a", "val_flops": 10**21}, {"name": "b", "val_flops": 5}])
    assert frame["val_flops"].to_list() == [1e21, 5.0]
    assert math.isfinite(frame["val_flops"].sum())
