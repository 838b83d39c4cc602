"""Compare training on several processes with training on one: losses, weights and bytes sent.

    python -m research.benchmarks.processes [--json=results/processes_cpu.json]

Each row trains a small model for 20 steps of 8 sequences with gloo on CPUs, and stores the largest
differences from one process with the same settings: of a loss, and of a weight relative to the
largest weight of its parameter. Collectives and bytes are those that a rank starts in the last
step: the sizes of the tensors that it passes, whatever the algorithm sends.
"""

import argparse
import collections
import json
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from model import build
from training import distributed, optimizer
from training.config import TrainConfig
from utils import files

NUM_STEPS = 20
BATCH_SIZE = 8
MICRO_BATCH_SIZE = 1
SIZE = {
    "vocab_size": 64,
    "block_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "head_dim": 16,
    "hidden_size": 32,
}
STREAMS = (
    "gpt-mha-rope",
    "DDL-gpt-mha-rope-CC-EC",
    "mHC-gpt-mha-rope",
    "MUDD-gpt-mha-rope",
    "DenseFormer-gpt-mha-rope",
)


class Case(NamedTuple):
    """How a model is trained."""

    model: str
    optimizer: str
    dtype: str
    engine: str
    num_processes: int
    shard_size: int | None = None


ENGINES = (
    ("ddp", 2, None),
    ("fsdp", 2, None),
    ("ddp", 4, None),
    ("fsdp", 4, None),
    ("fsdp", 4, 2),
)


class Traffic(TorchDispatchMode):
    """Counts the collectives inside, and the bytes of the tensors that they are given."""

    def __init__(self):
        super().__init__()
        self.counts = collections.Counter()
        self.bytes = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d" and not func.__name__.startswith(("barrier", "monitored")):
            name = func.__name__.partition(".")[0].strip("_")
            self.add(name, sum(t.nbytes for t in tree_leaves(args) if torch.is_tensor(t)))
        return func(*args, **(kwargs or {}))

    def add(self, name: str, num_bytes: int) -> None:
        self.counts[name] += 1
        self.bytes[name] += num_bytes


def train(case: Case, rank: int, folder: str) -> dict:
    """Train and return losses, full weights and the traffic of the last step."""
    world = distributed.World(rank, case.num_processes, torch.device("cpu"))
    is_bfloat16 = case.dtype == "bfloat16"
    torch.manual_seed(0)
    model = build(case.model, **SIZE)
    train_model, _ = distributed.parallelize(
        model,
        world,
        engine=case.engine,
        compile=False,
        bfloat16=is_bfloat16,
        shard_size=case.shard_size,
    )
    config = TrainConfig(
        model=case.model,
        optimizer=case.optimizer,
        learning_rate=2e-3,
        max_steps=NUM_STEPS,
        warmup_steps=2,
    )
    optimizers = optimizer.build_optimizers(model, config, getattr(torch, case.dtype))
    generator = torch.Generator().manual_seed(1)
    losses = []
    traffic = Traffic()
    if isinstance(train_model, DistributedDataParallel):
        # DDP reduces its buckets in C++, where no dispatch mode sees them
        train_model.register_comm_hook(traffic, count_bucket)
    for step in range(NUM_STEPS):
        optimizer.set_learning_rates(optimizers, step, config)
        shape = (BATCH_SIZE, SIZE["block_size"] + 1)
        batch = torch.randint(0, SIZE["vocab_size"], shape, generator=generator)
        own_batch = batch.chunk(case.num_processes)[rank]
        micro_batches = own_batch.split(MICRO_BATCH_SIZE)
        traffic.counts.clear()
        traffic.bytes.clear()
        loss_sum = 0.0
        with traffic:
            for index, ids in enumerate(micro_batches):
                is_last = index == len(micro_batches) - 1
                with distributed.gradient_sync(train_model, is_last, True):
                    with torch.autocast("cpu", torch.bfloat16, enabled=is_bfloat16):
                        _, loss = train_model(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
                    (loss / len(micro_batches)).backward()
                loss_sum += loss.item()
            distributed.average_replicated_gradients(model, world)
            distributed.clip_grad_norm(model, 1.0)
            for each_optimizer in optimizers:
                each_optimizer.step()
                each_optimizer.zero_grad()
        [total] = world.sum(loss_sum)
        losses.append(total / BATCH_SIZE)
    weights = {
        name: parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        for name, parameter in model.named_parameters()
    }
    return {
        "losses": losses,
        "weights": weights,
        "collectives": dict(traffic.counts),
        "bytes": dict(traffic.bytes),
    }


def count_bucket(traffic: Traffic, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Reduce a bucket of DDP as it would by itself, and count it."""
    gradient = bucket.buffer()
    traffic.add("allreduce", gradient.nbytes)
    gradient.div_(dist.get_world_size())
    work = dist.all_reduce(gradient, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def train_rank(rank: int, case: Case, folder: str) -> None:
    torch.set_num_threads(1)
    if case.num_processes > 1:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/rendezvous",
            rank=rank,
            world_size=case.num_processes,
        )
    result = train(case, rank, folder)
    if rank == 0:
        torch.save(result, Path(folder) / "result.pt")
    if case.num_processes > 1:
        dist.barrier()
        dist.destroy_process_group()


def run(case: Case) -> dict:
    """Train with the processes of a case."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(
            train_rank, (case, folder), nprocs=case.num_processes, start_method="fork"
        )
        return torch.load(Path(folder) / "result.pt")


def compare(result: dict, baseline: dict) -> tuple[float, float]:
    """Return the largest difference of a loss, and of a weight relative to its parameter."""
    loss_difference = max(abs(a - b) for a, b in zip(result["losses"], baseline["losses"]))
    weight_difference = max(
        ((result["weights"][name] - weight).abs().max() / weight.abs().max()).item()
        for name, weight in baseline["weights"].items()
    )
    return loss_difference, weight_difference


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, help="file to write the rows to")
    parser.add_argument("--models", default=",".join(STREAMS), help="models, comma-separated")
    arguments = parser.parse_args()
    rows = []
    for model in arguments.models.split(","):
        for optimizer_name in ("adamw", "muon"):
            for dtype in ("float32", "bfloat16"):
                baseline = run(Case(model, optimizer_name, dtype, "ddp", 1))
                for engine, num_processes, shard_size in ENGINES:
                    case = Case(model, optimizer_name, dtype, engine, num_processes, shard_size)
                    result = run(case)
                    loss_difference, weight_difference = compare(result, baseline)
                    row = {
                        **case._asdict(),
                        "loss_difference": loss_difference,
                        "weight_difference": weight_difference,
                        "collectives": sum(result["collectives"].values()),
                        "bytes": sum(result["bytes"].values()),
                        "bytes_by_collective": result["bytes"],
                    }
                    rows.append(row)
                    print(json.dumps(row), flush=True)
                    if arguments.json is not None:
                        files.write_text(arguments.json, json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
