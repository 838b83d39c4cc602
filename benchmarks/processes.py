"""Processes that run the repository's scripts and end together, with all that they have started."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]


def start(arguments: list[str], env: dict[str, str], log) -> subprocess.Popen:
    """`python ARGUMENTS` in the repository's root, in a process group of its own; its output to the file `log`."""
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **env},
        stdout=log,
        stderr=subprocess.STDOUT,
        process_group=0,
    )


def wait(processes: list[subprocess.Popen], seconds: float) -> list[int | None]:
    """Their exit codes; None: ended, with its group, because it was not done in time."""
    wait_until(processes, time.monotonic() + seconds)
    late = [process for process in processes if process.poll() is None]
    for number in (signal.SIGTERM, signal.SIGKILL) if late else ():
        for process in late:
            with contextlib.suppress(ProcessLookupError):  # all of the group has ended
                os.killpg(process.pid, number)
        wait_until(late, time.monotonic() + 10)
    return [None if process in late else process.poll() for process in processes]


def wait_until(processes: list[subprocess.Popen], deadline: float) -> None:
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(deadline - time.monotonic(), 0))
