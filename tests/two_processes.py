"""Run by test_kernel_streams.py: compare a fused model under DDP and FSDP2 with the plain one."""

import copy
from collections.abc import Callable

import pytest
import torch
from fused import check_close, set_num_processors
from in_process import run_on_ranks
from models import TINY
from torch import nn

from model import build, kernels
from model.causality import move_parameters
from training.checkpoint import gather_tensors
from training.distributed import parallelize
from utils.processes import World


def gradients(
    model: nn.Module, run: Callable, ids: torch.Tensor, targets: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return the gradients of a model by name, after a pass of `run`, which may wrap the model."""
    run(ids, targets)[1].backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def compare_engines(world: World) -> None:
    """Compare the gradients of both engines with those of the float64 model, on one of two ranks."""
    set_num_processors(pytest.MonkeyPatch(), 1)
    torch.manual_seed(0)
    model = move_parameters(build("DDL-gpt-mha-rope-CC-EC", **{**TINY, "num_hidden_layers": 1}))
    ids, targets = torch.randint(0, TINY["vocab_size"], (2, 2, 1, 3))
    exact = copy.deepcopy(model).double()
    expected = gradients(exact, exact, ids.flatten(0, 1), targets.flatten(0, 1))
    for engine in ("ddp", "fsdp"):
        fused = copy.deepcopy(model)
        kernels.use(fused, "on", "cpu")
        run, _ = parallelize(fused, world, engine=engine, compile=False)
        complete = gather_tensors(gradients(fused, run, ids[world.rank], targets[world.rank]))
        assert not world.is_main or complete.keys() == expected.keys()
        for name, gradient in complete.items():
            check_close(f"{engine} {name}", gradient, expected[name], 1e-4)


if __name__ == "__main__":
    run_on_ranks(compare_engines, 2)
