"""Faults of training at chosen moments. As a script, train.py with faults, for processes of their own:

    [torchrun] tests/faults.py FOLDER FAULTS ARGUMENTS...

FAULTS is a JSON list of the fields of `Fault`. Each fault happens once on each of its ranks: FOLDER
receives a file when it does.
"""

import json
import os
import resource
import runpy
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from training import distributed, validation
from utils import machine, processes


class Fault(NamedTuple):
    """A fault that happens at the beginning of a step, or in an evaluation after it."""

    kind: str  # a key of KINDS
    step: int
    rank: int | None = None  # None: every rank
    evaluation: int = 0  # 1: in the evaluation after the step; 2: in that of the averaged weights

    def marker(self, folder: Path, rank: int) -> Path:
        """Return the file with the number of the process in which the fault has happened."""
        return folder / f"{self.kind}_in_step_{self.step}_on_rank_{rank}"


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hang() -> None:
    """Stop this process until somebody sends SIGCONT."""
    os.kill(os.getpid(), signal.SIGSTOP)


def raise_error() -> None:
    raise ZeroDivisionError


def raise_memory_error() -> None:
    raise MemoryError


def limit_memory() -> None:
    """Allow this process 1 GiB more than it has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + 2**30
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def terminate() -> None:
    """Send SIGTERM to this process."""
    os.kill(os.getpid(), signal.SIGTERM)


def terminate_launcher() -> None:
    """Send SIGTERM to torchrun, and wait until it has passed the signal on."""
    os.kill(os.getppid(), signal.SIGTERM)
    stop = signal.getsignal(signal.SIGTERM).__self__
    while stop.reason() is None:
        time.sleep(0.01)


KINDS = {
    "kill": kill,
    "hang": hang,
    "error": raise_error,
    "memory error": raise_memory_error,
    "terminate": terminate,
    "terminate launcher": terminate_launcher,
}


class FaultyTraining:
    """The functions of training in which faults happen, to be used in place of the real ones."""

    def __init__(self, faults: list[Fault], folder: Path):
        self.faults = faults
        self.folder = folder
        self.step = 0
        self.evaluation = 0  # number of evaluations since the step
        self.begin_step = distributed.seed_step
        self.read_batches = validation.prefetched

    def seed_step(self, seed: int, step: int, world: processes.World) -> None:
        """Begin a step, perhaps with a fault."""
        self.step = step
        self.evaluation = 0
        self.cause_faults()
        self.begin_step(seed, step, world)

    def prefetched(self, *arguments, **keys) -> Iterator:
        """Yield the batches of an evaluation, perhaps with a fault after the first one."""
        batches = self.read_batches(*arguments, **keys)
        yield next(batches)
        self.evaluation += 1
        self.cause_faults()
        yield from batches

    def cause_faults(self) -> None:
        rank = machine.rank()
        for fault in self.faults:
            marker = fault.marker(self.folder, rank)
            is_due = (fault.step, fault.evaluation) == (self.step, self.evaluation)
            if is_due and fault.rank in (None, rank) and not marker.exists():
                marker.write_text(str(os.getpid()))
                KINDS[fault.kind]()


def main() -> None:
    folder, faults, *arguments = sys.argv[1:]
    faulty = FaultyTraining([Fault(*fields) for fields in json.loads(faults)], Path(folder))
    distributed.seed_step = faulty.seed_step
    validation.prefetched = faulty.prefetched
    sys.argv = ["train.py", *arguments]
    runpy.run_path("train.py", run_name="__main__")


if __name__ == "__main__":
    main()
