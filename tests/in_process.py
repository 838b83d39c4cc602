"""Scripts in the test's own process: starting Python with torch takes three seconds."""

import contextlib
import importlib
import io
import signal
import subprocess
import sys

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGPIPE)


def call(path: str, *arguments, stdin: bytes = b"") -> subprocess.CompletedProcess:
    """`python PATH ARGUMENTS` by its main(): exit code and what it printed, as `conftest.script` has them."""
    main = importlib.import_module(path.removesuffix(".py").replace("/", ".")).main
    out, err, code = io.StringIO(), io.StringIO(), 0
    argv, stream, handlers = sys.argv, sys.stdin, {number: signal.getsignal(number) for number in SIGNALS}
    sys.argv, sys.stdin = [path, *map(str, arguments)], io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8")
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main()
    except SystemExit as end:
        code = end.code or 0
    finally:
        sys.argv, sys.stdin = argv, stream
        signal.set_wakeup_fd(-1)
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return subprocess.CompletedProcess([path, *arguments], code, out.getvalue().encode(), err.getvalue().encode())
