"""How kernels are launched: warps of a program, depth of its load pipeline, and how many programs share the tokens.

A table, not Triton's autotuner: another launch is another order of summation, and a run that goes on must give the
bits that it would have given. `bench.py kernels --tune` measures the alternatives.
"""

import os
from dataclasses import dataclass

import torch

# TRITON_INTERPRET=1 (set before the first import of triton) runs kernels on a CPU, slowly: for tests.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@dataclass(frozen=True)
class Launch:
    num_warps: int
    stages: int
    programs: int  # for each multiprocessor of the GPU

    def options(self) -> dict:
        return {"num_warps": self.num_warps, "STAGES": self.stages}


# Chosen by registers (bench.py registers), not yet by time.
KERNELS = {
    "step forward": Launch(8, 3, 4),
    "step backward": Launch(8, 3, 2),
    "step backward, one column": Launch(4, 3, 4),
    # The sums of the gradient of a read over several tokens take many registers: more threads share them.
    "step backward, several tokens": Launch(16, 2, 1),
    "add_norm forward": Launch(4, 2, 8),
    "add_norm backward": Launch(4, 2, 4),
    "expand forward": Launch(4, 2, 8),
    "expand backward": Launch(4, 2, 8),
}


def name_of(kernel: str, columns: int, kernel_size: int) -> str:
    """The kernel's key in KERNELS, for states of so many columns and reads over so many tokens."""
    for case, applies in (("several tokens", kernel_size > 1), ("one column", columns == 1)):
        if applies and f"{kernel}, {case}" in KERNELS:
            return f"{kernel}, {case}"
    return kernel


def processors(device: torch.device) -> int:
    """Streaming multiprocessors of the GPU; under the interpreter a small number, so that programs share the tokens."""
    return 2 if INTERPRETED else torch.cuda.get_device_properties(device).multi_processor_count


def share(device: torch.device, launch: Launch, sequences: int, tokens: int, kernel_size: int) -> tuple[int, int, int]:
    """(tokens of a sequence, tokens of a program, programs of a sequence), for sequences that are kept apart.

    The batch and the device alone decide. A program of a token convolution computes kernel_size - 1 tokens twice: it
    should have many more of its own.
    """
    wanted = -(-launch.programs * processors(device) // sequences)
    least = 1 if INTERPRETED else 8 * (kernel_size - 1) + 1
    chunk = max(-(-tokens // wanted), least)
    return tokens, chunk, -(-tokens // chunk)
