"""Run by test_overlap.py: in which order pieces of the compiled backward pass run and buckets are
summed, on two gloo processes, and whether gradients and losses are those of the eager model.
"""

import copy
import functools
import json
import sys
import tempfile
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from model import build, kernels
from training import distributed

SIZE = {
    "vocab_size": 64,
    "block_size": 4,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "head_dim": 64,
}
SIZE |= {"hidden_size": 192}


def backend(log: list):
    """torch.compile's backend that notes when a piece of the backward pass has run."""
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


def gradients(model, run, batches) -> dict:
    """Of an accumulated batch: averaged over the processes with its last micro-batch."""
    for number, (ids, targets) in enumerate(batches):
        with distributed.gradient_sync(run, number == len(batches) - 1):
            run(ids, targets)[1].backward()
    result = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return result


def measure(rank: int, stem: str, fused: str) -> dict:
    world, log = SimpleNamespace(world_size=2, device=torch.device("cpu")), []
    torch.manual_seed(0)
    plain = build(stem, **SIZE)
    model = copy.deepcopy(plain)
    kernels.use(model, fused, "cpu")
    batches = [tuple(pair) for pair in torch.randint(0, 64, (2, 3, 2, 1, 4))[rank]]
    torch.compile = functools.partial(COMPILE, backend=backend(log))
    run, evaluated = distributed.parallelize(model, world, engine="ddp", compile=True)
    eager, _ = distributed.parallelize(plain, world, engine="ddp", compile=False)

    def summed(group, bucket):
        log.append("bucket")
        return allreduce_hook(group, bucket)

    run.register_comm_hook(None, summed)
    for _ in range(2):  # the first pass rebuilds the buckets
        log.clear()
        found, wanted = gradients(model, run, batches), gradients(plain, eager, batches)
    largest = {name: gradient.abs().max().clamp(min=1e-2) for name, gradient in wanted.items()}
    worst = max(
        ((found[name] - wanted[name]).abs().max() / largest[name]).item() for name in wanted
    )
    with torch.no_grad():
        losses = [each(*batches[0])[1].item() for each in (evaluated, plain)]
    pieces = log.count("piece") // len(batches)
    # events of the passes before the last one, if they sum nothing
    before = (len(batches) - 1) * pieces
    alone = "bucket" not in log[:before]
    return {"events": log[before:], "alone": alone, "worst": worst, "losses": losses}


def work(rank: int, folder: str, stem: str, fused: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    torch.set_num_threads(1)
    # so that a small model has several buckets
    DDP.__init__ = functools.partialmethod(DDP.__init__, bucket_cap_mb=1)
    measured = measure(rank, stem, fused)
    if rank == 0:
        print(json.dumps(measured))
    dist.barrier()
    dist.destroy_process_group()


COMPILE, DDP = torch.compile, distributed.DistributedDataParallel

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(
            work, (folder, *sys.argv[1:]), nprocs=2, start_method="fork"
        )
