"""Scripts in the test's own process: starting Python with torch takes three seconds."""

import contextlib
import importlib
import io
import signal
import subprocess
import sys

import pytest


@contextlib.contextmanager
def signals_given_back():
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
    """`python PATH ARGUMENTS` by its main(): exit code and what it printed, as `conftest.script` has them."""
    main = importlib.import_module(path.removesuffix(".py").replace("/", ".")).main
    out, err = io.StringIO(), io.StringIO()
    argv = [path, *map(str, arguments)]
    with (
        pytest.MonkeyPatch.context() as patch,
        signals_given_back(),
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
