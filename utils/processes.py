"""One process, or several under torchrun: their devices, and the process group."""

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from utils import machine

NVIDIA_DEVICE = Path("/dev/nvidiactl")  # exists where NVIDIA's driver has found a GPU
# How long ranks wait for each other, if the key collective_timeout does not say.
DEFAULT_TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True)
class World:
    """This rank among the others; a `world_size` of 1 has no process group."""

    rank: int
    world_size: int
    device: torch.device
    timeout: timedelta = DEFAULT_TIMEOUT  # how long ranks wait for each other

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def sum(self, *values: float) -> list[float]:
        """Return each value summed over all ranks, in float64. Every rank must call it."""
        if self.world_size == 1:
            return list(values)
        # gloo and nccl both reduce float64 on their own device
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return total.tolist()


# ---- devices ----


def pick_device(name: str) -> torch.device:
    """Return the device that the key `device` means for this rank.

    Raises:
        ValueError: there is no such device, or fewer GPUs than ranks on this machine
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
        if name == "cpu" and has_unusable_gpu():
            raise ValueError(
                "torch cannot use the GPU of this machine: its driver may be too old for CUDA "
                f"{torch.version.cuda}, for which this torch is built; install another build of "
                "torch (docs/cluster.md), or give --device=cpu"
            )
    if name != "cuda":
        return torch.device(name)
    if not torch.cuda.is_available():
        raise ValueError("device=cuda: torch finds no GPU; give --device=cpu")
    num_gpus = torch.cuda.device_count()
    if machine.local_rank() >= num_gpus:
        raise ValueError(
            f"local rank {machine.local_rank()} has no GPU, because this machine has {num_gpus}; "
            f"start at most {num_gpus} processes per machine"
        )
    return torch.device("cuda", machine.local_rank())


def has_unusable_gpu() -> bool:
    """Return whether there is an NVIDIA GPU that torch, although built for CUDA, does not find."""
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return torch.version.cuda is not None and NVIDIA_DEVICE.exists() and not is_hidden


def get_compute_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype that the key `dtype` means on a device."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return getattr(torch, name)


def keep_freed_memory() -> None:
    """Let the C library keep the memory that a training step frees for the next one.

    If it is returned to the system, every page must be cleared and mapped again, which takes 5 to
    8% of a step on a CPU (results/step_choices.md of commit 5a3b22a5).
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        return
    mmap_threshold = -3
    trim_threshold = -1
    # 2**25 is the largest value that it accepts; larger tensors are still returned
    libc.mallopt(mmap_threshold, 2**25)
    libc.mallopt(trim_threshold, 2**31 - 1)


@contextlib.contextmanager
def restored_state() -> Iterator[None]:
    """Put back, at the end of a block, what a script changes in its process.

    These are signal handlers, new environment variables, and torch's switches for deterministic
    operations and for TF32. After `%run train.py` in a notebook, Ctrl+C interrupts other work again.
    """
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    environment = set(os.environ)
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    fills_memory = torch.utils.deterministic.fill_uninitialized_memory
    precision = torch.get_float32_matmul_precision()
    try:
        yield
    finally:
        for number, handler in handlers.items():
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)
        for name in os.environ.keys() - environment:
            del os.environ[name]
        torch.use_deterministic_algorithms(is_deterministic)
        torch.utils.deterministic.fill_uninitialized_memory = fills_memory
        torch.set_float32_matmul_precision(precision)


# ---- the process group ----


def start(device: torch.device, timeout: timedelta = DEFAULT_TIMEOUT) -> World:
    """Join the process group (nccl on GPUs, gloo on CPUs) if torchrun started several processes.

    timeout: how long a rank waits for the others in a collective
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if device.type == "cpu":
        keep_freed_memory()
    if machine.world_size() > 1:
        store, rank, world_size = next(dist.rendezvous("env://", timeout=DEFAULT_TIMEOUT))
        # torchrun keeps its store over a restart (--max-restarts). Without a prefix the new ranks
        # would look for the old ones at the addresses that these left there. On several machines
        # only the one whose rank died counts the restart; there, torchrun starts a new store each
        # time if TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 is set (docs/slurm.sbatch).
        attempt = "0"
        if machine.num_machines() == 1:
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=dist.PrefixStore(f"attempt_{attempt}", store),
            rank=rank,
            world_size=world_size,
            timeout=timeout,
        )
    return World(machine.rank(), machine.world_size(), device, timeout)


def stop(world: World) -> None:
    """Leave the process group. Every rank must call it."""
    if world.world_size == 1:
        return
    # the main process may still close its log
    dist.barrier()
    # gloo's threads release their last tensors shortly after the collective, and need Python's
    # global lock to do so. Its destructor joins these threads while it holds the lock: without a
    # pause, which releases the lock, 1 run in 5 hung at its exit (torch 2.13).
    time.sleep(0.5)
    dist.destroy_process_group()


def check_agreement(world: World, values: dict[str, object]) -> None:
    """Raise ValueError, on every rank, if ranks differ in one of the values.

    values: the values of this rank, keyed by the name to use in the error message
    """
    values_by_rank: list = [None] * world.world_size
    dist.all_gather_object(values_by_rank, values)
    for rank, others in enumerate(values_by_rank):
        for name in values:
            value = others[name]
            expected = values_by_rank[0][name]
            if value == expected:
                continue
            raise ValueError(
                f"rank {rank} and rank 0 differ in {describe_difference(name, value, expected)}; "
                "start all ranks with the same command, files and versions"
            )


def describe_difference(name: str, value: object, expected: object) -> str:
    """Return the name; if both values are dicts, add the first key that differs and its two values."""
    if not isinstance(value, dict) or not isinstance(expected, dict):
        return name
    keys = sorted(value.keys() | expected.keys())
    key = next(key for key in keys if value.get(key) != expected.get(key))
    return f"{name} ({key}={value.get(key)!r} and {expected.get(key)!r})"
