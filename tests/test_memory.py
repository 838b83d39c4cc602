"""The bound of a run's memory: against torch's allocator and measured peaks, and what is refused
with it.
"""

import dataclasses
import gc
import json
import os
import resource
import subprocess
import sys
import types

import broken_streams
import pytest
import torch
from helpers import ROOT, SMALL, one_line_error, small_run
from in_process import call
from torch.profiler import ProfilerActivity, profile

import utils.machine
from model import STEMS, build, model_class
from training import memory
from training.config import TrainConfig
from training.settings import configure

SIZE = {
    "vocab_size": 320,
    "block_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "head_dim": 16,
}
SIZE |= {"hidden_size": 32}
ROWS, CPU = 4, torch.device("cpu")


def setting(stem: str, **keys):
    """(run keys, model keys) of a small model."""
    run = {
        "model": stem,
        "compile": False,
        "global_batch_size": ROWS,
        "micro_batch_size": ROWS,
        "dtype": "float32",
    }
    return TrainConfig(**{**run, **keys}), model_class(stem).Config(**SIZE)


def allocated(stem: str, bf16: bool) -> int:
    """Most bytes at once that the allocator hands out during a forward and backward pass, gradients
    among them.
    """
    model, ids = build(stem, **SIZE), torch.zeros(ROWS, 64, dtype=torch.int64)
    gc.collect()  # what earlier tests left would be freed, and counted, while the model runs
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            _, loss = model(ids, ids)
        loss.backward()
    now = most = 0
    events = [
        event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


@pytest.mark.parametrize("stem", STEMS)
def test_an_eager_step_keeps_no_less_than_the_bound_and_not_much_more(stem):
    bf16 = len(stem) % 2 == 0
    config, model_config = setting(stem, dtype="bfloat16" if bf16 else "float32")
    true = allocated(stem, bf16)
    assert 0.6 * true < ROWS * memory.bytes_saved_for_backward(config, model_config, 2) < true


# ---- against measured peaks of whole processes (results/memory_cpu.json) ----

MEASURED = json.loads((ROOT / "results" / "memory_cpu.json").read_text())


def configs_of_row(row: dict) -> tuple:
    """Return the configurations that research/benchmarks/memory.py measured."""
    size = MEASURED["sizes"][row["size"]]
    config = TrainConfig(
        model=row["model"],
        device="cpu",
        dtype="bfloat16",
        compile=row["compile"],
        activation_checkpointing=row["activation_checkpointing"],
        global_batch_size=16,
        micro_batch_size=16,
    )
    # 4,096 tokens, the vocabulary of the corpus python_stdlib
    sizes = {**size, "num_attention_heads": 4, "vocab_size": 4096}
    return config, model_class(row["model"]).Config(**sizes)


def test_no_measured_peak_lies_below_the_bound():
    assert len(MEASURED["rows"]) == 16
    for row in MEASURED["rows"]:
        assert 0.2 < row["least"] / row["measured"] < 1, row


def test_estimates_are_within_a_third_of_measured_peaks():
    for row in MEASURED["rows"]:
        assert 0.67 < row["estimate"] / row["measured"] < 1.33, row


@pytest.mark.parametrize("index", [0, -1])
def test_stored_figures_are_those_of_this_code(index):
    row = MEASURED["rows"][index]
    assert memory.least_memory(*configs_of_row(row)) == row["least"]
    assert memory.estimate_memory(*configs_of_row(row), "cpu").total == row["estimate"]


# ---- the terms of the estimate ----


def estimate(device_type: str = "cuda", world_size: int = 1, stem="DDL-gpt-mha-rope", **keys):
    config, model_config = setting(stem, **keys)
    return memory.estimate_memory(config, model_config, device_type, world_size)


def test_the_total_is_the_sum_of_the_terms():
    terms = dataclasses.asdict(estimate("cpu"))
    assert len(terms) == 7
    assert estimate("cpu").total == sum(terms.values())


def test_adamw_has_two_moments_and_muon_one_of_the_matrices():
    count = memory.count_parameters("gpt-mha-rope", setting("gpt-mha-rope")[1])
    # attention: four matrices 32 x 32; MLP: three of 32 x 85; in two blocks
    matrices = 2 * (4 * 32 * 32 + 3 * 32 * 85)
    assert estimate(stem="gpt-mha-rope").optimizer == 8 * count
    assert estimate(stem="gpt-mha-rope", optimizer="muon").optimizer == 8 * count - 4 * matrices


def test_fsdp_shards_weights_gradients_and_moments():
    full = estimate()
    shard = estimate(world_size=4, engine="fsdp")
    assert shard.weights == full.weights // 4
    assert shard.gradients == full.gradients // 4
    assert shard.optimizer == full.optimizer // 4
    assert shard.activations == full.activations


def test_fsdp_holds_full_gradients_while_it_accumulates():
    shard = estimate(world_size=4, engine="fsdp", micro_batch_size=1)
    assert shard.gradients == estimate().gradients


def test_checkpointing_and_compiling_save_activations():
    eager = estimate("cpu").activations
    assert estimate("cpu", compile=True).activations < eager
    assert estimate("cpu", activation_checkpointing=True).activations < eager


def test_fused_kernels_save_fewer_activations_on_a_gpu():
    assert estimate("cuda").activations < 0.7 * estimate("cuda", kernels="off").activations


def test_bfloat16_keeps_copies_of_the_weights():
    assert estimate(dtype="float32").weight_copies == 0
    assert estimate(dtype="bfloat16").weight_copies == estimate().weights // 2


def test_a_dry_run_prints_the_estimate(corpus, tmp_path):
    printed = call("train.py", *small_run(corpus, tmp_path / "run", dry_run=True)).stdout.decode()
    assert "estimated peak memory of a process on the CPU: " in printed
    assert "\n  activations " in printed


@pytest.mark.parametrize("stem", STEMS)
def test_parameters_are_counted_without_the_model(stem):
    _, model_config = setting(stem)
    deep = dataclasses.replace(model_config, num_hidden_layers=5)
    assert (
        memory.count_parameters(stem, deep)
        == build(stem, **dataclasses.asdict(deep)).num_parameters()
    )


def test_weights_count_by_optimizer_and_engine(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    count = memory.count_parameters("gpt-mha-rope", setting("gpt-mha-rope")[1])

    def least(**keys):
        return memory.least_memory(*setting("gpt-mha-rope", **keys))

    # weights, gradients, two moments
    assert least() - least(engine="fsdp") == 16 * count - 16 * count // 4
    assert least() - least(optimizer="muon") == 4 * count
    assert least() > least(compile=True) > least(activation_checkpointing=True)


@pytest.fixture
def machine(monkeypatch):
    """Sets the memory that the machine has."""
    return lambda size: monkeypatch.setattr(utils.machine, "available_memory", lambda: int(size))


WIDE = {
    **SMALL,
    "model": "gpt-mha-rope",
    "hidden_size": 192,
    "block_size": 256,
    "global_batch_size": 24,
}


def test_a_run_that_does_not_fit_is_told_what_may(corpus, tmp_path, machine):
    arguments = small_run(corpus, tmp_path / "run", **WIDE, micro_batch_size=24)
    config, model_config = configure(arguments)
    least = {
        rows: memory.least_memory(dataclasses.replace(config, micro_batch_size=rows), model_config)
        for rows in (1, 8, 12, 24)
    }
    machine(least[12] - 1)
    line = one_line_error(call("train.py", *arguments))
    assert "micro_batch_size=24 needs more than" in line
    assert "give --micro_batch_size=8 or less, or --activation_checkpointing=True" in line
    assert not (tmp_path / "run").exists()
    machine(least[1] - 1)
    assert "give a smaller model, or --activation_checkpointing=True" in one_line_error(
        call("train.py", *arguments)
    )
    machine(least[24])
    memory.check_fits(config, model_config, CPU)


def test_several_processes_of_a_machine_share_its_memory(monkeypatch):
    whole = utils.machine.available_memory()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert utils.machine.available_memory() == pytest.approx(whole / 4, rel=0.2)


def test_a_model_that_looks_at_its_values_is_trained_all_the_same(corpus, tmp_path, monkeypatch):
    looking = types.SimpleNamespace(Model=broken_streams.additive(write=broken_streams.Branching))
    monkeypatch.setitem(sys.modules, "model.looking-gpt", looking)
    monkeypatch.setattr("model.STEMS", [*STEMS, "looking-gpt"])
    arguments = small_run(corpus, tmp_path / "run", model="looking-gpt", max_steps=1)
    assert memory.bytes_saved_for_backward(*configure(arguments), 1) == 0
    assert call("train.py", *arguments).returncode == 0
    assert (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="limits of address space")
def test_an_allocation_that_fails_ends_in_one_line(corpus, tmp_path):
    """A limit that the bound does not see, as other processes' memory would be."""
    keys = {
        "block_size": 512,
        "hidden_size": 128,
        "ddl_value_channels": 16,
        "global_batch_size": 32,
    }
    arguments = small_run(corpus, tmp_path / "run", **keys, micro_batch_size=32)
    result = subprocess.run(
        [sys.executable, "train.py", *arguments],
        cwd=ROOT,
        capture_output=True,
        timeout=300,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (2**31, 2**31)),
    )
    line = one_line_error(result)
    assert "out of memory" in line
    assert "--micro_batch_size" in line
