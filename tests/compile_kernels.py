"""Compile every form of the kernels for sm_90, which needs no GPU: python tests/compile_kernels.py

The interpreter accepts code that the compiler rejects. Prints a line for each form, and stops at the
first one that does not compile.
"""

import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import triton

sys.path.insert(0, str(Path(__file__).parent.parent))

from model.kernels import rope, step_kernels, swiglu_kernel

NO_WRITE = dict.fromkeys(
    (
        "direction",
        "gate_logit",
        "value_logit",
        "inverse_norm",
        "delta",
        "update",
        "new_state",
        "grad_direction",
        "grad_gate_logit",
        "grad_value_logit",
    )
)
NO_GATE = dict.fromkeys(("gate_weight", "gate_bias", "next_gate_logit", "grad_next_gate_logit"))
NO_VALUE = dict.fromkeys(
    ("value_weight", "value_bias", "next_value_logit", "grad_next_value_logit")
)
CONSTANT = {"VALUE_FORM": "constant", "value_logit": None, "grad_value_logit": None}


def is_type(value: object) -> bool:
    """Return whether an argument is the name of a type, such as "*bf16" or "i32"."""
    return isinstance(value, str) and re.fullmatch(r"\*?(bf16|fp16|fp32|i32)", value) is not None


def compile_for(kernel, arguments: dict, num_warps: int, arch: int = 90):
    """Compile a kernel.

    arguments: for each name a pointer type ("*bf16"), a number type ("i32"), a tuple of types, or
        the value of a constant
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    # torch aligns the memory of tensors to 16 bytes
    aligned = [["tt.divisibility", 16]]
    signature = {}
    constants = {}
    attributes = {}
    for index, (name, value) in enumerate(arguments.items()):
        if isinstance(value, tuple):
            signature[name] = value
            for part, part_type in enumerate(value):
                if part_type.startswith("*"):
                    attributes[index, part] = aligned
        elif is_type(value):
            signature[name] = value
            # strides are multiples of 16 at the widths that are used
            if value.startswith("*") or name in ("token_stride", "channel_stride"):
                attributes[(index,)] = aligned
        else:
            signature[name] = "constexpr"
            constants[(index,)] = value
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(
        source, target=GPUTarget("cuda", arch, 32), options={"num_warps": num_warps}
    )


def arguments_of(kernel, constants: dict, num_value_channels: int, num_writes: int = 0) -> dict:
    """Return the arguments of a kernel with all heads and results, for `compile_for`.

    States and vectors are bf16, numbers and sums fp32.

    Args:
        constants: arguments that differ from that
        num_writes: number of writes since the state was stored
    """
    bf16 = (
        "stored_state new_state state grad_new_state grad_state direction grad_direction x_in context "
        "grad_context x new_x grad_x grad_new_x h grad_h qkv qk grad_q grad_k grad_v grad_qkv "
        "grad joined grad_joined"
    )
    int32 = (
        "token_stride channel_stride num_tokens num_rows chunk_size num_chunks sequence_length "
        "table_stride num_elements"
    )
    fp32 = "k_eps_squared norm_eps eps value_scale value_constant"
    types = {
        **dict.fromkeys(bf16.split(), "*bf16"),
        **dict.fromkeys(int32.split(), "i32"),
        **dict.fromkeys(fp32.split(), "fp32"),
        **dict.fromkeys(("carry", "new_carry", "grad_x_in")),
        "directions": ("*bf16",) * num_writes,
        "updates": ("*fp32",) * num_writes,
        "V": num_value_channels,
        "VALUE_FORM": "sigmoid",
        "VALUE_INPUT": "residual",
        "ERASE": True,
        "TOTAL": 2**16,
        **constants,
    }
    return {name: types.get(name, "*fp32") for name in kernel.arg_names}


class Form(NamedTuple):
    """A kernel with the arguments in which it differs from others."""

    name: str
    kernel: triton.JITFunction
    constants: dict
    num_value_channels: int = 1
    num_writes: int = 0


SIZES = {"D": 40, "BLOCK": 16, "STAGES": 2, "PREFETCH": 0, "RELOAD": False}

STEP_OPTIONS = {
    "plain": {},
    "write_only": {"ERASE": False},
    "constant": {**CONSTANT, **NO_VALUE},
    "raw, context": {"VALUE_FORM": "raw", "VALUE_INPUT": "context"},
    "no heads": {**NO_GATE, **NO_VALUE},
    "no write": NO_WRITE,
    "reload": {"RELOAD": True, "PREFETCH": 2, "STAGES": 1},
    "alone": {"grad_new_state": None, "new_state": None, "x_in": None},
}

# a float32 state beside bfloat16 vectors
FP32_STATE = dict.fromkeys(
    "stored_state new_state x_in x new_x grad_new_state grad_state grad_x grad_new_x".split(),
    "*fp32",
)


def forms() -> Iterator[Form]:
    """Yield every form of every kernel."""
    directions = ("forward", "backward")
    for (name, changes), K, direction in itertools.product(
        STEP_OPTIONS.items(), (1, 3), directions
    ):
        if name == "alone" and K > 1:
            # a read of several tokens needs x_in
            changes = {"grad_new_state": None}
        yield Form(
            f"step {direction}, {name}, K={K}",
            getattr(step_kernels, f"{direction}_kernel"),
            {**SIZES, "K": K, **changes},
            num_value_channels=2,
            num_writes=1,
        )
    yield Form(
        "step forward, carry",
        step_kernels.forward_kernel,
        {**SIZES, "K": 3, "carry": "*fp32", "new_carry": "*fp32", "x_in": None},
    )
    yield Form(
        "step backward, x_in",
        step_kernels.backward_kernel,
        {**SIZES, "K": 1, "grad_x_in": "*bf16", "grad_context": "*fp16"},
        num_value_channels=8,
    )
    yield Form(
        "step forward, fp32",
        step_kernels.forward_kernel,
        {**SIZES, "K": 1, "stored_state": "*fp32", "direction": "*fp32"},
        num_value_channels=4,
        num_writes=2,
    )
    for kernel in (step_kernels.forward_kernel, step_kernels.backward_kernel):
        yield Form(
            f"{kernel.__name__} of steps, fp32 state",
            kernel,
            {**SIZES, "K": 3, **FP32_STATE},
            num_value_channels=4,
            num_writes=1,
        )
    for direction in directions:
        yield Form(
            f"rope_norm {direction}",
            getattr(rope, f"{direction}_kernel"),
            {**SIZES, "H": 3, "HALF": 16, "BLOCK": 16, "ROWS": 8},
        )
    yield Form(
        "swiglu backward",
        swiglu_kernel.backward_kernel,
        {"INNER": 192, "BLOCK": swiglu_kernel.BLOCK},
    )


if __name__ == "__main__":
    for form in forms():
        arguments = arguments_of(
            form.kernel, form.constants, form.num_value_channels, form.num_writes
        )
        compile_for(form.kernel, arguments, num_warps=2)
        print(form.name, flush=True)
