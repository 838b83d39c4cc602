"""Test runs that are killed, stopped, starved or moved: they end where an undisturbed run ends."""

import collections
import contextlib
import functools
import itertools
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from helpers import ROOT, SMALL, one_line_error, small_run, wait_for
from in_process import call, train_in_processes
from interruptions_helpers import (
    CONSTANT_RATE,
    completed_steps,
    current_phase,
    read_final_tensors,
    read_records,
    start_training,
    worker_pids,
)

import train
from model import build
from training import checkpoint, distributed, metrics, stopping
from training.checkpoint import TrainState, load_tensors
from training.distributed import World


def start_in_fork(arguments: list[str], log=os.devnull) -> multiprocessing.Process:
    """Start train.py in a fork of this process, which has Python and torch loaded already."""
    process = multiprocessing.get_context("fork").Process(
        target=train_with_log, args=(log, arguments)
    )
    process.start()
    return process


def train_with_log(log, arguments: list[str]) -> None:
    """Run train.py with its output in a file."""
    sys.argv = ["train.py", *arguments]
    with open(log, "w") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        train.main()


def train_to_the_end(arguments: list[str]) -> str:
    """Run train.py in this process, expect success and return what it prints."""
    result = call("train.py", *arguments)
    assert result.returncode == 0, result.stderr.decode()
    return result.stdout.decode()


def start_thread_that_waits(condition, action) -> None:
    """Call action once the condition holds, while a run trains in this process."""

    def wait_and_act():
        wait_for(condition)
        action()

    threading.Thread(target=wait_and_act, daemon=True).start()


def train_until_signal(arguments: list[str], condition, number=signal.SIGTERM) -> str:
    """Run train.py in this process, signal it once the condition holds; return what it prints."""
    start_thread_that_waits(condition, lambda: os.kill(os.getpid(), number))
    result = call("train.py", *arguments)
    assert result.returncode == stopping.EXIT_CODE == 75, result.stderr.decode()
    return result.stdout.decode()


LONG = {
    "hidden_size": 96,
    "eval_interval": 4,
    "eval_batches": 30,
    "checkpoint_interval": 3,
    "max_steps": 40,
}


@pytest.mark.parametrize(
    ("dtype", "times", "background"),
    [
        ("float32", 2, False),
        pytest.param("float32", 2, True, marks=pytest.mark.slow),
        pytest.param("bfloat16", 8, False, marks=pytest.mark.slow),
    ],
)
def test_killed_runs_end_bit_for_bit_as_the_undisturbed_one(
    corpus, tmp_path, dtype, times, background
):
    settings = {**LONG, "dtype": dtype, "resume": "auto", "save_in_background": background}
    expected = tmp_path / "expected"
    train_to_the_end(small_run(corpus, expected, **settings))
    run = tmp_path / "run"
    arguments = small_run(corpus, run, **settings)
    generator = random.Random(0)
    kills = collections.Counter()
    phases = ["training", "evaluation", "saving"] * times
    generator.shuffle(phases)
    for phase in phases:
        if kill_in_phase(arguments, run, phase, generator):
            kills[phase] += 1
    assert all(kills[phase] >= times / 2 for phase in phases), kills
    train_to_the_end(arguments)
    assert read_final_tensors(run) == read_final_tensors(expected)
    assert read_records(run) == read_records(expected)


def kill_in_phase(arguments: list[str], run: Path, phase: str, generator: random.Random) -> bool:
    """Start a run and kill it at a random moment of new work in a phase; return whether it was."""
    process = start_in_fork(arguments)
    initial_size = metrics_size(run)
    killed = False
    while process.is_alive():
        if metrics_size(run) != initial_size and current_phase(run) == phase:
            time.sleep(generator.random() * 0.01)
            # stop it first, to see whether it is still in that phase
            os.kill(process.pid, signal.SIGSTOP)
            if current_phase(run) == phase:
                killed = True
                process.kill()
                break
            os.kill(process.pid, signal.SIGCONT)
        time.sleep(0.0005)
    process.join()
    return killed


def metrics_size(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.stat().st_size if path.exists() else 0


class ComparedRuns(NamedTuple):
    run: Path
    expected: Path


@pytest.fixture(scope="module")
def run_of_several_engines(corpus, tmp_path_factory) -> ComparedRuns:
    """Train five steps with two ddp processes, five with fsdp and five alone; and all alone."""
    folder = tmp_path_factory.mktemp("engines")
    make_arguments = functools.partial(
        small_run,
        corpus,
        **{
            **CONSTANT_RATE,
            "checkpoint_interval": 100,
            "statistics_interval": 5,
            "eval_interval": 5,
        },
    )
    train_to_the_end(make_arguments(folder / "expected", max_steps=15))
    ddp = make_arguments(folder / "run", micro_batch_size=1, max_steps=5)
    assert "arning" not in train_in_processes(2, ddp, folder / "log")
    fsdp = make_arguments(
        folder / "run",
        micro_batch_size=1,
        max_steps=10,
        engine="fsdp",
        activation_checkpointing=True,
    )
    assert "arning" not in train_in_processes(2, fsdp, folder / "log")
    train_to_the_end(make_arguments(folder / "run", max_steps=15))
    return ComparedRuns(folder / "run", folder / "expected")


def test_a_run_of_several_engines_has_every_step(run_of_several_engines):
    assert completed_steps(run_of_several_engines.run) == list(range(1, 16))


@pytest.mark.parametrize(
    ("key", "tolerance"), [("loss", 1e-4), ("grad_norm", 1e-3), ("val_loss", 1e-4)]
)
def test_a_run_of_several_engines_has_the_metrics_of_one(run_of_several_engines, key, tolerance):
    values = [record.get(key) for record in read_records(run_of_several_engines.run)]
    expected = [record.get(key) for record in read_records(run_of_several_engines.expected)]
    assert len(values) == len(expected)
    for value, expected_value in zip(values, expected):
        assert value == pytest.approx(expected_value, abs=tolerance)


def test_a_run_of_several_engines_has_the_statistics_of_one(run_of_several_engines):
    run_records = read_records(run_of_several_engines.run)
    expected_records = read_records(run_of_several_engines.expected)
    assert any("residual" in record for record in run_records)
    for record, expected in zip(run_records, expected_records, strict=True):
        for name, values in record.get("residual", {}).items():
            assert values == pytest.approx(expected["residual"][name], abs=1e-3)


def test_a_run_of_several_engines_has_the_weights_of_one(run_of_several_engines):
    weights, expected = (
        load_tensors(checkpoint.find(run) / "model.safetensors") for run in run_of_several_engines
    )
    assert weights.keys() == expected.keys()
    for name, weight in weights.items():
        assert torch.allclose(weight, expected[name], atol=1e-4), name


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_saves_and_ends_with_a_code_of_its_own(corpus, tmp_path, number):
    if number == signal.SIGHUP:
        signal.signal(number, signal.SIG_DFL)  # the tests may have been started with nohup
    arguments = small_run(
        corpus, tmp_path, **CONSTANT_RATE, checkpoint_interval=10_000, max_steps=10_000
    )
    printed = train_until_signal(arguments, lambda: len(completed_steps(tmp_path)) > 3, number)
    assert f"({number.name}); resume with --resume=auto" in printed
    steps = completed_steps(tmp_path)
    assert steps == list(range(1, len(steps) + 1))
    assert checkpoint.read_state(checkpoint.find(tmp_path))["step"] == steps[-1]
    assert json.loads((tmp_path / "status.json").read_text()) == {
        "step": steps[-1],
        "of": 10_000,
        "ended": "stopped",
        "reason": number.name,
    }

    train_to_the_end([*arguments, f"--max_steps={steps[-1] + 2}"])
    assert completed_steps(tmp_path) == list(range(1, steps[-1] + 3))
    assert stopping.read_status(tmp_path).ended == "finished"


def test_nohup_keeps_a_run_from_stopping_when_the_terminal_closes():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    stop = stopping.Stop(None)
    os.kill(os.getpid(), signal.SIGHUP)
    assert stop.reason() is None


WAIT_FOR_SIGNALS = """
import time
from training.stopping import Stop

stop = Stop(None)
print(stop.reason(), flush=True)
time.sleep(60)
"""


def test_the_second_signal_ends_the_process_at_once():
    process = subprocess.Popen(
        [sys.executable, "-c", WAIT_FOR_SIGNALS],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout.readline() == b"None\n"
    # the launcher's copy of the same signal does not count as the second
    for _ in range(2):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
    time.sleep(stopping.DUPLICATE_SIGNAL_SECONDS)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=10) == 128 + signal.SIGTERM
    assert process.stderr.read() == (
        b"SIGTERM: the run stops after this step and saves a checkpoint; "
        b"a second signal ends it at once without saving\n"
    )


def test_an_evaluation_that_a_stop_interrupts_is_repeated(corpus, tmp_path):
    make_arguments = functools.partial(
        small_run,
        corpus,
        **CONSTANT_RATE,
        eval_interval=3,
        eval_batches=100,
        max_steps=6,
        checkpoint_interval=100,
    )
    train_to_the_end(make_arguments(tmp_path / "expected"))
    run = tmp_path / "run"
    train_until_signal(make_arguments(run), lambda: completed_steps(run)[-1:] == [3])
    assert not checkpoint.read_state(checkpoint.find(run))["evaluated"]
    assert all("val_loss" not in record for record in read_records(run))
    train_to_the_end(make_arguments(run))
    assert read_records(run) == read_records(tmp_path / "expected")
    assert read_final_tensors(run) == read_final_tensors(tmp_path / "expected")


def test_an_evaluation_that_fails_loses_no_step_and_is_made_up_for(corpus, tmp_path, monkeypatch):
    make_arguments = functools.partial(small_run, corpus, **CONSTANT_RATE, max_steps=6)
    train_to_the_end(make_arguments(tmp_path / "expected"))
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(train, "evaluate", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            call("train.py", *make_arguments(run))
    state = checkpoint.read_state(checkpoint.find(run))
    assert state["step"] == 3
    assert not state["evaluated"]
    train_to_the_end(make_arguments(run))
    assert read_records(run) == read_records(tmp_path / "expected")
    assert read_final_tensors(run) == read_final_tensors(tmp_path / "expected")


def test_an_evaluation_that_was_recorded_is_not_repeated(corpus, tmp_path, monkeypatch):
    make_arguments = functools.partial(small_run, corpus, tmp_path, **CONSTANT_RATE)
    train_to_the_end(make_arguments(max_steps=3))
    best_loss = metrics.read(tmp_path / "metrics.jsonl")[-1]["best_val_loss"]
    evaluations = []
    evaluate = train.evaluate

    def record(*args, **keys):
        evaluations.append(args)
        return evaluate(*args, **keys)

    monkeypatch.setattr(train, "evaluate", record)
    train_to_the_end(make_arguments(max_steps=4, eval_interval=100))
    assert len(evaluations) == 1  # after the last step
    assert metrics.read(tmp_path / "metrics.jsonl")[-1]["best_val_loss"] <= best_loss


def test_max_seconds_stops_a_run(corpus, tmp_path):
    arguments = small_run(
        corpus,
        tmp_path,
        **CONSTANT_RATE,
        max_steps=100_000,
        max_seconds=1.0,
        checkpoint_interval=100_000,
    )
    result = call("train.py", *arguments)
    assert result.returncode == stopping.EXIT_CODE
    assert b"(max_seconds=1); resume with --resume=auto" in result.stdout
    assert checkpoint.read_state(checkpoint.find(tmp_path))["step"] == completed_steps(tmp_path)[-1]


def test_max_seconds_leaves_time_for_a_step_and_a_save(monkeypatch):
    clock = SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(stopping.time, "monotonic", lambda: clock.seconds)
    stop = stopping.Stop(10.0)
    stop.record_step_seconds(60.0)  # the first step compiles, and does not count
    assert stop.reason() is None
    stop.record_step_seconds(2.0)
    stop.save_seconds = 3.0
    clock.seconds = 104.9
    assert stop.reason() is None
    clock.seconds = 105.0
    assert stop.reason() == "max_seconds=10"


def test_max_seconds_count_from_the_given_time(monkeypatch):
    monkeypatch.setattr(stopping.time, "monotonic", lambda: 105.0)
    assert stopping.Stop(10.0, start_time=96.0).reason() is None
    assert stopping.Stop(10.0, start_time=95.0).reason() == "max_seconds=10"


@pytest.mark.parametrize(("local_rank", "num_lines"), [("0", 1), ("3", 0)])
def test_one_process_of_a_machine_says_that_a_signal_stops_the_run(
    local_rank, num_lines, monkeypatch, capfd
):
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    stop = stopping.Stop(None)
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop.reason() == "SIGTERM"
    assert capfd.readouterr().err.count("the run stops after this step") == num_lines


def test_a_run_without_max_seconds_has_no_reason_to_stop():
    assert stopping.Stop(None).reason() is None


@pytest.fixture
def endless_run(corpus, tmp_path) -> Iterator[multiprocessing.Process]:
    """Start a run in a fork and wait until it trains; its folder is tmp_path / "run"."""
    run = tmp_path / "run"
    process = start_in_fork(small_run(corpus, run, **CONSTANT_RATE, max_steps=100_000))
    wait_for(lambda: len(completed_steps(run)) > 3)
    yield process
    process.kill()
    process.join()


def test_a_second_process_in_a_run_folder_is_refused(endless_run, corpus, tmp_path):
    arguments = small_run(corpus, tmp_path / "run", **CONSTANT_RATE, max_steps=100_000)
    line = one_line_error(call("train.py", *arguments))
    assert "another process is training in this folder" in line


def test_a_killed_run_has_no_status_of_its_end(endless_run, tmp_path):
    endless_run.kill()
    endless_run.join()
    assert stopping.read_status(tmp_path / "run").ended is None


def start_with_torchrun(corpus: Path, run: Path, max_restarts: int) -> subprocess.Popen:
    """Start a run of two processes, and return torchrun's once it has trained some steps."""
    arguments = small_run(corpus, run, **CONSTANT_RATE, checkpoint_interval=5, max_steps=10_000)
    launcher = start_training(arguments, processes=2, launcher=[f"--max-restarts={max_restarts}"])
    wait_for(lambda: len(completed_steps(run)) > 12)
    return launcher


@pytest.mark.slow
def test_a_killed_process_ends_a_job_without_restarts(corpus, tmp_path):
    launcher = start_with_torchrun(corpus, tmp_path / "run", max_restarts=0)
    processes = worker_pids(launcher)
    assert len(processes) == 2
    os.kill(processes[0], signal.SIGKILL)
    assert launcher.wait(timeout=60) == 1
    assert checkpoint.find(tmp_path / "run")


def test_torchrun_restarts_a_job_and_stops_the_restarted_one(corpus, tmp_path):
    run = tmp_path / "run"
    launcher = start_with_torchrun(corpus, run, max_restarts=1)
    processes = worker_pids(launcher)
    assert len(processes) == 2
    os.kill(processes[1], signal.SIGKILL)
    wait_for(lambda: not any(Path(f"/proc/{process}").exists() for process in processes))
    num_steps = len(completed_steps(run))
    wait_for(lambda: len(completed_steps(run)) > num_steps)
    launcher.send_signal(signal.SIGTERM)
    launcher.wait(timeout=20)
    assert stopping.read_status(run).ended == "stopped"
    steps = completed_steps(run)
    assert steps == list(range(1, len(steps) + 1))
    assert checkpoint.read_state(checkpoint.find(run))["step"] == steps[-1]


def test_a_full_disk_keeps_the_run_training_and_the_last_checkpoint(corpus, tmp_path):
    run = tmp_path / "run"
    log = tmp_path / "log"
    arguments = small_run(
        corpus,
        run,
        **CONSTANT_RATE,
        checkpoint_interval=20,
        keep_last=1,
        max_steps=100_000,
        hidden_size=64,
    )
    process = start_in_fork(arguments, log=log)
    wait_for(lambda: checkpoint.list_checkpoints(run))
    # the kernel refuses to let a file of this process grow beyond 100 kB, as on a full disk
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (100_000, 100_000))
    wait_for(lambda: log.read_text().count("could not save the checkpoint") >= 2)
    last_checkpoint = checkpoint.find(run)
    os.kill(process.pid, signal.SIGTERM)
    process.join(timeout=20)
    assert process.exitcode == 1
    assert "was not saved; free disk space" in log.read_text()
    assert stopping.read_status(run).ended == "failed"
    assert checkpoint.list_checkpoints(run) == [last_checkpoint]
    assert not list(run.glob("checkpoints/*.tmp"))

    step = checkpoint.read_state(last_checkpoint)["step"]
    train_to_the_end([*arguments, f"--max_steps={step + 5}"])
    assert completed_steps(run) == list(range(1, step + 6))


def test_a_run_folder_that_is_removed_is_created_again(corpus, tmp_path):
    run = tmp_path / "run"

    def remove_and_stop():
        run.rename(tmp_path / "removed")  # atomic: a deletion can fail while the run writes
        wait_for(lambda: len(completed_steps(run)) > 3)
        os.kill(os.getpid(), signal.SIGTERM)

    start_thread_that_waits(lambda: len(completed_steps(run)) > 3, remove_and_stop)
    arguments = small_run(
        corpus, run, **CONSTANT_RATE, checkpoint_interval=100_000, max_steps=100_000
    )
    assert call("train.py", *arguments).returncode == 75
    assert checkpoint.read_state(checkpoint.find(run))["step"] == completed_steps(run)[-1]


@pytest.fixture
def run_log(tmp_path) -> metrics.RunLog:
    return metrics.RunLog(
        tmp_path / "run",
        SimpleNamespace(global_batch_size=1, wandb_log=False),
        {},
        TrainState(),
        build("gpt-mha-rope", **SMALL),
        World(0, 1, torch.device("cpu")),
    )


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


def test_metrics_that_do_not_fit_on_the_disk_are_written_later(run_log, capsys):
    write_record(run_log, 1)
    size = run_log.path.stat().st_size
    with file_size_limit(size + 5):
        write_record(run_log, 2)
        write_record(run_log, 3)
    assert run_log.path.stat().st_size == size + 5  # a part of the second line
    write_record(run_log, 4)
    assert [record["step"] for record in metrics.read(run_log.path)] == [1, 2, 3, 4]
    warning = (
        "warning: metrics.jsonl cannot be written (File too large); its new lines are kept in memory "
        "until it can"
    )
    assert capsys.readouterr().err.count(warning) == 1  # for both lines


def test_metrics_without_a_run_folder_are_written_later(run_log):
    write_record(run_log, 4)
    folder = run_log.path.parent
    shutil.rmtree(folder)
    folder.touch()
    write_record(run_log, 5)
    folder.unlink()
    run_log.flush()
    assert [record["step"] for record in metrics.read(run_log.path)] == [5]


def disagree(rank: int, folder: Path) -> None:
    """Run one of two ranks with different seeds, and note that it is refused."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    world = World(rank, 2, torch.device("cpu"))
    distributed.check_agreement(world, {"the data": [1], "the configuration": {"seed": 0}})
    with pytest.raises(ValueError, match="rank 1 and rank 0 differ in the configuration"):
        distributed.check_agreement(world, {"the data": [1], "the configuration": {"seed": rank}})
    (folder / f"refused_{rank}").touch()


def test_ranks_that_differ_are_refused(tmp_path):
    torch.multiprocessing.start_processes(disagree, (tmp_path,), nprocs=2, start_method="fork")
    assert len(list(tmp_path.glob("refused_*"))) == 2


def test_output_that_cannot_be_written_does_not_end_a_run(corpus, tmp_path):
    with open("/dev/full", "w") as full_disk:
        process = start_training(
            small_run(corpus, tmp_path / "run", **CONSTANT_RATE), log=full_disk
        )
        assert process.wait(timeout=60) == 0
    assert checkpoint.read_state(checkpoint.find(tmp_path / "run"))["step"] == 6


@pytest.mark.slow
def test_restarts_do_not_extend_max_seconds(corpus, tmp_path):
    log = tmp_path / "log"
    arguments = small_run(
        corpus,
        tmp_path / "run",
        **CONSTANT_RATE,
        max_seconds=3.0,
        checkpoint_interval=10_000,
        max_steps=100_000,
    )
    with open(log, "w") as file:
        launcher = start_training(arguments, processes=2, launcher=["--max-restarts=2"], log=file)
        assert launcher.wait(timeout=90) == 0
    assert log.read_text().count("(max_seconds=3); resume with --resume=auto") == 1
    assert log.read_text().count("run folder") == 1


def test_a_run_resumes_with_its_corpus_in_another_folder(corpus, tmp_path):
    run = tmp_path / "run"
    train_to_the_end(small_run(corpus, run, **CONSTANT_RATE, max_steps=2))
    shutil.copytree(corpus, tmp_path / "elsewhere")
    train_to_the_end(small_run(tmp_path / "elsewhere", run, **CONSTANT_RATE, max_steps=4))
    assert completed_steps(run) == list(range(1, 5))


def test_metrics_are_read_up_to_a_line_that_is_not_text(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n\xff\xfe\n{"step": 3}\n')
    assert [r["step"] for r in metrics.read(path)] == [1, 2]


@pytest.fixture
def wandb_run(corpus, tmp_path, monkeypatch) -> Path:
    """Train a run of two steps that logs to an offline run of Weights & Biases."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_CONSOLE", "off")
    run = tmp_path / "first"
    train_to_the_end(small_run(corpus, run, **WANDB, max_steps=2))
    return run


WANDB = {**CONSTANT_RATE, "wandb_log": True, "wandb_run_name": "named"}


def read_wandb_ids(run: Path) -> list[str]:
    return [checkpoint.read_state(path)["wandb_id"] for path in checkpoint.list_checkpoints(run)]


def test_metrics_are_logged_to_wandb(wandb_run):
    [logged] = wandb_run.glob("wandb/offline-run-*/*.wandb")
    # wandb's own process may write the file a moment after the run has finished
    wait_for(lambda: all(key in logged.read_bytes() for key in (b"grad_norm", b"val_loss")))


def test_a_resumed_run_is_the_same_for_wandb_and_a_branch_is_another(wandb_run, corpus, tmp_path):
    branch = tmp_path / "branch"
    train_to_the_end(small_run(corpus, wandb_run, **WANDB, max_steps=3))
    train_to_the_end(small_run(corpus, branch, **{**WANDB, "resume": wandb_run}, max_steps=4))
    [first_id, resumed_id] = read_wandb_ids(wandb_run)
    [branch_id] = read_wandb_ids(branch)
    assert first_id == resumed_id
    assert branch_id != first_id


def test_random_numbers_are_a_function_of_seed_step_and_rank():
    def draw(seed, step, rank):
        distributed.seed_step(seed, step, World(rank, 4, torch.device("cpu")))
        return tuple(torch.rand(8).tolist())

    cases = list(itertools.product((0, 1), (1, 2, 3), (0, 1)))
    numbers = {case: draw(*case) for case in cases}
    assert len(set(numbers.values())) == len(cases)
    assert {case: draw(*case) for case in reversed(cases)} == numbers


METRICS = [
    {"step": 2, "val_loss": 1},
    {"step": 3, "loss": 2},
    {"step": 3, "val_loss": 3},
    {"step": 4, "loss": 5},
]


@pytest.mark.parametrize(("evaluated", "num_records"), [(True, 3), (False, 2)])
def test_metrics_are_truncated_after_a_step_and_its_evaluation(tmp_path, evaluated, num_records):
    """Drop the evaluation if it will be repeated."""
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in METRICS))
    metrics.truncate_after(path, 3, evaluated)
    assert metrics.read(path) == METRICS[:num_records]
