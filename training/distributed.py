"""One process or several under torchrun: devices, sums, one model on all (DDP or FSDP2)."""

import contextlib
import ctypes
import inspect
import os
import shutil
import sys
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from model.parameters import aliases

# Processes compile at their own pace before their first collective; one that dies is noticed at
# once.
START_TIMEOUT, TIMEOUT = timedelta(minutes=10), timedelta(minutes=30)
PATIENT_TIMEOUT = timedelta(days=7)
# The buffers, RoPE's tables, are the same on every process. torch 2.13 renamed the key for that.
KEYS_OF_DDP = inspect.signature(DistributedDataParallel).parameters
BUFFERS = ("broadcast_buffers", "forward_sync_buffers")["forward_sync_buffers" in KEYS_OF_DDP]


@dataclass(frozen=True)
class World:
    """This process among the others; `world_size` 1 needs no process group."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sum(self, *values: float) -> list[float]:
        """Each value summed over the processes, in float64."""
        if self.world_size == 1:
            return list(values)
        # gloo and nccl both reduce float64 on their own device.
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return total.tolist()


def pick_device(name: str) -> torch.device:
    """`auto`: this process's GPU, else the CPU. ValueError: cuda without a GPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        if not torch.cuda.is_available():
            raise ValueError("device=cuda: torch sees no GPU; give --device=cpu")
        index, count = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
        if index >= count:
            raise ValueError(f"process {index} of this machine has no GPU, of {count}: start fewer")
        return torch.device("cuda", index)
    return torch.device(name)


def can_compile(device: torch.device | str = "cpu") -> bool:
    """Whether torch.compile has what it needs: on a CPU a C++ compiler and Python's headers."""
    compiler = os.environ.get("CXX", "g++")
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    return torch.device(device).type != "cpu" or bool(shutil.which(compiler) and headers.exists())


def computes_in_bfloat16(dtype: str, device: torch.device) -> bool:
    """Whether train.py's key `dtype` means bfloat16 on the device."""
    return dtype == "bfloat16" or (dtype == "auto" and device.type != "cpu")


def cpu_has_bfloat16() -> bool:
    """Whether the CPU multiplies bfloat16 in hardware; torch < 2.13 cannot tell: no."""
    return getattr(torch.cpu, "get_capabilities", dict)().get("avx512_bf16", False)


def world_size() -> int:
    """Processes in this job, as torchrun says."""
    return int(os.environ.get("WORLD_SIZE", 1))


def start(device: torch.device) -> World:
    """Join the process group (nccl on GPUs, gloo on the CPU) where torchrun started several."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        keep_freed_memory()
    if world_size() > 1:
        # torchrun keeps its store over a restart (--max-restarts): without a prefix the new
        # processes would look for the old ones at the addresses that these left there.
        store, number, processes = next(dist.rendezvous("env://", timeout=START_TIMEOUT))
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=dist.PrefixStore(f"attempt_{attempt}", store),
            rank=number,
            world_size=processes,
            timeout=TIMEOUT,
        )
    return World(int(os.environ.get("RANK", 0)), world_size(), device)


def keep_freed_memory() -> None:
    """Let the C library keep what a training step frees for the next one."""
    # Handed back to the system, every page would have to be cleared and mapped again: 5 to 8% of
    # a step on a CPU (results/step_choices.md).
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        mmap_threshold, trim_threshold = -3, -1
        libc.mallopt(mmap_threshold, 2**25)  # the most it takes; larger tensors are handed back
        libc.mallopt(trim_threshold, 2**31 - 1)


def be_deterministic(wanted: bool) -> None:
    """Only operations that give the same bits every time; to be called before the first of them."""
    if wanted:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


def seed_step(seed: int, step: int, world: World) -> None:
    """Let what is random in a step be a function of (seed, step, process): no state to save."""
    sequence = np.random.SeedSequence([seed, step, world.rank])
    torch.manual_seed(int(sequence.generate_state(1, np.uint64)[0]))


def refuse_disagreement(world: World, facts: dict) -> None:
    """ValueError, on every process: they differ in one of the facts (by name)."""
    if world.world_size == 1:
        return
    everyone: list = [None] * world.world_size
    dist.all_gather_object(everyone, facts)
    for number, theirs in enumerate(everyone):
        for name in facts:
            if theirs[name] != everyone[0][name]:
                what = f"process {number} and process 0 differ in {name}"
                raise ValueError(f"{what}: start all of them alike")


def patient_group() -> dist.ProcessGroup:
    """All processes, on the CPU, where one may work, or wait for a hub, for longer than TIMEOUT."""
    return dist.new_group(backend="gloo", timeout=PATIENT_TIMEOUT)


def stop(world: World) -> None:
    """Leave the process group, all together."""
    # gloo's threads drop the last tensors a moment after the collective, for which they need the
    # interpreter's lock. Its destructor joins them while holding that lock: torn down at once, 1
    # run in 5 hung at its exit (torch 2.13).
    if world.world_size > 1:
        dist.barrier()
        time.sleep(0.5)  # releases the lock
        dist.destroy_process_group()


def rank() -> int:
    """This process's number, as torchrun says; 0 alone."""
    return int(os.environ.get("RANK", 0))


# ---- one model on all processes ----


def parallelise(model, engine: str, compiled: bool, world, without_gradient: bool = False):
    """(model for training, model for evaluation) on the device, compiled where asked for.

    DDP averages the gradients of whole copies. With the engine `fsdp` each process keeps a part of
    every parameter, as a DTensor in `model` itself, which goes to the device a block at a time.
    without_gradient: the loss does not depend on some parameters, which DDP has to look for.
    ValueError: fsdp, and blocks share a weight.
    """
    if compiled:
        keep_graphs_with_autocast()
    if engine == "fsdp" and world.world_size > 1:
        shard(model, compiled, world)
        return model, model
    model.to(world.device)
    run = torch.compile(model) if compiled else model
    if world.world_size == 1:
        return run, run
    # Compiled inside of DDP's forward pass, the graph is cut between DDP's buckets, so that one is
    # summed over the processes while the backward pass goes on (tests/test_overlap.py).
    looking = {"find_unused_parameters": without_gradient, BUFFERS: False}
    return DistributedDataParallel(run, gradient_as_bucket_view=True, **looking), run


def shard(model, compiled: bool, world) -> None:
    """FSDP2: each process keeps its part of every parameter, gathered a block at a time."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    for name, first in aliases(model).items():
        if name.startswith("transformer.h."):
            what = f"engine=fsdp cannot share weights between blocks ({name} is {first})"
            raise ValueError(f"{what}: give engine=ddp")
    mesh = init_device_mesh(world.device.type, (world.world_size,))
    if compiled:
        # Blocks share their code and may differ in their states: by default the ninth runs eagerly.
        limit = max(8 * len(model.transformer.h), 256)
        torch._dynamo.config.recompile_limit = limit
        torch._dynamo.config.accumulated_recompile_limit = limit
    for block in model.transformer.h:
        if compiled:  # a block at a time: gathering its parameters breaks the graph anyway
            block.compile()
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def keep_graphs_with_autocast() -> None:
    """Let a later process find the compiled model again where it leaves autocast (`linear_fp32`)."""
    # torch.compile keeps no graph that enters autocast, though what it enters with is part of the
    # graph and so of the key under which it would be kept.
    names = [f"torch.amp.autocast_mode.{name}" for name in ("_enter_autocast", "_exit_autocast")]
    cacheable = torch._inductor.config.unsafe_marked_cacheable_functions
    cacheable.update(dict.fromkeys(names, torch.__version__))


@contextlib.contextmanager
def synchronising(model, wanted: bool):
    """Average gradients over the processes in the backward passes inside, or in a later one."""
    if isinstance(model, DistributedDataParallel) and not wanted:
        with model.no_sync():
            yield
        return
    if hasattr(model, "set_requires_gradient_sync"):  # FSDP2
        model.set_requires_gradient_sync(wanted)
    yield


def clip_gradients(model, largest: float) -> torch.Tensor:
    """Scale the whole gradient down to norm `largest` (0: leave it) and return its norm before.

    Nothing waits for the device. A gradient that is not finite stays as it is.
    """
    parameters = [p for p in model.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters])
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    if largest:
        # What is not finite would be NaN everywhere after scaling, and hide where that began. A
        # norm of 0 is within the limit, and leaves the gradient: no need to ask the device.
        finite = torch.where(norm.isfinite(), norm, 0.0)
        torch.nn.utils.clip_grads_with_norm_(parameters, largest, finite)
    return norm


def gathered(tensors: dict[str, torch.Tensor], world) -> dict[str, torch.Tensor]:
    """Whole tensors on the main process's CPU; {} on the others. All must call it."""
    whole = {}
    for name, tensor in tensors.items():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if world.is_main:
            whole[name] = full.detach().cpu()
    return whole


def placed_like(tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A whole tensor where the parameter is, sharded as it is; step counters stay whole."""
    # Step counters stay where the optimizer keeps them, moments go with their parameter.
    tensor = tensor.to(parameter.device) if tensor.ndim or parameter.is_cuda else tensor
    if isinstance(parameter, DTensor) and tensor.ndim:
        mesh, placements = parameter.device_mesh, parameter.placements
        return distribute_tensor(tensor, mesh, placements, src_data_rank=None)
    return tensor


def non_finite_gradients(model, world) -> list[str]:
    """Names of the parameters whose gradient, on any process, holds an inf or NaN."""
    parameters = {name: p for name, p in model.named_parameters() if p.grad is not None}
    grads = [p.grad for p in parameters.values()]
    own = (grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads)
    bad = world.sum(*(float((~gradient.isfinite()).any()) for gradient in own))
    return [name for name, count in zip(parameters, bad) if count]


def summed(loss: torch.Tensor, stop: bool, norm: torch.Tensor, world) -> torch.Tensor:
    """[the losses' sum over the processes, how many want to stop, norm], float64, on the device.

    Nothing waits for the device.
    """
    wish = torch.tensor([float(stop)], dtype=torch.float64, pin_memory=world.device.type == "cuda")
    wish = wish.to(world.device, non_blocking=True)
    numbers = torch.cat((loss.double().reshape(1), wish))
    if world.world_size > 1:
        dist.all_reduce(numbers)
    return torch.cat((numbers, norm.double().reshape(1)))


def read_later(numbers: torch.Tensor) -> Callable[[], list[float]]:
    """A function that returns the numbers; on a GPU it waits for them, not for what comes after."""
    # The device works on while the program reads.
    if numbers.device.type != "cuda":
        return numbers.tolist
    host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    host.copy_(numbers, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()

    def read():
        arrived.synchronize()
        return host.tolist()

    return read
