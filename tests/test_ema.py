"""Averaged weights (ema_half_life): against a plain loop, in evaluations, and as a model."""

import json
import math
from pathlib import Path

import pytest
import torch
from helpers import SMALL, configure, small_run
from in_process import call
from training_runs import (
    CONSTANT_RATE,
    read_final_tensors,
    read_records,
    read_weights,
    run_train,
)

import model_folder
import train
from data import shards
from data.loader import ValidationBatches
from model import build
from training import checkpoint, setup
from training.ema import AveragedWeights

HALF_LIFE = 2
AVERAGED = {
    "ema_half_life": HALF_LIFE,
    "checkpoint_interval": 1,
    "keep_last": 99,
    "eval_interval": 1,
    "max_steps": 6,
}


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory) -> Path:
    """Train a run of six steps with averaged weights and a checkpoint of every step."""
    folder = tmp_path_factory.mktemp("runs") / "averaged"
    run_train(*small_run(corpus, folder, **AVERAGED))
    return folder


def read_averages(run: Path, step: int) -> dict[str, torch.Tensor]:
    return read_weights(run, step, checkpoint.EMA_FILE)


def assert_average(
    averages: dict[str, torch.Tensor],
    before: dict[str, torch.Tensor],
    weights: dict[str, torch.Tensor],
) -> None:
    """Assert that averages are those before, moved towards the weights by one step, in float64."""
    assert averages.keys() == weights.keys()
    decay = 0.5 ** (1 / HALF_LIFE)
    for name, average in averages.items():
        expected = decay * before[name].double() + (1 - decay) * weights[name].double()
        torch.testing.assert_close(average.double(), expected, rtol=1e-6, atol=1e-7)


# ---- the average ----


def test_averages_equal_a_plain_loop_in_float64(corpus, run, tmp_path):
    config, model_config = configure(small_run(corpus, tmp_path))
    model = setup.build_model(config, model_config, torch.device("cpu"))
    before = checkpoint.get_model_tensors(model)
    for step in range(1, 7):
        averages = read_averages(run, step)
        assert_average(averages, before=before, weights=read_weights(run, step))
        before = averages


def test_a_skipped_step_does_not_move_the_averages(corpus, tmp_path, monkeypatch):
    compute_gradients = train.compute_gradients

    def fail_in_step_4(run, batches):
        loss_sum, grad_norm = compute_gradients(run, batches)
        return (loss_sum * math.nan if run.state.step == 3 else loss_sum), grad_norm

    monkeypatch.setattr(train, "compute_gradients", fail_in_step_4)
    run_train(*small_run(corpus, tmp_path, **AVERAGED, skip_nonfinite=1))
    averages = [read_averages(tmp_path, step) for step in (3, 4, 5)]
    for name, average in averages[0].items():
        assert torch.equal(averages[1][name], average)
    # they differed from the weights, so that an update would have moved them
    assert_average(averages[2], before=averages[1], weights=read_weights(tmp_path, 5))


def test_a_run_that_is_resumed_with_the_key_starts_from_the_weights(corpus, tmp_path):
    keys = {**CONSTANT_RATE, "checkpoint_interval": 1}
    run_train(*small_run(corpus, tmp_path, **keys, max_steps=3))
    printed = run_train(*small_run(corpus, tmp_path, **keys, max_steps=4, ema_half_life=HALF_LIFE))
    assert "ema_half_life=2 (not None)" in printed
    assert_average(
        read_averages(tmp_path, 4),
        before=read_weights(tmp_path, 3),
        weights=read_weights(tmp_path, 4),
    )


# ---- evaluations ----


def test_training_is_the_same_with_averaged_weights(corpus, run, tmp_path):
    run_train(*small_run(corpus, tmp_path, **{**AVERAGED, "ema_half_life": None}))
    plain = read_final_tensors(tmp_path)
    tensors = read_final_tensors(run)
    assert {name: tensors[name] for name in plain} == plain
    records = read_records(run)
    for record in records:
        record.pop("ema_val_loss", None)
    assert records == read_records(tmp_path)


def test_evaluations_report_the_loss_of_the_averages(run, corpus):
    batches = ValidationBatches(shards.open_corpus(str(corpus)).val, 16, 257)
    ids, targets = batches.get(batches.spread(8, "all"), 8)
    evaluations = [record for record in read_records(run) if "val_loss" in record]
    assert [record["step"] for record in evaluations] == [1, 2, 3, 4, 5, 6]
    for record in evaluations:
        folder = run / "checkpoints" / f"step_{record['step']:08d}"
        for path, key in ((folder, "val_loss"), (folder / "ema", "ema_val_loss")):
            model, _, _ = model_folder.load_model(path, "cpu")
            _, loss = model(ids, targets)
            assert record[key] == pytest.approx(loss.item(), rel=1e-5)
        assert record["best_val_loss"] == min(r["val_loss"] for r in evaluations[: record["step"]])


def test_weights_and_averages_are_swapped_in_place():
    """CUDA graphs find the weights where they were."""
    model = build("DDL-gpt-mha-rope", **SMALL)
    averaged = AveragedWeights(model, HALF_LIFE)
    parameters = list(model.parameters())
    with torch.no_grad():
        for parameter in parameters:
            parameter.add_(1)
    weights = [parameter.detach().clone() for parameter in parameters]
    averages = [average.clone() for average in averaged.averages]
    addresses = [parameter.data_ptr() for parameter in parameters]
    with averaged.swapped_in():
        assert all(map(torch.equal, parameters, averages))
        assert [parameter.data_ptr() for parameter in parameters] == addresses
    assert all(map(torch.equal, parameters, weights))
    assert all(map(torch.equal, averaged.averages, averages))


# ---- the commands ----


def test_averages_are_exported_and_evaluated_beside_the_trained_weights(run, corpus, tmp_path):
    exported = tmp_path / "exported"
    assert call("export.py", checkpoint.find(run) / "ema", exported).returncode == 0
    weights = checkpoint.load_tensors(exported / "model.safetensors")
    averages = read_averages(run, 6)
    assert weights.keys() == averages.keys()
    for name, average in averages.items():
        assert torch.equal(weights[name], average)

    for command in (
        (checkpoint.find(run) / "ema", "--val"),
        (run, "--val"),
        (exported, f"--val={corpus}"),
    ):
        assert call("eval.py", *command, f"--out={tmp_path}").returncode == 0
    losses = {}
    for file in tmp_path.glob("results_*.json"):
        result = json.loads(file.read_text())
        losses[result["label"]] = result["validation"]["val_loss"]
    assert losses["averaged, step 6, averaged weights"] == losses["exported"]
    assert losses["averaged, step 6"] != losses["exported"]
