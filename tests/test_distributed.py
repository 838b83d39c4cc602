"""What a process sets up for itself."""

import subprocess
import sys

import pytest

FAULTS = """
import resource, torch
from training import distributed
distributed.start(torch.device("cpu"))
def step():
    tensors = [torch.ones(2_000_000) for _ in range(3)]  # 8 MB each
for _ in range(8):  # until the heap has its size
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the C library's settings are glibc's")
def test_memory_of_a_step_is_kept_for_the_next():
    result = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True)
    assert int(result.stdout) < 200  # pages; the tensors have 6,000, and would be mapped anew in each of ten steps
