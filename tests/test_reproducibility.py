"""Compiled code has no additions whose order depends on threads.

The compiled rows of test_resume.py compare the bits of a few models; this looks at the code of all.
"""

import os

import pytest
import torch
from helpers import SMALL
from torch._inductor.utils import run_fw_bw_and_get_code

from model import MODEL_NAMES, build
from training.config import TrainConfig
from training.distributed import use_deterministic_algorithms
from utils.machine import can_compile
from utils.processes import restored_state

pytestmark = [
    pytest.mark.skipif(not can_compile(), reason="no C++ compiler"),
    pytest.mark.skipif(os.cpu_count() == 1, reason="one core has no second thread"),
]


@pytest.fixture
def two_threads():
    """Use two threads, because code for one thread has no atomic additions; restore the settings."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    with restored_state():
        yield
    torch.set_num_threads(num_threads)


def compile_and_get_code(name: str) -> str:
    """Return the code that Inductor generates for a training step of a small model."""
    torch._dynamo.reset()
    sizes = {"vocab_size": 512, "block_size": 64, "head_dim": 16, "hidden_size": 32}
    model = build(name, **{**SMALL, **sizes})
    compiled_model = torch.compile(model)
    ids = torch.randint(0, 500, (4, 65))
    _, code = run_fw_bw_and_get_code(lambda: compiled_model(ids[:, :-1], ids[:, 1:])[1])
    return "".join(code)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODEL_NAMES)
def test_compiled_code_on_a_cpu_has_no_atomic_additions(two_threads, name):
    """Threads that add to one number in any order would change its last bits."""
    use_deterministic_algorithms(TrainConfig(), torch.device("cpu"))
    code = compile_and_get_code(name)
    assert "embedding" in code or "index_put" in code
    assert "atomic_add" not in code


@pytest.mark.slow
def test_it_would_have_them_without_determinism(two_threads):
    use_deterministic_algorithms(TrainConfig(deterministic=False), torch.device("cpu"))
    assert "atomic_add" in compile_and_get_code("gpt-mha-rope")
