"""When to stop before the last step: a signal (a preempted job, Ctrl-C) or the end of the granted time.

How a run ended is left in its status.json, for programs that start runs.
"""

import contextlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import configurator

EXIT_CODE = 75  # EX_TEMPFAIL: stopped in time, saved, to be started again
SAME_EVENT = 1.0  # seconds in which a second signal is the same event, sent by the launcher as well


class Stop:
    """`reason()` is None until the run shall end. The first signal asks for that, the next one ends the process.

    Granted time ends earlier by what the last step and the last save took, so that both still fit in.
    """

    def __init__(self, max_seconds: float | None):
        self.started, self.max_seconds = time.monotonic(), max_seconds
        self.signal_name, self.signal_time = None, 0.0
        self.steps, self.step_seconds, self.save_seconds = 0, 0.0, 0.0
        # A thread takes the signals: Python's own handlers wait for a main thread that may hang in a collective.
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(writer)
        threading.Thread(target=self._listen, args=(reader,), daemon=True).start()

    def _listen(self, reader: int) -> None:
        while number := os.read(reader, 1):
            if number[0] in (signal.SIGTERM, signal.SIGINT):
                self._on_signal(number[0])

    def _on_signal(self, number: int) -> None:
        now = time.monotonic()
        if self.signal_name is None:
            self.signal_name, self.signal_time = signal.Signals(number).name, now
            with contextlib.suppress(OSError):
                line = f"{self.signal_name}: stopping after this step; a second one ends at once, unsaved\n"
                os.write(sys.__stderr__.fileno(), line.encode())
        elif now - self.signal_time > SAME_EVENT:
            os._exit(128 + number)

    def step_took(self, seconds: float) -> None:
        self.step_seconds = seconds if self.steps else 0.0  # the first step compiles: no measure of the next
        self.steps += 1

    def save_took(self, seconds: float) -> None:
        self.save_seconds = seconds

    def reason(self) -> str | None:
        """Why to stop now, None to go on."""
        if self.signal_name:
            return self.signal_name
        needed = time.monotonic() - self.started + self.step_seconds + self.save_seconds
        if self.max_seconds is not None and needed >= self.max_seconds:
            return f"max_seconds={self.max_seconds:g}"
        return None


def write_status(run: Path, step: int, of: int, ended: str | None, reason: str = "") -> None:
    """Say in status.json how far the run is and how it ended: finished, stopped or failed; None: it goes on."""
    status = {"step": step, "of": of, "ended": ended, "reason": reason}
    try:
        configurator.replace_text(run / "status.json", json.dumps(status) + "\n")
    except OSError as error:
        print(f"warning: status.json cannot be written ({error.strerror})", file=sys.stderr)


def read_status(run: Path) -> dict:
    """status.json of a run folder; one that is missing says nothing. ValueError: damaged."""
    nothing = {"step": 0, "of": None, "ended": None, "reason": ""}
    return nothing | (configurator.read_json(run / "status.json") if (run / "status.json").exists() else {})


class Tolerant:
    """A text stream whose writing may fail (a pipe that nobody reads, a full disk): the run is worth more."""

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


def tolerate_lost_output() -> None:
    """From now on what is printed may be lost without ending the run."""
    sys.stdout, sys.stderr = Tolerant(sys.stdout), Tolerant(sys.stderr)
