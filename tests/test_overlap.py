"""Gradients are summed over processes while the compiled backward pass goes on, and are the eager
ones.

Two gloo processes log the order in which pieces of the backward pass run and buckets are summed.
"""

import copy
import functools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from in_process import run_on_ranks
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from model import build, kernels
from training import distributed
from utils.processes import World

SIZE = {
    "vocab_size": 64,
    "block_size": 4,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "head_dim": 64,
    "hidden_size": 192,
}


def logging_backend(log: list[str]) -> Callable:
    """Return a backend of torch.compile that logs when a piece of the backward pass has run."""
    from functorch.compile import make_boxed_func

    def backward(graph, _):
        def run(*args):
            result = graph(*args)
            log.append("piece")
            return result

        return make_boxed_func(run)

    return aot_autograd(
        fw_compiler=lambda graph, _: make_boxed_func(graph.forward), bw_compiler=backward
    )


def gradients(model: nn.Module, run: nn.Module, batches: list) -> dict[str, torch.Tensor]:
    """Return the gradients of several micro-batches, averaged over the ranks with the last one.

    run: the model as DDP wraps it
    """
    for number, (ids, targets) in enumerate(batches):
        with distributed.gradient_sync(run, number == len(batches) - 1):
            run(ids, targets)[1].backward()
    result = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return result


def measure(world: World, model_name: str, fused: str) -> dict:
    """Return the log of the last backward pass, and the differences from the eager model."""
    log = []
    torch.manual_seed(0)
    plain = build(model_name, **SIZE)
    model = copy.deepcopy(plain)
    kernels.use(model, fused, "cpu")
    batches = [tuple(pair) for pair in torch.randint(0, 64, (2, 3, 2, 1, 4))[world.rank]]
    compile_logged = functools.partial(torch.compile, backend=logging_backend(log))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", compile_logged)
        # so that a small model has several buckets
        small_buckets = functools.partial(distributed.DistributedDataParallel, bucket_cap_mb=1)
        patch.setattr(distributed, "DistributedDataParallel", small_buckets)
        run, eval_model = distributed.parallelize(model, world, engine="ddp", compile=True)
        eager, _ = distributed.parallelize(plain, world, engine="ddp", compile=False)

    def log_and_sum(group, bucket):
        log.append("bucket")
        return allreduce_hook(group, bucket)

    run.register_comm_hook(None, log_and_sum)
    for _ in range(2):  # the first pass rebuilds the buckets
        log.clear()
        compiled_gradients = gradients(model, run, batches)
        eager_gradients = gradients(plain, eager, batches)
    errors = [
        (compiled_gradients[name] - gradient).abs().max() / gradient.abs().max().clamp(min=1e-2)
        for name, gradient in eager_gradients.items()
    ]
    with torch.no_grad():
        losses = [forward(*batches[0])[1].item() for forward in (eval_model, plain)]
    num_pieces = log.count("piece") // len(batches)
    # Only the last micro-batch sums; the log of the others holds nothing but their pieces.
    last_start = (len(batches) - 1) * num_pieces
    return {
        "events": log[last_start:],
        "alone": "bucket" not in log[:last_start],
        "worst": max(errors).item(),
        "losses": losses,
    }


def work(world: World, folder: Path, model_name: str, fused: str) -> None:
    """Measure on one of two ranks; rank 0 writes the result to a file."""
    measurement = measure(world, model_name, fused)
    if world.is_main:
        (folder / "measured.json").write_text(json.dumps(measurement))


CC_EC = "DDL-gpt-mha-rope-CC-EC"


@pytest.mark.parametrize(
    ("model_name", "fused"),
    [
        ("DDL-vdim1-gpt-mha-rope", "off"),
        pytest.param(CC_EC, "off", marks=pytest.mark.slow),
        pytest.param(CC_EC, "on", marks=pytest.mark.slow),
    ],
)
def test_buckets_are_summed_between_the_pieces_of_the_backward_pass(model_name, fused, tmp_path):
    """One after each piece, with the plain operations and with the fused kernels, interpreted."""
    run_on_ranks(work, 2, tmp_path, model_name, fused)
    measured = json.loads((tmp_path / "measured.json").read_text())
    events = measured["events"]
    assert len(events) >= 4
    assert events == ["piece", "bucket"] * (len(events) // 2)
    assert measured["alone"]  # nothing is summed before the last pass of an accumulated batch
    assert measured["worst"] < 1e-4  # of the largest gradient of the same parameter, or of 0.01
    assert measured["losses"][0] == pytest.approx(measured["losses"][1], abs=1e-5)
