"""Times of calls on a GPU."""

import pytest
import torch

from research.benchmarks import timing

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_calls_are_timed_on_the_gpu():
    device = torch.device("cuda", torch.cuda.current_device())
    clock = timing.Clock(device)
    x = torch.ones(2**20, device=device)
    for _ in range(3):
        seconds = clock.measure({"once": lambda: x * 2, "twice": lambda: (x * 2, x * 2)})
    assert seconds.keys() == {"once", "twice"}
    assert min(seconds.values()) > 0
