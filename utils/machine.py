"""What this process knows of its machine and job without importing torch."""

import os
import shutil
import sysconfig
from pathlib import Path


def rank() -> int:
    """Return the rank of this process, as torchrun says; 0 without torchrun."""
    return int(os.environ.get("RANK", 0))


def local_rank() -> int:
    """Return the rank of this process among those of its machine; 0 without torchrun."""
    return int(os.environ.get("LOCAL_RANK", 0))


def world_size() -> int:
    """Return the number of processes in this job, as torchrun says; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", 1))


def num_machines() -> int:
    """Return the number of machines of this job; 1 without torchrun."""
    return world_size() // int(os.environ.get("LOCAL_WORLD_SIZE", world_size()))


def count_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def can_compile(device_type: str = "cpu") -> bool:
    """Return whether torch.compile has what it needs: on a CPU a C++ compiler and Python.h."""
    if device_type != "cpu":
        return True
    compiler = os.environ.get("CXX", "g++")
    header = Path(sysconfig.get_path("include")) / "Python.h"
    return shutil.which(compiler) is not None and header.exists()


def cpu_has_bfloat16() -> bool:
    """Return whether the CPU multiplies bfloat16 in hardware (AVX-512 BF16); False if unknown."""
    # the same flag that torch.cpu.get_capabilities() reads, without importing torch
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.exists() and "avx512_bf16" in cpuinfo.read_text().split()
