"""What Inductor makes of a training step on an H200 that is not there: CPU-seconds, and what it calls.

    python -m benchmarks.lowering DDL-gpt-mha-rope-CC-EC

For a Python whose torch is a CUDA build of the version in question (tried with 2.11.0), and gcc. Tensors
are fake, so nothing runs: it shows that a deep model compiles, and no time of a GPU. What is patched is
private to torch.
"""

import argparse
import collections
import contextlib
import ctypes
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path

import torch

from benchmarks import suites
from model import build, kernels
from training.provenance import provenance

# What torch's C++ asks the driver before anything runs.
DRIVER = "int absent_gpus; signed char _ZN3c104cuda12device_countEv(void) { return absent_gpus; }"
DRIVER += "int cuDevicePrimaryCtxGetState(int d, unsigned *f, int *a) { *f = *a = 0; return 0; }"
H200 = types.SimpleNamespace(
    name="NVIDIA H200", type="cuda", index=0, uuid="", cc=90, major=9, minor=0, gcnArchName="sm_90",
    multi_processor_count=132, warp_size=32, total_memory=141 * 2**30, L2_cache_size=60 * 2**20,
    max_threads_per_multi_processor=2048, max_threads_per_block=1024, regs_per_multiprocessor=65536,
    shared_memory_per_block=49152, shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
)  # fmt: skip
CALL = re.compile(r"(\w+\.run|extern_kernels\.\w+|torch\.ops\.[\w.]+)\(")


class Lowered(Exception):  # noqa: N818 (no error)
    """The compiled step was called: both its graphs are lowered by then."""


class NoDevice(contextlib.nullcontext):
    """In the place of torch.cuda.device(index)."""

    def __init__(self, *args):
        super().__init__()


def answer(target, **answers) -> None:
    """Functions of a module or a class that return what they are given here."""
    for name, value in answers.items():
        function = lambda *args, value=value, **keys: value  # noqa: E731
        setattr(target, name, staticmethod(function) if isinstance(target, type) else function)


def pretend() -> None:
    """Have torch and Inductor take this machine for one with an H200, from here on."""
    import triton
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor import config
    from torch._inductor.fx_passes import fuse_attention, misc_patterns, pad_mm
    from torch._subclasses import fake_tensor
    from triton.backends.compiler import GPUTarget

    torch._C._ensureCUDADeviceGuardSet()  # it has 127 devices, and autograd goes through them all
    ctypes.c_int.in_dll(ctypes.CDLL(os.environ["LD_PRELOAD"]), "absent_gpus").value = 127
    device = {"is_available": True, "is_bf16_supported": True, "device_count": 1}
    device |= {"current_device": 0, "get_device_properties": H200}
    answer(torch.cuda, **device, is_initialized=True, get_device_capability=(9, 0), _lazy_init=None)
    answer(torch.cuda, synchronize=None, get_rng_state=torch.zeros(16).byte(), set_rng_state=None)
    answer(CudaInterface, **device, is_triton_capable=True, get_compute_capability=90)
    answer(CudaInterface, raise_if_triton_unavailable=None)
    answer(CudaInterface.Worker, current_device=0, get_device_properties=H200, set_device=None)
    answer(fake_tensor, init_gpu_context=None)
    torch.cuda.device = torch.cuda._DeviceGuard = CudaInterface.device = NoDevice
    target = types.SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, 32))
    triton.runtime.driver.set_active(target)
    # What would be done on the device: constants, the choice of padding, and tracing of patterns.
    config.joint_graph_constant_folding = config.shape_padding = config.fx_graph_cache = False
    answer(fuse_attention, _sfdp_init=None)
    answer(pad_mm, _pad_mm_init=None)
    answer(misc_patterns, _misc_patterns_init=None)


def flash_attention(q, k, v, attn_mask=None, is_causal=False):
    """What scaled_dot_product_attention comes to there: it would ask the device."""
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[0]


def stop(_):
    raise Lowered


def row_of(stem: str, layers: int, limit: int) -> dict:
    """Forward and backward of 16 sequences lowered; killed after `limit` CPU-seconds."""
    from torch._functorch import config as functorch
    from torch._inductor.graph import GraphLowering
    from torch._subclasses.fake_tensor import FakeTensorMode

    row = {"stem": stem, "layers": layers}

    def keep(graph):
        """Count in the place of loading the code."""
        code = graph.codegen()[0].value
        calls = collections.Counter(CALL.findall(code[code.index("def call(") :]))
        way = "backward" if graph.is_backward else "forward"
        triton = {name: count for name, count in calls.items() if name.endswith(".run")}
        row[f"triton_launches_{way}"] = sum(triton.values())
        row[f"distinct_kernels_{way}"] = len(triton)
        row[f"calls_{way}"] = {name: calls[name] for name in sorted(calls.keys() - triton.keys())}
        graph.cache_key, graph.cache_path, graph.cache_linemap = "", "", []
        module = types.ModuleType("lowered")
        module.__file__, module.call = "", stop
        return module

    GraphLowering.compile_to_module, functorch.force_non_lazy_backward_lowering = keep, True
    torch.nn.functional.scaled_dot_product_attention = flash_attention
    for name in ("uniform_", "normal_"):  # there is nothing to fill
        setattr(torch.Tensor, name, lambda tensor, *args, **keys: tensor)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.autocast("cuda", torch.bfloat16):
        with torch.device("cuda:0"):
            model = build(stem, **suites.SMALL | {"num_hidden_layers": layers})
            ids = torch.zeros(16, model.config.block_size, dtype=torch.int64)
        row["not_fused"] = kernels.use(model, "auto", "cuda")
        start = time.process_time()
        resource.setrlimit(resource.RLIMIT_CPU, (int(start) + limit + 1,) * 2)
        with contextlib.suppress(Lowered):
            torch.compile(model, fullgraph=True)(ids, ids)
    return row | {"lowering_cpu_seconds": round(time.process_time() - start, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("stem")
    parser.add_argument("--layers", type=int, default=12, help="of the paper's small size")
    parser.add_argument("--limit", type=int, default=300, help="CPU-seconds, then it is killed")
    args = parser.parse_args()
    if "absent_gpu" not in os.environ.get("LD_PRELOAD", ""):
        if torch.version.cuda is None or torch.cuda.is_available() or not shutil.which("gcc"):
            parser.error("to pretend a GPU takes gcc, torch built for CUDA, and that there is none")
        library = Path(tempfile.mkdtemp(prefix="absent_gpu")) / "libcuda.so.1"
        command = ["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", library]
        subprocess.run([*command, "-x", "c", "-"], input=DRIVER, text=True, check=True)
        env = os.environ | {"LD_PRELOAD": str(library), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        command = [sys.executable, "-m", "benchmarks.lowering", *sys.argv[1:]]
        os.execve(sys.executable, command, env)  # again, with that driver there before torch is
    origin = provenance()  # before there seems to be a GPU
    pretend()
    print(json.dumps(origin | row_of(args.stem, args.layers, args.limit), indent=1))


if __name__ == "__main__":
    main()
