"""Runs as data, whatever has happened to their files; runs.csv says the same, digit for digit."""

import csv
import hashlib
import json
import math
import os
import random
import shutil
import statistics
from dataclasses import replace

import pytest
from helpers import ROOT, one_line_error
from hypothesis import given
from hypothesis import strategies as st
from in_process import call
from report_helpers import BASE, edit_state, load, write_checkpoint, write_lines, write_run

from research import runs
from training import checkpoint
from training.config import TrainConfig
from training.optimizer import get_learning_rate


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


@pytest.mark.parametrize("points", [7, 100, 2000])
def test_a_curve_is_the_means_of_naive_python(tmp_path, monkeypatch, points):
    monkeypatch.setattr(runs, "MAX_CURVE_POINTS", points)
    lines = lines_of_a_run(903)
    [run] = load(write_lines(tmp_path / "run", [*lines[:400], "}{", *lines[400:]]))
    trained = [line for line in lines if "loss" in line]
    members = {}
    for index, line in enumerate(trained):
        group = math.floor(index * min(points, 850) / len(trained))
        members.setdefault(group, []).append(line)
    assert run.training.height == len(members) == min(points, 850)
    for row, group in zip(run.training.to_dicts(), members.values()):
        for key in ("step", "tokens", "flops", "seconds", "loss", "grad_norm", "tokens_per_second"):
            assert row[key] == pytest.approx(math.fsum(e[key] for e in group) / len(group), 1e-12)
        assert row["memory"] == max(line["memory"] for line in group)
    assert run.evaluations.to_dicts() == [line for line in lines if "val_loss" in line]
    assert run.residual_records == [line for line in lines if "residual" in line]
    totals = {key: trained[-1][key] for key in ("tokens", "flops", "seconds")}
    totals["tokens_per_second"] = statistics.median(line["tokens_per_second"] for line in trained)
    totals["memory"] = max(line["memory"] for line in trained)
    assert (run.totals, run.step, run.first_seconds) == (totals, 903, 0.5)
    assert run.notes[0] == "not a record of a step: line 401 of metrics.jsonl"


GOOD = [
    {"step": n, "tokens": n, "flops": n, "seconds": float(n), "loss": 4.0 - n} for n in (1, 2, 3)
]
DAMAGE = {  # a line in the middle: (what a note says, the losses that are left)
    '{"step": 9, "lo': ("not a record of a step: line 3", [3, 2, 1]),
    "\udcff\udcfe\x00": ("not a record of a step: line 3", [3, 2, 1]),
    "[1, 2]": ("not a record of a step: line 3", [3, 2, 1]),
    '{"loss": 5.0}': ("not a record of a step: line 3", [3, 2, 1]),
    '{"step": "3", "loss": 5.0}': ("not a record of a step: line 3", [3, 2, 1]),
    '{"step": 2, "val_loss": NaN}': ("no finite loss: step 2", [3, 2, 1]),
    '{"step": 2, "val_loss": null}': ("no finite loss: step 2", [3, 2, 1]),
    '{"step": 2, "loss": -Infinity}': ("no finite loss: step 2", [3, 1]),
    '{"step": 2, "loss": 5.0}': (
        "1 lines of metrics.jsonl are of steps that were repeated",
        [3, 5, 1],
    ),
    '{"step": 9, "loss": 5.0}': (
        "1 lines of metrics.jsonl are of steps that were repeated",
        [3, 2, 1],
    ),
    '{"step": 1, "loss": 5.0}': (
        "2 lines of metrics.jsonl are of steps that were repeated",
        [5, 1],
    ),
    "": ("not a record of a step: line 3", [3, 2, 1]),
}


@pytest.mark.parametrize("line", DAMAGE)
def test_damage_is_named_and_the_rest_is_read(tmp_path, line):
    note, losses = DAMAGE[line]
    text = "\n".join([json.dumps(GOOD[0]), json.dumps(GOOD[1]), line, json.dumps(GOOD[2])]) + "\n"
    (tmp_path / "metrics.jsonl").write_bytes(text.encode("utf-8", "surrogateescape"))
    [run] = load(tmp_path)
    assert run.training["loss"].to_list() == losses
    assert any(note in line for line in run.notes)
    assert "its settings are not known" in run.notes[-1]
    assert (run.settings, run.model_name, run.parameters, run.finished) == ({}, None, None, None)
    ended = call("research/report.py", "curves", tmp_path)
    assert (ended.returncode, len(ended.stderr.splitlines())) == (0, len(run.notes))


def test_a_run_that_went_on_from_an_earlier_step(tmp_path):
    lines = lines_of_a_run(100)
    again = [{**x, **({"loss": 0.5} if "loss" in x else {})} for x in lines if 60 < x["step"] < 81]
    [run] = load(write_lines(tmp_path / "run", [*lines, *again]))
    losses = [line["loss"] for line in lines if "loss" in line and line["step"] <= 60]
    assert run.training["loss"].to_list() == losses + [0.5] * sum("loss" in x for x in again)
    assert run.evaluations["step"].to_list() == [20, 40, 60, 80]
    assert [record["step"] for record in run.residual_records] == [50]
    assert run.step == 80


def test_figures_among_runs_are_skipped(tmp_path):
    """`report.py curves runs/*` also names the figure that an earlier call wrote."""
    write_run(tmp_path / "run")
    figure = tmp_path / "curves.png"
    figure.write_bytes(b"\x89PNG")
    loaded, error_lines = runs.load([figure, tmp_path / "run"])
    assert [run.name for run in loaded] == ["run"]
    assert error_lines == []
    assert len(runs.load([figure])[1]) == 1


def test_what_cannot_be_read_is_named_and_the_rest_is_reported(tmp_path):
    sweep = tmp_path / "sweep"
    write_run(sweep / "good")
    write_lines(sweep / "empty", [])
    (sweep / "no_metrics/checkpoints").mkdir(parents=True)
    write_lines(sweep / "garbage", ["}{"] * 5)
    (sweep / "elsewhere").mkdir()
    (sweep / "folder/metrics.jsonl").mkdir(parents=True)
    missing = tmp_path / "missing"
    other = tmp_path / "notes.txt"
    other.write_text("hello\n")
    loaded, error_lines = runs.load([sweep, missing, other])
    assert [run.name for run in loaded] == ["good"]
    several = "not a record of a step: lines 1, 2, 3 and 2 more"
    assert [line.partition(" of metrics")[0] for line in error_lines] == [
        "empty: metrics.jsonl has no step yet",
        "folder: metrics.jsonl is missing or unreadable (Is a directory)",
        f"garbage: metrics.jsonl has no step yet; {several}",
        "no_metrics: metrics.jsonl is missing or unreadable (No such file or directory)",
        f"{missing} does not exist: give a run folder made by train.py",
        f"{other} was not written by report.py runs: give a run folder, or a runs.csv",
    ]
    for name, out in (("curves", "x.png"), ("table", None), ("runs", "x.csv")):
        options = [f"--out={tmp_path / out}"] if out else []
        ended = call("research/report.py", name, sweep, missing, *options)
        assert (ended.returncode, len(ended.stderr.splitlines())) == (0, 5)
    assert "and 2 more" in one_line_error(
        call("research/report.py", "table", sweep / "empty", missing, other, sweep / "garbage", "x")
    )


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_counts(tmp_path):
    run = write_run(tmp_path / "run", seed=3)
    [state] = run.glob("checkpoints/*/state.json")
    stored = json.loads(state.read_text())
    newer = run / "checkpoints/step_00000006"
    newer.mkdir()
    (newer / "state.json").write_text('{"step": 6')
    [loaded] = load(run)
    assert (loaded.seed, loaded.model_name, loaded.parameters) == (3, "gpt-mha-rope", 7052)
    assert ["is damaged" in note for note in loaded.notes] == [True]
    for change, note in (
        (
            {"model": "other-stem"},
            "its model cannot be built: model='other-stem' is not a model variant",
        ),
        ({"model_config": {"layers": 1}}, "its model cannot be built: unknown key layers"),
    ):
        write_checkpoint(run, 6, **{k: v for k, v in (stored | change).items() if k != "step"})
        [loaded] = load(run)
        assert (loaded.parameters, loaded.published, loaded.training.height) == (None, None, 4)
        assert [note in line for line in loaded.notes] == [True]


def test_stored_accuracy_is_that_of_the_runs_own_weights(tmp_path):
    folder = write_run(tmp_path / "run")
    sums = folder / "checkpoints/step_00000004" / checkpoint.CHECKSUMS
    record = {
        "weights": hashlib.sha256(sums.read_bytes()).hexdigest(),
        "shown": [{"task": "piqa", "value": 61.5}],
        "settings": {"dtype": "float32"},
    }
    out = folder / "eval"
    out.mkdir()
    (out / "results_own.json").write_text(json.dumps({**record, "folder": "x"}))
    (out / "results_other.json").write_text(json.dumps({**record, "weights": "other"}))
    (out / "results_damaged.json").write_text('{"shown": [3')
    [run] = load(folder)
    assert run.accuracy == [record]
    assert "results_damaged.json is left out" in run.notes[0]


def test_accuracy_is_read_from_all_evaluations_with_other_runs(tmp_path):
    sweep = tmp_path / "sweep"
    folder = write_run(sweep / "a")
    sums = folder / "checkpoints/step_00000004" / checkpoint.CHECKSUMS
    weights = hashlib.sha256(sums.read_bytes()).hexdigest()
    dates = {"a/eval": "2026-01-02", "eval_a+b": "2026-01-03", "eval_a+c": "2026-01-01"}
    dates["../eval_a_of_two_sweeps"] = "2026-01-04"
    for path, date in dates.items():
        (sweep / path).mkdir()
        record = {"weights": weights, "shown": [], "date": date}
        (sweep / path / "results_0-shot.json").write_text(json.dumps(record))
    [run] = load(folder)
    # the newest comes last
    assert [record["date"] for record in run.accuracy] == sorted(dates.values())


def test_runs_of_one_name_are_told_apart_by_their_folders(tmp_path):
    for name in ("a/x/run", "b/x/run", "b/other"):
        write_run(tmp_path / name)
    names = [run.name for run in load(tmp_path, tmp_path / "b/other")]  # each once
    assert names == ["a/x/run", "other", "b/x/run"]


# ---- runs.csv ----

FIELDS = (
    "model_name",
    "seed",
    "parameters",
    "corpus",
    "commit",
    "machine",
    "processes",
    "accuracy",
    "notes",
    "step",
    "totals",
    "finished",
    "first_seconds",
    "final_evaluation",
)


def test_a_row_says_what_the_folder_says(tmp_path):
    folders = [tmp_path / f"seed={seed}" for seed in (0, 1)]
    for seed, folder in enumerate(folders):
        write_run(folder, seed=seed, val=2 + seed / 7)
        trained_on = {"machine": "8 x H200", "torch": "2.13.0", "processes": 8}
        edit_state(folder, commit="1e5123456789", trained_on=trained_on)
    out = tmp_path / "stored" / "runs.csv"
    printed = call("research/report.py", "runs", tmp_path, f"--out={out}")
    assert printed.stdout.decode() == f"{out}: 2 runs added, 0 replaced\n"
    for row_run, folder_run in zip(load(out), load(*folders), strict=True):
        assert row_run.settings == folder_run.settings
        for name in FIELDS:
            assert getattr(row_run, name) == getattr(folder_run, name), name
        assert row_run.published == folder_run.published
    table_of_folders = call("research/report.py", "table", *folders).stdout
    table_of_rows = call("research/report.py", "table", out).stdout
    assert table_of_folders == table_of_rows != b""
    assert "has no curves" in one_line_error(call("research/report.py", "curves", out))
    write_run(tmp_path / "new/seed=1", seed=1, val=1.0)
    printed = call("research/report.py", "runs", tmp_path / "new/seed=1", f"--out={out}")
    assert printed.stdout.decode() == f"{out}: 0 runs added, 1 replaced\n"
    assert [run.final_evaluation["val_loss"] for run in load(out)] == [2.0, 1.0]
    assert os.listdir(out.parent) == ["runs.csv"]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            {"model_name": "DDL-gpt-mha-rope"},
            "with model=gpt-mha-rope, and this run seed=0 has DDL-",
        ),
        ({"schedule": "wsd"}, "with schedule=cosine, and this run seed=0 has wsd"),
    ],
)
def test_another_run_of_the_same_name_is_not_replaced(tmp_path, other, message):
    first = write_run(tmp_path / "first" / "seed=0")
    second = write_run(tmp_path / "second" / "seed=0", **other)
    out = tmp_path / "runs.csv"
    runs.write_csv(load(first), out)
    stored = out.read_text()
    with pytest.raises(ValueError, match=message):
        runs.write_csv(load(second), out)
    assert out.read_text() == stored
    assert runs.write_csv(load(first), out) == (0, 1)


def test_a_run_that_was_extended_says_that_its_schedule_changed(tmp_path):
    """The first four of eight steps had the learning rates of a run of four steps."""
    config = TrainConfig(learning_rate=1e-2, warmup_steps=1, max_steps=4)
    keys = {"learning_rate": 1e-2, "warmup_steps": 1, "schedule": "cosine", "min_lr": None}
    folders = [tmp_path / "straight", tmp_path / "extended"]
    for folder, num_steps_before in zip(folders, (0, 4)):
        write_run(folder, steps=8, **keys)
        edit_state(folder, run_config={**keys, "model": BASE, "seed": 0, "max_steps": 8})
        lines = []
        for step in range(1, 9):
            max_steps = 4 if step <= num_steps_before else 8
            rate = get_learning_rate(step - 1, replace(config, max_steps=max_steps))
            lines.append({"step": step, "loss": 1.0, "lr": rate})
        write_lines(folder, lines)
    straight, extended = load(*folders)
    assert straight.notes == []
    [note] = extended.notes
    assert note.startswith("its learning rate followed another schedule until step 4")


@pytest.mark.parametrize("name", ["20260117", "1e-3", "true", "run"])
def test_a_run_is_replaced_whatever_its_name(tmp_path, name):
    run = write_run(tmp_path / name)
    out = tmp_path / "runs.csv"
    assert [runs.write_csv(load(run), out) for _ in range(3)] == [(1, 0), (0, 1), (0, 1)]
    assert [stored.name for stored in load(out)] == [name]


def test_a_run_without_a_checkpoint_is_replaced(tmp_path):
    run = write_run(tmp_path / "run")
    shutil.rmtree(run / "checkpoints")
    out = tmp_path / "runs.csv"
    assert [runs.write_csv(load(run), out) for _ in range(2)] == [(1, 0), (0, 1)]


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", '{"step": 1}\n', "name,step\na,1\na,1\n"])
def test_another_file_is_refused_in_one_line(text, tmp_path):
    run = write_run(tmp_path / "run")
    out = tmp_path / "runs.csv"
    out.write_text(text)
    assert one_line_error(call("research/report.py", "table", out))
    assert one_line_error(call("research/report.py", "runs", run, f"--out={out}"))
    assert out.read_text() == text


JSON = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()


@given(JSON | st.lists(JSON, max_size=3))
def test_a_cell_reads_as_what_was_written(value):
    text = runs.format_cell(value)
    assert text
    assert runs.parse_cell(text) == value
    assert type(runs.parse_cell(text)) is type(value)


def test_the_stored_rows_are_whole():
    """Each row of each study has what a reader of the study needs."""
    paths = list((ROOT / "results").rglob("*runs.csv"))
    assert paths
    for path in paths:
        with open(path, encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        needed = ("commit", "seed", "model", "step")
        assert all(row[key] for row in rows for key in needed), path
