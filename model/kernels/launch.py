"""How kernels are launched: warps of a program, how its loads run ahead, and how many programs share the tokens.

A table, not Triton's autotuner: another launch is another order of summation, and a run that goes on must give the
bits that it would have given. `bench.py ceiling` says what each launch allows, without a GPU; `bench.py kernels --tune`
measures it and the runners-up.
"""

import functools
import os
from dataclasses import dataclass, replace

import torch
import triton

from model.kernels.tiles import block_of

# TRITON_INTERPRET=1 (set before the first import of triton) runs kernels on a CPU, slowly: for tests.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@dataclass(frozen=True)
class Launch:
    num_warps: int
    stages: int  # tokens in flight to shared memory, the one that is computed included; 1: none
    programs: int  # of each multiprocessor at a time
    prefetch: int = 0  # tokens that the L2 cache is asked for ahead: costs no registers and no shared memory
    reload: bool = False  # the parameters are loaded for each token again, from the L1 cache: they do not fit registers

    def options(self, x: torch.Tensor) -> dict:
        """What a kernel over the vectors of x is given."""
        d = x.shape[-1]
        # Bulk copies are of 16 bytes or a multiple; beside a float32 state lie vectors of two bytes a feature.
        prefetch = self.prefetch if copies_in_bulk(x.device) and d * 2 % 16 == 0 else 0
        return {"num_warps": self.num_warps, "STAGES": self.stages, "PREFETCH": prefetch, "BLOCK": block_of(d)}


L2 = {"stages": 1, "prefetch": 2}

# At widths of up to 768, and above: the best by `bench.py ceiling`, not yet by time, then two that --tune measures too.
KERNELS = {
    "add_norm forward": [(Launch(2, 3, 8), Launch(1, 3, 16), Launch(2, programs=8, **L2))] * 2,
    "add_norm backward": [(Launch(2, 3, 8), Launch(1, 3, 16), Launch(2, programs=8, **L2))] * 2,
    "expand forward": [(Launch(4, 2, 8), Launch(2, 2, 16), Launch(4, 1, 8))] * 2,
    "expand backward": [(Launch(4, 2, 4), Launch(2, 2, 4), Launch(4, 1, 4))] * 2,
    "step forward v=1": [(Launch(2, 3, 8), Launch(1, 3, 11), Launch(2, programs=8, **L2))] * 2,
    "step forward v=2": [
        (Launch(2, 2, 6), Launch(2, 3, 6), Launch(2, programs=6, **L2)),
        (Launch(2, 2, 4), Launch(2, 3, 4), Launch(2, programs=4, **L2)),
    ],
    "step forward v=4": [
        (Launch(2, 2, 4), Launch(2, 3, 4), Launch(2, programs=4, **L2)),
        (Launch(4, 2, 3), Launch(4, 3, 2), Launch(4, programs=3, **L2)),
    ],
    "step forward v=8": [
        (Launch(4, 2, 2), Launch(4, programs=2, **L2), Launch(4, 3, 2)),
        (Launch(8, 2, 1), Launch(4, programs=2, reload=True, **L2), Launch(8, 3, 1)),
    ],
    "step backward v=1": [
        (Launch(4, 3, 4), Launch(2, 3, 4), Launch(4, programs=4, **L2)),
        (Launch(4, 3, 3), Launch(4, 2, 3), Launch(4, programs=3, **L2)),
    ],
    "step backward v=2": [
        (Launch(4, 2, 3), Launch(4, 3, 3), Launch(4, programs=3, **L2)),
        (Launch(4, 2, 2), Launch(4, 3, 2), Launch(4, programs=2, **L2)),
    ],
    "step backward v=4": [
        (Launch(4, 2, 2), Launch(4, 3, 2), Launch(4, programs=2, **L2)),
        (Launch(4, programs=2, reload=True, **L2), Launch(8, 2, 1), Launch(8, 3, 1)),
    ],
    "step backward v=8": [
        (Launch(4, programs=2, reload=True, **L2), Launch(8, 2, 1), Launch(8, 2, 1, reload=True)),
        (Launch(8, 2, 1, reload=True), Launch(8, programs=1, reload=True, **L2), Launch(8, 2, 1)),
    ],
    "step forward v=2 K>1": [
        (Launch(4, 2, 3), Launch(2, 2, 4), Launch(4, programs=3, **L2)),
        (Launch(4, 2, 2), Launch(4, 3, 2), Launch(4, programs=2, **L2)),
    ],
    "step forward v=4 K>1": [
        (Launch(4, 2, 2), Launch(4, 3, 2), Launch(4, programs=2, **L2)),
        (Launch(4, programs=2, reload=True, **L2), Launch(8, 2, 1), Launch(8, 3, 1)),
    ],
    "step forward v=8 K>1": [(Launch(8, 2, 1), Launch(8, programs=1, **L2), Launch(8, 3, 1))] * 2,
    "step backward v=2 K>1": [
        (Launch(4, programs=2, reload=True, **L2), Launch(4, 2, 2), Launch(4, 2, 2, reload=True)),
        (Launch(4, programs=2, reload=True, **L2), Launch(8, 2, 1), Launch(8, 2, 1, reload=True)),
    ],
    "step backward v=4 K>1": [
        (Launch(4, programs=2, reload=True, **L2), Launch(8, 2, 1), Launch(4, 2, 2, reload=True)),
        (Launch(8, 2, 1, reload=True), Launch(8, 3, 1, reload=True), Launch(8, programs=1, reload=True, **L2)),
    ],
    "step backward v=8 K>1": [
        (Launch(8, programs=1, reload=True, **L2), Launch(8, 2, 1, reload=True), Launch(8, 3, 1, reload=True)),
    ]
    * 2,
}


FORCED: dict[str, Launch] = {}  # by the same keys: launches that `bench.py kernels --tune` times


def name_of(kernel: str, columns: int, kernel_size: int) -> str:
    """The kernel's key in KERNELS, for states of so many columns and reads over so many tokens."""
    if not kernel.startswith("step"):
        return kernel
    return f"{kernel} v={max(columns, 2)} K>1" if kernel_size > 1 else f"{kernel} v={columns}"


def launches_of(kernel: str, d: int, columns: int = 1, kernel_size: int = 1) -> list[Launch]:
    """The launch of a kernel at width d, then its runners-up."""
    return [at_width(each, kernel, d) for each in KERNELS[name_of(kernel, columns, kernel_size)][d > 768]]


def launch_of(kernel: str, d: int, columns: int = 1, kernel_size: int = 1) -> Launch:
    return FORCED.get(name_of(kernel, columns, kernel_size)) or launches_of(kernel, d, columns, kernel_size)[0]


@functools.cache
def at_width(launch: Launch, kernel: str, d: int) -> Launch:
    """Wider vectors have more warps, and a multiprocessor fewer programs. (`expand` takes a vector in pieces.)"""
    width = 1024 if kernel.startswith("expand") else triton.next_power_of_2(d)
    warps = min(max(launch.num_warps * width // 1024, 1), 16)
    return replace(launch, num_warps=warps, programs=max(launch.programs * launch.num_warps // warps, 1))


@functools.cache
def processors(device: torch.device) -> int:
    """Streaming multiprocessors of the GPU; under the interpreter a small number, so that programs share the tokens."""
    return 2 if INTERPRETED else torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def copies_in_bulk(device: torch.device) -> bool:
    """Whether the GPU copies, and prefetches, whole rows by one instruction: from Hopper (sm_90) on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def share(device: torch.device, launch: Launch, sequences: int, tokens: int, kernel_size: int) -> tuple[int, int, int]:
    """(tokens of a sequence, tokens of a program, programs of a sequence), for sequences that are kept apart."""
    return tokens, *chunks(launch.programs * processors(device), sequences, tokens, kernel_size - 1)


@functools.cache
def chunks(slots: int, sequences: int, tokens: int, halo: int) -> tuple[int, int]:
    """(tokens of a program, programs of a sequence) that take the least time on `slots` programs at once.

    A program computes `halo` tokens of its neighbour too. One program more than there are slots takes as long as
    twice as many: what counts is whole waves.
    """

    def time(count: int) -> int:
        chunk = -(-tokens // count)
        return -(-sequences * -(-tokens // chunk) // slots) * (chunk + halo)

    # More programs than slots only shorten the last wave, which four waves do nearly as well as many.
    most = min(max(4 * slots // sequences, 4), tokens)
    chunk = -(-tokens // min(range(1, most + 1), key=lambda count: (time(count), count)))
    return chunk, -(-tokens // chunk)
