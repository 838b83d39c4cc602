"""Training in float16: the loss scale, and steps that are skipped because their gradient overflows."""

import math
from pathlib import Path

import pytest
import torch
from helpers import configure, small_run
from in_process import train_in_processes
from training_runs import (
    CONSTANT_RATE,
    change_saved_state,
    read_final_tensors,
    read_records,
    read_state,
    read_weights,
    run_train,
)

from training import checkpoint, optimizer, setup
from training.batches import open_data
from training.checkpoint import TrainState
from training.distributed import StepStats
from training.loss_scale import LossScaler

# so large an embedding that the first steps overflow
OVERFLOWING = {"dtype": "float16", "embedding_init_std": 1}


def train(corpus: Path, run: Path, num_ranks: int = 1, **keys) -> list[dict]:
    """Train a small run and return its records of training steps."""
    arguments = small_run(corpus, run, **keys)
    if num_ranks > 1:
        train_in_processes(num_ranks, arguments, run.with_name(f"{run.name}_log"))
    else:
        run_train(*arguments)
    return [record for record in read_records(run) if "loss" in record or "skipped" in record]


def test_the_loss_scale_is_that_of_torchs_grad_scaler():
    scaler = torch.amp.GradScaler("cpu")
    parameter = torch.nn.Parameter(torch.zeros(1))
    sgd = torch.optim.SGD([parameter])
    state = TrainState()
    own_scaler = LossScaler(state)
    # rare enough for the scale to grow in between
    overflows = torch.rand(9000, generator=torch.Generator().manual_seed(3)) < 1 / 2500
    scales = []
    for has_overflow in overflows.tolist():
        scaler.scale(torch.zeros(1))  # which sets the initial scale
        assert own_scaler.scale == scaler.get_scale()
        parameter.grad = torch.tensor([math.inf if has_overflow else 1.0])
        scaler.unscale_(sgd)
        scaler.step(sgd)
        scaler.update()
        grad_norm = math.inf if has_overflow else 1.0
        own_scaler.update(StepStats(loss_sum=1.0, num_stop_requests=0.0, grad_norm=grad_norm))
        scales.append(state.loss_scale)
    assert min(scales) < 2**16 < max(scales)


def test_a_run_in_float16_is_a_plain_loop_with_torchs_grad_scaler(corpus, tmp_path):
    keys = {**OVERFLOWING, "max_steps": 8, "checkpoint_interval": 8, "grad_clip": 0.5}
    records = train(corpus, tmp_path / "run", **keys)

    config, model_config = configure(small_run(corpus, tmp_path / "other", **keys))
    model = setup.build_model(config, model_config, torch.device("cpu"))
    [adamw] = optimizer.build_optimizers(model, config)
    batches = open_data(config, model_config).train
    scaler = torch.amp.GradScaler("cpu")
    norms = []
    scales = []
    for step in range(8):
        optimizer.set_learning_rates([adamw], step, config)
        for first in (0, 2):
            ids, targets = batches.get(step, first, 2)
            with torch.autocast("cpu", torch.float16):
                _, loss = model(ids, targets)
            scaler.scale(loss / 2).backward()
        scales.append(scaler.get_scale())
        scaler.unscale_(adamw)
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        scaler.step(adamw)
        scaler.update()
        adamw.zero_grad()

    assert [record["loss_scale"] for record in records] == scales
    is_skipped = [not math.isfinite(norm) for norm in norms]
    assert set(is_skipped) == {False, True}
    assert [record.get("skipped", False) for record in records] == is_skipped
    finite_norms = [norm for norm in norms if math.isfinite(norm)]
    assert [record["grad_norm"] for record in records if "loss" in record] == finite_norms
    saved = read_weights(tmp_path / "run")
    for name, tensor in checkpoint.get_model_tensors(model).items():
        assert torch.equal(saved[name], tensor), name


def test_both_engines_skip_the_same_steps(corpus, tmp_path):
    """Muon and AdamW skip them together."""
    keys = {**OVERFLOWING, "optimizer": "muon"}
    records = [
        train(corpus, tmp_path / engine, num_ranks=2, engine=engine, **keys)
        for engine in ("ddp", "fsdp")
    ]
    # the norms are added up in another order
    for key in ("loss", "loss_scale", "skipped"):
        assert [record.get(key) for record in records[0]] == [
            record.get(key) for record in records[1]
        ]
    assert {"skipped" in record for record in records[0]} == {False, True}


# ---- runs that end ----


@pytest.fixture
def run(corpus, tmp_path) -> Path:
    """Train two steps in float16."""
    train(corpus, tmp_path / "run", **CONSTANT_RATE, max_steps=2, dtype="float16")
    return tmp_path / "run"


def resume(corpus: Path, run: Path, scale: float, exit_code: int = 0, **keys) -> str:
    """Resume a run with another loss scale."""
    change_saved_state(run, lambda state: state.update(loss_scale=scale))
    keys = {**CONSTANT_RATE, "dtype": "float16", "max_steps": 40, **keys}
    return run_train(*small_run(corpus, run, **keys), exit_code=exit_code)


def test_a_run_ends_with_the_twentieth_overflow_in_a_row(corpus, run):
    before = read_final_tensors(run)
    printed = resume(corpus, run, scale=2.0**100, skip_nonfinite=99, exit_code=1)
    assert "train.py: step 22: loss 5." in printed
    assert [record["step"] for record in read_records(run) if "skipped" in record][-1] == 21
    assert read_final_tensors(run / "nonfinite") == before


def test_overflows_are_no_nonfinite_steps(corpus, run):
    resume(corpus, run, scale=2.0**30, max_steps=24)
    skipped = [record["loss_scale"] for record in read_records(run) if "skipped" in record]
    assert skipped[0] == 2.0**30
    assert len(skipped) > 5
    state = read_state(run)
    assert state["skipped"] == 0
    assert state["loss_scale"] == skipped[-1] / 2


def test_a_loss_that_is_not_finite_ends_a_run_in_float16(corpus, tmp_path):
    keys = {"dtype": "float16", "embedding_init_std": 1e30}
    printed = run_train(*small_run(corpus, tmp_path / "run", **keys), exit_code=1)
    assert "step 1: loss nan" in printed
