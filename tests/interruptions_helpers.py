"""Training in processes that are interrupted, and what a run has written."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from helpers import ROOT

from training import checkpoint, metrics

TIMINGS = ("seconds", "tokens_per_second", "memory")


def start_training(
    arguments: Sequence[str],
    processes: int = 1,
    launcher: Sequence[str] = (),
    log: int | IO = subprocess.DEVNULL,
) -> subprocess.Popen:
    """Start train.py in a process of its own, or in several by torchrun.

    launcher: further options of torchrun
    """
    torchrun = []
    if processes > 1:
        torchrun = [
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc_per_node={processes}",
            *launcher,
        ]
    return subprocess.Popen(
        [sys.executable, *torchrun, "train.py", *arguments],
        cwd=ROOT,
        stdout=log,
        stderr=log,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def worker_pids(torchrun: subprocess.Popen) -> list[int]:
    """Return the process ids of the ranks that torchrun has started."""
    listed = subprocess.run(
        ["pgrep", "-P", str(torchrun.pid), "-f", "train.py"], capture_output=True, check=True
    )
    return [int(number) for number in listed.stdout.split()]


def read_records(run: Path) -> list[dict]:
    """Read a run's metrics, without those that depend on the clock."""
    return [
        {key: value for key, value in record.items() if key not in TIMINGS}
        for record in metrics.read(run / "metrics.jsonl")
    ]


def read_final_tensors(run: Path) -> dict[str, bytes]:
    """Read the bytes of every tensor of the newest checkpoint."""
    path = checkpoint.find(run)
    return {
        name: tensor.numpy().tobytes()
        for kind in ("model", "optimizer")
        for name, tensor in checkpoint.load_tensors(path / f"{kind}.safetensors").items()
    }


def current_phase(run: Path) -> str:
    """Return what a run is doing, judged by what it has written."""
    if list(run.glob("checkpoints/*.tmp")):
        return "saving"
    path = run / "metrics.jsonl"
    lines = path.read_bytes().splitlines() if path.exists() else []
    if not lines:
        return "starting"
    last = lines[-1]
    # runs of these tests evaluate every fourth step
    is_due = last.startswith(b'{"step": ') and int(last[9:].partition(b",")[0]) % 4 == 0
    return "evaluation" if is_due and b"val_loss" not in last else "training"


# a learning rate that does not depend on max_steps, so that a run may end in several parts
CONSTANT_RATE = {"schedule": "wsd", "decay_steps": 0, "eval_full": False, "resume": "auto"}


def completed_steps(run: Path) -> list[int]:
    """Return the steps that a run has logged so far."""
    path = run / "metrics.jsonl"
    if not path.exists():
        return []
    return [record["step"] for record in metrics.read(path) if "loss" in record]
