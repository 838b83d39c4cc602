"""Ctrl+C in real processes: one line and exit code 130, while packages are imported and while a script works."""

import os
import signal
import subprocess
import sys
import time
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


def begin(*arguments, env: dict | None = None, group=True) -> subprocess.Popen:
    keys = {"cwd": ROOT, "start_new_session": group, "env": {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}}
    pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen([sys.executable, *map(str, arguments)], stdin=subprocess.DEVNULL, **pipes, **keys)


def interrupted(process: subprocess.Popen) -> tuple[int, list[str]]:
    """Exit code and lines on stderr after Ctrl+C, which reaches all processes of a terminal's group."""
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    return process.returncode, errors.decode().splitlines()


def scripts() -> list[str]:
    names = "train sample export eval research/report research/bench research/analyze research/sweep".split()
    own = [ROOT / f"{name}.py" for name in names]
    return [str(path.relative_to(ROOT)) for path in (*own, *sorted(ROOT.glob("data/*/prepare.py"))) if path.exists()]


@pytest.mark.parametrize("name", scripts())
def test_ctrl_c_while_packages_are_imported(name, tmp_path):
    """The first package that is slow to import waits for the signal, of which it makes another error, as torch does."""
    for package in ("torch", "numpy", "tiktoken", "tqdm"):
        (tmp_path / f"{package}.py").write_text(SLOW)
    process = begin(name, env={"PYTHONPATH": str(tmp_path)})
    assert process.stdout.readline() == b"begun\n"
    assert interrupted(process) == (130, [f"{Path(name).name}: interrupted"])


def test_processes_of_one_run_say_it_once(tmp_path):
    (tmp_path / "torch.py").write_text(SLOW)
    for rank, lines in (("0", ["train.py: interrupted"]), ("1", [])):
        process = begin("train.py", env={"PYTHONPATH": str(tmp_path), "RANK": rank})
        process.stdout.readline()
        assert interrupted(process) == (130, lines)


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "tiny"
    assert call("train.py", *small_run(corpus, out, max_steps=3)).returncode == 0
    return out


def test_ctrl_c_while_text_is_written(run):
    process = begin("sample.py", run, "--max_new_tokens=1000000", "--prompt=a")
    assert process.stdout.read(30)
    assert interrupted(process) == (130, ["sample.py: interrupted"])


def test_ctrl_c_while_a_folder_is_exported_leaves_nothing(run, tmp_path):
    """Between the first and the last of its files: `git`, which says the commit, is one that presses Ctrl+C."""
    (tmp_path / "git").write_text("#!/bin/sh\nkill -INT $PPID\nsleep 20\n")
    (tmp_path / "git").chmod(0o755)
    process = begin("export.py", run, tmp_path / "out/model", env={"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, b"export.py: interrupted\n")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_program_that_imports_from_here_keeps_its_own_ctrl_c(tmp_path):
    code = "import configurator, signal\nprint(signal.getsignal(signal.SIGINT).__name__)\n"
    (tmp_path / "notebook.py").write_text(code)
    process = begin(tmp_path / "notebook.py", env={"PYTHONPATH": str(ROOT)})
    assert process.communicate(timeout=60)[0] == b"default_int_handler\n"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["train", "sample", "export", "eval"])
def test_ctrl_c_at_any_moment_of_the_first_seconds(run, corpus, tmp_path, name):
    arguments = {
        "train": small_run(corpus, tmp_path / "new", max_steps=10**6),
        "sample": [run, "--max_new_tokens=1000000"],
        "export": [run, tmp_path / "exported", "--overwrite"],
        "eval": [run, "--val", f"--out={tmp_path / 'eval'}"],
    }[name]
    for tenths in range(2, 32, 2):
        process = begin(f"{name}.py", *arguments)
        time.sleep(tenths / 10)
        if process.poll() is None:
            code, lines = interrupted(process)
            # Once train.py trains, it saves; a script may just have ended, where Python itself takes the signal.
            assert (code, len(lines)) in ((130, 1), (75, 1), (0, 0), (-2, 0), (-2, 1)), (tenths, lines)
