"""The same bits from the same command, as a user runs it: compiled, on the default number of
threads.

The other tests run with one thread and without torch.compile, and cannot see what threads do.
"""

import hashlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from helpers import ROOT, small_run
from torch._inductor.utils import run_fw_bw_and_get_code

from model import MODEL_NAMES, build
from training import checkpoint, metrics
from training.config import TrainConfig
from training.distributed import use_deterministic_algorithms
from utils.machine import can_compile

pytestmark = [
    pytest.mark.skipif(not can_compile(), reason="no C++ compiler"),
    pytest.mark.skipif(os.cpu_count() == 1, reason="one core has no second thread"),
]

MODELS = {
    "additive": {"model": "gpt-mha-rope"},
    "TC": {"model": "DDL-gpt-mha-rope"},
    "CC-EC": {"model": "DDL-gpt-mha-rope-CC-EC"},
    "MUDD": {"model": "MUDD-gpt-mha-rope"},
    "value embeddings": {
        "model": "Lambdas-gpt-mha-rope",
        "lambda_value_embeddings": True,
        "num_hidden_layers": 4,
    },
}


def start_training(arguments: list[str]) -> subprocess.Popen:
    """Start train.py with the threads that it has by default."""
    environment = {name: os.environ[name] for name in os.environ if name != "OMP_NUM_THREADS"}
    return subprocess.Popen(
        [sys.executable, "train.py", *arguments],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


def train_to_the_end(arguments: list[str]) -> None:
    process = start_training(arguments)
    _, stderr = process.communicate(timeout=300)
    assert process.returncode == 0, stderr.decode()


def train_until_killed(arguments: list[str], run_folder: Path, step: int) -> None:
    """Kill train.py as soon as it has logged a step."""
    process = start_training(arguments)
    deadline = time.monotonic() + 300
    while count_steps(run_folder) < step:
        assert process.poll() is None, process.stderr.read().decode()
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate()


def count_steps(run_folder: Path) -> int:
    """Return the last step in the log of a run."""
    path = run_folder / "metrics.jsonl"
    records = metrics.read(path) if path.exists() else []
    return max((record["step"] for record in records), default=0)


def hash_last_checkpoint(run_folder: Path) -> list[str]:
    folder = checkpoint.find(run_folder)
    names = ("model.safetensors", "optimizer.safetensors")
    return [hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name == "additive" else pytest.mark.slow) for name in MODELS],
)
def test_a_killed_run_that_is_compiled_for_all_threads_ends_with_the_same_bits(
    corpus, tmp_path, name
):
    def arguments(run_folder: Path) -> list[str]:
        # many tokens of few kinds: threads add to the same rows of the embedding's gradient
        settings = {
            "num_hidden_layers": 2,
            "block_size": 64,
            "hidden_size": 32,
            "head_dim": 16,
            "global_batch_size": 16,
            "micro_batch_size": 16,
            "max_steps": 24,
            "checkpoint_interval": 4,
            "eval_interval": 24,
            "eval_batches": 1,
            "eval_full": False,
            "optimizer": "muon",
            "compile": True,
            "resume": "auto",
            **MODELS[name],
        }
        return small_run(corpus, run_folder, **settings)

    undisturbed = tmp_path / "undisturbed"
    killed = tmp_path / "killed"
    train_to_the_end(arguments(undisturbed))
    train_until_killed(arguments(killed), killed, step=7)
    train_until_killed(arguments(killed), killed, step=17)
    train_to_the_end(arguments(killed))

    assert hash_last_checkpoint(killed) == hash_last_checkpoint(undisturbed)


@pytest.fixture
def two_threads():
    """Use two threads, because code for one thread has no atomic additions."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture
def algorithms_as_before(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    previous_setting = torch.are_deterministic_algorithms_enabled()
    fill_memory = torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(previous_setting)
    torch.utils.deterministic.fill_uninitialized_memory = fill_memory


def compile_and_get_code(name: str) -> str:
    """Return the code that Inductor generates for a training step of a small model."""
    torch._dynamo.reset()
    model = build(
        name,
        vocab_size=512,
        block_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        head_dim=16,
        hidden_size=32,
    )
    compiled_model = torch.compile(model)
    ids = torch.randint(0, 500, (4, 65))
    _, code = run_fw_bw_and_get_code(lambda: compiled_model(ids[:, :-1], ids[:, 1:])[1])
    return "".join(code)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODEL_NAMES)
def test_compiled_code_on_a_cpu_has_no_atomic_additions(two_threads, algorithms_as_before, name):
    """Threads that add to one number in any order would change its last bits."""
    use_deterministic_algorithms(TrainConfig(), torch.device("cpu"))
    code = compile_and_get_code(name)
    assert "embedding" in code or "index_put" in code
    assert "atomic_add" not in code


@pytest.mark.slow
def test_it_would_have_them_without_determinism(two_threads, algorithms_as_before):
    use_deterministic_algorithms(TrainConfig(deterministic=False), torch.device("cpu"))
    assert "atomic_add" in compile_and_get_code("gpt-mha-rope")
