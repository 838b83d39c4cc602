"""Launch the operators' kernels on a driver without a GPU: python tests/launch_kernels.py [CASE ...]

Triton's own launcher is used, which neither the interpreter nor compiling shows: how it takes
arguments, grids, shared memory, and whether another number of tokens compiles a kernel again.
Prints "ok" and the name of each case, by default of all. Nothing is computed.
"""

import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
# bytes of shared memory that a program may use on sm_90
MAX_SHARED_MEMORY = 232448
# options of residual_step that no case changes
OPTIONS = {
    "k_eps": 1e-5,
    "norm_eps": 1e-5,
    "value_scale": 4.0,
    "value_constant": 2.0,
    "value_input": "residual",
    "erase": True,
}


def run_with_absent_driver(folder: str) -> None:
    """Run this script in a process that finds the absent driver as libcuda.so.1, and exit."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-o", f"{folder}/libcuda.so.1", HERE / "absent_driver.c"],
        check=True,
    )
    env = {
        **os.environ,
        "LD_LIBRARY_PATH": folder,
        "TRITON_LIBCUDA_PATH": folder,
        "ABSENT_DRIVER": folder,
        "CUDA_VISIBLE_DEVICES": "",
    }
    sys.exit(subprocess.run([sys.executable, *sys.argv], env=env).returncode)


def use_absent_driver() -> ctypes.CDLL:
    """Let Triton use the absent driver, and return its library, which counts launches."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia import driver

    class AbsentDriver(driver.CudaDriver):
        def __init__(self):
            self.utils = driver.CudaUtils()
            self.launcher_cls = driver.CudaLauncher
            self.get_current_device = lambda: 0
            self.set_current_device = lambda device: None
            self.get_current_stream = lambda device: 0
            self.get_device_capability = lambda device=0: (9, 0)

        def get_current_target(self):
            return GPUTarget("cuda", 90, 32)

    triton.runtime.driver.set_active(AbsentDriver())
    return ctypes.CDLL(f"{os.environ['ABSENT_DRIVER']}/libcuda.so.1")


def main():
    library = use_absent_driver()
    sys.path.insert(0, str(HERE.parent))
    import torch

    from model.kernels import launch, residual_step, rope, swiglu_kernel

    for module in (launch, rope):
        module.count_processors = lambda device: 132
    launch.has_bulk_copies = lambda device: True

    def random(*shape, dtype=torch.bfloat16):
        return torch.randn(*shape).to(dtype).requires_grad_()

    def number(*shape):
        return random(*shape, dtype=torch.float32)

    def step(
        B,
        T,
        v,
        d,
        K,
        replayed=0,
        store=False,
        dtype=torch.bfloat16,
        form="sigmoid",
        heads=True,
        write=True,
    ):
        stored_state = random(B, T, v, d, dtype=dtype).detach()
        direction = random(B, T, d, dtype=dtype) if write else None
        has_value_logit = write and form != "constant"
        output = residual_step.StepOutput(
            *residual_step.residual_step(
                **OPTIONS,
                state=stored_state.clone().requires_grad_(),
                stored_state=stored_state,
                directions=[random(B, T, d, dtype=dtype).detach()] * replayed,
                updates=[number(B, T, v).detach()] * replayed,
                direction=direction,
                gate_logit=number(B, T) if write else None,
                value_logit=number(B, T, v) if has_value_logit else None,
                read_weights=number(K, v, d),
                norm_weight=number(d),
                gate_weight=number(d) if heads else None,
                gate_bias=number(1) if heads else None,
                value_weight=number(v, d) if heads else None,
                value_bias=number(v) if heads else None,
                value_form=form,
                store_state=store,
                return_x_in=False,
                carry=None,
                context_dtype=dtype,
            )
        )
        (output.new_state.sum() + output.context.sum()).backward()

    def generate(T):
        with torch.no_grad():
            residual_step.residual_step(
                **OPTIONS,
                state=random(1, T, 2, 64),
                stored_state=random(1, T, 2, 64),
                directions=[],
                updates=[],
                direction=random(1, T, 64),
                gate_logit=number(1, T),
                value_logit=number(1, T, 2),
                read_weights=number(4, 2, 64),
                norm_weight=number(64),
                gate_weight=None,
                gate_bias=None,
                value_weight=None,
                value_bias=None,
                value_form="sigmoid",
                store_state=True,
                return_x_in=False,
                carry=torch.zeros(1, 3, 64),
                context_dtype=torch.bfloat16,
            )

    def rotation(T):
        results = rope.RotatedHeads.apply(
            random(2, T, 3, 2, 32), number(T, 16), number(T, 16), number(32), number(32), 1e-5
        )
        sum(result.sum() for result in results).backward()

    def swiglu(T):
        swiglu_kernel.fused_swiglu(random(2, T, 128)).sum().backward()

    # name: (number of launches, function of the number of tokens)
    cases = {
        "v=4": (2, lambda T: step(2, T, 4, 64, 1)),
        "v=4 stored": (2, lambda T: step(2, T, 4, 64, 1, replayed=1, store=True)),
        "v=1 no write": (2, lambda T: step(2, T, 1, 64, 1, write=False)),
        "v=2 K=4": (2, lambda T: step(2, T, 2, 64, 4, replayed=1)),
        "v=2 K=3 constant, no heads, fp32": (
            2,
            lambda T: step(2, T, 2, 72, 3, form="constant", heads=False, dtype=torch.float32),
        ),
        "v=4 d=768": (2, lambda T: step(2, T, 4, 768, 1, store=True)),
        "v=4 d=1024 K=4": (2, lambda T: step(1, T, 4, 1024, 4)),
        "carried": (1, generate),
        "rope_norm": (2, rotation),
        "SwiGLU": (1, swiglu),
    }
    num_launches = ctypes.c_int.in_dll(library, "absent_launches")
    # grid, block and shared memory of the last launch
    last_launch = (ctypes.c_uint * 7).in_dll(library, "absent_last")
    kernels = [
        kernel
        for module in (residual_step, rope)
        for kernel in (module.forward_kernel, module.backward_kernel)
    ]
    kernels.append(swiglu_kernel.backward_kernel)

    def count_compiled() -> int:
        return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())

    for name in sys.argv[1:] or cases:
        expected_launches, case = cases[name]
        launches_before = num_launches.value
        case(33)
        launches = num_launches.value - launches_before
        assert launches == expected_launches, (
            f"{name}: {launches} launches, not {expected_launches}"
        )
        *grid_and_block, shared_memory = last_launch
        assert all(grid_and_block), f"{name}: grid and block {grid_and_block}"
        assert shared_memory <= MAX_SHARED_MEMORY, f"{name}: {shared_memory} bytes of shared memory"
        compiled_before = count_compiled()
        for num_tokens in (1, 16, 7):
            case(num_tokens)
        assert count_compiled() == compiled_before, (
            f"{name}: another number of tokens compiles a kernel again"
        )
        print("ok", name, flush=True)


if __name__ == "__main__":
    if "ABSENT_DRIVER" in os.environ:
        main()
    else:
        with tempfile.TemporaryDirectory() as folder:
            run_with_absent_driver(folder)
