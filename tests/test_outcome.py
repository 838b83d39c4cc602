"""Steps whose loss or gradient is not finite: the device skips them as the program does."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from helpers import SMALL, small_run
from in_process import call
from torch import nn

from model import build
from training import checkpoint, distributed, metrics, optimizer
from training.distributed import StepStats, World

FINITE = torch.tensor([9.0, 0.0, 2.5], dtype=torch.float64)
TIMINGS = ("seconds", "tokens_per_second", "memory")


# ---- one step ----


class Trained(NamedTuple):
    """A model and its fused AdamW."""

    model: nn.Module
    optimizers: list[torch.optim.Optimizer]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Copies of the weights and of the optimizer's state."""
        tensors = {
            **self.model.state_dict(),
            **optimizer.state_by_parameter_name(self.optimizers),
        }
        return {name: tensor.clone() for name, tensor in tensors.items()}


@pytest.fixture
def build_trained():
    """Return a function that builds the same model with the same gradient every time."""

    def build_trained() -> Trained:
        torch.manual_seed(0)
        model = build("DDL-gpt-mha-rope", **SMALL)
        config = SimpleNamespace(
            optimizer="adamw",
            learning_rate=1e-2,
            weight_decay=0.1,
            mixing_decay=True,
            beta1=0.9,
            beta2=0.95,
        )
        optimizers = optimizer.build_optimizers(model, config)
        ids = torch.randint(0, 260, (2, 8))
        _, loss = model(ids, ids)
        loss.backward()
        return Trained(model, optimizers)

    return build_trained


def assert_equal(tensors: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> None:
    assert tensors.keys() == others.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, others[name]), name


def test_a_finite_step_is_that_of_the_optimizer(build_trained):
    trained = build_trained()
    plain = build_trained()
    for _ in range(3):
        assert optimizer.step_if_finite(trained.optimizers, StepStats(FINITE), on_device=True)
        plain.optimizers[0].step()
    assert_equal(trained.tensors(), plain.tensors())


@pytest.mark.parametrize("num_steps", [0, 2])
def test_a_skipped_step_leaves_no_trace(build_trained, num_steps):
    trained = build_trained()
    for _ in range(num_steps):
        trained.optimizers[0].step()
    tensors = trained.tensors()
    for parameter in trained.model.parameters():
        parameter.grad.fill_(math.nan)
    stats = StepStats(FINITE * math.nan)
    assert not optimizer.step_if_finite(trained.optimizers, stats, on_device=True)
    assert_equal(trained.tensors(), tensors)
    assert not hasattr(trained.optimizers[0], "found_inf")


def test_step_stats_are_the_loss_the_requests_to_stop_and_the_gradient_norm():
    world = World(0, 1, torch.device("cpu"))
    stats = distributed.all_reduce_step_stats(torch.tensor(9.0), torch.tensor(2.5), True, world)
    numbers = distributed.StepNumbers(loss_sum=9.0, num_stop_requests=1.0, grad_norm=2.5)
    assert stats.wait() == numbers


# ---- whole runs: with engine=fsdp the program decides, with engine=ddp the device ----


HUGE_WEIGHTS = {"embedding_init_std": 1e30}
HUGE_STEPS = {"learning_rate": 1e30, "warmup_steps": 0, "grad_clip": 0.0}
FAILING_RUNS = {
    "ends in the first step": {**HUGE_WEIGHTS, "checkpoint_interval": 1},
    "ends later": {**HUGE_STEPS, "checkpoint_interval": 1},
    "skips, then ends": {**HUGE_STEPS, "skip_nonfinite": 2},
}
SKIPPING_RUN = {**HUGE_WEIGHTS, "skip_nonfinite": 9, "max_steps": 3}


class Outcome(NamedTuple):
    """All that a run leaves, but for its timings."""

    exit_code: int
    message: str
    records: str  # of metrics.jsonl, as text, because nan is not equal to itself
    tensors: dict[str, bytes]  # the tensor files of every checkpoint by path
    diagnosis: dict | None


def train(corpus: Path, out_dir: Path, engine: str, keys: dict) -> Outcome:
    arguments = small_run(corpus, out_dir, eval_full=False, engine=engine, **keys)
    result = call("train.py", *arguments)
    records = [
        {key: value for key, value in record.items() if key not in TIMINGS}
        for record in metrics.read(out_dir / "metrics.jsonl")
    ]
    checkpoints = sorted(path.parent for path in out_dir.rglob("SHA256SUMS"))
    tensors = {
        f"{folder.relative_to(out_dir)}/{file}": (folder / file).read_bytes()
        for folder in checkpoints
        for file in ("model.safetensors", "optimizer.safetensors")
    }
    diagnosis_file = out_dir / "nonfinite" / "diagnosis.json"
    diagnosis = json.loads(diagnosis_file.read_text()) if diagnosis_file.exists() else None
    message = result.stderr.decode().replace(str(out_dir), "RUN")
    return Outcome(result.returncode, message, repr(records), tensors, diagnosis)


@pytest.mark.parametrize("name", FAILING_RUNS)
def test_a_run_fails_alike_whoever_decides(corpus, tmp_path, name):
    by_device = train(corpus, tmp_path / "ddp", "ddp", FAILING_RUNS[name])
    by_program = train(corpus, tmp_path / "fsdp", "fsdp", FAILING_RUNS[name])
    assert by_device.exit_code == 1
    assert by_device.diagnosis is not None
    assert by_device == by_program
    for engine in ("ddp", "fsdp"):
        folder = tmp_path / engine / "nonfinite"
        assert checkpoint.find(folder).is_relative_to(folder / "checkpoints")


def test_a_run_skips_its_first_steps_alike_whoever_decides(corpus, tmp_path):
    by_device = train(corpus, tmp_path / "ddp", "ddp", SKIPPING_RUN)
    by_program = train(corpus, tmp_path / "fsdp", "fsdp", SKIPPING_RUN)
    assert by_device.exit_code == 0
    assert by_device.diagnosis is None
    assert by_device == by_program
