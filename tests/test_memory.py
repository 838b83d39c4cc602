"""The memory of a run: its lower bound and its estimate, against torch and measured peaks."""

import dataclasses
import functools
import gc
import json
import os
import resource
import statistics
import subprocess
import sys
import types

import broken_streams
import pytest
import torch
from helpers import ROOT, one_line_error, small_run
from in_process import call
from torch.profiler import ProfilerActivity, profile

import utils.machine
from model import MODEL_NAMES, build, model_class
from model.gpt import GPTConfig
from training import memory
from training.config import TrainConfig
from training.memory import MemoryEstimate
from training.settings import configure

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
    return memory.estimate_memory(config, model_config, device_type, world_size)


def count_additive_parameters() -> int:
    _, model_config = make_configs("gpt-mha-rope")
    return memory.count_parameters("gpt-mha-rope", model_config)


def least(**keys) -> int:
    config, model_config = make_configs("gpt-mha-rope", **keys)
    return memory.least_memory(config, model_config)


# ---- against torch's allocator ----


@functools.cache
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
    terms = memory.estimate_memory(config, model_config, "cpu")
    estimated = terms.activations + terms.logits + terms.weight_copies
    assert 0.75 * allocated < estimated < 1.1 * allocated


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_the_lower_bound_is_below_what_an_eager_pass_allocates(name):
    config, model_config = make_configs(name)
    lower_bound = memory.compute_lower_bound(config, model_config)
    assert lower_bound.compute(BATCH_SIZE) - lower_bound.fixed < measure_allocated(name, False)


# ---- against measured peaks of whole processes (results/memory_cpu.json) ----

MEASURED = json.loads((ROOT / "results" / "memory_cpu.json").read_text())


def read_ratios(key: str) -> list[float]:
    return [row[key] / row["measured"] for row in MEASURED["rows"]]


def test_no_measured_peak_lies_below_the_lower_bound():
    assert len(MEASURED["rows"]) == 24
    assert min(read_ratios("least")) > 0.3
    assert max(read_ratios("least")) < 1


def test_estimates_are_near_measured_peaks():
    assert statistics.median(read_ratios("estimate")) == pytest.approx(1, abs=0.05)
    assert all(ratio == pytest.approx(1, abs=0.25) for ratio in read_ratios("estimate"))


@pytest.mark.parametrize(
    "index",
    [
        index if index in (0, 7, 23) else pytest.param(index, marks=pytest.mark.slow)
        for index in range(24)
    ],
)
def test_stored_figures_are_those_of_this_code(index, corpus, tmp_path):
    row = MEASURED["rows"][index]
    settings = {
        **MEASURED["settings"],
        **MEASURED["sizes"][row["size"]],
        "model": row["model"],
        "compile": row["compile"],
        "activation_checkpointing": row["activation_checkpointing"],
        "dataset": corpus,
        "out_dir": tmp_path,
    }
    config, model_config = configure([f"--{key}={value}" for key, value in settings.items()])
    assert memory.least_memory(config, model_config) == row["least"]
    # since these peaks were measured, the width of the MLP is padded, which adds up to 0.4%
    total = memory.estimate_memory(config, model_config, "cpu").total
    assert total == pytest.approx(row["estimate"], rel=0.005)


# ---- the terms of the estimate ----


def test_the_total_is_the_sum_of_the_terms():
    terms = estimate("cpu")
    assert dataclasses.asdict(terms).keys() == memory.TERMS.keys()
    assert terms.total == sum(dataclasses.astuple(terms))


def test_weights_and_gradients_are_in_float32():
    num_parameters = count_additive_parameters()
    terms = estimate(name="gpt-mha-rope", dtype="bfloat16")
    assert terms.weights == terms.gradients == 4 * num_parameters


def test_adamw_has_two_moments():
    num_parameters = count_additive_parameters()
    assert estimate(name="gpt-mha-rope").optimizer == 8 * num_parameters


def test_muon_has_one_moment_of_the_matrices():
    adamw = estimate(name="gpt-mha-rope").optimizer
    muon = estimate(name="gpt-mha-rope", optimizer="muon").optimizer
    assert adamw - muon == 4 * 2 * MATRIX_NUMBERS


def test_bfloat16_copies_the_matrices_and_the_output_layer():
    numbers = 2 * MATRIX_NUMBERS + SIZE["vocab_size"] * SIZE["hidden_size"]
    assert estimate(name="gpt-mha-rope", dtype="bfloat16").weight_copies == 2 * numbers


def test_float32_copies_no_weights():
    assert estimate(dtype="float32").weight_copies == 0


def test_fsdp_shards_weights_gradients_and_optimizer_state():
    full = estimate()
    shard = estimate(world_size=4, engine="fsdp")
    assert shard.weights == full.weights // 4
    assert shard.gradients == full.gradients // 4
    assert shard.optimizer == full.optimizer // 4


def test_fsdp_gathers_at_most_the_model():
    shard = estimate(world_size=4, engine="fsdp")
    assert 0 < shard.gathered <= estimate().weights


def test_ddp_gathers_nothing():
    assert estimate(world_size=4).gathered == 0


def test_fsdp_reduces_gradients_with_every_micro_batch():
    shard = estimate(world_size=4, engine="fsdp", micro_batch_size=1)
    assert shard.gradients == estimate().gradients // 4


def test_fsdp_holds_full_gradients_if_it_reduces_them_once_per_step():
    shard = estimate(world_size=4, engine="fsdp", micro_batch_size=1, gradient_reduction="step")
    assert shard.gradients == estimate().gradients


def test_fsdp_gathers_half_the_bytes_of_a_block_in_bfloat16():
    config, model_config = make_configs("gpt-mha-rope")
    outside = memory.estimate_gathered(config, model_config, 0, is_bfloat16=False)
    in_float32 = memory.estimate_gathered(config, model_config, 2, is_bfloat16=False)
    in_bfloat16 = memory.estimate_gathered(config, model_config, 2, is_bfloat16=True)
    assert in_bfloat16 - outside == (in_float32 - outside) // 2
    assert memory.estimate_gathered(config, model_config, 0, is_bfloat16=True) == outside


def test_fsdp_keeps_no_bfloat16_copies_of_blocks():
    shard = estimate(name="gpt-mha-rope", world_size=4, engine="fsdp", dtype="bfloat16")
    assert shard.weight_copies == 2 * SIZE["vocab_size"] * SIZE["hidden_size"]


def test_hsdp_shards_over_the_processes_of_one_copy():
    full = estimate()
    assert estimate(world_size=4, engine="fsdp", shard_size=2).weights == full.weights // 2


def test_checkpointing_saves_fewer_activations():
    assert estimate(activation_checkpointing=True).activations < estimate().activations


def test_a_compiled_step_saves_fewer_activations():
    assert estimate("cpu", compile=True).activations < estimate("cpu").activations


def test_fused_kernels_save_fewer_activations_on_a_gpu():
    pytest.importorskip("triton")
    assert estimate("cuda").activations < 0.7 * estimate("cuda", kernels="off").activations


def test_a_longer_interval_between_stored_states_saves_memory():
    pytest.importorskip("triton")
    config, model_config = make_configs("DDL-gpt-mha-rope")
    deep = dataclasses.replace(model_config, num_hidden_layers=8)
    rare = dataclasses.replace(config, state_checkpoint_interval=4)
    saved = memory.estimate_saved(config, deep, "cuda")
    saved_by_rare = memory.estimate_saved(rare, deep, "cuda")
    # of the 15 writes before the readout's, every second or every fourth stores its state
    # (B, T, v, d); each of the others keeps its factors (B, T, v); all in float32
    factors = 4 * BATCH_SIZE * SIZE["block_size"] * model_config.ddl_value_channels
    state = factors * SIZE["hidden_size"]
    assert saved.products - saved_by_rare.products == (7 - 3) * (state - factors)


def test_activations_grow_with_the_micro_batch():
    one = estimate(compile=True, micro_batch_size=1).activations
    assert estimate(compile=True).activations == pytest.approx(BATCH_SIZE * one, rel=0.05)


def test_logits_follow_the_chunks_of_the_device():
    assert memory.count_tokens_at_once(8192, 50304, "cpu") == 2560
    assert memory.count_tokens_at_once(8192, 50304, "cuda") == 8192
    assert memory.count_tokens_at_once(20480, 50304, "cuda") == 10240


@pytest.mark.parametrize("name", ["gpt-mha-rope", "DDL-gpt-mha-rope", "DenseFormer-gpt-mha-rope"])
def test_deep_models_are_extrapolated(name, monkeypatch):
    config, model_config = make_configs(name)
    deep = dataclasses.replace(model_config, num_hidden_layers=10)
    counted = memory.estimate_saved(config, deep, "cpu")
    monkeypatch.setattr(memory, "MAX_PASSED_BLOCKS", 9)
    assert memory.estimate_saved(config, deep, "cpu") == pytest.approx(counted, rel=1e-3)


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_parameters_are_counted_without_the_model(name):
    _, model_config = make_configs(name)
    deep = dataclasses.replace(model_config, num_hidden_layers=5)
    assert memory.count_parameters(name, deep) == build(name, deep).num_parameters()


# ---- the text of --dry_run ----


def test_a_dry_run_prints_the_estimate(corpus, tmp_path):
    printed = call("train.py", *small_run(corpus, tmp_path / "run", dry_run=True)).stdout.decode()
    assert "estimated peak memory of one process on a CPU (float32, eager):\n  weights " in printed
    assert "\n  total " in printed


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


def test_a_dry_run_for_any_device_prints_the_estimate_of_a_gpu(corpus, tmp_path):
    arguments = small_run(corpus, tmp_path / "run", dry_run=True, device="auto", dtype="auto")
    printed = call("train.py", *arguments).stdout.decode()
    assert "estimated peak memory of one process on a GPU (bfloat16, eager, " in printed


# ---- the lower bound, and what is refused ----


def test_the_lower_bound_counts_weights_by_engine(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    num_parameters = count_additive_parameters()
    # weights, gradients, two moments
    assert least() - least(engine="fsdp") == 16 * num_parameters - 16 * num_parameters // 4


def test_the_lower_bound_counts_one_moment_of_muon():
    num_parameters = count_additive_parameters()
    assert least() - least(optimizer="muon") == 4 * num_parameters


def test_the_lower_bound_counts_fewer_activations_if_they_are_recomputed():
    assert least() > least(compile=True) > least(compile=True, activation_checkpointing=True)


def test_the_lower_bound_counts_the_logits_of_one_chunk():
    config, model_config = make_configs("gpt-mha-rope")
    wide = dataclasses.replace(model_config, vocab_size=50304)
    lower_bound = memory.compute_lower_bound(config, wide)
    grown = lower_bound.compute(201) - lower_bound.compute(200)  # 12,864 and 12,800 tokens
    assert grown == lower_bound.bytes_per_sequence


@pytest.fixture
def set_available_memory(monkeypatch):
    """Return a function that sets the memory that the machine has."""
    return lambda size: monkeypatch.setattr(utils.machine, "available_memory", lambda: int(size))


@pytest.fixture
def wide_run(corpus, tmp_path):
    """Return the arguments of a run of 24 sequences at a time, most of whose memory they take."""
    return small_run(
        corpus,
        tmp_path / "run",
        model="gpt-mha-rope",
        hidden_size=192,
        block_size=256,
        global_batch_size=24,
        micro_batch_size=24,
    )


def least_of(arguments: list[str], micro_batch_size: int) -> int:
    config, model_config = configure(arguments)
    sized = dataclasses.replace(config, micro_batch_size=micro_batch_size)
    return memory.least_memory(sized, model_config)


def test_a_run_that_does_not_fit_is_told_a_batch_that_may(wide_run, set_available_memory, tmp_path):
    set_available_memory(least_of(wide_run, 12) - 1)
    line = one_line_error(call("train.py", *wide_run))
    assert "micro_batch_size=24 needs more than" in line
    assert "give --micro_batch_size=8 or less, or --activation_checkpointing=True" in line
    assert not (tmp_path / "run").exists()


def test_a_model_that_does_not_fit_is_to_be_smaller(wide_run, set_available_memory):
    set_available_memory(least_of(wide_run, 1) - 1)
    line = one_line_error(call("train.py", *wide_run))
    assert "give a smaller model, or --activation_checkpointing=True" in line


def test_a_run_that_may_just_fit_is_not_refused(wide_run, set_available_memory):
    set_available_memory(least_of(wide_run, 24))
    memory.check_fits(*configure(wide_run), CPU)


def test_nothing_is_refused_on_a_gpu(wide_run, set_available_memory):
    set_available_memory(1)
    memory.check_fits(*configure(wide_run), torch.device("cuda"))


def test_several_processes_of_a_machine_share_its_memory(monkeypatch):
    available = utils.machine.available_memory()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert utils.machine.available_memory() == pytest.approx(available / 4, rel=0.2)


def test_a_model_that_looks_at_its_values_is_trained_all_the_same(corpus, tmp_path, monkeypatch):
    looking = types.SimpleNamespace(Model=broken_streams.additive(write=broken_streams.Branching))
    monkeypatch.setitem(sys.modules, "model.looking-gpt", looking)
    monkeypatch.setattr("model.MODEL_NAMES", [*MODEL_NAMES, "looking-gpt"])
    arguments = small_run(corpus, tmp_path / "run", model="looking-gpt", max_steps=1)
    assert sum(memory.bytes_saved_for_backward(*configure(arguments), 1)) == 0
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
        ddl_value_channels=16,
        global_batch_size=32,
        micro_batch_size=32,
    )
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
