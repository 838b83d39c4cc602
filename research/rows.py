"""The rows of a study: a JSON object a line, appended as each run ends."""

import contextlib
import json
import os
from pathlib import Path
from typing import BinaryIO


def read_rows(path: Path) -> list[dict]:
    """Return the stored rows, without incomplete lines, which a kill or a full disk leaves."""
    rows = []
    if path.is_file():
        for line in path.read_text(encoding="utf-8").split("\n"):
            with contextlib.suppress(json.JSONDecodeError):
                rows.append(json.loads(line))
    return rows


def append_row(path: Path, row: dict) -> None:
    """Append a row to the file with one write, so that two processes may share it.

    Raises:
        OSError: the row could not be written, or only a part of it, which `read_rows` skips
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    line = (json.dumps(row) + "\n").encode()
    with open(path, "a+b", buffering=0) as stream:
        if not ends_with_line(stream):
            line = b"\n" + line
        num_written = stream.write(line)
        # on a disk that is nearly full, a part of the line is written without an error
        if num_written < len(line):
            raise OSError(
                f"{path}: a row of {len(line)} bytes could not be written; free disk space"
            )
        os.fsync(stream.fileno())


def ends_with_line(stream: BinaryIO) -> bool:
    """Return whether a file is empty or its last line is complete."""
    if stream.seek(0, os.SEEK_END) == 0:
        return True
    stream.seek(-1, os.SEEK_END)
    return stream.read(1) == b"\n"
