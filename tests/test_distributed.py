"""One process or several: their set-up, ranks that are lost, and engines that compute the same."""

import itertools
import subprocess
import sys
from multiprocessing import Process
from pathlib import Path

import pytest
import torch
from faults import Fault, FaultyTraining
from helpers import small_run
from in_process import (
    find_free_port,
    rank_environment,
    start_in_fork,
    train_in_processes,
)
from torch import nn
from torch._dynamo.utils import counters
from training_runs import CONSTANT_RATE, read_records, read_weights, run_train

from training import checkpoint, distributed
from utils import machine, processes
from utils.processes import World

# This prints how many pages the system maps anew for a tensor, after a larger one has been freed. By
# itself the C library would have returned the memory of the first one, which it maps on its own.
COUNT_PAGE_FAULTS = """
import resource, torch
from utils import processes
processes.start(torch.device("cpu"))
torch.ones(7_500_000)
num_faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
torch.ones(7_000_000)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - num_faults)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the C library's settings are glibc's")
def test_freed_memory_is_reused():
    result = subprocess.run(
        [sys.executable, "-c", COUNT_PAGE_FAULTS], capture_output=True, text=True, check=True
    )
    assert int(result.stdout) < 700  # of 6,800 pages of the tensor


class Product(nn.Module):
    """A product of matrices in an autocast of its own, as that of a gate in float32."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: torch.Tensor, enabled: bool, dtype: torch.dtype) -> torch.Tensor:
        with torch.autocast("cpu", dtype, enabled=enabled):
            return nn.functional.linear(x, self.weight)


@pytest.mark.skipif(not machine.can_compile(), reason="no C++ compiler")
def test_a_later_process_finds_the_graph_of_its_autocast():
    """torch by itself does not cache a graph that enters autocast; each autocast has its own."""
    model = Product()
    world = World(0, 1, torch.device("cpu"))
    compiled_model, _ = distributed.parallelize(model, world, engine="ddp", compile=True)
    x = torch.randn(8, 8)
    cases = [(False, torch.bfloat16), (True, torch.bfloat16), (True, torch.float16)]
    num_hits = []
    for case in cases * 2:  # the second time, all three are in the cache
        torch._dynamo.reset()
        counters.clear()
        product = compiled_model(x, *case)
        product.sum().backward()
        torch.testing.assert_close(product, model(x, *case), rtol=0, atol=0)
        num_hits.append(counters["aot_autograd"]["autograd_cache_hit"])
    assert num_hits[3:] == [1, 1, 1]


def test_a_gpu_that_this_torch_cannot_use_is_not_replaced_by_the_cpu(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(processes, "NVIDIA_DEVICE", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(ValueError, match=r"its driver may be too old for CUDA 13\.0"):
        processes.pick_device("auto")
    assert processes.pick_device("cpu").type == "cpu"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert processes.pick_device("auto").type == "cpu"


def start_two_ranks(folder: Path, *arguments_of_ranks: list[str]) -> list[Process]:
    port = find_free_port()
    return [
        start_in_fork(arguments, folder / f"log_{rank}", rank_environment(2, rank, port))
        for rank, arguments in enumerate(arguments_of_ranks)
    ]


def test_the_others_end_when_a_rank_hangs(corpus, tmp_path, monkeypatch):
    faulty = FaultyTraining([Fault("hang", step=5, rank=1)], tmp_path)
    monkeypatch.setattr(distributed, "seed_step", faulty.seed_step)
    arguments = small_run(corpus, tmp_path / "run", micro_batch_size=1, collective_timeout=3)
    ranks = start_two_ranks(tmp_path, arguments, arguments)
    ranks[0].join(timeout=60)
    ranks[1].kill()
    ranks[1].join()
    assert ranks[0].exitcode == 1  # by itself, with torch's error that it has waited for 3 seconds


def test_ranks_that_differ_are_refused(corpus, tmp_path):
    arguments = small_run(corpus, tmp_path / "run", micro_batch_size=1)
    for rank in start_two_ranks(tmp_path, arguments, [*arguments, "--seed=1"]):
        rank.join(timeout=60)
        assert rank.exitcode == 2
    line = "rank 1 and rank 0 differ in the settings (seed=1 and 0)"
    assert line in (tmp_path / "log_0").read_text()
    assert not (tmp_path / "run").exists()


def test_random_numbers_are_a_function_of_seed_step_and_rank():
    def draw(seed, step, rank):
        distributed.seed_step(seed, step, World(rank, 4, torch.device("cpu")))
        return tuple(torch.rand(8).tolist())

    cases = list(itertools.product((0, 1), (1, 2, 3), (0, 1)))
    numbers = {case: draw(*case) for case in cases}
    assert len(set(numbers.values())) == len(cases)
    assert {case: draw(*case) for case in reversed(cases)} == numbers


# ---- several engines ----


def test_a_run_of_several_engines_has_the_metrics_and_the_weights_of_one(corpus, tmp_path):
    """Train five steps with two ddp processes, five with fsdp and five alone; and all alone."""
    run = tmp_path / "run"
    alone = tmp_path / "alone"
    keys = {
        **CONSTANT_RATE,
        "checkpoint_interval": 100,
        "statistics_interval": 5,
        "eval_interval": 5,
        "ema_half_life": 4,
    }
    for changes in (
        {"max_steps": 5},
        {"max_steps": 10, "engine": "fsdp", "activation_checkpointing": True},
    ):
        arguments = small_run(corpus, run, **keys, **changes, micro_batch_size=1)
        assert "arning" not in train_in_processes(2, arguments, tmp_path / "log")
    run_train(*small_run(corpus, run, **keys, max_steps=15))
    run_train(*small_run(corpus, alone, **keys, max_steps=15))

    tolerances = {"loss": 1e-4, "grad_norm": 1e-3, "val_loss": 1e-4, "ema_val_loss": 1e-4}
    for record, expected in zip(read_records(run), read_records(alone), strict=True):
        assert record.keys() == expected.keys()
        assert record["step"] == expected["step"]
        for key, tolerance in tolerances.items():
            assert record.get(key) == pytest.approx(expected.get(key), abs=tolerance), key
        for name, values in record.get("residual", {}).items():
            assert values == pytest.approx(expected["residual"][name], abs=1e-3)
    assert any("residual" in record for record in read_records(run))
    for file in ("model.safetensors", checkpoint.EMA_FILE):
        expected_weights = read_weights(alone, file=file)
        for name, weight in read_weights(run, file=file).items():
            torch.testing.assert_close(weight, expected_weights[name], rtol=1e-4, atol=2e-4)
