"""Run scripts in the process of the test, because starting Python with torch takes three seconds."""

import contextlib
import gc
import importlib
import io
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from utils import processes
from utils.processes import World

# The first backward pass of a process starts the threads of its devices, after which no fork can compute
# gradients. After fake tensors, a CUDA build of torch takes a machine without a GPU for one that has
# some; before, it starts none.
torch.ones(1, requires_grad=True).backward()


@contextlib.contextmanager
def restore_signals() -> Iterator[None]:
    """Restore the signal handlers that a script in this process has replaced."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM, signal.SIGPIPE)
    handlers = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        signal.set_wakeup_fd(-1)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def import_main(path: str) -> Callable:
    """Return a script's main()."""
    # the first optimizer imports it, which takes each fork of this process as long as training
    importlib.import_module("torch._dynamo")
    return importlib.import_module(path.removesuffix(".py").replace("/", ".")).main


def call(path: str, *arguments, stdin: bytes = b"") -> subprocess.CompletedProcess:
    """Call a script's main() as `python PATH ARGUMENTS` would.

    Returns:
        Its exit code and what it printed, as `helpers.run_script` returns them.
    """
    main = import_main(path)
    out = io.StringIO()
    err = io.StringIO()
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
    # the traceback of an error may keep the file that locks its run folder open
    gc.collect(1)
    return subprocess.CompletedProcess(argv, code, out.getvalue().encode(), err.getvalue().encode())


def torchrun(num_processes: int, *options: str) -> list[str]:
    """Return the command that starts a script on several ranks of this machine."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*launcher, f"--nproc_per_node={num_processes}", *options]


def find_free_port() -> int:
    with socket.create_server(("localhost", 0)) as free:
        return free.getsockname()[1]


def rank_environment(num_processes: int, rank: int, port: int) -> dict[str, str]:
    """Return the variables that torchrun sets for a rank."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_processes),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
    }


def train_as_rank(
    rank: int, num_processes: int, port: int, log: Path, arguments: list[str]
) -> None:
    """Train in this process as torchrun would start it, and end the process."""
    os.environ.update(rank_environment(num_processes, rank, port))
    result = call("train.py", *arguments)
    log.with_name(f"{log.name}_{rank}").write_bytes(result.stdout + result.stderr)
    sys.exit(result.returncode)


def train_in_processes(num_processes: int, arguments: list[str], log: Path) -> str:
    """Train on several ranks, which are forks of this process, and return what they printed."""
    import_main("train.py")
    torch.multiprocessing.start_processes(
        train_as_rank,
        (num_processes, find_free_port(), log, arguments),
        nprocs=num_processes,
        start_method="fork",
    )
    return "".join(path.read_text() for path in log.parent.glob(f"{log.name}_*"))


def run_on_ranks(work: Callable, num_ranks: int, *arguments) -> None:
    """Call work(world, *arguments) on several gloo ranks; an assertion that fails there fails here."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(
            work_as_rank,
            (work, num_ranks, folder, arguments),
            nprocs=num_ranks,
            start_method="fork",
        )


def work_as_rank(rank: int, work: Callable, num_ranks: int, folder: str, arguments: tuple) -> None:
    """Join the others, work, and leave the process group."""
    torch.set_num_threads(1)
    os.environ["RANK"] = str(rank)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=60),
    )
    world = World(rank, num_ranks, torch.device("cpu"))
    work(world, *arguments)
    processes.stop(world)


def start_in_fork(
    arguments: list[str], log: str | Path = os.devnull, environment: dict[str, str] | None = None
) -> multiprocessing.Process:
    """Start train.py in a fork of this process, which has Python and torch loaded already."""
    import_main("train.py")
    process = multiprocessing.get_context("fork").Process(
        target=train_with_log, args=(arguments, log, environment or {})
    )
    process.start()
    return process


def train_with_log(arguments: list[str], log: str | Path, environment: dict[str, str]) -> None:
    """Run train.py with its output in a file."""
    os.environ.update(environment)
    sys.argv = ["train.py", *arguments]
    with open(log, "w") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        import_main("train.py")()
