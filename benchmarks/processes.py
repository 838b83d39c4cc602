"""Run the repository's scripts in processes of their own."""

import contextlib
import math
import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
FORK = "BENCH_FORK"  # in the environment: fork, a second instead of the four that Python and torch need to start


def start(arguments: list[str], env: dict[str, str], log, own_group: bool = True):
    """`python ARGUMENTS` in the repository's root, its output to the file `log`.

    In a process group of its own, which `wait` can end with all that it has started, or in this one's. Returns an
    object with `pid` and subprocess's `poll`.
    """
    env = {**os.environ, "PYTHONUNBUFFERED": "1", **env}
    if FORK in env:
        return Forked(arguments, env, log, own_group)
    command, group = [sys.executable, *arguments], 0 if own_group else None
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT, process_group=group)


class Forked:
    """A fork of this process that runs a script as `python ARGUMENTS` would: for tests, where nothing uses a GPU and
    no thread has been started."""

    def __init__(self, arguments: list[str], env: dict[str, str], log, own_group: bool):
        sys.stdout.flush()
        self.code, self.pid = None, os.fork()
        if not self.pid:
            if own_group:
                os.setpgid(0, 0)
            os._exit(self._run(arguments, env, log))

    @staticmethod
    def _run(arguments: list[str], env: dict[str, str], log) -> int:
        os.chdir(ROOT)
        os.environ.update(env)
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
        sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
        module = arguments[0] == "-m"
        sys.argv = list(arguments[1 if module else 0 :])
        try:
            runpy.run_module(sys.argv[0], run_name="__main__") if module else runpy.run_path(
                sys.argv[0], None, "__main__"
            )
        except SystemExit as stop:
            return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            return 1
        finally:
            sys.stdout.flush()
        return 0

    def poll(self) -> int | None:
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid else None
        return self.code


def wait(processes: list, seconds: float = math.inf) -> list[int | None]:
    """Their exit codes; None: ended, with its group, because it was not done in time."""
    deadline = time.monotonic() + seconds
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        time.sleep(0.02)
    late = [process for process in processes if process.poll() is None]
    for number in (signal.SIGTERM, signal.SIGKILL) if late else ():
        for process in late:
            with contextlib.suppress(ProcessLookupError):  # all of the group has ended
                os.killpg(process.pid, number)
        until = time.monotonic() + 10
        while any(process.poll() is None for process in late) and time.monotonic() < until:
            time.sleep(0.02)
    return [None if process in late else process.poll() for process in processes]
