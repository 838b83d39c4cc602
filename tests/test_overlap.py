"""Gradients are summed over processes while the compiled backward pass goes on, and are the eager
ones.
"""

import json
import os
import subprocess
import sys

import pytest
from helpers import ROOT


@pytest.mark.parametrize("fused", ["off", pytest.param("on", marks=pytest.mark.slow)])
def test_buckets_are_summed_between_the_pieces_of_the_backward_pass(fused):
    """One after each piece, with the plain operations and with the fused kernels, interpreted."""
    command = [sys.executable, "tests/overlap.py", "DDL-gpt-mha-rope-CC-EC", fused]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
    result = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False, env=env
    )
    assert result.returncode == 0, result.stderr
    measured = json.loads(result.stdout)
    events = measured["events"]
    assert len(events) >= 4
    assert events == ["piece", "bucket"] * (len(events) // 2)
    assert measured["alone"]  # nothing is summed before the last pass of an accumulated batch
    assert measured["worst"] < 1e-4  # of the largest gradient of the same parameter, or of 0.01
    assert measured["losses"][0] == pytest.approx(measured["losses"][1], abs=1e-5)
