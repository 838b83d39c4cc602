"""The estimate of the traffic, against the collectives that processes call."""

import os
import re
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from in_process import call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from model import build
from training import distributed, optimizer, traffic
from training.distributed import World
from training.settings import configure

MODEL = {
    "model": "DDL-gpt-mha-rope",
    "vocab_size": 64,
    "block_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "head_dim": 8,
    "hidden_size": 16,
}
NUM_MICRO_BATCHES = 3


def make_configs(num_processes: int, **keys):
    settings = {
        **MODEL,
        "device": "cpu",
        "compile": False,
        "micro_batch_size": 1,
        "global_batch_size": NUM_MICRO_BATCHES * num_processes,
        **keys,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORLD_SIZE", str(num_processes))
        return configure([f"--{key}={value}" for key, value in settings.items()])


class TrafficRecorder(TorchDispatchMode):
    """Count what the collectives inside would send in rings, in bytes."""

    def __init__(self):
        super().__init__()
        self.num_bytes = 0.0

    def __torch_dispatch__(self, operator, types, arguments=(), keywords=None):
        name = str(operator)
        if name.startswith("c10d."):
            self.num_bytes += self.count(name, arguments)
        return operator(*arguments, **(keywords or {}))

    def count(self, name: str, arguments: tuple) -> float:
        tensors = [leaf for leaf in tree_leaves(arguments) if torch.is_tensor(leaf)]
        sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
        if re.search("allgather|reduce_scatter", name):
            # of the input and output, the larger has everything
            return max(sizes) - min(sizes)
        # whose messages go to all processes of a group
        groups = [leaf for leaf in arguments if isinstance(leaf, torch.ScriptObject)]
        num_processes = dist.ProcessGroup.unbox(groups[0]).size()
        ring = (num_processes - 1) / num_processes
        if "allreduce" in name:
            return 2 * ring * sum(sizes)
        if "alltoall" in name:
            return ring * max(sizes)
        raise ValueError(f"no count for {name}")


def record_step(rank: int, num_processes: int, port: int, folder: Path, keys: dict) -> None:
    """Write how many bytes one rank sends in its third step; DDP orders buckets in the second."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(num_processes),
        MASTER_ADDR="localhost",
        MASTER_PORT=str(port),
    )
    config, model_config = make_configs(num_processes, **keys)
    world = distributed.start(torch.device("cpu"))
    is_bfloat16 = config.dtype == "bfloat16"
    model = build(config.model, model_config)
    train_model, _ = distributed.parallelize(
        model,
        world,
        engine=config.engine,
        compile=False,
        bfloat16=is_bfloat16,
        shard_size=config.shard_size,
    )
    muon_dtype = torch.bfloat16 if is_bfloat16 else torch.float32
    optimizers = optimizer.build_optimizers(model, config, muon_dtype)
    for _ in range(2):
        take_step(config, model, train_model, optimizers, world)
    with TrafficRecorder() as recorder:
        take_step(config, model, train_model, optimizers, world)
    (folder / str(rank)).write_text(str(recorder.num_bytes))
    distributed.stop(world)


def take_step(config, model, train_model, optimizers, world: World) -> None:
    ids = torch.zeros(1, MODEL["block_size"], dtype=torch.int64)
    for micro_step in range(NUM_MICRO_BATCHES):
        is_last = micro_step == NUM_MICRO_BATCHES - 1
        every_micro_batch = config.gradient_reduction == "micro_batch"
        with (
            distributed.gradient_sync(train_model, is_last, every_micro_batch),
            torch.autocast("cpu", torch.bfloat16, enabled=config.dtype == "bfloat16"),
        ):
            _, loss = train_model(ids, ids)
        loss.backward()
    distributed.average_replicated_gradients(model, world)
    for each_optimizer in optimizers:
        each_optimizer.step()


def slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("num_processes", "keys"),
    [
        (2, {"engine": "ddp", "optimizer": "muon"}),
        (4, {"engine": "fsdp", "shard_size": 2, "dtype": "bfloat16", "optimizer": "muon"}),
        slow(4, {"engine": "fsdp", "dtype": "bfloat16"}),
        slow(2, {"engine": "fsdp", "gradient_reduction": "step", "dtype": "bfloat16"}),
        slow(2, {"engine": "fsdp", "activation_checkpointing": True}),
    ],
)
def test_the_estimate_is_what_the_collectives_send(num_processes, keys, tmp_path):
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    torch.multiprocessing.start_processes(
        record_step,
        (num_processes, port, tmp_path, keys),
        nprocs=num_processes,
        start_method="fork",
    )
    sent = [float((tmp_path / str(rank)).read_text()) for rank in range(num_processes)]
    config, model_config = make_configs(num_processes, **keys)
    estimate = traffic.estimate_traffic(config, model_config, "cpu", num_processes)
    # FSDP2 pads what does not divide
    assert sum(sent) / num_processes == pytest.approx(estimate.total, rel=0.02)


def estimate(world_size: int, **keys) -> traffic.TrafficEstimate:
    config, model_config = make_configs(world_size, **keys)
    return traffic.estimate_traffic(config, model_config, "cuda", world_size)


def test_a_process_alone_sends_nothing():
    assert estimate(1).total == 0
    config, model_config = make_configs(1)
    assert traffic.describe_traffic(config, model_config, "cuda", 1) == []


def test_ddp_sends_each_gradient_about_twice():
    config, model_config = make_configs(4)
    counts = traffic.count_parameters_by_use(config.model, model_config)
    assert estimate(4) == traffic.TrafficEstimate(0, 2 * 3 * counts.total, 0, 0)


def test_hsdp_sends_each_shard_once_between_copies():
    within = estimate(4, engine="fsdp")
    hybrid = estimate(16, engine="fsdp", shard_size=4)
    assert hybrid.parameters == within.parameters
    assert within.gradients_between_copies == 0
    # 2 x 3/4 of a quarter of the sharded gradients, against 3/4 of all of them per micro-batch
    sharded_gradients = 4 * hybrid.gradients_between_copies / (2 * 3 / 4)
    config, model_config = make_configs(4)
    counts = traffic.count_parameters_by_use(config.model, model_config)
    assert sharded_gradients == pytest.approx(4 * (counts.blocks + counts.outside), abs=16)


def test_a_reduction_per_step_sends_gradients_once():
    per_micro_batch = estimate(4, engine="fsdp", dtype="float32")
    per_step = estimate(4, engine="fsdp", dtype="float32", gradient_reduction="step")
    assert per_micro_batch.gradients == NUM_MICRO_BATCHES * per_step.gradients
    assert per_micro_batch.parameters == per_step.parameters


def test_a_dry_run_of_several_processes_prints_the_traffic(monkeypatch, tmp_path):
    monkeypatch.setenv("WORLD_SIZE", "4")
    arguments = [f"--{key}={value}" for key, value in MODEL.items()]
    result = call(
        "train.py", *arguments, "--engine=fsdp", "--shard_size=2", "--device=cpu", "--dry_run"
    )
    printed = result.stdout.decode()
    assert (
        "estimated traffic (fsdp, 2 copies on 2 processes each); each of 4 processes sends per step:\n"
        "  parameters "
    ) in printed
    assert "\n  gradients between copies " in printed
