"""The memory of a run: exact terms, an estimate against torch's allocator, and what is refused."""

import dataclasses
import gc
import sys
import types

import broken_streams
import pytest
import torch
from helpers import configure, one_line_error, run_script, small_run
from in_process import call
from torch.profiler import ProfilerActivity, profile

from model import MODEL_NAMES, build, model_class
from model.gpt import GPTConfig
from training import memory
from training.config import TrainConfig
from training.memory import MemoryEstimate

CPU = torch.device("cpu")
BATCH_SIZE = 4
SIZE = {
    "vocab_size": 320,
    "block_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "head_dim": 16,
    "hidden_size": 32,
}
# Numbers in the matrices of a block: attention has four of 32 x 32, the MLP three of 32 x 85.
MATRIX_NUMBERS = 4 * 32 * 32 + 3 * 32 * 85


def make_configs(name: str, **keys) -> tuple[TrainConfig, GPTConfig]:
    """Return the configurations of a small eager run in float32."""
    config = TrainConfig(
        model=name,
        compile=False,
        global_batch_size=BATCH_SIZE,
        micro_batch_size=BATCH_SIZE,
        dtype="float32",
    )
    return dataclasses.replace(config, **keys), model_class(name).Config(**SIZE)


def estimate(
    device_type: str = "cuda", world_size: int = 1, name: str = "DDL-gpt-mha-rope", **keys
) -> MemoryEstimate:
    config, model_config = make_configs(name, **keys)
    return memory.estimate_memory(config, build(name, model_config), device_type, world_size)


# ---- against torch's allocator ----


def measure_allocated(name: str, is_bfloat16: bool) -> int:
    """Return the peak of what a forward and backward pass allocates, gradients among it."""
    model = build(name, **SIZE)
    ids = torch.zeros(BATCH_SIZE, SIZE["block_size"], dtype=torch.int64)
    gc.collect()  # what earlier tests left would be freed, and counted, while the model runs
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        with torch.autocast("cpu", torch.bfloat16, enabled=is_bfloat16):
            _, loss = model(ids, ids)
        loss.backward()
    events = profiler.profiler.kineto_results.events()
    memory_events = [event for event in events if event.name() == "[memory]"]
    allocated = 0
    peak = 0
    for event in sorted(memory_events, key=lambda event: event.start_ns()):
        allocated += event.nbytes()
        peak = max(peak, allocated)
    return peak


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_an_eager_pass_saves_what_is_counted(name):
    # one model in bfloat16, the next in float32
    is_bfloat16 = MODEL_NAMES.index(name) % 2 == 0
    config, model_config = make_configs(name, dtype="bfloat16" if is_bfloat16 else "float32")
    allocated = measure_allocated(name, is_bfloat16)
    terms = memory.estimate_memory(config, build(name, model_config), "cpu")
    assert 0.6 * allocated < terms.activations + terms.logits < 1.2 * allocated


@pytest.mark.parametrize(
    ("name", "activation_checkpointing"),
    [
        ("HC-gpt-mha-rope", False),
        ("wide-gpt-mha-rope", True),
        ("LAuReL-gpt-mha-rope", False),
        ("DDL-gpt-mha-rope", True),
    ],
)
def test_a_base_depth_of_the_same_size_changes_no_estimate(name, activation_checkpointing):
    """The models with fewer blocks that are counted must not scale their updates either."""
    config, model_config = make_configs(name, activation_checkpointing=activation_checkpointing)
    config = dataclasses.replace(config, engine="fsdp")
    with_base = dataclasses.replace(model_config, num_hidden_layers_base=2)
    terms = memory.estimate_memory(config, build(name, with_base), "cpu", world_size=2)
    plain = build(name, model_config)
    assert terms == memory.estimate_memory(config, plain, "cpu", world_size=2)
    assert terms.activations is not None


# ---- the terms of the estimate ----


def test_adamw_has_two_moments_and_muon_one_of_the_matrices():
    adamw = estimate(name="gpt-mha-rope").optimizer_state
    muon = estimate(name="gpt-mha-rope", optimizer="muon").optimizer_state
    assert adamw == 8 * build("gpt-mha-rope", **SIZE).num_parameters()
    assert adamw - muon == 4 * 2 * MATRIX_NUMBERS


def test_averaged_weights_are_one_more_copy_which_fsdp_shards():
    assert estimate().averaged_weights == 0
    averaged = estimate(ema_half_life=9)
    assert averaged.averaged_weights == averaged.weights
    assert averaged.total == estimate().total + averaged.weights
    shard = estimate(world_size=4, engine="fsdp", ema_half_life=9)
    assert shard.averaged_weights == averaged.weights // 4


@pytest.mark.parametrize(("shard_size", "num_shards"), [(None, 4), (2, 2)])
def test_fsdp_shards_weights_gradients_and_optimizer_state(shard_size, num_shards):
    full = estimate()
    shard = estimate(world_size=4, engine="fsdp", shard_size=shard_size)
    assert shard.weights == full.weights // num_shards
    assert shard.gradients == full.gradients // num_shards
    assert shard.optimizer_state == full.optimizer_state // num_shards
    assert full.gathered == 0
    assert 0 < shard.gathered <= full.weights


# ---- the text of --dry_run ----


@pytest.mark.parametrize(("device", "name"), [("cpu", "CPU"), ("auto", "GPU")])
def test_a_dry_run_prints_the_estimate(corpus, tmp_path, device, name):
    arguments = small_run(corpus, tmp_path / "run", dry_run=True, device=device)
    printed = call("train.py", *arguments).stdout.decode()
    assert f"estimated memory of one process on a {name} in float32: " in printed
    assert "(weights " in printed


def test_a_dry_run_for_several_processes_needs_no_other_process(corpus, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    arguments = small_run(
        corpus, tmp_path / "run", dry_run=True, resume="auto", engine="fsdp", global_batch_size=8
    )
    result = call("train.py", *arguments)
    assert result.returncode == 0, result.stderr.decode()


def test_a_dry_run_prints_what_the_vocabulary_costs(corpus, tmp_path):
    arguments = small_run(corpus, tmp_path / "run", dry_run=True, vocab_size=1000, hidden_size=16)
    printed = call("train.py", *arguments).stdout.decode()
    assert "token embedding, tied to the output layer: 16,000 parameters (" in printed
    # weight, gradient and two moments
    assert "of the model), 250 KiB to train it, " in printed


# ---- what is refused ----


def test_kernels_that_are_asked_for_count_on_any_gpu(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    activations = {
        setting: memory.estimate_activations(
            *make_configs("DDL-gpt-mha-rope-CC", kernels=setting), "cuda"
        )
        for setting in ("on", "auto", "off")
    }
    assert activations["on"] < activations["auto"] == activations["off"]


def test_a_model_that_looks_at_its_values_is_trained_all_the_same(corpus, tmp_path, monkeypatch):
    looking = types.SimpleNamespace(Model=broken_streams.additive(write=broken_streams.Branching))
    monkeypatch.setitem(sys.modules, "model.looking-gpt", looking)
    monkeypatch.setattr("model.MODEL_NAMES", [*MODEL_NAMES, "looking-gpt"])
    arguments = small_run(corpus, tmp_path / "run", model="looking-gpt", max_steps=1)
    assert memory.estimate_activations(*configure(arguments), "cpu") is None
    assert call("train.py", *arguments).returncode == 0
    assert (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="limits of address space")
def test_an_allocation_that_fails_ends_in_one_line(corpus, tmp_path):
    """A limit that the bound does not see, as other processes' memory would be."""
    arguments = small_run(
        corpus,
        tmp_path / "run",
        block_size=512,
        hidden_size=128,
        ddl_value_channels=64,
        global_batch_size=32,
        micro_batch_size=32,
    )
    code = (
        "import faults, runpy, sys; faults.limit_memory(); sys.argv[0] = 'train.py'; "
        "runpy.run_path('train.py', run_name='__main__')"
    )
    result = run_script("-c", code, *arguments, env={"PYTHONPATH": "tests"})
    line = one_line_error(result)
    assert "out of memory" in line
    assert "--micro_batch_size" in line
