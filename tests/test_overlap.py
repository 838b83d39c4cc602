"""Gradients are summed over processes while the compiled backward pass goes on, and are the eager
ones.

Two gloo processes log the order in which pieces of the backward pass run and buckets are summed.
"""

import copy
import functools
from collections.abc import Callable

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


def check_overlap(world: World, model_name: str, fused: str) -> None:
    """Compare a compiled model with the eager one, on one of two ranks."""
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

    # the last micro-batch alone sums, one bucket after each piece
    num_pieces = log.count("piece") // len(batches)
    assert num_pieces > 1
    assert log == ["piece"] * num_pieces * 2 + ["piece", "bucket"] * num_pieces
    for name, gradient in eager_gradients.items():
        scale = gradient.abs().max().clamp(min=1e-2)
        assert (compiled_gradients[name] - gradient).abs().max() < 1e-4 * scale
    with torch.no_grad():
        torch.testing.assert_close(eval_model(*batches[0])[1], plain(*batches[0])[1])


CC_EC = "DDL-gpt-mha-rope-CC-EC"


@pytest.mark.parametrize(
    ("model_name", "fused"),
    [
        ("DDL-vdim1-gpt-mha-rope", "off"),
        pytest.param(CC_EC, "off", marks=pytest.mark.slow),
        pytest.param(CC_EC, "on", marks=pytest.mark.slow),  # the fused kernels, interpreted
    ],
)
def test_buckets_are_summed_between_the_pieces_of_the_backward_pass(model_name, fused):
    run_on_ranks(check_overlap, 2, model_name, fused)
