"""Registers and spills of every kernel, compiled for sm_90 without a GPU: `bench.py registers`."""

import re
import subprocess
import tempfile
from pathlib import Path


def compile_for(kernel, arguments: dict, num_warps: int, arch: int = 90):
    """The compiled kernel. arguments: name -> a pointer type ("*bf16"), a type ("i32"), a tuple of them, or a constant.

    Pointers are taken as aligned to 16 bytes, as torch allocates them.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, constants, attributes = {}, {}, {}

    def is_type(value):
        return isinstance(value, str) and re.fullmatch(r"\*?(bf16|fp16|fp32|i32)", value)

    for place, (name, value) in enumerate(arguments.items()):
        if is_type(value) or isinstance(value, tuple):
            signature[name] = value
            for part, each in enumerate(value if isinstance(value, tuple) else (value,)):
                if each.startswith("*"):
                    where = (place, part) if isinstance(value, tuple) else (place,)
                    attributes[where] = [["tt.divisibility", 16]]
        else:
            signature[name], constants[(place,)] = "constexpr", value
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": num_warps})


def resources(compiled) -> dict:
    """{registers (per thread), spill_bytes (per thread), shared_bytes (per program)}, as ptxas reports them."""
    import triton

    ptxas = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(compiled.asm["ptx"])
        command = [
            ptxas,
            "-v",
            f"--gpu-name=sm_{compiled.metadata.target.arch}a",
            source,
            "-o",
            f"{folder}/kernel.cubin",
        ]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = int(re.search(r"Used (\d+) registers", report)[1])
    spills = sum(map(int, re.findall(r"(\d+) bytes spill", report)))
    return {"registers": registers, "spill_bytes": spills, "shared_bytes": compiled.metadata.shared}


def step_arguments(d: int, v: int, kernel_size: int, backward: bool, writes: int, stored: bool) -> tuple[dict, int]:
    """(arguments of the residual step's kernel in bf16 with learned value and gate, warps a program)."""
    from model.kernels import residual_step

    kernel = residual_step.backward_kernel if backward else residual_step.forward_kernel
    settings = residual_step.launch_settings(v, kernel_size, backward)
    bf16 = "base hs h new_state x_in context grad_state grad_context grad_x_in new_grad_state grad_h"
    integers = "row_stride column_stride tokens chunk chunks zero"
    numbers = "k_eps_squared norm_eps value_scale value_constant"
    types = dict.fromkeys(bf16.split(), "*bf16") | dict.fromkeys(integers.split(), "i32")
    types |= dict.fromkeys(numbers.split(), "fp32")
    types |= {
        "hs": ("*bf16",) * writes,
        "us": ("*fp32",) * writes,
        "carry": None,
        "new_carry": None,
        "x_in": None,
        "grad_x_in": None,
    }
    if not stored:
        types["new_state"] = None
    block = 1 << (d - 1).bit_length()
    types |= {"D": d, "BLOCK": block, "V": v, "K": kernel_size, "STAGES": settings["STAGES"]}
    types |= {"VALUE": "sigmoid", "VALUE_INPUT": "residual", "ERASE": True}
    return {name: types.get(name, "*fp32") for name in kernel.arg_names}, settings["num_warps"]
