"""Where a stored figure comes from."""

import datetime
import functools
import hashlib
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path

import torch

from data.shards import write_json
from training.metrics import cpu_name

ROOT = Path(__file__).parents[1]


def provenance() -> dict:
    """What a stored figure must say of itself: command, commit, machine, versions and date."""
    command, date = shlex.join(["python", *sys.argv]), datetime.date.today().isoformat()
    return {"command": command, "commit": commit(), **machine(), "date": date}


def machine() -> dict:
    """Its GPUs, or its cores where it has none, and the versions of what computes on it."""
    name = f"{os.cpu_count()} x {cpu_name()}"
    if torch.cuda.is_available():
        name = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton_version(),
    }
    return {"machine": name, **versions}


@functools.cache
def commit() -> str:
    """The commit of this code, when it was first asked for; COMMIT in the environment for a copy
    without history.
    """
    return commit_of(ROOT) or os.environ.get("COMMIT", "")


def commit_of(repository: Path) -> str:
    """Its commit, with "-dirty" where a tracked file differs from it, or Python files are not
    tracked; "" where git or the history is missing.

    Files of results/ may differ: a measurement writes its figures there, and nothing that is
    measured reads them.
    """

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=repository, capture_output=True, text=True, check=False
        ).stdout

    try:
        commit = git("describe", "--always", "--abbrev=12").strip()
        changes = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!results")
        changes += git("ls-files", "--others", "--exclude-standard", "--", "*.py")
    except OSError:  # no git on this machine
        return ""
    return f"{commit}-dirty" if changes else commit


def store(path: Path, figures: dict, origin: dict | None = None) -> None:
    """Write figures to a JSON file with their provenance, that of now without `origin`; the file is
    replaced whole.

    Figures of a tree that is not committed are nobody's to repeat: a note says so, once for each
    file.
    """
    origin = origin or provenance()
    write_json(path, {**origin, **figures})
    if origin["commit"].endswith("-dirty"):
        note_dirty(path, origin["commit"])


@functools.cache
def note_dirty(path: Path, commit: str) -> None:
    note = f"note: {path} is of {commit}, with changes that are not committed: commit and measure again"
    print(note, file=sys.stderr, flush=True)  # a table may go elsewhere than the screen


def triton_version() -> str | None:
    """The installed Triton; None without one, as on most machines that have no GPU."""
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return None


def code_digest() -> str:
    """SHA-256 over the repository's Python files that training runs."""
    return digest("train.py", "model/*.py", "data/*.py", "training/*.py")


def digest(*patterns: str, leave_out: tuple[str, ...] = ()) -> str:
    """SHA-256 over the names and contents of the repository's files that fit any of the
    patterns.
    """
    files = {path for pattern in patterns for path in ROOT.glob(pattern)}
    result = hashlib.sha256()
    for path in sorted(path for path in files if path.name not in leave_out):
        result.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return result.hexdigest()
