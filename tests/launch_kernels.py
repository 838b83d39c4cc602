"""Launch every operator's kernels by Triton's own launcher on a driver without a GPU: python
tests/launch_kernels.py

What neither the interpreter nor compiling shows: arguments as the launcher takes them, grids,
shared memory, and whether other numbers of tokens compile anew. Prints "ok" and a line a case;
nothing is computed.
"""

import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
MOST_SHARED = 232448


def start_again(folder: str) -> None:
    """In a process that finds the absent driver as libcuda.so.1."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-o", f"{folder}/libcuda.so.1", HERE / "absent_driver.c"],
        check=True,
    )
    env = os.environ | {
        "LD_LIBRARY_PATH": folder,
        "TRITON_LIBCUDA_PATH": folder,
        "ABSENT_DRIVER": folder,
        "CUDA_VISIBLE_DEVICES": "",
    }
    sys.exit(subprocess.run([sys.executable, __file__], env=env).returncode)


def use_absent_driver():
    """The library, which counts launches."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia import driver

    class Absent(driver.CudaDriver):
        def __init__(self):
            self.utils, self.launcher_cls = driver.CudaUtils(), driver.CudaLauncher
            self.get_current_device, self.set_current_device = lambda: 0, lambda device: None
            self.get_current_stream, self.get_device_capability = (
                lambda device: 0,
                lambda device=0: (9, 0),
            )

        def get_current_target(self):
            return GPUTarget("cuda", 90, 32)

    triton.runtime.driver.set_active(Absent())
    return ctypes.CDLL(f"{os.environ['ABSENT_DRIVER']}/libcuda.so.1")


def main():
    library = use_absent_driver()
    sys.path.insert(0, str(HERE.parent))
    import torch

    from model.kernels import add_norm, expand, launch, residual_step, rope

    for module in (launch, rope):
        module.processors = lambda device: 132
    launch.copies_in_bulk = lambda device: True

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
        base = random(B, T, v, d, dtype=dtype).detach()
        hs, us = (
            [random(B, T, d, dtype=dtype).detach()] * replayed,
            [number(B, T, v).detach()] * replayed,
        )
        h, y = (random(B, T, d, dtype=dtype), number(B, T)) if write else (None, None)
        z = number(B, T, v) if write and form != "constant" else None
        weights = [number(d), number(1), number(v, d), number(v)] if heads else [None] * 4
        place = base.clone().requires_grad_()
        state, context, *_ = residual_step.residual_step(
            place, base, hs, us, h, y, z, number(K, v, d), number(d), *weights, 1e-5, 1e-5, form, 4.0, 2.0, "residual",
            True, store, False, None, dtype,
        )  # fmt: skip
        (state.sum() + context.sum()).backward()

    def generate(T):
        with torch.no_grad():
            residual_step.residual_step(
                random(1, T, 2, 64), random(1, T, 2, 64), [], [], random(1, T, 64), number(1, T), number(1, T, 2),
                number(4, 2, 64), number(64), None, None, None, None, 1e-5, 1e-5, "sigmoid", 4.0, 2.0, "residual",
                True, True, False, torch.zeros(1, 3, 64), torch.bfloat16,
            )  # fmt: skip

    def addition(h, dtype=torch.bfloat16):
        new_x, context, _ = add_norm.add_norm(
            random(2, 9, 64, dtype=dtype), h, number(64), 1e-5, torch.bfloat16
        )
        (context.sum() + new_x.sum()).backward()

    cases = {
        "v=4": (2, lambda T: step(2, T, 4, 64, 1)),
        "v=4 stored": (2, lambda T: step(2, T, 4, 64, 1, replayed=1, store=True)),
        "v=1 no write": (2, lambda T: step(2, T, 1, 64, 1, write=False)),
        "v=2 K=4": (2, lambda T: step(2, T, 2, 64, 4, replayed=1)),
        "v=2 K=3 constant, no heads, fp32": (
            2, lambda T: step(2, T, 2, 72, 3, form="constant", heads=False, dtype=torch.float32)),
        "v=4 d=768": (2, lambda T: step(2, T, 4, 768, 1, store=True)),
        "v=4 d=1024 K=4": (2, lambda T: step(1, T, 4, 1024, 4)),
        "carried": (1, generate),
        "add_norm": (2, lambda T: addition(random(2, 9, 64))),
        "add_norm, fp32 state": (2, lambda T: addition(random(2, 9, 64, dtype=torch.bfloat16), torch.float32)),
        "add_norm without h": (2, lambda T: addition(None)),
        "expand": (2, lambda T: expand.expand(random(2, T, 300), number(4, 2, 300)).sum().backward()),
        "rope_norm": (2, lambda T: sum(part.sum() for part in rope.RotatedHeads.apply(
            random(2, T, 3, 2, 32), number(T, 16), number(T, 16), number(32), number(32), 1e-5)).backward()),
    }  # fmt: skip
    count, last = (
        ctypes.c_int.in_dll(library, "absent_launches"),
        (ctypes.c_uint * 7).in_dll(library, "absent_last"),
    )
    kernels = {module.__name__: [getattr(module, f"{way}_kernel") for way in ("forward", "backward")]
        for module in (add_norm, expand, residual_step, rope)}  # fmt: skip

    def compiled() -> int:
        caches = [
            cache[0]
            for both in kernels.values()
            for kernel in both
            for cache in kernel.device_caches.values()
        ]
        return sum(map(len, caches))

    for name, (launches, case) in cases.items():
        before = count.value
        case(33)
        assert count.value - before == launches, (
            f"{name}: {count.value - before} launches, not {launches}"
        )
        assert all(last[:6]), f"{name}: grid and block {list(last[:6])}"
        assert last[6] <= MOST_SHARED, f"{name}: {last[6]} bytes of shared memory"
        known = compiled()
        for tokens in (1, 16, 7):
            case(tokens)
        assert compiled() == known, f"{name}: other numbers of tokens compile anew"
        print("ok", name, flush=True)


if __name__ == "__main__":
    if "ABSENT_DRIVER" in os.environ:
        main()
    else:
        with tempfile.TemporaryDirectory() as folder:
            start_again(folder)
