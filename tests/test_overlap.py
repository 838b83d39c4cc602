"""Gradients are summed over processes while the compiled backward pass goes on, and are the eager ones."""

import json
import os
import subprocess
import sys

import pytest
from conftest import ROOT


@pytest.fixture(scope="module", params=["off", pytest.param("on", marks=pytest.mark.slow)])
def found(request) -> dict:
    """With the plain operations, and with the fused kernels, interpreted."""
    command = [sys.executable, "tests/overlap.py", "DDL-gpt-mha-rope-CC-EC", request.param]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False, env=env)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_buckets_are_summed_between_the_pieces_of_the_backward_pass(found):
    """One after each piece. Without the cuts there is one piece, and all buckets come after it."""
    events, uncut = found["True"]["events"], found["False"]["events"]
    assert len(events) >= 4
    assert events == ["piece", "bucket"] * (len(events) // 2)
    assert uncut == ["piece", *["bucket"] * uncut.count("bucket")]


def test_nothing_is_summed_before_the_last_pass_of_an_accumulated_batch(found):
    assert all(each["alone"] for each in found.values())


def test_gradients_and_losses_are_those_of_the_eager_model(found):
    for each in found.values():
        assert each["worst"] < 1e-4  # of the largest gradient of the same parameter
        assert each["losses"][0] == pytest.approx(each["losses"][1], abs=1e-5)
