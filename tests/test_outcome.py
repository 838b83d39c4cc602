"""A step whose loss or gradient is not finite, left out by the device as on a GPU, and by the
program; on a CPU.
"""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from helpers import SMALL, small_run
from in_process import call

from model import build
from training import checkpoint, distributed, metrics, optimizer
from training.distributed import StepStats, World

ALONE = World(0, 1, torch.device("cpu"))
KEYS = {
    "optimizer": "adamw",
    "learning_rate": 1e-2,
    "weight_decay": 0.1,
    "beta1": 0.9,
    "beta2": 0.95,
}


def made():
    """A model with its gradient, and fused AdamW."""
    torch.manual_seed(0)
    model = build("DDL-gpt-mha-rope", **SMALL)
    optimizers = optimizer.build_optimizers(model, SimpleNamespace(**KEYS))
    ids = torch.randint(0, 260, (2, 8))
    model(ids, ids)[1].backward()
    return model, optimizers


def everything(model, optimizers) -> dict:
    tensors = {**model.state_dict(), **optimizer.state_by_parameter_name(optimizers)}
    return {name: tensor.clone() for name, tensor in tensors.items()}


def same(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


FINITE = torch.tensor([9.0, 0.0, 2.5], dtype=torch.float64)


def test_a_step_that_is_wanted_is_the_step():
    (model, optimizers), (plain, plainly) = made(), made()
    for _ in range(3):
        assert optimizer.step_if_finite(optimizers, StepStats(FINITE), on_device=True)
        plainly[0].step()
    assert same(everything(model, optimizers), everything(plain, plainly))


@pytest.mark.parametrize("before", [0, 2])
def test_a_step_that_is_not_wanted_leaves_no_trace(before):
    model, optimizers = made()
    for _ in range(before):
        optimizers[0].step()
    kept = everything(model, optimizers)
    for p in model.parameters():
        p.grad.fill_(math.nan)
    assert not optimizer.step_if_finite(optimizers, StepStats(FINITE * math.nan), on_device=True)
    assert same(everything(model, optimizers), kept)
    assert not hasattr(optimizers[0], "found_inf")


def test_what_is_summed_is_start_reading():
    stats = distributed.all_reduce_step_stats(torch.tensor(9.0), torch.tensor(2.5), True, ALONE)
    assert stats.wait() == [9.0, 1.0, 2.5]


CASES = {
    "ends in the first step": ({"embedding_init_std": 1e30, "checkpoint_interval": 1}, 1),
    "ends later": (
        {"learning_rate": 1e30, "warmup_steps": 0, "grad_clip": 0.0, "checkpoint_interval": 1},
        1,
    ),
    "skips": ({"learning_rate": 1e30, "warmup_steps": 0, "grad_clip": 0.0, "skip_nonfinite": 2}, 1),
    "skips the first steps": ({"embedding_init_std": 1e30, "skip_nonfinite": 9, "max_steps": 3}, 0),
}


@pytest.mark.parametrize("case", CASES)
def test_the_device_s_decision_is_the_program_s(corpus, tmp_path, case):
    """Exit code, message, diagnosis, metrics and every tensor of every checkpoint: with
    `engine=fsdp` the program decides.
    """
    changes, code = CASES[case]
    messages, found = [], []
    for engine in ("ddp", "fsdp"):
        out = tmp_path / engine
        result = call(
            "train.py", *small_run(corpus, out, **{"eval_full": False, **changes}, engine=engine)
        )
        assert result.returncode == code
        messages.append(result.stderr.decode().replace(str(out), "RUN"))
        diagnosis = out / "nonfinite" / "diagnosis.json"
        assert diagnosis.exists() == bool(code)
        lines = [{k: v for k, v in line.items() if k not in ("seconds", "tokens_per_second", "memory")}
            for line in metrics.read(out / "metrics.jsonl")]  # fmt: skip
        folders = sorted(path.parent for path in out.rglob("SHA256SUMS"))
        tensors = {f"{folder.relative_to(out)}/{file}": (folder / file).read_bytes()
            for folder in folders for file in ("model.safetensors", "optimizer.safetensors")}  # fmt: skip
        found.append((json.loads(diagnosis.read_text()) if code else None, repr(lines), tensors))
        if code:
            assert checkpoint.find(out / "nonfinite").parent.parent == out / "nonfinite"
    assert messages[0] == messages[1]
    assert found[0] == found[1]


def test_utilisation_counts_six_flops_a_parameter_and_attention():
    """6 N + 12 L d T (arXiv 2204.02311, appendix B), of two blocks of width 12 over 16 tokens."""
    model = build("gpt-mha-rope", **SMALL)
    assert (SMALL["num_hidden_layers"], SMALL["hidden_size"], SMALL["block_size"]) == (2, 12, 16)
    assert metrics.nominal_flops_per_token(model) == 6 * model.num_parameters() + 12 * 2 * 12 * 16
