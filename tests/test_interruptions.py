"""Runs that are killed, stopped, starved or spread over other processes end where an undisturbed
run ends.
"""

import collections
import contextlib
import json
import math
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
from pathlib import Path
from types import SimpleNamespace

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
from training.checkpoint import load_tensors
from training.distributed import World
from training.state import TrainState


def forked(*arguments, log=os.devnull) -> multiprocessing.Process:
    """train.py in a child of this process, which may be killed; Python and torch are there
    already.
    """
    process = multiprocessing.get_context("fork").Process(target=train_into, args=(log, arguments))
    process.start()
    return process


def train_into(log, arguments) -> None:
    """train.py with its output in a file."""
    sys.argv = ["train.py", *map(str, arguments)]
    with open(log, "w") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        train.main()


def finish(*arguments) -> str:
    """What train.py prints, in this process, to its end."""
    result = call("train.py", *arguments)
    assert result.returncode == 0, result.stderr.decode()
    return result.stdout.decode()


def meanwhile(condition, action) -> threading.Thread:
    """Does something once it is time, while a run goes on in this process."""

    def wait():
        wait_for(condition)
        action()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def stopped(arguments, condition, number=signal.SIGTERM) -> str:
    """What train.py prints, in this process, when it gets a signal once it is time."""
    meanwhile(condition, lambda: os.kill(os.getpid(), number))
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
def test_killed_runs_end_bit_for_bit_as_the_whole_one(corpus, tmp_path, dtype, times, background):
    keys = {**LONG, "dtype": dtype, "resume": "auto", "save_in_background": background}
    finish(*small_run(corpus, tmp_path / "whole", **keys))
    run, draw, killed = tmp_path / "run", random.Random(0), collections.Counter()
    wanted = ["training", "evaluation", "saving"] * times
    draw.shuffle(wanted)
    for phase in wanted:
        process = forked(*small_run(corpus, run, **keys))
        seen = metrics_size(run)
        while process.is_alive():
            # Kill within the wanted phase of work that is new, at a random moment of it; stopped,
            # to see what it is.
            if metrics_size(run) != seen and current_phase(run) == phase:
                time.sleep(draw.random() * 0.01)
                os.kill(process.pid, signal.SIGSTOP)
                if current_phase(run) == phase:
                    killed[phase] += 1
                    process.kill()
                    break
                os.kill(process.pid, signal.SIGCONT)
            time.sleep(0.0005)
        process.join()
    assert all(killed[phase] >= times / 2 for phase in wanted), killed
    finish(*small_run(corpus, run, **keys))
    assert read_final_tensors(run) == read_final_tensors(tmp_path / "whole")
    assert read_records(run) == read_records(tmp_path / "whole")


def metrics_size(run):
    path = run / "metrics.jsonl"
    return path.stat().st_size if path.exists() else 0


def test_processes_and_engines_change_within_a_run(corpus, tmp_path):
    keys = {
        **CONSTANT_RATE,
        "checkpoint_interval": 100,
        "statistics_interval": 5,
        "eval_interval": 5,
    }
    finish(*small_run(corpus, tmp_path / "one", **keys, max_steps=15))
    run = tmp_path / "run"
    for steps, changes in ((5, {}), (10, {"engine": "fsdp", "activation_checkpointing": True})):
        arguments = small_run(
            corpus, run, **{**keys, "micro_batch_size": 1}, max_steps=steps, **changes
        )
        assert "arning" not in train_in_processes(2, arguments, tmp_path / "log")
    finish(*small_run(corpus, run, **keys, max_steps=15))
    ours, theirs = (read_records(path) for path in (run, tmp_path / "one"))
    assert [r["step"] for r in ours if "loss" in r] == list(range(1, 16))
    for mine, other in zip(ours, theirs, strict=True):
        for key, bound in (("loss", 1e-4), ("grad_norm", 1e-3), ("val_loss", 1e-4)):
            assert mine.get(key) == pytest.approx(other.get(key), abs=bound)
        for name, values in mine.get("residual", {}).items():
            assert values == pytest.approx(other["residual"][name], abs=1e-3)
    weights = [
        load_tensors(checkpoint.find(path) / "model.safetensors")
        for path in (run, tmp_path / "one")
    ]
    assert weights[0].keys() == weights[1].keys()
    assert all(
        torch.allclose(value, weights[1][name], atol=1e-4) for name, value in weights[0].items()
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_leaves_with_a_code_of_its_own(corpus, tmp_path, number):
    run = tmp_path / "run"
    keys = {**CONSTANT_RATE, "checkpoint_interval": 10_000, "max_steps": 10_000}
    printed = stopped(small_run(corpus, run, **keys), lambda: len(completed_steps(run)) > 3, number)
    assert f"({number.name}); resume with --resume=auto" in printed
    done = completed_steps(run)
    assert done == list(range(1, len(done) + 1))
    assert checkpoint.read_state(checkpoint.find(run))["step"] == done[-1]
    status = {"step": done[-1], "of": 10_000, "ended": "stopped", "reason": number.name}
    assert json.loads((run / "status.json").read_text()) == status
    finish(*small_run(corpus, run, **{**keys, "max_steps": done[-1] + 2}))
    assert completed_steps(run) == list(range(1, done[-1] + 3))
    assert stopping.read_status(run).ended == "finished"


def test_the_second_signal_ends_the_process_at_once():
    code = "import time; from training.stopping import Stop; "
    code += "s = Stop(None); print(s.reason(), flush=True); time.sleep(60)"
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout.readline() == b"None\n"
    for _ in range(2):  # the launcher's copy of the same signal
        process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
    time.sleep(stopping.DUPLICATE_SIGNAL_SECONDS)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=10) == 128 + signal.SIGTERM
    assert (
        process.stderr.read() == b"SIGTERM: the run stops after this step and saves a checkpoint; "
        b"a second signal ends it at once without saving\n"
    )


def test_a_stop_within_an_evaluation_does_it_again(corpus, tmp_path):
    keys = {
        **CONSTANT_RATE,
        "eval_interval": 3,
        "eval_batches": 100,
        "max_steps": 6,
        "checkpoint_interval": 100,
    }
    finish(*small_run(corpus, tmp_path / "whole", **keys))
    run = tmp_path / "run"
    stopped(small_run(corpus, run, **keys), lambda: completed_steps(run)[-1:] == [3])
    assert not checkpoint.read_state(checkpoint.find(run))["evaluated"]
    assert all("val_loss" not in record for record in read_records(run))
    finish(*small_run(corpus, run, **keys))
    assert read_records(run) == read_records(tmp_path / "whole")
    assert read_final_tensors(run) == read_final_tensors(tmp_path / "whole")


def test_granted_time_ends_a_run(corpus, tmp_path):
    run = tmp_path / "run"
    keys = {
        **CONSTANT_RATE,
        "max_steps": 100_000,
        "max_seconds": 1.0,
        "checkpoint_interval": 100_000,
    }
    result = call("train.py", *small_run(corpus, run, **keys))
    assert result.returncode == stopping.EXIT_CODE
    assert b"(max_seconds=1); resume with --resume=auto" in result.stdout
    assert checkpoint.read_state(checkpoint.find(run))["step"] == completed_steps(run)[-1]


def test_granted_time_leaves_room_for_a_step_and_a_save(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(stopping.time, "monotonic", lambda: now[0])
    stop = stopping.Stop(10.0)
    stop.record_step_seconds(60.0)  # compiles
    assert stop.reason() is None
    stop.record_step_seconds(2.0)
    stop.save_seconds = 3.0
    now[0] = 104.9
    assert stop.reason() is None
    now[0] = 105.0
    assert stop.reason() == "max_seconds=10"
    assert stopping.Stop(None).reason() is None


def test_a_second_process_is_refused_and_a_killed_run_does_not_say_that_it_ended(corpus, tmp_path):
    run = tmp_path / "run"
    arguments = small_run(corpus, run, **CONSTANT_RATE, max_steps=100_000)
    process = forked(*arguments)
    wait_for(lambda: len(completed_steps(run)) > 3)
    assert "another process is training in this folder" in one_line_error(
        call("train.py", *arguments)
    )
    process.kill()
    process.join()
    assert stopping.read_status(run).ended is None


@pytest.mark.parametrize("restarts", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_dead_process_ends_the_job_which_restarts_where_asked(corpus, tmp_path, restarts):
    """By torchrun, to which a signal then stops the restarted job."""
    run = tmp_path / "run"
    keys = {**CONSTANT_RATE, "checkpoint_interval": 5, "max_steps": 10_000}
    process = start_training(
        small_run(corpus, run, **keys), processes=2, launcher=[f"--max-restarts={restarts}"]
    )
    wait_for(lambda: len(completed_steps(run)) > 12)
    children = worker_pids(process)
    assert len(children) == 2
    os.kill(children[restarts], signal.SIGKILL)
    if not restarts:
        assert process.wait(timeout=60) == 1
        assert checkpoint.find(run)
        return
    wait_for(lambda: not any(Path(f"/proc/{child}").exists() for child in children))
    before = len(completed_steps(run))
    wait_for(lambda: len(completed_steps(run)) > before)
    process.send_signal(signal.SIGTERM)
    process.wait(timeout=20)
    assert stopping.read_status(run).ended == "stopped"
    done = completed_steps(run)
    assert done == list(range(1, len(done) + 1))
    assert checkpoint.read_state(checkpoint.find(run))["step"] == done[-1]


def test_a_full_disk_leaves_the_run_going_and_the_old_checkpoint(corpus, tmp_path):
    run, log = tmp_path / "run", tmp_path / "log"
    keys = {
        **CONSTANT_RATE,
        "checkpoint_interval": 20,
        "keep_last": 1,
        "max_steps": 100_000,
        "hidden_size": 64,
    }
    process = forked(*small_run(corpus, run, **keys), log=log)
    wait_for(lambda: checkpoint.list_checkpoints(run))
    # From now on no file of this process may grow beyond 100 kB: the kernel refuses the write as on
    # a full disk.
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (100_000, 100_000))
    wait_for(lambda: log.read_text().count("could not save the checkpoint") >= 2)
    old = checkpoint.find(run)
    os.kill(process.pid, signal.SIGTERM)
    process.join(timeout=20)
    assert process.exitcode == 1
    assert "was not saved; free disk space" in log.read_text()
    assert stopping.read_status(run).ended == "failed"
    assert checkpoint.list_checkpoints(run) == [old]
    assert not list(run.glob("checkpoints/*.tmp"))
    step = checkpoint.read_state(old)["step"]
    finish(*small_run(corpus, run, **{**keys, "max_steps": step + 5}))
    assert completed_steps(run) == list(range(1, step + 6))


def test_a_removed_run_folder_is_made_again(corpus, tmp_path):
    run = tmp_path / "run"
    keys = {**CONSTANT_RATE, "checkpoint_interval": 100_000, "max_steps": 100_000}

    def remove_and_stop():
        run.rename(tmp_path / "gone")  # at once: a removal can fail while the run writes
        wait_for(lambda: len(completed_steps(run)) > 3)
        os.kill(os.getpid(), signal.SIGTERM)

    meanwhile(lambda: len(completed_steps(run)) > 3, remove_and_stop)
    result = call("train.py", *small_run(corpus, run, **keys))
    assert result.returncode == 75
    assert checkpoint.read_state(checkpoint.find(run))["step"] == completed_steps(run)[-1]


def test_metrics_that_cannot_be_written_wait(tmp_path, capsys):
    """The kernel refuses to let files grow, as on a full disk; then a file stands where the folder
    was.
    """
    folder = tmp_path / "run"
    config = SimpleNamespace(global_batch_size=1, wandb_log=False)
    state = TrainState()
    log = metrics.RunLog(
        folder,
        config,
        {},
        state,
        build("gpt-mha-rope", **SMALL),
        World(0, 1, torch.device("cpu")),
    )

    def write(step):
        state.step = step
        log.write(loss=1.0)

    write(1)
    size, limits = log.path.stat().st_size, resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 5, limits[1]))
        write(2)
        write(3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert log.path.stat().st_size == size + 5  # a part of the second line
    write(4)
    assert [r["step"] for r in metrics.read(log.path)] == [1, 2, 3, 4]
    shutil.rmtree(folder)
    folder.touch()
    write(5)
    folder.unlink()
    log.flush()
    assert [r["step"] for r in metrics.read(log.path)] == [5]
    assert (
        "warning: metrics.jsonl cannot be written (File too large); its new lines stay in memory "
        "until it can"
    ) in capsys.readouterr().err


def test_non_finite_steps_are_skipped_up_to_a_limit(corpus, tmp_path):
    run = tmp_path / "run"
    keys = {
        "embedding_init_std": 1e30,
        "checkpoint_interval": 1,
        "skip_nonfinite": 2,
        "eval_interval": 9,
    }
    result = call("train.py", *small_run(corpus, run, **keys))
    assert result.returncode == 1
    assert b"step 3: loss" in result.stderr
    assert [r for r in read_records(run) if r.get("skipped")] == [
        r for r in read_records(run) if r["step"] in (1, 2)
    ]
    assert checkpoint.read_state(checkpoint.find(run))["skipped"] == 2
    assert stopping.read_status(run).ended == "failed"


def differ(rank: int, folder: str) -> None:
    """One of two processes with different seeds."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    world = World(rank, 2, torch.device("cpu"))
    distributed.check_agreement(world, {"the data": [1], "the configuration": {"seed": 0}})
    with pytest.raises(ValueError, match="rank 1 and rank 0 differ in the configuration"):
        distributed.check_agreement(world, {"the data": [1], "the configuration": {"seed": rank}})
    (folder / f"refused_{rank}").touch()


def test_processes_that_differ_are_refused(tmp_path):
    torch.multiprocessing.start_processes(differ, (tmp_path,), nprocs=2, start_method="fork")
    assert len(list(tmp_path.glob("refused_*"))) == 2


def test_output_that_nobody_takes_does_not_end_a_run(corpus, tmp_path):
    run = tmp_path / "full"
    with open("/dev/full", "w") as full:
        assert (
            start_training(small_run(corpus, run, **CONSTANT_RATE), log=full).wait(timeout=60) == 0
        )
    assert checkpoint.read_state(checkpoint.find(run))["step"] == 6


@pytest.mark.slow
def test_granted_time_is_not_granted_again_by_restarts(corpus, tmp_path):
    run, log = tmp_path / "run", tmp_path / "log"
    keys = {
        **CONSTANT_RATE,
        "max_seconds": 3.0,
        "checkpoint_interval": 10_000,
        "max_steps": 100_000,
    }
    with open(log, "w") as file:
        process = start_training(
            small_run(corpus, run, **keys), processes=2, launcher=["--max-restarts=2"], log=file
        )
        assert process.wait(timeout=90) == 0
    assert log.read_text().count("(max_seconds=3); resume with --resume=auto") == 1
    assert log.read_text().count("run folder") == 1


def test_a_run_goes_on_with_its_corpus_elsewhere(corpus, tmp_path):
    run = tmp_path / "run"
    finish(*small_run(corpus, run, **CONSTANT_RATE, max_steps=2))
    shutil.copytree(corpus, tmp_path / "elsewhere")
    finish(*small_run(tmp_path / "elsewhere", run, **CONSTANT_RATE, max_steps=4))
    assert completed_steps(run) == list(range(1, 5))


def test_skipped_from_the_start_a_run_can_go_on(corpus, tmp_path):
    keys = {
        "embedding_init_std": 1e30,
        "checkpoint_interval": 1,
        "skip_nonfinite": 9,
        "eval_interval": 9,
        **CONSTANT_RATE,
    }
    run = tmp_path / "run"
    # The evaluation after the last step is not finite either, and is written as such.
    finish(*small_run(corpus, run, **keys, max_steps=2))
    finish(*small_run(corpus, run, **keys, max_steps=4))
    assert [r["step"] for r in read_records(run) if r.get("skipped")] == [1, 2, 3, 4]


def test_the_parameter_where_it_began_is_named():
    model = build("DDL-gpt-mha-rope", **SMALL)
    _, loss = model(torch.randint(0, 260, (2, 8)), torch.randint(0, 260, (2, 8)))
    loss.backward()
    model.transformer.h[1].mlp.c_proj.weight.grad[3, 2] = math.nan
    assert math.isnan(distributed.clip_grad_norm(model, 1.0))
    world = World(0, 1, torch.device("cpu"))
    assert distributed.find_nonfinite_gradients(model, world) == [
        "transformer.h.1.mlp.c_proj.weight"
    ]


def test_a_line_of_metrics_that_is_no_text_ends_the_reading(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n\xff\xfe\n{"step": 3}\n')
    assert [r["step"] for r in metrics.read(path)] == [1, 2]


def test_a_branch_is_another_run_for_wandb(corpus, tmp_path, monkeypatch):
    for name, value in (("MODE", "offline"), ("SILENT", "true"), ("CONSOLE", "off")):
        monkeypatch.setenv(f"WANDB_{name}", value)
    first, branch = tmp_path / "first", tmp_path / "branch"
    keys = {**CONSTANT_RATE, "wandb_log": True, "wandb_run_name": "named"}
    finish(*small_run(corpus, first, **keys, max_steps=2))
    [logged] = first.glob("wandb/offline-run-*/*.wandb")
    # wandb's own process may write the file a moment after the run has finished
    wait_for(lambda: all(key in logged.read_bytes() for key in (b"grad_norm", b"val_loss")))
    finish(*small_run(corpus, first, **keys, max_steps=3))
    finish(*small_run(corpus, branch, **{**keys, "resume": first}, max_steps=4))
    ids = [
        checkpoint.read_state(path)["wandb_id"]
        for run in (first, branch)
        for path in checkpoint.list_checkpoints(run)
    ]
    assert len(ids) == 3
    assert ids[0] == ids[1] != ids[2]


def test_random_numbers_are_a_function_of_seed_step_and_process():
    def draw(seed, step, rank):
        distributed.seed_step(seed, step, World(rank, 4, torch.device("cpu")))
        return torch.rand(8).tolist()

    cases = [(seed, step, rank) for seed in (0, 1) for step in (1, 2, 3) for rank in (0, 1)]
    assert len({tuple(draw(*case)) for case in cases}) == len(cases)
    assert [draw(*case) for case in cases] == [draw(*case) for case in reversed(cases)][::-1]


def test_an_evaluation_that_will_be_done_again_is_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [
        {"step": 2, "val_loss": 1},
        {"step": 3, "loss": 2},
        {"step": 3, "val_loss": 3},
        {"step": 4, "loss": 5},
    ]
    for evaluated, kept in ((True, lines[:3]), (False, lines[:2])):
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        metrics.truncate_after(path, 3, evaluated)
        assert metrics.read(path) == kept
