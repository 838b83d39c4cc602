"""How kernels are launched: warps of a program, prefetching of its loads, and number of programs.

Launches come from a table, not from Triton's autotuner: another launch sums in another order, and a
resumed run must continue with the bits of an uninterrupted one.
"""

import functools
import os
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton

from .launch_table import KERNELS, Launch
from .tiles import choose_block

# With TRITON_INTERPRET=1, set before triton is first imported, kernels run on a CPU, slowly, for
# tests.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

# Narrower and wider vectors have entries of their own in the table.
NARROW_WIDTH = 768


class KernelLaunch(NamedTuple):
    """How a kernel is launched for one input."""

    grid: tuple[int, ...]  # numbers of programs
    arguments: dict[str, Any]


def launch_key(kernel: str, num_value_channels: int = 1, kernel_size: int = 1) -> str:
    """Return the key of a kernel in the table of launches.

    Args:
        kernel: "step forward" or "step backward"
        num_value_channels: d_v of the state
        kernel_size: number of tokens K that a read covers
    """
    if kernel_size > 1:
        return f"{kernel} v={max(num_value_channels, 2)} K>1"
    return f"{kernel} v={num_value_channels}"


def choose_launch(
    kernel: str, width: int, num_value_channels: int = 1, kernel_size: int = 1
) -> Launch:
    """Return the launch of a kernel for vectors of some width."""
    narrow, wide = KERNELS[launch_key(kernel, num_value_channels, kernel_size)]
    return scale_to_width(narrow if width <= NARROW_WIDTH else wide, width)


def launch_options(launch: Launch, x: torch.Tensor) -> dict[str, int]:
    """Return the options and constants of a kernel that follow from its launch.

    x: (..., d), whose vectors the kernel loads
    """
    width = x.shape[-1]
    # Bulk copies move a multiple of 16 bytes. Beside a float32 state there are vectors of two bytes
    # per feature, so the width must be a multiple of 8 whatever the dtype of x is.
    can_prefetch = has_bulk_copies(x.device) and width * 2 % 16 == 0
    return {
        "num_warps": launch.num_warps,
        "STAGES": launch.stages,
        "PREFETCH": launch.prefetch if can_prefetch else 0,
        "BLOCK": choose_block(width),
    }


@functools.cache
def scale_to_width(launch: Launch, width: int) -> Launch:
    """Return a launch, which the table has for a width of 1024, for vectors of another width.

    A program of wider vectors has more warps, and a multiprocessor fewer programs.
    """
    padded_width = triton.next_power_of_2(width)
    num_warps = min(max(launch.num_warps * padded_width // 1024, 1), 16)
    programs = max(launch.programs * launch.num_warps // num_warps, 1)
    return replace(launch, num_warps=num_warps, programs=programs)


@functools.cache
def count_processors(device: torch.device) -> int:
    """Return the number of streaming multiprocessors of a GPU.

    It is a small number under the interpreter, where several programs are to share the tokens too.
    """
    if INTERPRETED:
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def has_bulk_copies(device: torch.device) -> bool:
    """Return whether one instruction of the GPU copies or prefetches a vector: Hopper and newer."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


class Chunks(NamedTuple):
    """How programs share the tokens of a sequence: each computes one chunk."""

    chunk_size: int  # in tokens
    num_chunks: int  # of a sequence


def split_into_chunks(
    device: torch.device, launch: Launch, *, num_sequences: int, num_tokens: int, kernel_size: int
) -> Chunks:
    """Split sequences of `num_tokens` tokens each into chunks, one for each program of a launch.

    kernel_size: number of tokens K that a read covers; no chunk crosses the end of a sequence
    """
    num_slots = launch.programs * count_processors(device)
    return choose_chunks(num_slots, num_sequences, num_tokens, kernel_size - 1)


@functools.cache
def choose_chunks(num_slots: int, num_sequences: int, num_tokens: int, halo: int) -> Chunks:
    """Return the chunks that take the least time.

    Args:
        num_slots: number of programs that the device runs at once
        num_tokens: of a sequence
        halo: number of tokens of its neighbor that a program computes besides its chunk
    """

    def estimate_time(num_chunks: int) -> int:
        # One program more than there are slots takes as long as twice as many: programs run in
        # waves of `num_slots`.
        chunk_size = divide_up(num_tokens, num_chunks)
        num_programs = num_sequences * divide_up(num_tokens, chunk_size)
        return divide_up(num_programs, num_slots) * (chunk_size + halo)

    # More programs than slots only shorten the last wave, and four waves do that nearly as well as
    # many.
    max_chunks = min(max(4 * num_slots // num_sequences, 4), num_tokens)
    num_chunks = min(
        range(1, max_chunks + 1), key=lambda num_chunks: (estimate_time(num_chunks), num_chunks)
    )
    chunk_size = divide_up(num_tokens, num_chunks)
    # rounding the size up may leave fewer chunks
    return Chunks(chunk_size, divide_up(num_tokens, chunk_size))


def divide_up(dividend: int, divisor: int) -> int:
    """Return the quotient, rounded up."""
    return -(-dividend // divisor)
