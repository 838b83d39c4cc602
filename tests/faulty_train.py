"""Run by test_faults.py under torchrun: train.py, with a fault at one step of one rank.

    torchrun tests/faulty_train.py FAULT STEP RANK MARKER ARGUMENTS...

The fault happens once: MARKER is a file that is written when it does.
"""

import os
import resource
import runpy
import signal
import sys
from pathlib import Path

import torch

from training import distributed


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def raise_memory_error() -> None:
    raise MemoryError


def exhaust_memory() -> None:
    """Allocate 8 GiB where the system allows 1 GiB more."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + 2**30
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    torch.empty(2**31)


FAULTS = {
    "kill": kill,
    "stop": stop,
    "memory error": raise_memory_error,
    "memory limit": exhaust_memory,
}


def main() -> None:
    fault, faulty_step, faulty_rank, marker, *arguments = sys.argv[1:]
    begin_step = distributed.seed_step

    def seed_step(seed: int, step: int, world: distributed.World) -> None:
        is_due = step == int(faulty_step) and world.rank == int(faulty_rank)
        if is_due and not Path(marker).exists():
            Path(marker).touch()
            FAULTS[fault]()
        begin_step(seed, step, world)

    distributed.seed_step = seed_step
    sys.argv = ["train.py", *arguments]
    runpy.run_path("train.py", run_name="__main__")


if __name__ == "__main__":
    main()
