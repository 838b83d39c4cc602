"""Where a run runs: one process or several under torchrun, their device, what it can do, and sums over processes."""

import os
import shutil
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist


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
            raise ValueError(f"process {index} of this machine has no GPU of its own, there are {count}: start fewer")
        return torch.device("cuda", index)
    return torch.device(name)


def can_compile(device: torch.device | str = "cpu") -> bool:
    """Whether torch.compile has what it needs: on a CPU a C++ compiler and Python's headers, on a GPU its Triton."""
    compiler = os.environ.get("CXX", "g++")
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    return torch.device(device).type != "cpu" or bool(shutil.which(compiler) and headers.exists())


def cpu_has_bfloat16() -> bool:
    """Whether the CPU multiplies bfloat16 in hardware; without, float32 is faster. torch < 2.13 cannot tell: no."""
    return getattr(torch.cpu, "get_capabilities", dict)().get("avx512_bf16", False)


def world_size() -> int:
    """Processes in this job, as torchrun says."""
    return int(os.environ.get("WORLD_SIZE", 1))


def start(device: torch.device) -> World:
    """Join the process group (nccl on GPUs, gloo on the CPU) where torchrun started several processes."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world_size() > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return World(int(os.environ.get("RANK", 0)), world_size(), device)


def stop(world: World) -> None:
    """Leave the process group, all together.

    gloo's threads drop the last tensors a moment after the collective, for which they need the interpreter's lock. Its
    destructor joins them while holding that lock: torn down at once, 1 run in 5 hung at its exit (torch 2.13).
    """
    if world.world_size > 1:
        dist.barrier()
        time.sleep(0.5)  # releases the lock
        dist.destroy_process_group()


def rank() -> int:
    """This process's number, as torchrun says; 0 alone."""
    return int(os.environ.get("RANK", 0))
