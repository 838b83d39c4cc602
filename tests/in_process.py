"""Scripts in the test's own process: starting Python with torch takes three seconds."""

import contextlib
import functools
import importlib
import io
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch


@contextlib.contextmanager
def restore_signals():
    """A script may take over the signals of the process that it runs in."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGPIPE)
    handlers = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        signal.set_wakeup_fd(-1)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def call(path: str, *arguments, stdin: bytes = b"") -> subprocess.CompletedProcess:
    """`python PATH ARGUMENTS` by its main(): exit code and what it printed, as `conftest.script`
    has them.
    """
    main = importlib.import_module(path.removesuffix(".py").replace("/", ".")).main
    out, err = io.StringIO(), io.StringIO()
    argv = [path, *map(str, arguments)]
    with (
        pytest.MonkeyPatch.context() as patch,
        restore_signals(),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        patch.setattr(sys, "argv", argv)
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        try:
            code = main() or 0
        except SystemExit as end:
            code = end.code or 0
    return subprocess.CompletedProcess(argv, code, out.getvalue().encode(), err.getvalue().encode())


def train_as_rank(processes: int, rank: int, port: int, log: Path, arguments: list[str]) -> None:
    """train.py as torchrun would start it."""
    job = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": processes,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": port,
    }
    os.environ.update({name: str(value) for name, value in job.items()})
    result = call("train.py", *arguments)
    log.with_name(f"{log.name}_{rank}").write_bytes(result.stdout + result.stderr)
    sys.exit(result.returncode)


def train_in_processes(processes: int, arguments: list[str], log: Path) -> str:
    """What several processes print, in children of this one, to their end."""
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    work = functools.partial(train_as_rank, processes)
    torch.multiprocessing.start_processes(
        work, (port, log, arguments), nprocs=processes, start_method="fork"
    )
    return "".join(path.read_text() for path in log.parent.glob(f"{log.name}_*"))
