"""What a process sets up for itself, and that runs of several end to the bit where an undisturbed
one ends.
"""

import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from helpers import small_run, wait_for
from in_process import train_in_processes
from interruptions_helpers import (
    CONSTANT_RATE,
    completed_steps,
    current_phase,
    read_final_tensors,
    read_records,
    start_training,
    worker_pids,
)
from torch._dynamo.utils import counters
from torch.multiprocessing import ProcessExitedException

from model import build
from training import checkpoint, distributed
from utils import machine

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
    result = subprocess.run(
        [sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True
    )
    # pages; the tensors have 6,000, and would be mapped anew in each of ten steps
    assert int(result.stdout) < 200


@pytest.mark.skipif(not machine.can_compile(), reason="no C++ compiler")
def test_a_later_process_finds_the_compiled_model():
    """Also where the model turns autocast off for its gates."""
    keys = {
        "vocab_size": 9,
        "block_size": 4,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "head_dim": 4,
    }
    world, ids = (
        SimpleNamespace(device=torch.device("cpu"), world_size=1),
        torch.zeros(1, 4, dtype=torch.long),
    )
    found = []
    for _ in range(2):
        torch._dynamo.reset()
        counters.clear()
        model, _ = distributed.parallelize(
            build("DDL-gpt-mha-rope", hidden_size=4, **keys), world, engine="ddp", compile=True
        )
        with torch.autocast("cpu", torch.bfloat16):
            model(ids, ids)[1].backward()
        found.append(
            {
                name: counters["aot_autograd"][f"autograd_cache_{name}"]
                for name in ("bypass", "miss", "hit")
            }
        )
    assert found[0]["bypass"] == 0
    assert found[1] == {"bypass": 0, "miss": 0, "hit": 1}


@pytest.mark.skipif(not machine.can_compile(), reason="no C++ compiler")
def test_a_kept_graph_is_of_one_autocast():
    """Graphs that differ in nothing but what they enter autocast with are told apart."""
    distributed.cache_graphs_with_autocast()

    def product(x, weight, enabled, dtype):
        with torch.autocast("cpu", dtype, enabled=enabled):
            return torch.nn.functional.linear(x, weight)

    x, weight = torch.randn(8, 8), torch.randn(8, 8, requires_grad=True)
    cases = [(False, torch.bfloat16), (True, torch.bfloat16), (True, torch.float16)]
    for case in cases * 2:  # the second time all three are kept
        torch._dynamo.reset()
        counters.clear()
        compiled = torch.compile(product)(x, weight, *case)
        compiled.sum().backward()
        torch.testing.assert_close(compiled, product(x, weight, *case), rtol=0, atol=0)
    assert counters["aot_autograd"]["autograd_cache_hit"] == 1


KEYS = {
    **CONSTANT_RATE,
    "global_batch_size": 12,
    "checkpoint_interval": 3,
    "eval_interval": 4,
    "statistics_interval": 4,
}
MUON, RECOMPUTED = {"optimizer": "muon"}, {"activation_checkpointing": True}
# 6 MB: several buckets, of which the first has 1 MB
LARGE = {"hidden_size": 192, "num_hidden_layers": 3}


def dying(monkeypatch, victims: range, at: int):
    """From now on processes of these ranks end by SIGKILL when they begin step `at`."""
    begin_step = distributed.seed_step

    def seed_step(seed, step, world):
        if step == at and world.rank in victims:
            os.kill(os.getpid(), signal.SIGKILL)
        begin_step(seed, step, world)

    monkeypatch.setattr(distributed, "seed_step", seed_step)


def slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


CASES = [
    (3, "ddp", (5,), {}),
    (3, "fsdp", (5,), {"num_hidden_layers": 1}),
    slow(4, "fsdp", (3, 7), {}),
]
CASES += [
    slow(2, "ddp", (3, 7), {}),
    slow(2, "fsdp", (3, 7), {}),
    slow(3, "fsdp", (3, 7), RECOMPUTED),
    slow(4, "ddp", (3, 7), {}),
    slow(4, "ddp", (5,), LARGE),
]
CASES += [slow(3, "ddp", (3, 7), changes) for changes in (MUON, RECOMPUTED, {"dtype": "bfloat16"})]


@pytest.mark.parametrize(("processes", "engine", "deaths", "changes"), CASES)
def test_killed_processes_end_bit_for_bit_as_undisturbed_ones(
    corpus, tmp_path, monkeypatch, processes, engine, deaths, changes
):
    """All are killed first, one of them the second time: three or more sum in an order that must
    not change.
    """
    keys = {**KEYS, "micro_batch_size": 6 // processes, "max_steps": 8, "engine": engine, **changes}
    train_in_processes(processes, small_run(corpus, tmp_path / "whole", **keys), tmp_path / "log")
    arguments = small_run(corpus, tmp_path / "run", **keys)
    for step, victims in zip(deaths, (range(processes), range(1, 2))):
        with monkeypatch.context() as patch:
            dying(patch, victims, step)
            with pytest.raises(ProcessExitedException):
                train_in_processes(processes, arguments, tmp_path / "log")
        assert completed_steps(tmp_path / "run")[-1] == step - 1
    train_in_processes(processes, arguments, tmp_path / "log")
    assert read_final_tensors(tmp_path / "run") == read_final_tensors(tmp_path / "whole")
    assert read_records(tmp_path / "run") == read_records(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "compiled"), [("ddp", False), ("ddp", True), ("fsdp", False)])
def test_jobs_of_torchrun_end_bit_for_bit_as_undisturbed_ones(corpus, tmp_path, engine, compiled):
    """A process is killed and the job restarted by torchrun; then it is stopped within an
    evaluation and goes on.

    A compiled model then meets the evaluation first, in which nothing would tell torch.compile
    where to cut.
    """
    keys = {
        **KEYS,
        "engine": engine,
        "compile": compiled,
        "micro_batch_size": 2,
        "max_steps": 16,
        "eval_batches": 100,
    }
    keys |= {"num_hidden_layers": 1, "hidden_size": 384}  # 7 MB: the compiled graph is cut
    if engine == "fsdp":
        keys |= {"checkpoint_writers": 2, "save_in_background": True}
    run, whole = tmp_path / "run", tmp_path / "whole"
    assert start_training(small_run(corpus, whole, **keys), processes=3).wait(timeout=400) == 0
    job = start_training(small_run(corpus, run, **keys), processes=3, launcher=["--max-restarts=1"])
    wait_for(lambda: len(completed_steps(run)) >= 7, 400)
    os.kill(worker_pids(job)[1], signal.SIGKILL)
    wait_for(lambda: len(completed_steps(run)) >= 12 and current_phase(run) == "evaluation", 400)
    job.send_signal(signal.SIGTERM)
    assert job.wait(timeout=60) in (0, 1)
    assert not checkpoint.read_state(checkpoint.find(run))["evaluated"]
    assert start_training(small_run(corpus, run, **keys), processes=3).wait(timeout=400) == 0
    assert read_final_tensors(run) == read_final_tensors(whole)
    assert read_records(run) == read_records(whole)
