"""How kernels are launched: warps of a program, how its loads run ahead, and how many programs
share the tokens.

A table, not Triton's autotuner: another launch is another order of summation, and a run that goes
on must give the bits that it would have given. `bench.py kernels --tune` measures each entry and
the runners-up.
"""

import functools
import os
from dataclasses import replace

import torch
import triton

from model.kernels.launch_table import KERNELS, Launch
from model.kernels.tiles import block_of

# TRITON_INTERPRET=1 (set before the first import of triton) runs kernels on a CPU, slowly: for
# tests.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


FORCED: dict[str, Launch] = {}  # by the table's keys: launches that `bench.py kernels --tune` times
# what was launched so far, by the table's key and width: figures say what they are of
USED: dict[str, Launch] = {}


def name_of(kernel: str, columns: int, kernel_size: int) -> str:
    """The kernel's key in KERNELS, for states of so many columns and reads over so many tokens."""
    if not kernel.startswith("step"):
        return kernel
    return f"{kernel} v={max(columns, 2)} K>1" if kernel_size > 1 else f"{kernel} v={columns}"


def launches_of(kernel: str, d: int, columns: int = 1, kernel_size: int = 1) -> list[Launch]:
    """The launch of a kernel at width d, then its runners-up."""
    return [
        at_width(each, kernel, d)
        for each in KERNELS[name_of(kernel, columns, kernel_size)][d > 768]
    ]


def launch_of(kernel: str, d: int, columns: int = 1, kernel_size: int = 1) -> Launch:
    name = name_of(kernel, columns, kernel_size)
    USED[f"{name} d={d}"] = launch = (
        FORCED.get(name) or launches_of(kernel, d, columns, kernel_size)[0]
    )
    return launch


def in_table(used: str) -> Launch:
    """What the table has for a key of USED."""
    name, _, d = used.rpartition(" d=")
    return at_width(KERNELS[name][int(d) > 768][0], name, int(d))


def options_of(launch: Launch, x: torch.Tensor) -> dict:
    """What a kernel over the vectors of x is given."""
    d = x.shape[-1]
    # Bulk copies are of 16 bytes or a multiple; beside a float32 state lie vectors of two bytes a
    # feature.
    prefetch = launch.prefetch if copies_in_bulk(x.device) and d * 2 % 16 == 0 else 0
    return {
        "num_warps": launch.num_warps,
        "STAGES": launch.stages,
        "PREFETCH": prefetch,
        "BLOCK": block_of(d),
    }


@functools.cache
def at_width(launch: Launch, kernel: str, d: int) -> Launch:
    """Wider vectors have more warps, and a multiprocessor fewer programs.

    (`expand` takes a vector in pieces.)
    """
    width = 1024 if kernel.startswith("expand") else triton.next_power_of_2(d)
    warps = min(max(launch.num_warps * width // 1024, 1), 16)
    return replace(
        launch, num_warps=warps, programs=max(launch.programs * launch.num_warps // warps, 1)
    )


@functools.cache
def processors(device: torch.device) -> int:
    """Streaming multiprocessors of the GPU; under the interpreter a small number, so that programs
    share the tokens.
    """
    return 2 if INTERPRETED else torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def copies_in_bulk(device: torch.device) -> bool:
    """Whether the GPU copies, and prefetches, whole rows by one instruction: from Hopper (sm_90)
    on.
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def share(
    device: torch.device, launch: Launch, sequences: int, tokens: int, kernel_size: int
) -> tuple[int, int, int]:
    """(tokens of a sequence, tokens of a program, programs of a sequence), for sequences that are
    kept apart.
    """
    return tokens, *chunks(launch.programs * processors(device), sequences, tokens, kernel_size - 1)


@functools.cache
def chunks(slots: int, sequences: int, tokens: int, halo: int) -> tuple[int, int]:
    """(tokens of a program, programs of a sequence) that take the least time on `slots` programs at
    once.

    A program computes `halo` tokens of its neighbour too. One program more than there are slots
    takes as long as twice as many: what counts is whole waves.
    """

    def time(count: int) -> int:
        chunk = -(-tokens // count)
        return -(-sequences * -(-tokens // chunk) // slots) * (chunk + halo)

    # More programs than slots only shorten the last wave, which four waves do nearly as well as
    # many.
    most = min(max(4 * slots // sequences, 4), tokens)
    chunk = -(-tokens // min(range(1, most + 1), key=lambda count: (time(count), count)))
    return chunk, -(-tokens // chunk)
