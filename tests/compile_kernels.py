"""Compile the kernels for sm_90 as they are launched, without a GPU: python tests/compile_kernels.py

The interpreter accepts code that the compiler rejects. Prints the kernel of each launch, and stops at
the first one that does not compile.
"""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

os.environ["TRITON_INTERPRET"] = "0"
sys.path.insert(0, str(Path(__file__).parent.parent))

import fused
import pytest
import torch
from fused import Step
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from model.kernels import launch
from model.kernels.swiglu_kernel import fused_swiglu

OPTIONS = [
    {},
    {"erase": False},
    {"form": "constant", "heads": "gate"},
    {"form": "raw", "value_input": "context"},
    {"heads": ""},
    {"write": False, "store": False},
    {"store": False, "with_x_in": False, "used": "context"},
]
STEPS = [
    *(
        Step(40, 2, K, T=3, dtype="bf16", **{"pending": 1, **options})
        for options in OPTIONS
        for K in (1, 3)
    ),
    # parameters that are loaded again for each token
    Step(40, 8, T=3, dtype="bf16"),
    Step(776, 4, 4, T=3, dtype="bf16"),
    Step(40, 1, T=3, dtype="fp16"),
    Step(40, 4, T=3, pending=2),
    Step(40, 4, 3, T=3, dtype="mixed", pending=1),
]


def compile_instead_of_launching() -> None:
    """Let launches on CPU tensors compile for an H200, and leave the results undefined."""
    run = JITFunction.run

    def compile_launch(kernel, *args, grid, warmup, **options):
        run(kernel, *args, grid=grid, warmup=True, **options)
        print(kernel.__module__, kernel.__name__, flush=True)

    JITFunction.run = compile_launch
    target = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
    )
    driver.set_active(target)
    launch.has_bulk_copies = lambda device: True
    fused.set_num_processors(pytest.MonkeyPatch(), 132)
    fused.DEVICE = "cpu"


def launch_all() -> None:
    """Launch every kernel, forward and backward."""
    for case in STEPS:
        fused.run(case)
    with torch.no_grad():
        case = Step(40, 2, 3, T=3, dtype="bf16")
        inputs = case.inputs()
        carry = torch.zeros(case.B, case.K - 1, case.d)
        fused.call_step(**fused.arguments(case, inputs, inputs["stored_state"], carry))
    fused.heads(fused.heads_inputs(1, 3, 2, 32, "bf16", own_positions=False))
    joined, grad = fused.swiglu_inputs(3, 192, dtype="bf16")
    fused_swiglu(joined.requires_grad_()).backward(grad)


if __name__ == "__main__":
    compile_instead_of_launching()
    launch_all()
