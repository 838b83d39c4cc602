"""Write files atomically: a kill, a power cut or a full disk never leaves a partial file."""

import contextlib
import fcntl
import functools
import json
import math
import os
import secrets
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO


@contextlib.contextmanager
def atomic_path(path: Path, is_shared: bool = False) -> Iterator[Path]:
    """Yield a temporary path next to `path`, whose file replaces `path` when the block ends.

    If the block fails, `path` stays as it was and the temporary file is removed. An OSError, such
    as that of a full disk, names `path`.

    is_shared: whether other processes may write the same file at the same time
    """
    # In the same folder, because a rename cannot cross file systems. By default, the name is the same
    # each time, so that what a killed process leaves is overwritten.
    suffix = f".{secrets.token_hex(4)}.tmp" if is_shared else ".tmp"
    temporary = path.with_name(path.name + suffix)
    try:
        yield temporary
        temporary.replace(path)
    except OSError as error:
        error.filename = str(path)
        raise
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def write_text(path: Path, text: str, is_shared: bool = False) -> None:
    """Write a text file atomically, and flush it to disk.

    is_shared: as of `atomic_path`
    """
    with atomic_path(path, is_shared) as temporary, open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        # flushed before it is renamed, so that a power cut cannot leave an empty file
        file.flush()
        os.fsync(file.fileno())


def show_path(path: Path | str) -> str:
    """Return a path as text that can be printed: bytes that are not UTF-8 are escaped."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def lock_file(path: Path) -> TextIO:
    """Lock a file, which is created if it is missing, as long as the returned object is open.

    The system releases the lock when the process ends, however it ends. On a file system without
    locks, nothing is locked. The file is opened for writing, because NFS tells other machines only
    of such locks.

    Raises:
        BlockingIOError: another process has locked the file
    """
    file = open(path, "a")  # noqa: SIM115
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise
    except OSError as error:
        warn_of_missing_locks(path, error.strerror)
    return file


@functools.cache  # once for each file
def warn_of_missing_locks(path: Path, reason: str) -> None:
    """Print that a file system has no locks."""
    print(
        f"warning: {path} cannot be locked ({reason}); nothing prevents a second process from writing "
        "to this folder at the same time",
        file=sys.stderr,
    )


def replace_items(value: object, replace: Callable[[object], object]) -> object:
    """Return a value of JSON with replace(item) in place of every item in it that holds no others."""
    if isinstance(value, dict):
        return {key: replace_items(item, replace) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [replace_items(item, replace) for item in value]
    return replace(value)


def to_json(value: object, **options: object) -> str:
    """Return a value as JSON, with null for numbers that are not finite, which JSON does not have.

    options: of `json.dumps`
    """

    def replace(item: object) -> object:
        return None if isinstance(item, float) and not math.isfinite(item) else item

    return json.dumps(replace_items(value, replace), allow_nan=False, **options)


def write_json(path: Path, value: object) -> None:
    """Write a JSON file atomically."""
    write_text(path, to_json(value, indent=1) + "\n")


def restore_nan(value: object) -> object:
    """Return a value of JSON with nan for null, if `to_json` wrote it and it had no None."""
    return replace_items(value, lambda item: math.nan if item is None else item)


def read_json(path: Path) -> dict:
    """Return the JSON object that a file holds.

    Raises:
        ValueError: the file is missing, unreadable, or holds something else
    """
    try:
        # of bytes, in which a byte order mark is allowed
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path} is missing or unreadable ({error.strerror})") from error
    except ValueError as error:
        raise ValueError(f"{path} is damaged: it is not valid JSON ({error})") from error
    except RecursionError as error:
        raise ValueError(f"{path} is nested too deeply for Python to read its JSON") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is damaged: it does not hold a JSON object")
    return content


def read_text_argument(argument: str) -> str:
    """Return the text that an option such as --prompt gives: itself, a file (FILE:path), or standard input (-).

    Raises:
        ValueError: the text is not UTF-8
    """
    try:
        if argument == "-":
            return sys.stdin.buffer.read().decode("utf-8")
        if argument.startswith("FILE:"):
            return Path(argument[5:]).read_bytes().decode("utf-8")
        # Python represents bytes that are not UTF-8 in an argument by surrogates, which raise here
        return argument.encode("utf-8").decode("utf-8")
    except UnicodeError as error:
        raise ValueError(
            f"the prompt is not UTF-8 text ({error}); convert it to UTF-8 first"
        ) from error
