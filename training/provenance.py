"""Where a stored figure comes from."""

import datetime
import hashlib
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path

import torch

from training.metrics import cpu_name

ROOT = Path(__file__).parents[1]


def provenance() -> dict:
    """What a stored figure must say of itself: command, commit, machine, versions and date."""
    git = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        said = subprocess.run(git, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
        commit = said.stdout.strip()
    except OSError:  # no git on this machine
        commit = ""
    commit = commit or os.environ.get("COMMIT", "")  # of a copy without its history
    machine = f"{os.cpu_count()} x {cpu_name()}"
    if torch.cuda.is_available():
        machine = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    versions = {"python": platform.python_version(), "torch": torch.__version__, "triton": triton_version()}
    command, date = shlex.join(["python", *sys.argv]), datetime.date.today().isoformat()
    return {"command": command, "commit": commit, "machine": machine, **versions, "date": date}


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
    """SHA-256 over the names and contents of the repository's files that fit any of the patterns."""
    files = {path for pattern in patterns for path in ROOT.glob(pattern)}
    result = hashlib.sha256()
    for path in sorted(path for path in files if path.name not in leave_out):
        result.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return result.hexdigest()
