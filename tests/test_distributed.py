"""Set up processes, and resume runs of several processes with the bits of an undisturbed run."""

import os
import signal
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
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

# This prints how many pages the system maps anew in ten steps that allocate the same tensors.
COUNT_PAGE_FAULTS = """
import resource, torch
from training import distributed
distributed.start(torch.device("cpu"))
def step():
    tensors = [torch.ones(2_000_000) for _ in range(3)]  # 8 MB each
for _ in range(8):  # until the heap has its size
    step()
num_faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - num_faults)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the C library's settings are glibc's")
def test_the_memory_of_a_step_is_reused_in_the_next():
    result = subprocess.run(
        [sys.executable, "-c", COUNT_PAGE_FAULTS], capture_output=True, text=True, check=True
    )
    # without reuse, each of the ten steps would map the 6,000 pages of its tensors
    assert int(result.stdout) < 200


@pytest.mark.skipif(not machine.can_compile(), reason="no C++ compiler")
def test_a_later_process_finds_the_compiled_model():
    """The model disables autocast for its gates; torch by itself does not cache such a graph."""
    world = SimpleNamespace(device=torch.device("cpu"), world_size=1)
    ids = torch.zeros(1, 4, dtype=torch.long)
    cache_counters = []
    for _ in range(2):
        torch._dynamo.reset()
        counters.clear()
        model = build(
            "DDL-gpt-mha-rope",
            vocab_size=9,
            block_size=4,
            num_hidden_layers=1,
            num_attention_heads=1,
            head_dim=4,
            hidden_size=4,
        )
        train_model, _ = distributed.parallelize(model, world, engine="ddp", compile=True)
        with torch.autocast("cpu", torch.bfloat16):
            train_model(ids, ids)[1].backward()
        cache_counters.append(
            {
                name: counters["aot_autograd"][f"autograd_cache_{name}"]
                for name in ("bypass", "miss", "hit")
            }
        )
    assert cache_counters[0]["bypass"] == 0
    assert cache_counters[1] == {"bypass": 0, "miss": 0, "hit": 1}


@pytest.mark.skipif(not machine.can_compile(), reason="no C++ compiler")
def test_a_cached_graph_belongs_to_one_autocast():
    """Graphs that differ only in the arguments of autocast are cached separately."""
    distributed.cache_graphs_with_autocast()

    def product(x, weight, enabled, dtype):
        with torch.autocast("cpu", dtype, enabled=enabled):
            return torch.nn.functional.linear(x, weight)

    x = torch.randn(8, 8)
    weight = torch.randn(8, 8, requires_grad=True)
    cases = [(False, torch.bfloat16), (True, torch.bfloat16), (True, torch.float16)]
    for case in cases * 2:  # the second time, all three are in the cache
        torch._dynamo.reset()
        counters.clear()
        compiled = torch.compile(product)(x, weight, *case)
        compiled.sum().backward()
        torch.testing.assert_close(compiled, product(x, weight, *case), rtol=0, atol=0)
    assert counters["aot_autograd"]["autograd_cache_hit"] == 1


SETTINGS = {
    **CONSTANT_RATE,
    "global_batch_size": 12,
    "checkpoint_interval": 3,
    "eval_interval": 4,
    "statistics_interval": 4,
}
MUON = {"optimizer": "muon"}
RECOMPUTED = {"activation_checkpointing": True}
# 6 MB of gradients, so that DDP has several buckets, of which the first has 1 MB
LARGE = {"hidden_size": 192, "num_hidden_layers": 3}


def kill_ranks(monkeypatch, ranks: range, fatal_step: int) -> None:
    """Kill the processes of these ranks when they begin a step."""
    begin_step = distributed.seed_step

    def seed_step(seed, step, world):
        if step == fatal_step and world.rank in ranks:
            os.kill(os.getpid(), signal.SIGKILL)
        begin_step(seed, step, world)

    monkeypatch.setattr(distributed, "seed_step", seed_step)


def slow_case(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


# (number of processes, engine, steps at which they are killed, settings)
CASES = [
    (3, "ddp", (5,), {}),
    (3, "fsdp", (5,), {"num_hidden_layers": 1}),
    slow_case(4, "fsdp", (3, 7), {}),
    slow_case(2, "ddp", (3, 7), {}),
    slow_case(2, "fsdp", (3, 7), {}),
    slow_case(3, "fsdp", (3, 7), RECOMPUTED),
    slow_case(4, "ddp", (3, 7), {}),
    slow_case(4, "ddp", (5,), LARGE),
    slow_case(3, "ddp", (3, 7), MUON),
    slow_case(3, "ddp", (3, 7), RECOMPUTED),
    slow_case(3, "ddp", (3, 7), {"dtype": "bfloat16"}),
]


@pytest.mark.parametrize(("num_processes", "engine", "fatal_steps", "changes"), CASES)
def test_killed_processes_end_bit_for_bit_as_undisturbed_ones(
    corpus, tmp_path, monkeypatch, num_processes, engine, fatal_steps, changes
):
    """All processes are killed the first time, and one of them the second time.

    With three or more processes, the order in which gradients are summed must not change.
    """
    settings = {
        **SETTINGS,
        "micro_batch_size": 6 // num_processes,
        "max_steps": 8,
        "engine": engine,
        **changes,
    }
    log = tmp_path / "log"
    undisturbed = tmp_path / "undisturbed"
    train_in_processes(num_processes, small_run(corpus, undisturbed, **settings), log)
    run = tmp_path / "run"
    arguments = small_run(corpus, run, **settings)
    for fatal_step, ranks in zip(fatal_steps, (range(num_processes), range(1, 2))):
        with monkeypatch.context() as patch:
            kill_ranks(patch, ranks, fatal_step)
            with pytest.raises(ProcessExitedException):
                train_in_processes(num_processes, arguments, log)
        assert completed_steps(run)[-1] == fatal_step - 1
    train_in_processes(num_processes, arguments, log)
    assert read_final_tensors(run) == read_final_tensors(undisturbed)
    assert read_records(run) == read_records(undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "compiled"), [("ddp", False), ("ddp", True), ("fsdp", False)])
def test_jobs_of_torchrun_end_bit_for_bit_as_undisturbed_ones(corpus, tmp_path, engine, compiled):
    """A process is killed and torchrun restarts the job; then it is stopped in an evaluation.

    When it is resumed, a compiled model runs the evaluation first, in which nothing would tell
    torch.compile where to split the graph.
    """
    settings = {
        **SETTINGS,
        "engine": engine,
        "compile": compiled,
        "micro_batch_size": 2,
        "max_steps": 16,
        "eval_batches": 100,
        # 7 MB of gradients, so that DDP splits the compiled graph
        "num_hidden_layers": 1,
        "hidden_size": 384,
    }
    if engine == "fsdp":
        settings["save_in_background"] = True
    undisturbed = tmp_path / "undisturbed"
    job = start_training(small_run(corpus, undisturbed, **settings), processes=3)
    assert job.wait(timeout=400) == 0
    run = tmp_path / "run"
    arguments = small_run(corpus, run, **settings)
    job = start_training(arguments, processes=3, launcher=["--max-restarts=1"])
    wait_for(lambda: len(completed_steps(run)) >= 7, 400)
    os.kill(worker_pids(job)[1], signal.SIGKILL)
    wait_for(lambda: len(completed_steps(run)) >= 12 and current_phase(run) == "evaluation", 400)
    job.send_signal(signal.SIGTERM)
    assert job.wait(timeout=60) in (0, 1)
    assert not checkpoint.read_state(checkpoint.find(run))["evaluated"]
    assert start_training(arguments, processes=3).wait(timeout=400) == 0
    assert read_final_tensors(run) == read_final_tensors(undisturbed)
    assert read_records(run) == read_records(undisturbed)


def test_a_gpu_that_this_torch_cannot_use_is_not_replaced_by_the_cpu(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(distributed, "NVIDIA_DEVICE", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(ValueError, match=r"its driver may be too old for CUDA 13\.0"):
        distributed.pick_device("auto")
    assert distributed.pick_device("cpu").type == "cpu"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert distributed.pick_device("auto").type == "cpu"


@pytest.fixture
def one_rank(monkeypatch):
    """A process group of one rank, in a job of two."""
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    dist.init_process_group("gloo", init_method=f"tcp://localhost:{port}", rank=0, world_size=1)
    monkeypatch.setattr(os, "_exit", sys.exit)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "reason",
    ["[unbound_buffer.cc:129] Timed out waiting 2000ms", "Connection closed by peer [::1]"],
)
def test_a_lost_rank_is_reported_in_one_line(one_rank, capsys, reason):
    with pytest.raises(SystemExit, match="1"), distributed.exit_if_rank_is_lost():
        raise RuntimeError(f"{reason}\nmore")
    [line] = capsys.readouterr().err.splitlines()
    assert "rank 0 has lost another rank, which hangs, has ended or cannot be reached" in line
    assert f"({reason})" in line


@pytest.mark.parametrize("error", [RuntimeError("shapes differ"), ValueError("timed out waiting")])
def test_other_errors_are_not_those_of_a_lost_rank(one_rank, error):
    with pytest.raises(type(error)), distributed.exit_if_rank_is_lost():
        raise error


def test_a_single_process_has_no_lost_rank():
    with pytest.raises(RuntimeError), distributed.exit_if_rank_is_lost():
        raise RuntimeError("Timed out waiting")


def test_the_flight_recorder_writes_into_the_run_folder_unless_the_user_chose(
    tmp_path, monkeypatch
):
    name = "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"
    monkeypatch.setenv(name, "/scratch/trace_")
    distributed.enable_flight_recorder(tmp_path)
    assert os.environ[name] == "/scratch/trace_"
    monkeypatch.delenv(name)
    distributed.enable_flight_recorder(tmp_path)
    assert os.environ[name] == f"{tmp_path}/nccl_trace_rank_"
