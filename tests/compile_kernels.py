"""Compile every form of the kernels for sm_90, which needs no GPU: python tests/compile_kernels.py

The interpreter takes what the compiler refuses. Prints a line a form; a form that does not compile
ends it.
"""

import itertools
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from model.kernels import add_norm, expand, rope, step_kernels

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


def compile_for(kernel, arguments: dict, num_warps: int, arch: int = 90):
    """The compiled kernel.

    arguments: name -> a pointer type ("*bf16"), a type ("i32"), a tuple of them, or a constant.

    Pointers are taken as aligned to 16 bytes, as torch allocates them.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, constants, attributes = {}, {}, {}

    def is_type(value):
        return isinstance(value, str) and re.fullmatch(r"\*?(bf16|fp16|fp32|i32)", value)

    for index, (name, value) in enumerate(arguments.items()):
        if is_type(value) or isinstance(value, tuple):
            signature[name] = value
            for part, each in enumerate(value if isinstance(value, tuple) else (value,)):
                if each.startswith("*"):
                    where = (index, part) if isinstance(value, tuple) else (index,)
                    attributes[where] = [["tt.divisibility", 16]]
        else:
            signature[name], constants[(index,)] = "constexpr", value
        if name in ("token_stride", "channel_stride"):
            attributes[(index,)] = [["tt.divisibility", 16]]  # as at the widths that are used
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(
        source, target=GPUTarget("cuda", arch, 32), options={"num_warps": num_warps}
    )


def arguments_of(kernel, constants: dict, columns: int, writes: int = 0) -> dict:
    """The kernel's arguments in bf16 with all heads and results: states and vectors bf16, scalars
    and sums fp32.
    """
    bf16 = (
        "stored_state new_state state grad_new_state grad_state direction grad_direction x_in context "
        "grad_context x new_x grad_x grad_new_x h grad_h qkv qk grad_q grad_k grad_v grad_qkv"
    )
    int32 = (
        "token_stride channel_stride num_tokens num_rows chunk_size num_chunks sequence_length "
        "table_stride"
    )
    fp32 = "k_eps_squared norm_eps eps value_scale value_constant"
    types = {
        **dict.fromkeys(bf16.split(), "*bf16"),
        **dict.fromkeys(int32.split(), "i32"),
        **dict.fromkeys(fp32.split(), "fp32"),
        **dict.fromkeys(("carry", "new_carry", "grad_x_in")),
        "directions": ("*bf16",) * writes,
        "updates": ("*fp32",) * writes,
        "V": columns,
        "VALUE_FORM": "sigmoid",
        "VALUE_INPUT": "residual",
        "ERASE": True,
        "TOTAL": 2**16,
        **constants,
    }
    return {name: types.get(name, "*fp32") for name in kernel.arg_names}


def forms():
    """(name, kernel, constants that differ, columns, writes)."""
    sizes = {"D": 40, "BLOCK": 16, "STAGES": 2, "PREFETCH": 0, "RELOAD": False}
    options = {
        "plain": {},
        "write_only": {"ERASE": False},
        "constant": CONSTANT | NO_VALUE,
        "raw, context": {"VALUE_FORM": "raw", "VALUE_INPUT": "context"},
        "no heads": NO_GATE | NO_VALUE,
        "no write": NO_WRITE,
        "reload": {"RELOAD": True, "PREFETCH": 2, "STAGES": 1},
        "alone": {"grad_new_state": None, "new_state": None, "x_in": None},
    }
    for (name, changes), K, way in itertools.product(
        options.items(), (1, 3), ("forward", "backward")
    ):
        if name == "alone" and K > 1:
            changes = {"grad_new_state": None}
        kernel = getattr(step_kernels, f"{way}_kernel")
        yield f"step {way}, {name}, K={K}", kernel, sizes | {"K": K} | changes, 2, 1
    carried = {"K": 3, "carry": "*fp32", "new_carry": "*fp32", "x_in": None}
    yield "step forward, carry", step_kernels.forward_kernel, sizes | carried, 1, 0
    x_in = {"K": 1, "grad_x_in": "*bf16", "grad_context": "*fp16"}
    yield "step backward, x_in", step_kernels.backward_kernel, sizes | x_in, 8, 0
    yield (
        "step forward, fp32",
        step_kernels.forward_kernel,
        sizes | {"K": 1, "stored_state": "*fp32", "direction": "*fp32"},
        4,
        2,
    )
    mixed = dict.fromkeys(
        "stored_state new_state x_in x new_x grad_new_state grad_state grad_x grad_new_x".split(),
        "*fp32",
    )
    for kernel in (step_kernels.forward_kernel, step_kernels.backward_kernel):
        yield (
            f"{kernel.__name__} of steps, fp32 state",
            kernel,
            sizes | {"K": 3, "STAGES": 2} | mixed,
            4,
            1,
        )
    for kernel in (add_norm.forward_kernel, add_norm.backward_kernel):
        yield f"{kernel.__name__} of add_norm, fp32 state", kernel, sizes | mixed, 1, 0
    for module, way in itertools.product((add_norm, expand), ("forward", "backward")):
        yield f"{module.__name__} {way}", getattr(module, f"{way}_kernel"), sizes | {"K": 3}, 2, 0
    heads = {"H": 3, "HALF": 16, "BLOCK": 16, "ROWS": 8}
    for way in ("forward", "backward"):
        yield f"rope_norm {way}", getattr(rope, f"{way}_kernel"), sizes | heads, 1, 0
    yield (
        "add_norm forward, no h",
        add_norm.forward_kernel,
        sizes | {"h": None, "PREFETCH": 2, "STAGES": 1},
        1,
        0,
    )


if __name__ == "__main__":
    for name, kernel, constants, columns, writes in forms():
        compile_for(kernel, arguments_of(kernel, constants, columns, writes), 2)
        print(name, flush=True)
