"""Steps whose loss or gradient is not finite: they are skipped, or end the run with a diagnosis."""

import math

import pytest
import torch
from helpers import SMALL, small_run
from in_process import call
from training_runs import CONSTANT_RATE, read_records, read_state, run_train

from model import build
from training import checkpoint, distributed
from utils.processes import World

# ---- steps that are skipped ----


def test_non_finite_steps_are_skipped_up_to_a_limit(corpus, tmp_path):
    """The limit is that of the whole run, also if it is resumed."""
    keys = {"embedding_init_std": 1e30, "checkpoint_interval": 1, "eval_interval": 9}
    arguments = small_run(corpus, tmp_path, **{**CONSTANT_RATE, **keys}, skip_nonfinite=3)
    assert "note: step 2 was skipped: its loss is" in run_train(*arguments, "--max_steps=2")
    assert "step 4: loss" in run_train(*arguments, exit_code=1)
    skipped_steps = [record["step"] for record in read_records(tmp_path) if record.get("skipped")]
    assert skipped_steps == [1, 2, 3]
    assert read_state(tmp_path)["skipped"] == 3


def test_the_parameter_with_a_gradient_that_is_not_finite_is_named():
    model = build("DDL-gpt-mha-rope", **SMALL)
    _, loss = model(torch.randint(0, 260, (2, 8)), torch.randint(0, 260, (2, 8)))
    loss.backward()
    model.transformer.h[1].mlp.c_proj.weight.grad[3, 2] = math.nan
    assert math.isnan(distributed.clip_grad_norm(model, 1.0))
    names = distributed.find_nonfinite_gradients(model, World(0, 1, torch.device("cpu")))
    assert names == ["transformer.h.1.mlp.c_proj.weight"]


def test_a_skipped_step_changes_neither_weights_nor_the_optimizer(corpus, tmp_path):
    """The learning rate makes the second step finite in its loss and not in its gradient."""
    arguments = small_run(
        corpus,
        tmp_path,
        learning_rate=1e30,
        warmup_steps=0,
        grad_clip=0.0,
        skip_nonfinite=9,
        checkpoint_interval=1,
        keep_last=9,
        eval_interval=9,
        max_steps=3,
    )
    run_train(*arguments)
    first, *later = checkpoint.list_checkpoints(tmp_path)
    assert len(later) == 2
    for file in ("model.safetensors", "optimizer.safetensors"):
        assert {(path / file).read_bytes() for path in later} == {(first / file).read_bytes()}


# ---- a loss that is not finite ----


@pytest.mark.parametrize(
    ("changes", "step"),
    [
        ({"embedding_init_std": 1e30}, 1),
        ({"learning_rate": 1e30, "warmup_steps": 0, "grad_clip": 0.0}, 2),
    ],
)
def test_a_diverged_run_ends_with_one_line_and_is_saved_before_the_step(
    corpus, tmp_path, changes, step
):
    result = call("train.py", *small_run(corpus, tmp_path, checkpoint_interval=1, **changes))
    assert result.returncode == 1
    [line] = result.stderr.decode().splitlines()
    assert f"step {step}: loss" in line
    assert "nan" in line
    assert "the gradient of transformer.wte.weight is not finite" in line
    assert str(tmp_path / "nonfinite") in line
    assert len(checkpoint.list_checkpoints(tmp_path)) == step - 1
    assert read_state(tmp_path / "nonfinite")["step"] == step - 1
