"""Write files atomically: a kill, a power cut or a full disk never leaves a partial file."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path next to `path`, whose file replaces `path` when the block ends.

    If the block fails, `path` stays as it was and the temporary file is removed. An OSError, such
    as that of a full disk, names `path`.
    """
    # in the same folder, because a rename cannot cross file systems
    temporary = path.with_name(path.name + ".tmp")
    try:
        yield temporary
        temporary.replace(path)
    except OSError as error:
        error.filename = str(path)
        raise
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically, and flush it to disk."""
    with atomic_path(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        # flushed before it is renamed, so that a power cut cannot leave an empty file
        file.flush()
        os.fsync(file.fileno())


def read_json(path: Path) -> dict:
    """Return the JSON object that a file holds.

    Raises:
        ValueError: the file is missing, unreadable, or holds something else
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} is missing or unreadable ({error.strerror})") from error
    except ValueError as error:
        raise ValueError(f"{path} is damaged: it is not valid JSON ({error})") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is damaged: it does not hold a JSON object")
    return content
