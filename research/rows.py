"""The rows of a study: a JSON object a line, appended as each run ends."""

import json
import os
from pathlib import Path


def read_rows(path: Path) -> list[dict]:
    """Return the rows that are stored; a last line that was not written to its end is left out."""
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1]]


def append_row(path: Path, row: dict) -> None:
    """Append a row to the file with one write, so that two processes may share it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab", buffering=0) as stream:
        stream.write((json.dumps(row) + "\n").encode())
        os.fsync(stream.fileno())
