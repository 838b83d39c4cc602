"""What tests of interruptions and others share."""

import os
import subprocess
import sys

from helpers import ROOT

from training import checkpoint, metrics, sharded_checkpoint

TIMINGS = ("seconds", "tokens_per_second", "memory")


def start_training(arguments, processes=1, launcher=(), log=subprocess.DEVNULL) -> subprocess.Popen:
    """train.py in a process of its own, or in several by torchrun."""
    torchrun = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={processes}",
        *launcher,
    ]
    command = [sys.executable, *(torchrun if processes > 1 else []), "train.py", *arguments]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, env=env)


def worker_pids(torchrun: subprocess.Popen) -> list[int]:
    """Numbers of the processes that it started."""
    listed = subprocess.run(
        ["pgrep", "-P", str(torchrun.pid), "-f", "train.py"], capture_output=True, check=True
    )
    return [int(number) for number in listed.stdout.split()]


def read_records(run):
    """The run's metrics without what depends on the clock."""
    return [
        {k: v for k, v in r.items() if k not in TIMINGS}
        for r in metrics.read(run / "metrics.jsonl")
    ]


def read_final_tensors(run):
    """Every tensor of the newest checkpoint, as bytes."""
    path = checkpoint.find(run)
    return {
        name: saved[...].numpy().tobytes()
        for kind in ("model", "optimizer")
        for name, saved in sharded_checkpoint.open_tensors(path, kind).items()
    }


def current_phase(run) -> str:
    """What the run is doing, by what it has written."""
    if list(run.glob("checkpoints/*.tmp")):
        return "saving"
    path = run / "metrics.jsonl"
    lines = path.read_bytes().splitlines() if path.exists() else []
    if not lines:
        return "starting"
    last = lines[-1]
    due = last.startswith(b'{"step": ') and int(last[9:].partition(b",")[0]) % 4 == 0
    return "evaluation" if due and b"val_loss" not in last else "training"


CONSTANT_RATE = {"schedule": "wsd", "decay_steps": 0, "eval_full": False, "resume": "auto"}


def completed_steps(run):
    path = run / "metrics.jsonl"
    return [r["step"] for r in metrics.read(path) if "loss" in r] if path.exists() else []
