"""One-line error messages and exit codes of scripts."""

import contextlib
import difflib
import errno
import importlib
import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import NoReturn, TextIO

MISTAKE = 2
INTERRUPTED = 130

# How long a rank other than the first waits before it reports its error, in seconds. torchrun polls
# its processes ten times a second, and terminates all of them once one has failed.
OTHER_RANKS_WAIT = 3.0


def end_quietly_on_closed_pipe() -> None:
    """Let the process end without a traceback when the reader of its output exits, as `| head` does."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)


@contextlib.contextmanager
def one_line_errors(
    *error_types: type[Exception], out_of_memory_advice: str | None = None
) -> Iterator[None]:
    """End the script with one line instead of a traceback if the block fails.

    The exit code is 2 for a user's mistake, and 130 for Ctrl+C.

    Args:
        error_types: exceptions that report a user's mistake; by default ValueError and OSError
        out_of_memory_advice: if given, also report failed allocations, followed by this advice
    """
    try:
        yield
    except KeyboardInterrupt:
        exit_with_message("interrupted", INTERRUPTED)
    except Exception as error:
        # torch raises a RuntimeError, Python a MemoryError
        reason = describe_out_of_memory(error)
        if out_of_memory_advice is not None and reason is not None:
            exit_with_message(f"error: {reason}: {out_of_memory_advice}")
        if isinstance(error, error_types or (ValueError, OSError)):
            exit_with_message(f"error: {describe_error(error)}")
        raise


def say(text: str, file: TextIO | None = None) -> None:
    """Print a line at once, by default on stdout; if that fails, discard it and all later output.

    A log on a full disk, or a pipe that nobody reads, must not end a run.
    """
    stream = file or sys.stdout
    try:
        print(text, file=stream, flush=True)
    except OSError:
        # Python would try to write again at its exit, and change the exit code
        with open(os.devnull, "w") as devnull:
            os.dup2(devnull.fileno(), stream.fileno())


def exit_with_message(message: str, code: int = MISTAKE) -> NoReturn:
    """Print `program: message` as one line on stderr and exit.

    If several ranks make the same mistake, only the first one of a machine reports it, because
    torchrun ends the others as soon as it has ended. torchrun's own report shows the line as well.
    """
    line = f"{Path(sys.argv[0]).name}: {' '.join(message.split())}"
    # ranks usually make the same mistake, which one line reports well enough
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(OTHER_RANKS_WAIT)
        line = line.replace("error: ", f"error: [rank {os.environ.get('RANK', '?')}] ", 1)
    print(line, file=sys.stderr)
    # torchrun prints this file of the first rank that failed
    if report := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        content = {"message": f"\n\n{line}", "timestamp": int(time.time())}
        with contextlib.suppress(OSError):
            Path(report).write_text(json.dumps(content))
    sys.exit(code)


def describe_error(error: Exception) -> str:
    """Return the message of an error; for an OSError the file and the reason, without its number."""
    if not isinstance(error, OSError) or not error.strerror:
        return str(error)
    location = f"{error.filename}: " if error.filename else ""
    if isinstance(error, FileExistsError | NotADirectoryError):
        return f"{location}this is a file, but a folder is needed"
    if error.errno == errno.ENOSPC:
        return f"{location}{error.strerror}; free disk space and run the same command again"
    return f"{location}{error.strerror}"


def describe_out_of_memory(error: BaseException) -> str | None:
    """Return a short description of a failed allocation; None for any other error."""
    text = str(error)
    pattern = "out of memory|can't allocate"
    if not isinstance(error, MemoryError) and not re.search(pattern, text, re.IGNORECASE):
        return None
    request = re.search(r"tried to allocate ([\d.]+ \w+)", text, re.IGNORECASE)
    return f"out of memory (tried to allocate {request[1]})" if request else "out of memory"


def import_optional(module: str, use: str) -> ModuleType:
    """Import a module of a package that only some uses need.

    Args:
        use: what needs it, for the message

    Raises:
        ValueError: the package is not installed
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ValueError(
            f"{use} needs the {package} package, which cannot be imported ({error}): pip install "
            f"{package}"
        ) from error


def suggest(name: str, names: Iterable[str]) -> str:
    """Return ", did you mean X, Y or Z?" with up to three names that are near; "" if none is.

    Letter case makes no difference.
    """
    simplified = {other.lower(): other for other in names}
    own = name.lower()
    # similar spellings; if there are none, names that start with the given text
    close = difflib.get_close_matches(own, list(simplified), n=3)
    if own and not close:
        close = [other for other in simplified if other.startswith(own)][:3]
    if own in close:
        close = [own]  # only the case differs
    suggestions = [simplified[other] for other in close]
    if not suggestions:
        return ""
    if len(suggestions) == 1:
        return f", did you mean {suggestions[0]}?"
    return f", did you mean {', '.join(suggestions[:-1])} or {suggestions[-1]}?"
