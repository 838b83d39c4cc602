"""The memory that train.py expects to need: against what torch's allocators hand out, and what is refused with it."""

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

import train
from model import STEMS, build, model_class
from training import memory

SIZE = {"vocab_size": 320, "block_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 16}
SIZE |= {"hidden_size": 32}
ROWS, CPU = 4, torch.device("cpu")


@pytest.fixture
def exact(monkeypatch):
    """Count bytes alone, without what the C library wastes."""
    for name in ("WASTE", "WASTE_AGAIN"):
        monkeypatch.setattr(memory, name, 1.0)
    monkeypatch.setattr(memory, "KEPT_BLOCK", 0)


def setting(stem: str, **keys):
    """(run keys, model keys) of a small model."""
    size = {**SIZE, **{key: keys.pop(key) for key in list(keys) if key in SIZE}}
    run = {"model": stem, "compile": False, "global_batch_size": ROWS, "micro_batch_size": ROWS, "dtype": "float32"}
    return train.TrainConfig(**{**run, **keys}), model_class(stem).Config(**size)


def allocated(stem: str, bf16: bool, checkpointing: bool) -> int:
    """Most bytes at once that the allocator hands out during a forward and backward pass."""
    model, ids = build(stem, **SIZE), torch.zeros(ROWS, 64, dtype=torch.int64)
    model.activation_checkpointing = checkpointing
    gc.collect()  # what earlier tests left would be freed, and counted, while the model runs
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            _, loss = model(ids, ids)
        loss.backward()
    now = most = 0
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("stem", STEMS)
def test_an_eager_step_needs_what_the_allocator_hands_out(exact, stem, checkpointing):
    bf16 = checkpointing == (len(stem) % 2 == 0)  # each of the four combinations for some stem
    dtype = "bfloat16" if bf16 else "float32"
    found = memory.activations_needed(*setting(stem, dtype=dtype, activation_checkpointing=checkpointing), CPU)
    # What Sinkhorn-Knopp needs while it runs is not seen, as it is one operation; of so narrow a model it is 2%.
    close = 0.03 if stem.startswith("mHC") else 0.01
    assert found == pytest.approx(allocated(stem, bf16, checkpointing), rel=close)


@pytest.mark.parametrize("stem", ["AttnRes-gpt-mha-rope", "DenseFormer-gpt-mha-rope", "gpt-mha-rope"])
def test_depths_are_not_taken_to_be_alike_where_the_state_grows(exact, stem):
    config, model_config = setting(stem, num_hidden_layers=10)
    true = memory.eager_peak(config, model_config, 10, CPU)
    assert memory.activations_needed(config, model_config, CPU) == pytest.approx(true, rel=0.01)
    assert memory.parameters_of(stem, model_config) == build(stem, **dataclasses.asdict(model_config)).num_parameters()


def test_deep_models_lie_on_the_line_through_shallow_ones(exact):
    for stem in ("gpt-mha-rope", "DDL-gpt-mha-rope-EC"):
        deep = setting(stem, num_hidden_layers=7)
        assert memory.activations_needed(*deep, CPU) == pytest.approx(memory.eager_peak(*deep, 7, CPU), rel=0.01)


def test_the_estimates_agree_with_what_was_measured():
    """Of whole processes on a CPU, as stored; compiled steps are estimated by one constant."""
    rows = json.loads((ROOT / "results" / "memory_cpu.json").read_text())["rows"]
    for row in rows:
        assert row["estimated"] == pytest.approx(row["measured"], rel=0.2), row
    assert len(rows) >= 70


def test_the_estimate_counts_what_is_there(corpus, tmp_path):
    for stem in STEMS:
        config, model_config = train.configure(small_run(corpus, tmp_path / "run", model=stem, num_hidden_layers=5))
        model = build(stem, **dataclasses.asdict(model_config))
        assert memory.parameters_of(stem, model_config) == model.num_parameters()
        assert memory.least_memory(config, model_config) > 16 * model.num_parameters()


@pytest.fixture
def machine(monkeypatch):
    """Sets the memory that the machine has."""
    return lambda size: monkeypatch.setattr(memory, "memory_of", lambda device: int(size))


WIDE = {**SMALL, "model": "gpt-mha-rope", "hidden_size": 192, "block_size": 256, "global_batch_size": 24}


def refusal(arguments: list[str]) -> str:
    config, model_config = train.configure(arguments)
    with pytest.raises(ValueError, match="needs about") as found:
        memory.check_memory(config, model_config, CPU)
    return str(found.value)


def test_a_run_that_does_not_fit_is_told_what_does(corpus, tmp_path, machine):
    arguments = small_run(corpus, tmp_path / "run", **WIDE, micro_batch_size=24)
    config, model_config = train.configure(arguments)
    sizes = {rows: dataclasses.replace(config, micro_batch_size=rows) for rows in (8, 24)}
    needed = {rows: memory.memory_needed(changed, model_config, CPU).total for rows, changed in sizes.items()}
    there = 1.15 * (needed[8] + needed[24]) / 2
    machine(there)
    message = refusal(arguments)
    assert message.startswith("micro_batch_size=24 needs about ")
    advised = int(message.split("give --micro_batch_size=")[1].split()[0])
    assert 24 % advised == 0
    changed = dataclasses.replace(config, micro_batch_size=advised)
    memory.check_memory(changed, model_config, CPU)  # it does fit, and is not much too little
    assert memory.memory_needed(changed, model_config, CPU).total > 0.5 * there
    compiled = dataclasses.replace(config, compile=True)
    assert memory.memory_needed(compiled, model_config, CPU).activations < 0.5 * needed[24]


def test_where_no_micro_batch_fits_checkpointing_or_a_smaller_model_is_advised(corpus, tmp_path, machine):
    deep = {**WIDE, "num_hidden_layers": 24, "block_size": 1024, "micro_batch_size": 1}
    arguments = small_run(corpus, tmp_path / "run", **deep, compile=False)
    config, model_config = train.configure(arguments)
    plain, saving = (
        memory.memory_needed(dataclasses.replace(config, activation_checkpointing=on), model_config, CPU).total
        for on in (False, True)
    )
    assert plain > 1.3 * saving
    machine(1.1 * plain)
    assert "give --activation_checkpointing=True (about " in refusal(arguments)
    machine(0.9 * saving)
    assert "give a smaller model" in refusal(arguments)


def test_several_processes_of_a_machine_share_its_memory(monkeypatch):
    whole = memory.memory_of(CPU)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert memory.memory_of(CPU) == pytest.approx(whole / 4, rel=0.2)


def test_gradients_are_counted_once_where_micro_batches_accumulate_them(corpus, tmp_path):
    one, several = (
        train.configure(small_run(corpus, tmp_path / "run", global_batch_size=size, micro_batch_size=2))
        for size in (2, 4)
    )
    count = build("DDL-gpt-mha-rope", **dataclasses.asdict(one[1])).num_parameters()
    assert memory.memory_needed(*one, CPU).weights == 12 * count  # weights and AdamW's moments
    assert memory.memory_needed(*several, CPU).weights == 16 * count


def test_a_model_that_looks_at_its_values_is_trained_without_an_estimate(corpus, tmp_path, monkeypatch):
    looking = types.SimpleNamespace(Model=broken_streams.additive(write=broken_streams.Branching))
    monkeypatch.setitem(sys.modules, "model.looking-gpt", looking)
    monkeypatch.setattr("model.STEMS", [*STEMS, "looking-gpt"])
    monkeypatch.setattr(memory, "memory_of", lambda device: 2**28)  # so that it would be simulated
    arguments = small_run(corpus, tmp_path / "run", model="looking-gpt", hidden_size=300, max_steps=1)
    for more in (["--dry_run"], []):
        errors = call("train.py", *arguments, *more).stderr.decode()
        assert "whether the memory suffices is not known (DataDependentOutputException" in errors
    assert (tmp_path / "run" / "checkpoints").exists()


def test_parts_of_gradients_are_counted_under_fsdp(corpus, tmp_path, monkeypatch):
    def needed(engine, world):
        monkeypatch.setenv("WORLD_SIZE", str(world))
        keys = {"global_batch_size": 2 * world, "micro_batch_size": 2, "hidden_size": 96, "engine": engine}
        return memory.memory_needed(*train.configure(small_run(corpus, tmp_path / "run", **keys)), CPU)

    _, model_config = train.configure(small_run(corpus, tmp_path / "run", hidden_size=96))
    count = build("DDL-gpt-mha-rope", **dataclasses.asdict(model_config)).num_parameters()
    one, four, copies = needed("ddp", 1), needed("fsdp", 4), needed("ddp", 4)
    assert four.weights == one.weights // 4
    assert one.activations - four.activations == 3 * count  # of 4 bytes each
    assert copies.weights == one.weights + 4 * count  # DDP's buckets


@pytest.mark.skipif(sys.platform != "linux", reason="limits of address space")
def test_an_allocation_that_fails_ends_in_one_line(corpus, tmp_path):
    """A limit that the estimate does not see, as other processes' memory would be."""
    keys = {"block_size": 512, "hidden_size": 128, "ddl_value_channels": 16, "global_batch_size": 32}
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
