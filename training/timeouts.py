"""How long ranks wait for each other, and what the run says if one of them does not answer.

A rank that hangs, or a machine that cannot be reached, leaves all other ranks waiting in their next
collective. Within a training step they wait for `collective_timeout` seconds. Before the first step
is done, in evaluations and in saves, where ranks compile or write at their own pace, they wait for
PATIENT_TIMEOUT. A rank that dies is noticed at once, because its connections close.

gloo raises an error in the rank that waits, which `exit_if_rank_is_lost` turns into one line. With
NCCL the host does not wait in the collective, and a thread of NCCL's own ends the process. A thread
of ours prints the line shortly before, and NCCL's flight recorder writes its last collectives.
"""

import contextlib
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from utils import errors, machine

PATIENT_TIMEOUT = timedelta(minutes=30)
# How much later than our line NCCL ends the process.
NCCL_GRACE = timedelta(seconds=20)
# How often our thread looks at the phase that the run is in, in seconds.
POLL_INTERVAL = 1.0

# Messages of gloo and of torchrun's store.
TIMED_OUT = "timed out waiting|wait timeout|application timeout"
DISCONNECTED = "connection closed|connection reset|broken pipe|connection refused"

RESUME_ADVICE = "torchrun --max-restarts restarts the job; otherwise resume it with --resume=auto"


@dataclass
class Activity:
    """What this process does, for how long already, and how long it may wait for other ranks."""

    phase: str = "start"
    step: int | None = None  # None before the first one
    start_time: float = field(default_factory=time.monotonic)
    timeout: timedelta = PATIENT_TIMEOUT

    @property
    def seconds(self) -> float:
        """How long this phase has taken so far."""
        return time.monotonic() - self.start_time

    def __str__(self) -> str:
        return self.phase if self.step is None else f"{self.phase} of step {self.step}"


# One record is enough, because a process has one training loop.
_activity = Activity()
# The process groups whose time-out follows the phase.
_groups: list[dist.ProcessGroup] = []


def enter(phase: str, *, step: int | None = None, timeout: timedelta | None = None) -> None:
    """Say what this process does from now on.

    If the time-out changes, every rank must call it.

    Args:
        phase: a noun, for the message if a rank does not answer
        step: the training step, counted from 1; None if it is the same as before
        timeout: of the collectives in this phase; None if it is the same as before
    """
    global _activity
    previous = _activity
    if step is None:
        step = previous.step
    if timeout is None or timeout == previous.timeout:
        _activity = Activity(phase, step, timeout=previous.timeout)
        return
    if timeout < previous.timeout and _groups:
        # Some ranks may still compile, or write a checkpoint. The others wait here for them, and
        # not in a collective with the shorter time-out.
        dist.barrier()
    for group in _groups:
        set_group_timeout(group, timeout)
    _activity = Activity(phase, step, timeout=timeout)


def follow_phases(group: dist.ProcessGroup) -> None:
    """Let the time-out of a process group follow the phase of the run."""
    _groups.append(group)
    set_group_timeout(group, _activity.timeout)


def set_group_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Set the time-out of the collectives that are called on a group from now on."""
    if dist.get_backend(group) == "nccl":
        timeout += NCCL_GRACE
    _set_pg_timeout(timeout, group)


def forget_groups() -> None:
    """Forget all process groups, before they are destroyed."""
    _groups.clear()


# ---- messages ----


def describe_lost_rank(error: BaseException) -> str | None:
    """Return a message of one line if an error says that another rank is lost; otherwise None."""
    # gloo raises RuntimeError, of which the errors of torch.distributed are subclasses; those of its
    # store may come before there is a process group
    is_of_ranks = isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and _groups)
    if not is_of_ranks:
        return None
    text = str(error)
    if re.search(TIMED_OUT, text, re.IGNORECASE):
        return describe_timeout()
    if re.search(DISCONNECTED, text, re.IGNORECASE):
        return (
            f"rank {machine.rank()} lost the connection to another rank after "
            f"{_activity.seconds:.0f} s in the {_activity}: that rank has ended, or its machine "
            f"cannot be reached; {RESUME_ADVICE}"
        )
    return None


def describe_timeout() -> str:
    """Say what this rank has waited for, and how long."""
    return (
        f"rank {machine.rank()} waited {_activity.seconds:.0f} s for the other ranks in the "
        f"{_activity} (time-out {_activity.timeout.total_seconds():g} s): one of them hangs, or "
        f"cannot be reached; {RESUME_ADVICE}"
    )


@contextlib.contextmanager
def exit_if_rank_is_lost() -> Iterator[None]:
    """Exit with one line and code 1 if the block fails because another rank is lost."""
    try:
        yield
    except RuntimeError as error:
        message = describe_lost_rank(error)
        if message is None:
            raise
        try:
            errors.exit_with_message(message, code=1)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            # Without cleanup: the destructors of a process group may wait for the lost rank.
            os._exit(1)


# ---- NCCL ----


def prepare_nccl(folder: Path | None) -> None:
    """Switch on NCCL's flight recorder, unless the user has set it, and report time-outs of a run.

    It must be called before the process group is initialized.

    Args:
        folder: of the run, where the recorder writes. None for programs that do not say which phase
            they are in (eval.py): it writes to torch's default, and NCCL alone reports time-outs.
    """
    # each setting with its name in earlier versions of torch, which counts as well
    set_default("TORCH_FR_BUFFER_SIZE", "2000", old_name="TORCH_NCCL_TRACE_BUFFER_SIZE")
    set_default("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    if folder is not None:
        set_default(
            "TORCH_FR_DUMP_TEMP_FILE",
            str(folder / "nccl_trace_rank_"),
            old_name="TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
        )
        threading.Thread(target=report_timeout, daemon=True).start()


def set_default(name: str, value: str, old_name: str | None = None) -> None:
    """Set an environment variable, unless the user has set it, by this name or an old one."""
    if old_name is not None and old_name in os.environ:
        return
    os.environ.setdefault(name, value)


def describe_flight_recorder() -> str:
    """Say where NCCL's flight recorder writes if a collective times out."""
    prefix = os.environ.get(
        "TORCH_FR_DUMP_TEMP_FILE",
        os.environ.get("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "~/.cache/torch/comm_lib_trace_rank_"),
    )
    return f"NCCL's last collectives are written to {prefix}<rank>"


def report_timeout() -> None:
    """Wait until a phase takes longer than its time-out, and print one line about it.

    NCCL then ends the process. The line names the last phase that the host has entered: the GPU,
    for which it waits, may still be in an earlier collective of the same step.
    """
    while _activity.seconds <= _activity.timeout.total_seconds():
        time.sleep(POLL_INTERVAL)
    program = Path(sys.argv[0]).name
    print(f"{program}: {describe_timeout()}; {describe_flight_recorder()}", file=sys.stderr)
    sys.stderr.flush()
