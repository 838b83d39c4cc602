"""Run by test_kernel_streams.py: compare a fused model under DDP and FSDP2 with the plain one."""

import copy
import tempfile
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from fused import check_close, set_num_processors
from models import TINY
from torch import nn

from model import build, kernels
from model.causality import move_parameters
from training.checkpoint import gather_tensors
from training.distributed import parallelize


def gradients(
    model: nn.Module, run: Callable, ids: torch.Tensor, targets: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return the gradients of a model by name, after a pass of `run`, which may wrap the model."""
    run(ids, targets)[1].backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def work(rank: int, folder: str) -> None:
    """Compare the gradients of both engines with those of the float64 model, on one of two ranks."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    set_num_processors(pytest.MonkeyPatch(), 1)
    world = SimpleNamespace(world_size=2, device=torch.device("cpu"), is_main=rank == 0)
    torch.manual_seed(0)
    model = move_parameters(build("DDL-gpt-mha-rope-CC-EC", **{**TINY, "num_hidden_layers": 1}))
    ids, targets = torch.randint(0, TINY["vocab_size"], (2, 2, 1, 3))
    exact = copy.deepcopy(model).double()
    expected = gradients(exact, exact, ids.flatten(0, 1), targets.flatten(0, 1))
    for engine in ("ddp", "fsdp"):
        fused = copy.deepcopy(model)
        kernels.use(fused, "on", "cpu")
        run, _ = parallelize(fused, world, engine=engine, compile=False)
        grads = gradients(fused, run, ids[rank], targets[rank])
        collected = gather_tensors(grads, world.is_main, copy=False)
        assert not world.is_main or collected.keys() == expected.keys()
        for name, gradient in collected.items():
            check_close(f"{engine} {name}", gradient, expected[name], 1e-4)
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(work, (folder,), nprocs=2, start_method="fork")
