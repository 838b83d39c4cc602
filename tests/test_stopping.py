"""Runs that are stopped or starved: how they end, and what they leave behind."""

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from helpers import ROOT, small_run, wait_for
from in_process import start_in_fork, torchrun
from training_runs import CONSTANT_RATE, completed_steps, read_state, run_train, training_error

import train
from training import checkpoint, distributed, stopping
from utils.machine import can_compile
from utils.processes import World

# neither a checkpoint nor an evaluation, in which a run stops as well, is due for long
RARELY_SAVED = {"checkpoint_interval": 10_000, "eval_interval": 10_000}


def act_in_step_4(monkeypatch: pytest.MonkeyPatch, action: Callable) -> None:
    """Let runs of this process call an action at the beginning of their step 4."""
    seed_step = distributed.seed_step

    def act_and_seed(seed: int, step: int, world: World) -> None:
        if step == 4:
            action()
        seed_step(seed, step, world)

    monkeypatch.setattr(distributed, "seed_step", act_and_seed)


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2], ids=lambda n: n.name
)
def test_a_signal_saves_and_ends_with_a_code_of_its_own(corpus, tmp_path, monkeypatch, number):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may have been started with nohup
    act_in_step_4(monkeypatch, lambda: os.kill(os.getpid(), number))
    arguments = small_run(corpus, tmp_path, **CONSTANT_RATE, **RARELY_SAVED)
    printed = run_train(*arguments, exit_code=75)
    assert f"stopped after step 4 ({number.name}); resume with --resume=auto" in printed
    assert completed_steps(tmp_path) == [1, 2, 3, 4]
    assert read_state(tmp_path)["step"] == 4
    run_train(*arguments)
    assert completed_steps(tmp_path) == [1, 2, 3, 4, 5, 6]


def test_a_run_puts_back_what_it_changes_in_its_process(corpus, tmp_path, monkeypatch):
    def describe_process() -> list:
        numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
        return [
            *map(signal.getsignal, numbers),
            os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
            torch.are_deterministic_algorithms_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,
        ]

    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may have been started with nohup
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(False)
    before = describe_process()
    during = []
    save = checkpoint.save

    def save_and_look(*arguments):
        during.extend(describe_process())
        return save(*arguments)

    monkeypatch.setattr(checkpoint, "save", save_and_look)
    monkeypatch.setattr(sys, "argv", ["train.py", *small_run(corpus, tmp_path / "run")])
    train.main()
    after = describe_process()
    assert all(value != changed for value, changed in zip(before, during))
    assert after == before


COMPILER = """#!/bin/sh
# The first kernel is compiled when Ctrl+C is pressed in the run's terminal, which reaches all its processes.
for argument; do
    case $argument in *.cpp)
        if grep -q "void  *kernel(" "$argument" && mkdir {marker}; then
            kill -INT 0
            sleep 60
        fi
    esac
done
exec g++ "$@"
"""


@pytest.mark.skipif(not can_compile(), reason="no C++ compiler")
def test_a_signal_that_also_ends_the_compiler_loses_no_step(corpus, tmp_path):
    run = tmp_path / "run"
    arguments = small_run(corpus, run, **CONSTANT_RATE, **RARELY_SAVED)
    run_train(*arguments, "--max_steps=2")
    compiler = tmp_path / "compiler"
    compiler.write_text(COMPILER.format(marker=tmp_path / "marker"))
    compiler.chmod(0o755)
    environment = {"CXX": str(compiler), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    stopped = subprocess.run(
        [sys.executable, "train.py", *arguments, "--compile=blocks"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
        start_new_session=True,
    )
    assert stopped.returncode == stopping.EXIT_CODE, stopped.stderr
    assert "stopped after step 2 (SIGINT); resume with --resume=auto" in stopped.stdout
    assert (tmp_path / "marker").exists()
    assert read_state(run)["step"] == 2
    run_train(*arguments)
    assert completed_steps(run) == [1, 2, 3, 4, 5, 6]


def test_an_error_of_the_compiler_without_a_signal_is_no_stop(corpus, tmp_path, monkeypatch):
    def fail(run, batches):
        raise torch._dynamo.exc.Unsupported("it cannot be compiled")

    monkeypatch.setattr(train, "compute_gradients", fail)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        run_train(*small_run(corpus, tmp_path / "run"))


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


def test_max_seconds_leaves_time_for_two_steps_and_a_save(monkeypatch):
    clock = SimpleNamespace(seconds=101.0)
    monkeypatch.setattr(stopping.time, "monotonic", lambda: clock.seconds)
    stop = stopping.Stop(10.0, start_time=100.0)
    stop.record_step_seconds(60.0)  # the first step compiles, and does not count
    assert stop.reason() is None
    stop.record_step_seconds(2.0)
    stop.save_seconds = 3.0
    clock.seconds = 102.9
    assert stop.reason() is None
    clock.seconds = 103.0
    assert stop.reason() == "max_seconds=10"
    stop.save_seconds = 1.0  # the last checkpoint took less time
    assert stop.reason() == "max_seconds=10"


def test_a_second_process_is_refused_while_a_run_trains(corpus, tmp_path):
    arguments = small_run(corpus, tmp_path, **CONSTANT_RATE, max_steps=100_000)
    process = start_in_fork(arguments)
    try:
        wait_for(lambda: len(completed_steps(tmp_path)) > 3)
        # of one step, so that it would end at once
        line = training_error(*arguments, "--max_steps=1")
        assert "another process is training in this folder" in line
    finally:
        process.kill()
        process.join()


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
    assert checkpoint.list_checkpoints(run) == [last_checkpoint]
    assert not list(run.glob("checkpoints/*.tmp"))

    step = checkpoint.read_state(last_checkpoint)["step"]
    run_train(*arguments, f"--max_steps={step + 5}")
    assert completed_steps(run) == list(range(1, step + 6))


def test_a_run_folder_that_is_removed_is_created_again(corpus, tmp_path, monkeypatch):
    run = tmp_path / "run"
    act_in_step_4(monkeypatch, lambda: run.rename(tmp_path / "removed"))
    run_train(*small_run(corpus, run, **CONSTANT_RATE))
    assert completed_steps(run) == [4, 5, 6]
    assert read_state(run)["step"] == 6


def test_output_that_cannot_be_written_does_not_end_a_run(corpus, tmp_path):
    arguments = small_run(corpus, tmp_path / "run", **CONSTANT_RATE)
    process = start_in_fork(arguments, log="/dev/full")  # a full disk
    process.join(timeout=60)
    assert process.exitcode == 0
    assert read_state(tmp_path / "run")["step"] == 6


@pytest.mark.slow
def test_restarts_do_not_extend_max_seconds(corpus, tmp_path):
    keys = {**CONSTANT_RATE, **RARELY_SAVED, "max_steps": 100_000}
    arguments = small_run(corpus, tmp_path / "run", **keys, max_seconds=3.0)
    result = subprocess.run(
        [*torchrun(2, "--max-restarts=2"), "train.py", *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert result.returncode == 0
    assert result.stdout.count("(max_seconds=3); resume with --resume=auto") == 1
    assert result.stdout.count("run folder") == 1


def test_ctrl_c_ends_sampling_in_one_line(corpus, tmp_path):
    run_train(*small_run(corpus, tmp_path, max_steps=1))
    process = subprocess.Popen(
        [sys.executable, "sample.py", str(tmp_path), "--max_new_tokens=1000000", "--prompt=a"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout.read(30)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert error == b"sample.py: interrupted\n"
