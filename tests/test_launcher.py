"""What torchrun shows of a run and of a mistake."""

import os
import subprocess
import sys

from conftest import ROOT, small_run


def torchrun(*arguments) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone", *arguments]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=False)


def test_a_mistake_is_said_once_and_stands_at_the_end_of_torchruns_report(corpus, tmp_path):
    found = torchrun("train.py", *small_run(corpus, tmp_path / "run", max_stepz=5))
    lines = found.stderr.rstrip().splitlines()
    assert found.returncode == 1
    line = "train.py: error: unknown key --max_stepz, did you mean max_steps?"
    said = [number for number, text in enumerate(lines) if text.startswith(line)]
    assert len(said) == 2  # by the first process, and by torchrun
    assert said[1] == len(lines) - 2  # only a ruler follows
    assert set(lines[-1]) == {"="}
    assert "[rank 1]" not in found.stderr
    assert not (tmp_path / "run").exists()


def test_a_mistake_of_one_process_alone_is_said_by_it(corpus, tmp_path):
    """As where a machine has fewer GPUs than processes."""
    broken = 'import os, sys; sys.argv = ["train.py"]; sys.path.insert(0, "."); import configurator\n'
    broken += "configurator.OTHERS_WAIT = 0.2\nwith configurator.one_line_errors():\n"
    broken += "    if os.environ['RANK'] == '1': raise ValueError('no GPU for me')\n    import time; time.sleep(60)"
    (tmp_path / "broken.py").write_text(broken)
    found = torchrun(tmp_path / "broken.py")
    assert found.stderr.rstrip().splitlines()[-2] == "train.py: error: [rank 1] no GPU for me"
