"""Measurements in processes of their own, which a limit ends.

A model that hangs, or whose kernels fault, so costs its own time alone; what it had said last is kept as the reason.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_python(arguments: list[str], seconds: float) -> str:
    """Run `python ARGUMENTS` in the repository's root; "" where it ended well, else what became of it.

    Its output goes where this process's goes. After so many seconds it is told to say where it stands, and ended with
    all that it has started; likewise where this process is told to end.
    """
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    env = {**os.environ, "PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"}
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        command = [sys.executable, *arguments]
        process = subprocess.Popen(command, cwd=ROOT, env=env, stderr=said, process_group=0)
        ended = ""
        try:
            process.wait(max(seconds, 0))
        except subprocess.TimeoutExpired:
            ended = f"no end within {seconds:.0f} s"
            process.send_signal(signal.SIGABRT)  # the fault handler writes every thread's stack
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
        said.seek(0)
        text = said.read()
    print(text, end="", file=sys.stderr, flush=True)
    if ended:
        return f"{ended}{stood_at(text)}"
    if process.returncode == 0:
        return ""
    last = text.strip().rpartition("\n")[2] or "nothing said"
    return f"exit code {process.returncode}: {last[:200]}"


def stood_at(text: str) -> str:
    """The innermost line of the first stack that the fault handler wrote, as the end of a sentence."""
    _, _, stack = text.partition("(most recent call first):\n")
    line = stack.partition("\n")[0].strip().replace(f"{ROOT}/", "")
    return f": {line}" if line else ""
