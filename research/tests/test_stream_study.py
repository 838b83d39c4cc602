"""The runs of the controlled comparison: what is trained next, with which keys, and what is stored."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import one_line_error
from in_process import call

from research.residual_streams import rates, streams, study
from research.residual_streams.study import Run
from research.rows import append_row, read_rows
from training.settings import configure

STUDY = "research/residual_streams/study.py"


def make_row(run: Run, val_loss: float | None) -> dict:
    """Return the row of a run as the study stores it, with little in it."""
    return {
        "arm": run.arm,
        "rung": run.rung,
        "phase": run.phase,
        "seed": run.seed,
        "point": list(run.point),
        "val_loss": val_loss,
    }


def train_stage(stage: str, arm: str, rows: list[dict], loss_at) -> list[Run]:
    """Add a row for every run of a stage, with a loss that depends on its point."""
    trained = []
    while (run := study.next_run(stage, arm, rows)) is not None:
        trained.append(run)
        rows.append(make_row(run, loss_at(run.point)))
    return trained


def distance_to(muon: float, adamw: float):
    return lambda point: abs(point[0] - muon) + abs(point[1] - adamw)


def test_every_arm_is_a_model_of_the_repository():
    for arm in streams.ARMS:
        run = Run(arm, "short", "try", 1000, (0, 0))
        _, model_config = configure(study.make_arguments(run))
        assert model_config.hidden_size == 128


def test_a_run_has_the_rates_of_its_point():
    config, _ = configure(study.make_arguments(Run("ddl_tc", "long", "report", 3, (1, -0.5))))
    assert config.muon_learning_rate == 0.04
    assert config.learning_rate == pytest.approx(0.04 / 2**0.5)
    assert (config.max_steps, config.warmup_steps, config.seed) == (3200, 320, 3)


@pytest.mark.parametrize(
    ("phase", "part"), [("try", "first"), ("check", "first"), ("report", "second")]
)
def test_rates_are_chosen_on_the_other_half_of_validation(phase, part):
    config, _ = configure(study.make_arguments(Run("conv", "short", phase, 0, (0, 0))))
    assert config.eval_part == part


def test_decay_does_not_depend_on_the_rates():
    decays = set()
    for point in [(0, 0), (1, -1)]:
        config, _ = configure(study.make_arguments(Run("additive", "short", "try", 0, point)))
        decays.add((config.weight_decay, config.weight_decay_rate))
    assert len(decays) == 1
    assert None not in decays.pop()


@pytest.mark.parametrize(("arm", "num_seeds"), [("additive", 5), ("mudd", 3)])
def test_the_best_try_is_reported_with_every_seed(arm, num_seeds):
    runs = train_stage("short", arm, [], distance_to(1, 1))
    tries = runs[: rates.NUM_TRIES]
    reports = runs[rates.NUM_TRIES :]
    assert {run.phase for run in tries} == {"try"}
    assert {run.seed for run in tries} == {study.TUNING_SEED}
    assert [run.seed for run in reports] == list(range(num_seeds))
    assert {run.point for run in reports} == {(1, 1)}
    assert len(runs) == study.count_runs("short", arm)


def test_the_longer_rung_is_checked_from_the_best_try_on():
    rows = []
    train_stage("short", "ddl_tc", rows, distance_to(1, 0))
    runs = train_stage("long", "ddl_tc", rows, distance_to(0.5, -0.5))
    assert [run.point for run in runs[:3]] == [(1, 0), (0.5, -0.5), (0, -1)]
    assert {run.point for run in runs[3:]} == {(0.5, -0.5)}
    assert len(runs) == study.count_runs("long", "ddl_tc")


def test_the_cross_is_completed_to_nine_points():
    rows = []
    train_stage("short", "additive", rows, distance_to(0, 1))
    train_stage("tolerance", "additive", rows, distance_to(0, 1))
    points = {tuple(row["point"]) for row in rows}
    assert {(x, y) for x in (-1, 0, 1) for y in (0, 1, 2)} <= points
    assert study.next_run("tolerance", "additive", rows) is None


def test_a_diverged_try_is_not_reported():
    runs = train_stage(
        "short", "hc", [], lambda point: None if point[0] >= 0 else distance_to(-1, 0)(point)
    )
    assert {run.point for run in runs if run.phase == "report"} == {(-1, 0)}


def test_other_arms_do_not_count():
    rows = []
    train_stage("short", "conv", rows, distance_to(0, 0))
    assert study.next_run("short", "wide", rows) == Run("wide", "short", "try", 1000, (0, 0))


def test_the_longer_rung_needs_the_rates_of_the_shorter():
    with pytest.raises(ValueError, match="the stage long needs the rates of conv"):
        study.next_run("long", "conv", [])


# ---- rows ----


def test_group_losses_are_means_of_consecutive_sequences(tmp_path):
    losses = np.arange(100, dtype=np.float32)
    np.savez(tmp_path / "losses.npz", loss=losses, window=np.arange(100), step=1)
    assert study.read_group_losses(tmp_path) == [15.5, 47.5, 79.5]


def test_a_line_that_was_not_written_to_its_end_is_left_out(tmp_path):
    path = tmp_path / "rows.jsonl"
    append_row(path, {"number": 1})
    with open(path, "a") as file:
        file.write('{"number": ')
    assert read_rows(path) == [{"number": 1}]


def start_training(monkeypatch, tmp_path, code: int, status: str | None) -> Path:
    """Let train.py end with a code, and leave a status in the run folder."""
    folder = tmp_path / "run"
    folder.mkdir()
    if status is not None:
        (folder / "status.json").write_text(json.dumps({"ended": status}))
    result = SimpleNamespace(returncode=code, stderr="train.py: a reason", stdout="")
    monkeypatch.setattr(study.subprocess, "run", lambda *arguments, **keys: result)
    return folder


@pytest.mark.parametrize(
    ("code", "status", "is_finished"), [(0, "finished", True), (1, "failed", False)]
)
def test_a_run_is_finished_or_diverged(monkeypatch, tmp_path, code, status, is_finished):
    folder = start_training(monkeypatch, tmp_path, code, status)
    assert study.call_train([], folder) is is_finished


@pytest.mark.parametrize(("code", "status"), [(2, None), (75, "stopped")])
def test_a_run_that_ended_otherwise_is_an_error(monkeypatch, tmp_path, code, status):
    folder = start_training(monkeypatch, tmp_path, code, status)
    with pytest.raises(RuntimeError, match=r"^run: train.py: a reason$"):
        study.call_train([], folder)


# ---- the command ----


@pytest.fixture
def small_study(monkeypatch, corpus):
    """Let runs be three steps of a tiny model on bytes."""
    monkeypatch.setattr(study, "RUNGS", {"short": 3, "long": 4})
    monkeypatch.setattr(study, "GROUP_SIZE", 4)
    monkeypatch.setattr(rates, "NUM_TRIES", 2)
    monkeypatch.setattr(study, "PLANNED_SEEDS", (0,))
    monkeypatch.setattr(study, "check_corpus", lambda: None)
    make_arguments = study.make_arguments
    tiny = {
        "dataset": corpus,
        "vocab_size": 320,
        "block_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "head_dim": 8,
        "hidden_size": 8,
        "compile": False,
        "dtype": "float32",
    }
    options = [f"--{key}={value}" for key, value in tiny.items()]
    monkeypatch.setattr(study, "make_arguments", lambda run: [*make_arguments(run), *options])


def test_a_stage_trains_what_is_missing_and_repeats_have_the_same_bits(small_study, tmp_path):
    options = [f"--results={tmp_path / 'results'}", f"--runs={tmp_path / 'runs'}"]
    result = call(STUDY, "short", "--arms=ddl_tc", *options)
    assert result.returncode == 0, result.stderr.decode()
    assert b"3 of 3 | ddl_tc-short-report-0" in result.stdout
    rows = read_rows(tmp_path / "results" / "language.jsonl")
    assert [row["phase"] for row in rows] == ["try", "try", "report"]
    report = rows[-1]
    assert np.mean(report["group_losses"]) == pytest.approx(report["val_loss"], abs=0.05)
    assert not list((tmp_path / "runs").iterdir())

    result = call(STUDY, "short", "--arms=ddl_tc", *options)
    assert result.stdout == b""  # nothing is missing
    result = call(STUDY, "again", *options)
    assert b"same bits: True" in result.stdout
    result = call(STUDY, "short", "--arms=ddl_tc", "--mode=show", *options)
    assert result.stdout == b"short: 3 of 3 runs are finished\n"


def test_a_text_that_is_not_prepared_is_named_with_its_script(monkeypatch, tmp_path):
    monkeypatch.setattr(study, "ROOT", tmp_path)
    line = one_line_error(call(STUDY, "short", f"--results={tmp_path / 'results'}"))
    assert "is not prepared yet; run `python research/residual_streams/python_library.py`" in line
    assert not (tmp_path / "results").exists()


MISTAKES = [
    (["medium"], "medium: give one of short, long"),
    ([], "no stage: give one of short, long"),
    (["short", "--arm=conv"], "--arm is no option of the study; give one of results"),
    (["long", "--arms=conv,hc"], "the stage long has no arm hc; give some of additive"),
    (["short", "--mode=run"], "--mode=run: give train or show"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES)
def test_mistakes_end_in_one_line(arguments, message):
    assert message in one_line_error(call(STUDY, *arguments))
