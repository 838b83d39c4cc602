"""The provenance of measured figures: command, commit, machine, versions and date."""

import datetime
import functools
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]


def collect_provenance() -> dict:
    """Return what is stored with every figure: command, commit, machine, versions and date."""
    return {
        "command": describe_command(),
        "commit": current_commit(),
        **describe_machine(),
        "date": datetime.date.today().isoformat(),
    }


def describe_command() -> str:
    """Return the command of this process, without folders of the machine."""
    script = Path(sys.argv[0])
    if not script.is_absolute() or not script.is_relative_to(ROOT):
        return shlex.join(["python", *sys.argv])
    # `python -m` replaces the module's name in sys.argv by an absolute path
    module = ".".join(script.relative_to(ROOT).with_suffix("").parts)
    return shlex.join(["python", "-m", module, *sys.argv[1:]])


def describe_machine() -> dict:
    """Return the GPUs, or the cores of a machine without any, and the versions of the software."""
    if torch.cuda.is_available():
        name = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    else:
        name = f"{os.cpu_count()} x {get_cpu_name()}"
    return {
        "machine": name,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": find_triton_version(),
    }


def get_cpu_name() -> str:
    """Return the name of the processor, or of its architecture if the name is not known."""
    # older versions of torch do not have get_capabilities
    get_capabilities = getattr(torch.cpu, "get_capabilities", dict)
    return get_capabilities().get("cpu_name", platform.processor() or platform.machine())


def find_triton_version() -> str | None:
    """Return the version of Triton, or None if it is not installed, as on most CPU machines."""
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return None


# ---- the commit of the code ----


@functools.cache  # the files may change while a process runs, but not the code that it has loaded
def current_commit() -> str:
    """Return the commit of this repository as it was at the first call.

    A copy without git history takes it from the environment variable COMMIT.
    """
    return describe_commit(ROOT) or os.environ.get("COMMIT", "")


def describe_commit(repository: Path) -> str:
    """Return the commit of a repository, with "-dirty" if the code differs from it.

    The code differs if a tracked file has changed, or if there is a Python file that is neither
    tracked nor ignored. Files in results/ may change: measurements write their figures there, and
    no measurement reads them.

    Returns:
        The first 12 digits of the commit; "" without git, or without a repository.
    """
    try:
        commit = run_git(repository, "rev-parse", "--short=12", "HEAD").strip()
        changed_files = run_git(
            repository, "status", "--porcelain", "--untracked-files=no", "--", ".", ":!results"
        )
        new_files = run_git(repository, "ls-files", "--others", "--exclude-standard", "--", "*.py")
    except OSError:  # git is not installed
        return ""
    return f"{commit}-dirty" if changed_files or new_files else commit


def run_git(repository: Path, *arguments: str) -> str:
    """Run a git command in a repository and return what it prints, "" if it fails."""
    result = subprocess.run(
        ["git", *arguments], cwd=repository, capture_output=True, text=True, check=False
    )
    return result.stdout
