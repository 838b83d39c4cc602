"""What torchrun shows of a run and of a mistake."""

import subprocess

from helpers import ROOT, small_run
from in_process import torchrun


def test_a_mistake_is_said_once_and_stands_at_the_end_of_torchruns_report(corpus, tmp_path):
    command = [*torchrun(2), "train.py", *small_run(corpus, tmp_path / "run", max_stepz=5)]
    result = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    lines = result.stderr.rstrip().splitlines()
    assert result.returncode == 1
    line = "train.py: error: unknown key --max_stepz, did you mean max_steps, "
    error_lines = [number for number, text in enumerate(lines) if text.startswith(line)]
    assert len(error_lines) == 2  # by the first process, and by torchrun
    assert error_lines[1] == len(lines) - 2  # only a ruler follows
    assert "[rank 1]" not in result.stderr
    assert not (tmp_path / "run").exists()
