"""Faults of one rank under torchrun: the job restarts, and ends with the bits of an undisturbed run."""

import contextlib
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT, small_run
from in_process import train_in_processes
from interruptions_helpers import CONSTANT_RATE, read_final_tensors, read_records

import train
from training import distributed

SETTINGS = {
    **CONSTANT_RATE,
    "global_batch_size": 8,
    "micro_batch_size": 1,
    "checkpoint_interval": 3,
    "eval_interval": 4,
    "max_steps": 9,
    "collective_timeout": 5,
}


def slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


def run_with_fault(
    fault: str, faulty_rank: int, num_processes: int, arguments: list[str], folder: Path
) -> subprocess.CompletedProcess:
    """Train under torchrun with one fault in step 5, two steps after a checkpoint."""
    marker = folder / "marker"
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--max-restarts=2",
        f"--nproc_per_node={num_processes}",
        "tests/faulty_train.py",
        *(fault, "5", str(faulty_rank), str(marker)),
        *arguments,
    ]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        # how long torchrun waits for a process to end after SIGTERM; a stopped one cannot
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "2",
    }
    result = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=environment,
    )
    assert marker.exists()
    return result


def train_rank(rank: int, port: int, log: Path, arguments: list[str]) -> None:
    """Train as one of two ranks, of which rank 1 stops itself in step 5."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE="2",
        MASTER_ADDR="localhost",
        MASTER_PORT=str(port),
    )
    begin_step = distributed.seed_step

    def seed_step(seed: int, step: int, world: distributed.World) -> None:
        if step == 5 and rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        begin_step(seed, step, world)

    distributed.seed_step = seed_step
    sys.argv = ["train.py", *arguments]
    with open(log, "w") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        train.main()


@pytest.mark.parametrize("engine", ["ddp", slow("fsdp")])
def test_a_rank_that_hangs_is_reported_in_one_line(corpus, tmp_path, engine):
    arguments = small_run(
        corpus, tmp_path / "run", **{**SETTINGS, "engine": engine, "collective_timeout": 3}
    )
    log = tmp_path / "log"
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    context = multiprocessing.get_context("fork")
    ranks = [
        context.Process(target=train_rank, args=(rank, port, tmp_path / f"log_{rank}", arguments))
        for rank in range(2)
    ]
    for rank in ranks:
        rank.start()
    ranks[0].join(timeout=60)
    ranks[1].kill()
    ranks[1].join()
    assert ranks[0].exitcode == 1
    lines = log.with_name("log_0").read_text().splitlines()
    assert re.fullmatch(
        r"train.py: rank 0 has lost another rank, which hangs, has ended or cannot be reached \(.*"
        r"Timed out waiting 3000ms.*\); torchrun --max-restarts restarts the job; .*--resume=auto",
        lines[-1],
    )
    assert "Traceback" not in "".join(lines)


CASES = [
    slow("stop", 2, "ddp"),
    slow("stop", 4, "ddp"),
    slow("stop", 4, "fsdp"),
    # the model is replicated, and each replica sharded over two ranks
    slow("stop", 4, "hsdp"),
    slow("kill", 2, "ddp"),
    slow("kill", 4, "fsdp"),
    slow("memory error", 2, "ddp"),
    slow("memory error", 4, "ddp"),
    slow("memory limit", 2, "ddp"),
]
LINES = {
    "stop": "has lost another rank",
    "kill": "has lost another rank",
    "memory error": "out of memory: resume with --resume=auto and a smaller --micro_batch_size",
    "memory limit": "out of memory (tried to allocate 8589934592 bytes): resume with --resume=auto",
}


@pytest.mark.parametrize(("fault", "num_processes", "engine"), CASES)
def test_a_job_restarts_after_a_fault_and_ends_with_the_same_bits(
    corpus, tmp_path, fault, num_processes, engine
):
    settings = {**SETTINGS, "engine": engine}
    if engine == "hsdp":
        settings = {**SETTINGS, "engine": "fsdp", "shard_size": 2}
    undisturbed = tmp_path / "undisturbed"
    train_in_processes(num_processes, small_run(corpus, undisturbed, **settings), tmp_path / "log")
    run = tmp_path / "run"
    arguments = small_run(corpus, run, **settings)
    result = run_with_fault(fault, num_processes - 1, num_processes, arguments, tmp_path)
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    lines = [line for line in result.stderr.splitlines() if LINES[fault] in line]
    if fault != "kill":  # torchrun may end the other ranks before they notice
        assert lines
    if fault == "stop":
        # one line of each rank that waits, at most; torchrun ends them after the first
        assert len(lines) < num_processes
        assert lines[0].startswith("train.py: rank 0 has lost another rank")
    assert read_final_tensors(run) == read_final_tensors(undisturbed)
    assert read_records(run) == read_records(undisturbed)
