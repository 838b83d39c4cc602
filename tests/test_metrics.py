"""The log of a run: progress lines, records, and what Weights & Biases is told."""

import contextlib
import json
import math
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from helpers import SMALL, small_run, wait_for
from training_runs import CONSTANT_RATE, run_train

from model import build
from training import checkpoint, metrics, trackers
from training.checkpoint import TrainState
from training.config import TrainConfig
from utils.processes import World

LEARNING_RATES = {"lr": 4.8e-3}


@pytest.fixture
def model():
    return build("gpt-mha-rope", **SMALL)


@pytest.fixture
def open_log(tmp_path, model):
    """Return a function that opens the log of a run of 800 steps of 6,400 tokens."""

    def open_log(**keys) -> metrics.RunLog:
        config = TrainConfig(global_batch_size=400, max_steps=800, log_interval=10, **keys)
        world = World(0, 1, torch.device("cpu"))
        return metrics.RunLog(tmp_path, config, TrainState(), model, world)

    return open_log


def log_steps(log: metrics.RunLog, last_step: int) -> None:
    """Log steps of a second each, after a first one of 12.5 seconds."""
    for step in range(1, last_step + 1):
        log.state.step = step
        log.state.seconds = 12.5 + step - 1
        log.log_step(7.0428, 1.04, LEARNING_RATES)


# ---- progress lines ----


def test_the_first_line_has_the_time_of_the_first_step_which_the_speed_leaves_out(open_log, capsys):
    log = open_log()
    log.config.max_steps = 15
    log_steps(log, last_step=15)
    start = "loss 7.0428 | lr 4.80e-03 | grad norm 1.04"
    assert capsys.readouterr().out.splitlines() == [
        f"step 1/15 | {start} | first step took 12.5 s",
        f"step 10/15 | {start} | 6,400 tokens/s | elapsed 0:21 | remaining 0:05",
        f"step 15/15 | {start} | 6,400 tokens/s | elapsed 0:26 | remaining 0:00",
    ]


def test_mfu_is_printed_if_the_peak_is_known(open_log, capsys):
    log = open_log()
    log.ideal_step_seconds = 0.5  # a step takes a second
    log_steps(log, last_step=10)
    assert "| 6,400 tokens/s | MFU 50.0% | elapsed 0:21 |" in capsys.readouterr().out


# ---- evaluations ----


def test_an_evaluation_line_has_the_loss_in_three_units(open_log, capsys):
    log = open_log()
    log.state.step = 100
    log.log_evaluation(
        {"loss": 3.9155},
        bytes_per_token=3.67,
        num_sequences=64,
        split_size=455,
        is_full=False,
        ema_scores={"loss": 3.8},
    )
    assert capsys.readouterr().out == (
        "step 100 | validation loss 3.9155 | perplexity 50.17 | 1.5392 bits per byte | "
        "validation loss of averaged weights 3.8000 | 64 of 455 sequences\n"
    )


def test_an_evaluation_line_of_a_task_has_its_scores(open_log, capsys):
    log = open_log()
    scores = {"loss": 0.5, "accuracy": 0.925, "exact_match": 0.25}
    log.log_evaluation(scores, bytes_per_token=None, num_sequences=20, split_size=20, is_full=True)
    assert capsys.readouterr().out == (
        "step 0 | validation loss 0.5000 | perplexity 1.65 | accuracy 92.5% | exact match 25.0% | "
        "all 20 sequences\n"
    )
    [record] = metrics.read(log.path)
    assert record["val_exact_match"] == 0.25


def log_losses(log: metrics.RunLog, losses: list[float], is_full: bool) -> None:
    """Log evaluations that differ only in the loss."""
    for loss in losses:
        log.log_evaluation(
            {"loss": loss}, bytes_per_token=None, num_sequences=1, split_size=1, is_full=is_full
        )


def test_the_best_loss_is_finite_and_not_that_of_the_entire_split(open_log):
    log = open_log()
    log_losses(log, [float("nan"), 2.0, float("nan"), 3.0], is_full=False)
    log_losses(log, [1.0], is_full=True)
    records = metrics.read(log.path)
    assert [record.get("best_val_loss") for record in records] == [None, 2.0, 2.0, 2.0, 2.0]


# ---- failures ----


def fail(*_arguments: object, **_keys: object) -> None:
    raise ConnectionError("its service has ended")


@pytest.mark.parametrize("action", ["write", "close"])
def test_a_failure_of_a_tracker_ends_no_run_and_loses_no_record(open_log, capsys, action):
    log = open_log()
    log.tracker = trackers.Tracker("id", log=fail, finish=fail)
    getattr(log, action)()
    assert "failed (ConnectionError: its service has ended)" in capsys.readouterr().err
    log.write(loss=2.0)
    assert metrics.read(log.path)[-1]["loss"] == 2.0


# ---- metrics.jsonl ----


def write_record(log: metrics.RunLog, step: int) -> None:
    log.state.step = step
    log.write(loss=1.0)


@contextlib.contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    """Let the kernel refuse to let files of this process grow further, as on a full disk."""
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard_limit))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft_limit, hard_limit))


def test_metrics_that_do_not_fit_on_the_disk_are_written_later(open_log, capsys):
    log = open_log()
    write_record(log, 1)
    size = log.path.stat().st_size
    with file_size_limit(size + 5):
        write_record(log, 2)
        write_record(log, 3)
    assert log.path.stat().st_size == size + 5  # a part of the second line
    write_record(log, 4)
    assert [record["step"] for record in metrics.read(log.path)] == [1, 2, 3, 4]
    warning = (
        "warning: metrics.jsonl cannot be written (File too large); its new lines are kept in memory "
        "until it can"
    )
    assert capsys.readouterr().err.count(warning) == 1  # for both lines


def test_metrics_are_read_up_to_a_line_that_is_not_text(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n\xff\xfe\n{"step": 3}\n')
    assert [r["step"] for r in metrics.read(path)] == [1, 2]


def test_numbers_that_are_not_finite_are_null_and_read_as_nan(open_log):
    log = open_log()
    log.write(residual={"attn.beta": [1.0, float("inf")]})
    log_losses(log, [float("nan")], is_full=False)
    metrics.truncate_after(log.path, 5)
    first_line, second_line = log.path.read_text().splitlines()
    assert '"residual": {"attn.beta": [1.0, null]}' in first_line
    assert '"val_loss": null' in second_line
    first, second = metrics.read(log.path)
    assert math.isnan(first["residual"]["attn.beta"][1])
    assert math.isnan(second["val_loss"])


METRICS = [
    {"step": 2, "val_loss": 1},
    {"step": 3, "loss": 2},
    {"step": 3, "val_loss": 3},
    {"step": 4, "loss": 5},
]


def test_metrics_are_truncated_after_a_step_and_its_evaluation(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in METRICS))
    metrics.truncate_after(path, 3)
    assert metrics.read(path) == METRICS[:3]


# ---- utilization ----


def test_mfu_counts_six_flops_per_parameter_and_attention(model):
    """6 N + 12 L d T (arXiv 2204.02311, appendix B), of two blocks of width 12 over 16 tokens."""
    expected = 6 * model.num_parameters() + 12 * 2 * 12 * 16
    assert metrics.compute_nominal_flops_per_token(model) == expected


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA RTX A1000 6GB Laptop GPU", None),
    ],
)
def test_the_peak_is_that_of_the_gpu(monkeypatch, name, peak):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert metrics.get_peak_flops(torch.device("cuda")) == peak


# ---- trackers ----


def test_a_failing_wandb_ends_in_one_line_with_the_fix(open_log, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setattr(wandb, "init", fail)
    message = r"tracker=wandb cannot start .* \(WANDB_MODE=offline needs no login\)"
    with pytest.raises(ValueError, match=message):
        open_log(tracker="wandb")


def read_wandb_ids(run: Path) -> list[str]:
    return [checkpoint.read_state(path)["wandb_id"] for path in checkpoint.list_checkpoints(run)]


@pytest.fixture(scope="module")
def trackio(tmp_path_factory) -> Iterator[ModuleType]:
    """Import trackio with a database of its own; it reads the variable once in a process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRACKIO_DIR", str(tmp_path_factory.mktemp("trackio")))
        yield pytest.importorskip("trackio")


def train_interrupted(corpus: Path, run: Path, **keys) -> dict[int, float]:
    """Train four steps, lose the last checkpoint, and resume to six; return the loss of each step."""
    keys = {**CONSTANT_RATE, "checkpoint_interval": 2, **keys}
    run_train(*small_run(corpus, run, **keys, max_steps=4))
    shutil.rmtree(checkpoint.find(run))
    run_train(*small_run(corpus, run, **keys, max_steps=6))
    records = metrics.read(run / "metrics.jsonl")
    return {record["step"]: record["loss"] for record in records if "loss" in record}


def test_a_resumed_run_is_one_run_of_wandb(monkeypatch, corpus, tmp_path):
    """Without a login, wandb logs to the run folder."""
    wandb = pytest.importorskip("wandb")
    wandb.teardown()  # it reads its environment variables once in a process
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_CONSOLE", "off")
    keys = {**CONSTANT_RATE, "tracker": "wandb", "wandb_run_name": "named"}
    run_train(*small_run(corpus, tmp_path, **keys, max_steps=2))
    [logged] = tmp_path.glob("wandb/offline-run-*/*.wandb")
    # wandb's own process may write the file a moment after the run has finished
    wait_for(lambda: all(key in logged.read_bytes() for key in (b"grad_norm", b"val_loss")))
    run_train(*small_run(corpus, tmp_path, **keys, max_steps=3))
    [first_id, resumed_id] = read_wandb_ids(tmp_path)
    assert first_id == resumed_id


def test_a_resumed_run_is_one_run_of_trackio(corpus, tmp_path, trackio):
    keys = {"tracker": "trackio", "wandb_project": "small"}
    losses = train_interrupted(corpus, tmp_path / "first", **keys)
    [first_id] = set(read_wandb_ids(tmp_path / "first"))
    storage = trackio.sqlite_storage.SQLiteStorage
    assert set(storage.get_runs("small")) == {first_id}
    logged = storage.get_logs("small", first_id)
    # steps 3 and 4 are repeated, and have the same losses
    assert [log["step"] for log in logged if "loss" in log] == [1, 2, 3, 4, 3, 4, 5, 6]
    assert {log["step"]: log["loss"] for log in logged if "loss" in log} == losses
    assert any("val_loss" in log for log in logged)


def read_tensorboard(run: Path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    return events


def test_a_resumed_run_has_each_step_once_in_tensorboard(corpus, tmp_path):
    pytest.importorskip("tensorboard")
    losses = train_interrupted(corpus, tmp_path, tracker="tensorboard", statistics_interval=2)
    events = read_tensorboard(tmp_path)
    logged = {event.step: event.value for event in events.Scalars("loss")}
    assert logged == pytest.approx(losses, rel=1e-6)  # its numbers are float32
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3, 4, 5, 6]
    assert "residual/attn.state_rms/00" in events.Tags()["scalars"]
