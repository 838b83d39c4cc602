"""What this process knows of its machine and job without importing torch."""

import os
import shutil
import sysconfig
import time
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


def limit_spinning() -> None:
    """Choose how long threads that wait for each other spin before they sleep.

    Torch's OpenMP library spins 300,000 times, which costs nearly all of the speed if another process
    needs a core. 10,000 times cost 8% of it on two idle cores (the demo), but beside a busy process
    they are 0.58 times as fast as threads that sleep at once, which cost a third on idle cores.

    The library reads the variable when torch is imported, so this must be called before. What the
    user has set has precedence.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "0" if cores_are_busy() else "10000")


def cores_are_busy() -> bool:
    """Return whether other processes are running on cores that this one's threads need."""
    loadavg = Path("/proc/loadavg")
    if not loadavg.exists():
        return False
    num_threads = int(os.environ.get("OMP_NUM_THREADS") or count_cores())
    num_running = []
    for _ in range(5):  # the fewest, because other processes may only be ending
        # threads that are running now or waiting for a core, this one included, and all threads
        num_running.append(int(loadavg.read_text().split()[3].partition("/")[0]))
        time.sleep(0.005)
    return min(num_running) - 1 + num_threads > (os.cpu_count() or 1)


def cpu_has_bfloat16() -> bool:
    """Return whether the CPU multiplies bfloat16 in hardware (AVX-512 BF16); False if unknown."""
    # the same flag that torch.cpu.get_capabilities() reads, without importing torch
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.exists() and "avx512_bf16" in cpuinfo.read_text().split()
