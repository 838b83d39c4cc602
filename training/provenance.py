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


def provenance() -> dict:
    """What a stored figure must say of itself: command, commit, machine, versions and date."""
    git = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        found = subprocess.run(git, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
        commit = found.stdout.strip()
    except OSError:  # no git on this machine
        commit = ""
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()
    machine = f"{os.cpu_count()} x {capabilities.get('cpu_name', platform.processor() or platform.machine())}"
    if torch.cuda.is_available():
        machine = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    versions = {"python": platform.python_version(), "torch": torch.__version__, "triton": triton_version()}
    date = datetime.date.today().isoformat()
    return {
        "command": shlex.join(["python", *sys.argv]),
        "commit": commit,
        "machine": machine,
        **versions,
        "date": date,
    }


def triton_version() -> str | None:
    """The installed Triton; None without one, as on most machines that have no GPU."""
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return None


def code_digest() -> str:
    """SHA-256 over the repository's Python files that training runs."""
    root, digest = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(
        [root / "train.py", *(file for name in ("model", "data", "training") for file in root.glob(f"{name}/*.py"))]
    ):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
