"""Registers and spills of every kernel, compiled for sm_90 without a GPU: `bench.py registers`."""

import importlib.util
import json
import os
import re
import subprocess
import tempfile
from pathlib import Path

from training.provenance import provenance


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
        if name in ("row_stride", "column_stride", "tokens", "zero"):
            attributes[(place,)] = [["tt.divisibility", 16]]  # as at the widths that are used
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


def arguments_of(kernel, constants: dict, columns: int, writes: int = 0) -> dict:
    """The kernel's arguments in bf16 with all heads and results: states and vectors bf16, scalars and sums fp32."""
    bf16 = "base h x_in new_state context grad_state grad_context new_grad_state grad_h x new_x grad_x new_grad_x state"
    integers = "row_stride column_stride tokens rows chunk chunks zero"
    numbers = "k_eps_squared norm_eps eps value_scale value_constant"
    types = dict.fromkeys(bf16.split(), "*bf16") | dict.fromkeys(integers.split(), "i32")
    types |= dict.fromkeys(numbers.split(), "fp32") | dict.fromkeys("carry new_carry grad_x_in".split())
    types |= {"hs": ("*bf16",) * writes, "us": ("*fp32",) * writes, "V": columns}
    types |= {"VALUE": "sigmoid", "VALUE_INPUT": "residual", "ERASE": True, "TOTAL": 2**16, **constants}
    return {name: types.get(name, "*fp32") for name in kernel.arg_names}


def kernels(widths: list[int]):
    """(name, width, columns, tokens of the read, writes replayed, kernel) of all that training launches."""
    from model.kernels import add_norm, expand, step_kernels

    directions = ("forward", "backward")
    for d in widths:
        for way in directions:
            yield f"add_norm {way}", d, 1, 1, 0, getattr(add_norm, f"{way}_kernel")
        for way in directions:
            yield f"expand {way}", d, 4, 4, 0, getattr(expand, f"{way}_kernel")
        for columns, kernel_size in ((1, 1), (2, 1), (4, 1), (8, 1), (2, 4), (4, 4), (8, 4)):
            for way in directions:
                for writes in (0, 1) if way == "forward" else (0, 2):
                    yield f"step {way}", d, columns, kernel_size, writes, getattr(step_kernels, f"{way}_kernel")


def measure(widths: list[int], match: str) -> list[dict]:
    from model.kernels import expand
    from model.kernels.launch import KERNELS, name_of

    rows = []
    for name, d, columns, kernel_size, writes, kernel in kernels(widths):
        if match not in name:
            continue
        launch = KERNELS[name_of(name, columns, kernel_size)]
        block = expand.BLOCK if name.startswith("expand") else 1 << (d - 1).bit_length()
        constants = {"D": d, "BLOCK": block, "K": kernel_size, "STAGES": launch.stages}
        compiled = compile_for(kernel, arguments_of(kernel, constants, columns, writes), launch.num_warps)
        row = {"kernel": name, "d": d, "columns": columns, "tokens_of_read": kernel_size, "writes_replayed": writes}
        rows.append(row | {"warps": launch.num_warps, "stages": launch.stages, **resources(compiled)})
        print(" ".join(f"{value}" for value in rows[-1].values()), flush=True)
    return rows


def markdown(rows: list[dict]) -> str:
    """A line a kernel, its registers and spilled bytes at each width beside each other."""
    widths = sorted({row["d"] for row in rows})
    kernels: dict[tuple, dict] = {}
    for row in rows:
        name = (row["kernel"], row["columns"], row["tokens_of_read"], row["writes_replayed"])
        kernels.setdefault(name, {})[row["d"]] = (row["registers"], row["spill_bytes"])
    titles = ["kernel", "columns", "tokens of the read", "replayed"]
    titles += [title for d in widths for title in (f"registers, d = {d}", "spilled")]
    lines = [titles, ["---"] * len(titles)]
    lines += [[*name, *(figure for d in widths for figure in found[d])] for name, found in kernels.items()]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def run(args) -> None:
    """Print and store the figures of `bench.py registers`."""
    if importlib.util.find_spec("triton") is None:
        raise ValueError("registers needs triton: pip install triton")
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise ValueError("registers compiles kernels, TRITON_INTERPRET=1 interprets them: unset it")
    rows = measure([int(width) for width in args.widths.split(",")], args.match)
    if not rows:
        raise ValueError(f"--match={args.match}: no kernel has that in its name; try step, add_norm or expand")
    print(markdown(rows))
    if args.json:
        stored = {**provenance(), "target": "sm_90", "rows": rows}
        args.json.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
