"""A CUDA device that is not there, as far as compiling for it goes: an H200 on a machine without one.

Tensors on it are fake (torch's FakeTensorMode): they have shapes, dtypes and a device, and no data. Nothing can run.
A process is started with `environment()`, and calls `pretend()`. Much of what is patched is private to torch: it was
tried with the CUDA build of torch 2.11.0.
"""

import contextlib
import ctypes
import os
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

H200 = SimpleNamespace(
    name="NVIDIA H200", type="cuda", index=0, cc=90, major=9, minor=0, multi_processor_count=132, warp_size=32,
    total_memory=141 * 2**30, L2_cache_size=60 * 2**20, max_threads_per_multi_processor=2048,
    max_threads_per_block=1024, regs_per_multiprocessor=65536, shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448, shared_memory_per_multiprocessor=233472, gcnArchName="sm_90", uuid="",
)  # fmt: skip

# What these functions of torch.cuda, of Inductor's device interface and of its workers are to return.
CUDA = {
    "is_available": True, "is_initialized": True, "is_bf16_supported": True, "device_count": 1, "current_device": 0,
    "get_device_properties": H200, "get_device_capability": (9, 0), "get_device_name": H200.name, "synchronize": None,
    "set_rng_state": None, "_lazy_init": None,
}  # fmt: skip
INTERFACE = {
    "is_available": True, "is_bf16_supported": True, "is_triton_capable": True, "raise_if_triton_unavailable": None,
    "device_count": 1, "current_device": 0, "get_device_properties": H200, "get_compute_capability": 90,
}  # fmt: skip
WORKER = {"current_device": 0, "get_device_properties": H200, "set_device": None}


def environment(folder: Path) -> dict:
    """Environment variables of a process that is to pretend; builds what it loads in folder. ValueError: no compiler.

    Autograd asks the driver for streams, in C++: `absent_gpu.c` answers in its place, if it is there before torch is.
    """
    compiler, library = shutil.which("cc") or shutil.which("gcc"), folder / "libcuda.so.1"
    if compiler is None:
        raise ValueError("a C compiler is needed, cc or gcc, and there is none here: install one (apt install gcc)")
    source = Path(__file__).with_suffix(".c")
    subprocess.run([compiler, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", library, source], check=True)
    return {**os.environ, "LD_PRELOAD": str(library), "TORCHINDUCTOR_COMPILE_THREADS": "1"}


class NoDevice(contextlib.nullcontext):
    """In the place of `torch.cuda.device(index)`."""

    def __init__(self, *args, **keys):
        super().__init__()


def answer(target, answers: dict) -> None:
    for name, value in answers.items():
        function = lambda *args, value=value, **keys: value  # noqa: E731
        setattr(target, name, staticmethod(function) if isinstance(target, type) else function)


def pretend() -> None:
    """Have torch, Inductor and Triton take this machine for one with an H200, for the rest of the process."""
    import torch
    import triton
    from torch._dynamo.device_interface import CudaInterface
    from torch._subclasses import fake_tensor
    from triton.backends.compiler import GPUTarget

    torch._C._ensureCUDADeviceGuardSet()  # one that does nothing: there is no device yet
    # This guard says that it has as many devices as can be numbered, and autograd goes through them all.
    ctypes.c_int.in_dll(ctypes.CDLL(os.environ["LD_PRELOAD"]), "absent_gpu_devices").value = 127
    answer(torch.cuda, CUDA | {"get_rng_state": torch.zeros(16, dtype=torch.uint8)})
    answer(torch.cuda.random, {"_lazy_init": None})
    answer(fake_tensor, {"init_gpu_context": None})
    answer(CudaInterface, INTERFACE)
    answer(CudaInterface.Worker, WORKER)
    torch.cuda.device = torch.cuda._DeviceGuard = CudaInterface.device = NoDevice
    triton.runtime.driver.set_active(SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, 32)))
    spare_the_device()


def spare_the_device() -> None:
    """What Inductor would run on the device while it compiles."""
    import torch
    from torch._inductor import config
    from torch._inductor.fx_passes import fuse_attention, joint_graph, misc_patterns, pad_mm

    def without_device(function):
        def called(*args, **keys):
            available, torch.cuda.is_available = torch.cuda.is_available, lambda: False
            try:
                return function(*args, **keys)
            finally:
                torch.cuda.is_available = available

        return called

    def deduced(folder, node, deduce=joint_graph.UniformValueConstantFolder._deduce_value):
        keys = node.kwargs
        node.kwargs = keys | {"device": torch.device("cpu")} if "device" in keys else keys
        try:
            return deduce(folder, node)
        finally:
            node.kwargs = keys

    config.fx_graph_cache = False
    config.shape_padding = False  # it measures whether padding pays
    fuse_attention._sfdp_init = lambda *args, **keys: None  # patterns of attention written out, which no model has
    pad_mm._pad_mm_init = without_device(pad_mm._pad_mm_init)
    misc_patterns._misc_patterns_init = without_device(misc_patterns._misc_patterns_init)
    joint_graph.UniformValueConstantFolder._deduce_value = deduced
