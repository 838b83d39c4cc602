"""The rows of a study: a JSON object a line, appended as each run ends."""

import json
import os
from pathlib import Path


def read_rows(path: Path) -> list[dict]:
    """Return the stored rows, without an incomplete last line, which a kill leaves."""
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1]]


def append_row(path: Path, row: dict) -> None:
    """Append a row to the file with one write, so that two processes may share it.

    Raises:
        OSError: the row could not be written; the file is as it was before
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    line = (json.dumps(row) + "\n").encode()
    with open(path, "ab", buffering=0) as stream:
        num_written = stream.write(line)
        # on a disk that is nearly full, a part of the line is written without an error
        if num_written < len(line):
            stream.truncate(stream.tell() - num_written)
            raise OSError(
                f"{path}: a row of {len(line)} bytes could not be written; free disk space"
            )
        os.fsync(stream.fileno())
