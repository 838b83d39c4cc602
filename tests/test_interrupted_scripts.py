"""Ctrl+C in real processes: no traceback, while packages are imported and while a script works."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT, small_run
from in_process import call

SLOW = """
import time
print("begun", flush=True)
end = time.monotonic() + 30
while time.monotonic() < end:
    try:
        time.sleep(0.02)
    except BaseException as error:
        raise ImportError("damaged package") from error
"""


def begin(*arguments, env: dict | None = None) -> subprocess.Popen:
    env = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
    pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    words = [sys.executable, *map(str, arguments)]
    return subprocess.Popen(
        words, stdin=subprocess.DEVNULL, cwd=ROOT, start_new_session=True, env=env, **pipes
    )


def interrupted(process: subprocess.Popen) -> tuple[int, list[str]]:
    """Exit code and lines on stderr after Ctrl+C, which reaches all of a terminal's group."""
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    return process.returncode, errors.decode().splitlines()


SCRIPTS = [ROOT / f"{name}.py" for name in ("train", "sample", "export", "eval")]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_ctrl_c_while_packages_are_imported(script, tmp_path):
    """A package that is slow to import makes another error of an interruption, as torch does."""
    for package in ("torch", "numpy", "tiktoken", "tqdm"):
        (tmp_path / f"{package}.py").write_text(SLOW)
    process = begin(script, env={"PYTHONPATH": str(tmp_path)})
    assert process.stdout.readline() == b"begun\n"
    assert interrupted(process) == (-signal.SIGINT, [])


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "tiny"
    assert call("train.py", *small_run(corpus, out, max_steps=3)).returncode == 0
    return out


def test_ctrl_c_while_text_is_written(run):
    process = begin("sample.py", run, "--max_new_tokens=1000000", "--prompt=a", "--compile=False")
    assert process.stdout.read(30)
    assert interrupted(process) == (130, ["sample.py: interrupted"])


def test_ctrl_c_while_a_folder_is_exported_leaves_nothing(run, tmp_path):
    """Between its first and last file: `git`, which names the commit, is one that presses
    Ctrl+C.
    """
    (tmp_path / "git").write_text("#!/bin/sh\nkill -INT $PPID\nsleep 20\n")
    (tmp_path / "git").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    process = begin("export.py", run, tmp_path / "out/model", env={"PATH": path})
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, b"export.py: interrupted\n")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_program_that_imports_from_here_keeps_its_own_ctrl_c(tmp_path):
    code = "import train, signal\nprint(signal.getsignal(signal.SIGINT).__name__)\n"
    (tmp_path / "notebook.py").write_text(code)
    process = begin(Path(tmp_path / "notebook.py"), env={"PYTHONPATH": str(ROOT)})
    assert process.communicate(timeout=60)[0] == b"default_int_handler\n"
