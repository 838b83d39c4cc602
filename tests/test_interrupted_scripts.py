"""Ctrl+C in real processes that work: one line, and nothing half-written."""

import os
import signal
import subprocess
import sys

import pytest
from helpers import ROOT, small_run
from in_process import call


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


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "tiny"
    assert call("train.py", *small_run(corpus, out, max_steps=3)).returncode == 0
    return out


def test_ctrl_c_while_text_is_written(run):
    process = begin("sample.py", run, "--max_new_tokens=1000000", "--prompt=a")
    assert process.stdout.read(30)
    assert interrupted(process) == (130, ["sample.py: interrupted"])
