"""When to stop before the last step: a signal (a preempted job, Ctrl-C) or the end of the granted
time.
"""

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import configurator

EXIT_CODE = 75  # EX_TEMPFAIL: stopped in time, saved, to be started again
SAME_EVENT = 1.0  # seconds in which a second signal is the same event, sent by the launcher as well


class Stop:
    """`reason()` is None until the run shall end; a first signal asks for that, a second one ends
    the process.

    Granted time ends earlier by what the last step and the last save took, so that both still fit
    in.
    """

    def __init__(self, max_seconds: float | None):
        self.started, self.max_seconds = time.monotonic(), max_seconds
        self.signal_name, self.signal_time = None, 0.0
        self.step_seconds, self.save_seconds = None, 0.0
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.on_signal)

    def on_signal(self, number: int, frame) -> None:
        now = time.monotonic()
        if self.signal_name is None:
            self.signal_name, self.signal_time = signal.Signals(number).name, now
            line = f"{self.signal_name}: stopping after this step; a second one ends at once, unsaved\n"
            with contextlib.suppress(OSError):
                os.write(2, line.encode())  # print cannot be called within itself
        elif now - self.signal_time > SAME_EVENT:
            os._exit(128 + number)

    def step_took(self, seconds: float) -> None:
        # The first step compiles: it is no measure of the next.
        self.step_seconds = 0.0 if self.step_seconds is None else seconds

    def reason(self) -> str | None:
        """Why to stop now, None to go on."""
        if self.signal_name:
            return self.signal_name
        needed = time.monotonic() - self.started + (self.step_seconds or 0.0) + self.save_seconds
        if self.max_seconds is not None and needed >= self.max_seconds:
            return f"max_seconds={self.max_seconds:g}"
        return None


def write_status(run: Path, step: int, of: int, ended: str | None, reason: str = "") -> None:
    """Say in status.json, for programs that start runs, how far the run is and how it ended.

    ended: "finished", "stopped" or "failed"; None while it goes on.
    """
    status = {"step": step, "of": of, "ended": ended, "reason": reason}
    try:
        configurator.replace_text(run / "status.json", json.dumps(status) + "\n")
    except OSError as error:
        print(f"warning: status.json cannot be written ({error.strerror})", file=sys.stderr)


def read_status(run: Path) -> dict:
    """status.json of a run folder; one that is missing says nothing. ValueError: damaged."""
    file, nothing = run / "status.json", {"step": 0, "of": None, "ended": None, "reason": ""}
    return nothing | (configurator.read_json(file) if file.exists() else {})


class Tolerant:
    """A text stream whose writing may fail: a pipe that nobody reads, a full disk."""

    def __init__(self, stream):
        self.stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self.stream.flush()

    def __getattr__(self, name: str):
        return getattr(self.stream, name)
