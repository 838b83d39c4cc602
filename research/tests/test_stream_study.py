"""The runs of the controlled comparison: what is trained next, with which keys, and what is stored."""

import dataclasses
import json
import re
import resource
import shlex
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import ROOT, one_line_error
from in_process import call

from research.residual_streams import rates, runner, single_rate, streams, study
from research.residual_streams.study import Run
from research.rows import append_row, read_rows
from training.provenance import describe_machine
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
    ("phase", "part"),
    [("try", "first"), ("check", "first"), ("report", "second"), ("first_half", "first")],
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


def test_an_arm_at_the_edge_of_its_checks_is_checked_once_more():
    rows = []
    train_stage("short", "ddl_1", rows, distance_to(0, 0))
    train_stage("long", "ddl_1", rows, distance_to(-1, -1))
    edge_runs = train_stage("edge", "ddl_1", rows, distance_to(-1, -1))
    assert [(run.rung, run.point) for run in edge_runs] == [("long", (-1.5, -1.5))]
    # it chooses nothing
    assert study.next_run("long", "ddl_1", rows) is None
    assert study.count_finished("edge", ["ddl_1"], rows) == study.count_runs("edge", "ddl_1")


def test_both_halves_are_of_the_same_rates():
    rows = []
    for stage in ("short", "long"):
        train_stage(stage, "wide", rows, distance_to(0, 0))
    reported = [row for row in rows if (row["rung"], row["phase"]) == ("long", "report")]
    runs = train_stage("halves", "wide", rows, distance_to(0, 0))
    assert [(run.seed, list(run.point)) for run in runs] == [
        (row["seed"], row["point"]) for row in reported
    ]


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


def test_the_other_half_needs_the_rates_of_the_longer_rung():
    rows = []
    train_stage("short", "wide", rows, distance_to(0, 0))
    with pytest.raises(ValueError, match="needs the rates of wide: finish the stage long first"):
        study.next_run("halves", "wide", rows)


def test_the_longer_rung_needs_the_rates_of_the_shorter():
    with pytest.raises(ValueError, match="the stage long needs the rates of conv"):
        study.next_run("long", "conv", [])


# ---- rows ----


def test_group_losses_are_means_of_consecutive_sequences(tmp_path):
    losses = np.arange(100, dtype=np.float32)
    np.savez(tmp_path / "losses.npz", loss=losses, window=np.arange(100), step=1)
    assert runner.read_group_losses(tmp_path) == [15.5, 47.5, 79.5]


def test_a_line_that_was_not_written_to_its_end_is_left_out(tmp_path):
    path = tmp_path / "rows.jsonl"
    append_row(path, {"number": 1})
    with open(path, "a") as file:
        file.write('{"number": ')
    assert read_rows(path) == [{"number": 1}]


def test_a_row_after_one_that_did_not_fit_on_the_disk_is_read(tmp_path):
    path = tmp_path / "rows.jsonl"
    append_row(path, {"number": 1})
    stored = path.read_bytes()
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(stored) + 5, hard_limit))
        with pytest.raises(OSError, match="a row of 15 bytes could not be written"):
            append_row(path, {"number": 22})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft_limit, hard_limit))
    assert path.stat().st_size > len(stored)
    assert read_rows(path) == [{"number": 1}]
    append_row(path, {"number": 3})
    assert read_rows(path) == [{"number": 1}, {"number": 3}]


def start_training(
    monkeypatch, tmp_path, code: int, status: str | None, has_diverged: bool = False
) -> Path:
    """Let train.py end with a code, and leave a status in the run folder."""
    folder = tmp_path / "run"
    folder.mkdir()
    if has_diverged:
        (folder / "nonfinite").mkdir()
    if status is not None:
        (folder / "status.json").write_text(json.dumps({"ended": status}))
    result = SimpleNamespace(returncode=code, stderr="train.py: a reason", stdout="")
    monkeypatch.setattr(runner.subprocess, "run", lambda *arguments, **keys: result)
    return folder


@pytest.mark.parametrize(
    ("code", "status", "is_finished"), [(0, "finished", True), (1, "failed", False)]
)
def test_a_run_is_finished_or_diverged(monkeypatch, tmp_path, code, status, is_finished):
    folder = start_training(monkeypatch, tmp_path, code, status, has_diverged=not is_finished)
    assert runner.call_train([], folder) is is_finished


# "failed" without a diagnosis: the disk was full
@pytest.mark.parametrize(("code", "status"), [(2, None), (75, "stopped"), (1, "failed")])
def test_a_run_that_ended_otherwise_is_an_error(monkeypatch, tmp_path, code, status):
    folder = start_training(monkeypatch, tmp_path, code, status)
    message = rf"^run: train.py ended with exit code {code}: train.py: a reason$"
    with pytest.raises(RuntimeError, match=message):
        runner.call_train([], folder)


def test_a_run_that_was_killed_is_an_error(monkeypatch, tmp_path):
    killed = SimpleNamespace(returncode=-9, stderr="", stdout="")
    monkeypatch.setattr(runner.subprocess, "run", lambda *arguments, **keys: killed)
    with pytest.raises(RuntimeError, match="ended with exit code -9: it printed nothing"):
        runner.call_train([], tmp_path)


def test_the_seconds_of_a_resumed_run_are_those_of_all_its_training(monkeypatch, tmp_path):
    records = [
        {"step": 1, "loss": 5.0, "seconds": 90.0},
        {"step": 2, "val_loss": 4.0, "seconds": 99.0},
    ]
    lines = [json.dumps(record) for record in records]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    monkeypatch.setattr(runner, "call_train", lambda arguments, folder: True)
    result = runner.train([], tmp_path, is_reported=False)
    assert result == {"val_loss": 4.0, "train_loss": 5.0, "seconds": 99.0}


# ---- the command ----


TINY = {
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "head_dim": 8,
    "hidden_size": 8,
    "vocab_size": 320,
    "block_size": 16,
    "compile": False,
    "dtype": "float32",
}


@pytest.fixture
def small_study(monkeypatch, corpus):
    """Let runs be three steps of a tiny model on bytes."""
    monkeypatch.setattr(study, "RUNGS", {"short": 3, "long": 4})
    monkeypatch.setattr(runner, "GROUP_SIZE", 4)
    monkeypatch.setattr(rates, "NUM_TRIES", 2)
    monkeypatch.setattr(study, "PLANNED_SEEDS", (0,))
    monkeypatch.setattr(runner, "check_dataset", lambda name, command: None)
    make_arguments = study.make_arguments
    options = [f"--{key}={value}" for key, value in {**TINY, "dataset": corpus}.items()]
    monkeypatch.setattr(study, "make_arguments", lambda run: [*make_arguments(run), *options])


def test_a_stage_trains_what_is_missing(small_study, tmp_path):
    options = [f"--results={tmp_path / 'results'}", f"--runs={tmp_path / 'runs'}"]
    result = call(STUDY, "short", "--arms=ddl_tc", *options)
    assert result.returncode == 0, result.stderr.decode()
    last_line = result.stdout.decode().splitlines()[-1]
    assert last_line.startswith("ddl_tc-short-report-0")
    assert "| 0 left, 0:00" in last_line
    rows = read_rows(tmp_path / "results" / "language.jsonl")
    assert [row["phase"] for row in rows] == ["try", "try", "report"]
    report = rows[-1]
    assert np.mean(report["group_losses"]) == pytest.approx(report["val_loss"], abs=0.05)
    assert not list((tmp_path / "runs").iterdir())

    result = call(STUDY, "short", "--arms=ddl_tc", *options)
    assert result.stdout == b""  # nothing is missing
    result = call(STUDY, "short", "--arms=ddl_tc", "--mode=show", *options)
    assert result.stdout == b"short: 3 of 3 runs are finished\n"


def test_a_repeated_run_has_the_same_bits(small_study, monkeypatch, tmp_path):
    monkeypatch.setattr(rates, "NUM_TRIES", 1)
    monkeypatch.setattr(study, "NUM_REPEATED", 1)

    def run_stage(stage: str, option: str = "--mode=train") -> str:
        results = f"--results={tmp_path / 'results'}"
        result = call(STUDY, stage, option, results, f"--runs={tmp_path / 'runs'}")
        assert result.returncode == 0, result.stderr.decode()
        return result.stdout.decode()

    run_stage("short", "--arms=ddl_tc")
    assert run_stage("again", "--mode=show") == "again: 0 of 1 runs are finished\n"
    assert run_stage("again").count("same bits: True") == 1
    assert run_stage("again") == ""  # nothing is missing
    assert run_stage("again", "--mode=show") == "again: 1 of 1 runs are finished\n"


def test_runs_of_another_machine_are_not_repeated(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "check_dataset", lambda name, command: None)
    run = Run("conv", "short", "report", 0, (0, 0))
    row = make_row(run, val_loss=3.0)
    for machine in (describe_machine()["machine"], "64 x another processor"):
        append_row(tmp_path / "language.jsonl", {**row, "machine": machine})
    line = one_line_error(call(STUDY, "again", f"--results={tmp_path}"))
    assert "language.jsonl has 1; train other arms here first" in line


def test_speeds_are_counted_without_measuring_them(tmp_path):
    append_row(tmp_path / "speeds.jsonl", {"arm": "conv", "round": 0, "tokens_per_second": 1.0})
    result = call(STUDY, "speed", "--mode=show", "--arms=conv", f"--results={tmp_path}")
    assert result.stdout == b"speed: 1 of 3 runs are finished\n"


def test_a_text_that_is_not_prepared_is_named_with_its_script(monkeypatch, tmp_path):
    monkeypatch.setattr(runner, "ROOT", tmp_path)
    line = one_line_error(call(STUDY, "short", f"--results={tmp_path / 'results'}"))
    assert "is not prepared yet; run `python research/residual_streams/python_library.py`" in line
    assert not (tmp_path / "results").exists()


MISTAKES = [
    (["medium"], "'medium' is not a stage; the stages are short, long"),
    ([], "no stage is given; the stages are short, long"),
    (["short", "--arm=conv"], "--arm is not an option of the study; its options are --results"),
    (["long", "--arms=conv,hc"], "the stage long has no arm 'hc'; give some of additive"),
    (["short", "--mode=run"], "--mode=run: give --mode=train or --mode=show"),
    (["again", "--arms=conv"], "--arms has no effect on the stage again; omit it"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES)
def test_mistakes_end_in_one_line(arguments, message):
    assert message in one_line_error(call(STUDY, *arguments))


# ---- problems with one learning rate ----


def train_problem(problem: single_rate.Problem, arm: str, size: str, best: float) -> list:
    """Return the runs of an arm whose loss is lowest at a power, in their order."""
    rows = []
    while (run := single_rate.next_run(problem, arm, size, rows)) is not None:
        rows.append({**vars(run), "val_loss": abs(run.power - best)})
    return rows


@pytest.mark.parametrize("problem", single_rate.PROBLEMS.values(), ids=lambda problem: problem.name)
def test_every_run_of_a_problem_is_a_model_and_a_data_set(problem):
    for size in problem.sizes:
        for arm in problem.seeds:
            run = single_rate.Run(problem.name, size, arm, "report", 0, 1.0)
            config, _ = configure(single_rate.make_arguments(run))
            assert config.learning_rate == pytest.approx(2 * problem.start_rate)
            assert config.min_lr == pytest.approx(config.learning_rate / 10)
            assert config.dataset == problem.dataset
            assert config.optimizer == "adamw"


@pytest.mark.parametrize("best", [0.0, 1.0, -2.0])
def test_every_arm_of_a_problem_gets_the_same_tries_and_then_its_seeds(best):
    rows = train_problem(single_rate.REGISTERS, "ddl_tc", "deep", best)
    tries = [row for row in rows if row["phase"] == "try"]
    reports = [row for row in rows if row["phase"] == "report"]
    assert len(tries) == single_rate.REGISTERS.num_tries
    assert {row["seed"] for row in tries} == {single_rate.TUNING_SEED}
    assert [row["seed"] for row in reports] == [0, 1, 2, 3, 4]
    assert {row["power"] for row in reports} == {best}
    assert single_rate.count_missing(single_rate.REGISTERS, ["ddl_tc"], rows) == 20


def test_the_probe_is_trained_with_its_published_rate():
    rows = train_problem(single_rate.PROBE, "hc", "16_layers", 0.0)
    assert [(row["phase"], row["seed"], row["power"]) for row in rows] == [
        ("report", 0, 0.0),
        ("report", 1, 0.0),
        ("report", 2, 0.0),
    ]


@pytest.mark.parametrize(
    ("best", "powers"),
    [
        (0.0, [0, -1, 1, -0.5, 0.5]),
        (2.0, [0, -1, 1, 2, 3]),
        (-1.0, [0, -1, -2, -1.5, -0.5]),
    ],
)
def test_the_search_for_one_rate_moves_and_then_halves_its_step(best, powers):
    losses = {}
    while len(losses) < 5:
        power = rates.next_power(losses)
        losses[power] = abs(power - best)
    assert list(losses) == powers


@pytest.fixture
def small_problem(monkeypatch, corpus):
    """Let the Shakespeare problem be three steps of a tiny model on bytes."""
    problem = dataclasses.replace(
        single_rate.SHAKESPEARE,
        keys={**TINY, "global_batch_size": 2, "micro_batch_size": 2, "eval_full": True}
        | {"max_steps": 3, "warmup_steps": 1, "eval_interval": 3},
        dataset=corpus,
        seeds={"additive": (0, 1)},
        num_tries=1,
    )
    monkeypatch.setitem(single_rate.PROBLEMS, "shakespeare", problem)
    monkeypatch.setattr(runner, "check_dataset", lambda name, command: None)


def test_a_problem_trains_what_is_missing(small_problem, tmp_path):
    options = [f"--results={tmp_path / 'results'}", f"--runs={tmp_path / 'runs'}"]
    script = "research/residual_streams/single_rate.py"
    result = call(script, "shakespeare", "--arms=additive", "--mode=show", *options)
    assert result.stdout == b"shakespeare: 3 runs are missing\n"
    result = call(script, "shakespeare", "--arms=additive", *options)
    assert result.returncode == 0, result.stderr.decode()
    rows = read_rows(tmp_path / "results" / "shakespeare.jsonl")
    assert [row["phase"] for row in rows] == ["try", "report", "report"]
    result = call(script, "shakespeare", "--arms=additive", *options)
    assert result.stdout == b""  # nothing is missing


def test_mistakes_in_a_problem_end_in_one_line():
    script = "research/residual_streams/single_rate.py"
    line = one_line_error(call(script, "text"))
    assert "'text' is not a problem; the problems are registers, shakespeare, probe" in line
    line = one_line_error(call(script, "probe", "--arms=wide"))
    assert "the problem probe has no arm 'wide'; give some of additive,ihc,hc" in line


# ---- the plan ----

PLAN = (ROOT / "research/residual_streams/PLAN2.md").read_text(encoding="utf-8")


def list_sweeps() -> list[list[str]]:
    """Return the arguments of every sweep of the plan, with its shell variable filled in."""
    block_lines = "\n".join(re.findall(r"```bash\n(.*?)```", PLAN, flags=re.DOTALL))
    lines = block_lines.replace("\\\n", " ").splitlines()
    [size] = [line.removeprefix("SIZE=").strip('"') for line in lines if line.startswith("SIZE=")]
    return [
        shlex.split(line.replace("$SIZE", size))[2:]
        for line in lines
        if line.startswith("python research/sweep.py")
    ]


@pytest.mark.parametrize(
    ("number", "num_runs"), [(0, 2), (1, 4), (2, 45), (3, 5)], ids=["10min", "1h", "rates", "seeds"]
)
def test_the_sweeps_for_gpus_write_their_runs(number, num_runs, tmp_path):
    arguments = [*list_sweeps()[number], "--mode=slurm", f"--out={tmp_path}"]
    result = call("research/sweep.py", *dict.fromkeys(arguments))
    assert result.returncode == 0, result.stderr.decode()
    assert f"{num_runs} tasks; submit them with" in result.stdout.decode()


def test_the_plan_names_every_arm():
    missing = {arm for arm in streams.ARMS if f"`{arm}`" not in PLAN}
    assert missing == set(streams.ADDED)


def test_the_plan_counts_the_runs():
    planned = len(streams.PLANNED)
    runs_of_planned = study.count_runs("short", "additive")
    assert f"{planned} x ({rates.NUM_TRIES} + {runs_of_planned - rates.NUM_TRIES})" in PLAN
    others = len(streams.ARMS) - planned - len(streams.ADDED)
    assert f"{others} x ({rates.NUM_TRIES} + {study.count_runs('short', 'mudd') - 12})" in PLAN
    assert f"{planned} x (3 + {study.count_runs('long', 'wide') - 3})" in PLAN
