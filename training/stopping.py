"""Stop a run before its last step: at a signal (a preempted job, Ctrl+C), or when its time ends."""

import contextlib
import os
import signal
import time
from types import FrameType

from utils import machine

EXIT_CODE = 75  # EX_TEMPFAIL: the run was stopped and saved, and can be resumed
# A launcher may pass on a signal that its whole process group has received already. A second signal
# within this time counts as the same one.
DUPLICATE_SIGNAL_SECONDS = 1.0


class Stop:
    """Decide when to stop: `reason()` is None until the run must end.

    The first signal asks the run to stop; a second one ends the process. With `max_seconds` the run
    stops early enough for two more steps and one more checkpoint, if they take as long as the last.
    """

    def __init__(self, max_seconds: float | None, start_time: float | None = None):
        """Take over the signals by which terminals and schedulers ask a run to end.

        Args:
            max_seconds: the time limit; None means that there is none
            start_time: when it begins, in seconds of `time.monotonic()`; None means now
        """
        self.start_time = time.monotonic() if start_time is None else start_time
        self.max_seconds = max_seconds
        self.signal_name: str | None = None  # the first signal; None until there is one
        self.signal_time = 0.0
        self.step_seconds: float | None = None  # of the last step; None before the first one
        self.save_seconds = 0.0  # of the last checkpoint
        self.is_out_of_time = False
        numbers = [signal.SIGTERM, signal.SIGINT]
        # A terminal or an SSH connection sends SIGHUP when it closes, unless nohup ignores it; Slurm
        # and SGE send SIGUSR1 or SIGUSR2 on request, unless a library has a handler (None) for them.
        for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                numbers.append(number)
        for number in numbers:
            signal.signal(number, self.handle_signal)

    def handle_signal(self, number: int, frame: FrameType | None) -> None:
        """Note the first signal; end the process at a second one."""
        signal_time = time.monotonic()
        if self.signal_name is None:
            self.signal_name = signal.Signals(number).name
            self.signal_time = signal_time
            message = (
                f"{self.signal_name}: the run stops after this step and saves a checkpoint; "
                "a second signal ends it at once without saving\n"
            )
            # torchrun passes the signal on to all processes of a machine; one of them says so
            if machine.local_rank() == 0:
                # not print: the signal may arrive within one, and print cannot be called within
                # itself
                with contextlib.suppress(OSError):
                    os.write(2, message.encode())
        elif signal_time - self.signal_time > DUPLICATE_SIGNAL_SECONDS:
            # no cleanup: whoever sends a second signal may have found that it hangs
            os._exit(128 + number)

    def record_step_seconds(self, seconds: float) -> None:
        """Remember how long a step took."""
        if self.step_seconds is None:
            # the first step compiles, so it does not tell how long the next one will take
            self.step_seconds = 0.0
        else:
            self.step_seconds = seconds

    def reason(self) -> str | None:
        """Return why the run must stop now, or None if it need not."""
        if self.signal_name is not None:
            return self.signal_name
        if self.max_seconds is None:
            return None
        # Stop while there is still time for the rest of this step, of which a GPU may have computed
        # nothing yet, for another one, and for a checkpoint.
        elapsed = time.monotonic() - self.start_time
        if elapsed + 2 * (self.step_seconds or 0.0) + self.save_seconds >= self.max_seconds:
            self.is_out_of_time = True  # and stay so, even if the next save takes less time
        return f"max_seconds={self.max_seconds:g}" if self.is_out_of_time else None
