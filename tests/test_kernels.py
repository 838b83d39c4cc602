"""Results and gradients of the fused kernels against plain operations in float64 (see fused.py).

The kernels run under Triton's interpreter here, which conftest.py enables; test_gpu_kernels.py runs
the same checks compiled.
"""

import itertools
import math
import random

import numpy as np
import pytest
import torch
from helpers import run_script

pytest.importorskip("triton")

from fused import (
    INTERPRETED,
    Step,
    arguments,
    check_generation,
    check_step,
    make_unreadable_state,
    run,
    set_num_processors,
)
from triton.runtime import interpreter

from model.kernels import residual_step as residual_step_module
from model.kernels.launch import choose_chunks
from model.kernels.tiles import get_state_strides

# first address, and the one past the end, of each tensor that the running kernel was given
LIMITS = []

# the program that wrote to an address
WRITERS = {}


def addresses_in_bounds(pointers, mask, size: int) -> np.ndarray:
    """Return the addresses that an access uses, after checking that they are in its tensors."""
    pointers, mask = np.broadcast_arrays(np.ravel(pointers), np.ravel(mask))
    addresses = pointers[mask.astype(bool)].astype(np.int64)
    inside = [(first <= addresses) & (addresses + size <= last) for first, last in LIMITS]
    assert np.any(inside, axis=0).all(), "a kernel reaches past its tensors"
    return addresses


@pytest.fixture(autouse=True)
def _bounds(monkeypatch):
    """Check that kernels access only their tensors, and that no two programs write to one address.

    Reading past a tensor often does no visible harm. The interpreter runs programs in order, and a
    GPU does not.
    """
    memory = interpreter._interpreter
    init_arguments = interpreter.GridExecutor._init_args_hst

    def record_limits(self, *args):
        converted = init_arguments(self, *args)
        leaves = torch.utils._pytree.tree_leaves(converted)
        storages = [x.untyped_storage() for x in leaves if isinstance(x, torch.Tensor)]
        WRITERS.clear()
        LIMITS[:] = [
            (storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in storages
        ]
        return converted

    class Checked:
        def __getattr__(self, name):
            return getattr(memory, name)

        def load(self, pointers, mask, other, dtype):
            addresses_in_bounds(pointers, mask, np.dtype(dtype).itemsize)
            return memory.load(pointers, mask, other, dtype)

        def store(self, pointers, values, mask):
            program = interpreter.interpreter_builder.grid_idx
            for address in addresses_in_bounds(
                pointers, mask, np.asarray(values).dtype.itemsize
            ).tolist():
                assert WRITERS.setdefault(address, program) == program, (
                    "two programs write to the same place"
                )
            return memory.store(pointers, values, mask)

    monkeypatch.setattr(interpreter.GridExecutor, "_init_args_hst", record_limits)
    monkeypatch.setattr(interpreter, "_interpreter", Checked())


pytestmark = pytest.mark.skipif(
    not INTERPRETED, reason="test_gpu_kernels.py tests the compiled kernels"
)


@pytest.fixture(autouse=True)
def _programs(monkeypatch):
    set_num_processors(monkeypatch, 1)  # 2 to 8 programs


# Every shape, option and dtype with others beside it: what a case does not name is as in `Step`.
SHAPES = [
    Step(),
    Step(v=1, T=1),
    Step(v=2, K=3),
    Step(v=8, T=5),
    Step(d=96, B=2, T=3),
    Step(d=768, T=3),
    Step(K=4, T=2),
    Step(K=4, v=1, d=96, T=6),
    Step(K=3, v=8, T=4),
    Step(K=4, v=2, B=3, T=2),
    Step(K=4, v=2, B=2, T=5),
    # vectors of several pieces, the last not full, and more heads and columns than one reduction
    # sums
    Step(d=600, K=3, v=2, T=4),
    Step(d=600, v=8, K=2, T=3),
    Step(d=600, T=3, pending=1, value_input="context"),
]
OPTIONS = [
    Step(form="raw", value_input="context", pending=2, store=False),
    Step(value_input="context", erase=False, repeated=True),
    Step(form="constant", heads="gate", pending=3),
    Step(form="constant", heads="gate", erase=False, v=1),
    Step(form="raw", heads="", erase=False, store=False),
    Step(heads="value", with_x_in=False, pending=1),
    Step(heads="", with_x_in=False, K=3, v=2),
    Step(heads="gate", with_x_in=False, K=2, v=1),
    Step(write=False, store=False, repeated=True),
    Step(write=False, store=False, heads="", with_x_in=False, pending=2),
    Step(write=False, store=False, pending=1, K=3, v=2),
    Step(repeated=True, K=3, v=2, store=False, pending=1),
]
EXTREMES = [
    Step(logits=40.0),
    Step(logits=40.0, form="raw"),
    Step(h_scale=1e-20),
    Step(zero_h=True, h_scale=1e4),
    Step(x_scale=1e4),
    Step(x_scale=1e-4, K=3, v=2),
]
HALVES = [
    Step(dtype="bf16", pending=3),
    Step(dtype="fp16"),
    Step(dtype="bf16", d=768, T=2),
    Step(dtype="bf16", K=3, v=2, pending=1, store=False),
    Step(dtype="mixed", pending=1),
    Step(dtype="mixed", K=3, v=2, store=False),
    Step(dtype="fp16", v=1, erase=False),
]
USED = [
    *(Step(used=name) for name in Step.used.split()),
    *(Step(used=name, K=3, v=2) for name in ("new_state", "x_in")),
]
CASES = SHAPES + OPTIONS + EXTREMES + HALVES + USED


@pytest.mark.parametrize("case", CASES, ids=str)
def test_step(case):
    check_step(case)


def grid(seed: int):
    """Yield every shape and dtype, each with options drawn at random."""
    draw = random.Random(seed)
    for d, v, K, dtype in itertools.product(
        (37, 96, 600, 768), (1, 2, 4, 8), (1, 3, 4), ("fp32", "bf16", "fp16")
    ):
        write = draw.random() < 0.9
        yield Step(
            d=d,
            v=v,
            K=K,
            B=draw.choice((1, 1, 2, 3)),
            T=draw.choice((1, 2, 3, 5, 8)),
            dtype=dtype,
            write=write,
            form=draw.choice(("raw", "sigmoid", "constant")),
            value_input=draw.choice(("residual", "context")),
            heads=draw.choice(("", "gate", "value", "gate value", "gate value")),
            store=write and draw.random() < 0.5,
            with_x_in=draw.random() < 0.7,
            pending=draw.choice((0, 0, 1, 2, 3)),
            repeated=draw.random() < 0.2,
            erase=draw.random() < 0.8,
        )


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for seed in range(4) for case in grid(seed)], ids=str)
def test_step_over_the_grid(case):
    check_step(case)


@pytest.mark.slow
def test_every_kernel_compiles():
    """Kernels compile for sm_90: the interpreter accepts code that the compiler rejects."""
    result = run_script("tests/compile_kernels.py", env={"TRITON_INTERPRET": ""})
    assert result.returncode == 0, result.stderr.decode()
    assert len(set(result.stdout.splitlines())) == 5


@pytest.mark.parametrize(
    ("num_slots", "num_sequences", "num_tokens", "halo"),
    [
        (132, 16, 1024, 3),
        (264, 1, 16384, 0),
        (528, 1, 7, 0),
        (8, 3, 5, 2),
        (132, 200, 1024, 3),
        (4, 2, 1000, 1),
    ],
)
def test_tokens_are_shared_in_whole_waves(num_slots, num_sequences, num_tokens, halo):
    """No split into four waves or fewer is faster; a wave takes as long as its longest program."""

    def count_token_steps(chunk_size: int) -> int:
        num_programs = num_sequences * math.ceil(num_tokens / chunk_size)
        return math.ceil(num_programs / num_slots) * (chunk_size + halo)

    chunk_size, num_chunks = choose_chunks(num_slots, num_sequences, num_tokens, halo)
    assert (num_chunks - 1) * chunk_size < num_tokens <= num_chunks * chunk_size
    chunks_of_few_waves = [
        size
        for size in range(1, num_tokens + 1)
        if math.ceil(num_tokens / size) <= max(4, 4 * num_slots // num_sequences)
    ]
    assert count_token_steps(chunk_size) == min(map(count_token_steps, chunks_of_few_waves))


@pytest.mark.parametrize("case", [Step(K=4, v=2, T=9), Step(K=1, v=4, T=9, pending=1)], ids=str)
def test_chunks_change_no_bit_of_a_token(case, monkeypatch):
    """The number of programs depends on the device; only sums over tokens may depend on it."""
    expected_results, expected_gradients = run(case)
    set_num_processors(monkeypatch, 3)
    results, gradients = run(case)
    for name, expected in expected_results.items():
        assert torch.equal(results[name], expected), name
    for name in ("state", "direction", "gate_logit", "value_logit"):
        assert torch.equal(gradients[name], expected_gradients[name]), f"gradient of {name}"


@pytest.mark.parametrize("cuts", [(1,) * 7, (2, 1, 4)])
@pytest.mark.parametrize("case", [Step(K=4, v=2, B=2), Step(K=3, v=1)], ids=str)
def test_generation_carries_the_reads_that_are_under_way(case, cuts):
    check_generation(case, cuts)


def test_states_that_have_gaps_are_refused():
    assert get_state_strides(torch.empty(2, 3, 4, 5)) == (20, 5)
    assert get_state_strides(torch.empty(2, 3, 1, 5).expand(2, 3, 4, 5)) == (5, 0)
    assert get_state_strides(torch.empty(1, 3, 4, 5)[:, ::2]) == (40, 5)
    for state in (torch.empty(2, 3, 5, 4).transpose(2, 3), torch.empty(2, 3, 4, 5)[:, ::2]):
        with pytest.raises(ValueError, match="make it contiguous"):
            get_state_strides(state)


def make_leaves(case: Step) -> tuple[dict, torch.Tensor]:
    """Return the inputs of a step, those that have gradients as leaves, and its argument `state`."""
    inputs = case.inputs()
    differentiable = {
        name: x.requires_grad_()
        for name, x in inputs.items()
        if name not in ("stored_state", "directions", "updates")
    }
    return {**inputs, **differentiable}, make_unreadable_state(inputs)


OPERATORS = [
    Step(v=2, T=3),
    Step(v=2, T=3, store=False, pending=1, heads="gate", form="constant", with_x_in=False),
    Step(v=1, K=2, T=2, write=False, store=False, heads=""),
]


@pytest.mark.parametrize("case", OPERATORS, ids=str)
def test_opcheck_of_the_step(case):
    inputs, state = make_leaves(case)
    torch.library.opcheck(
        torch.ops.ddl.residual_step,
        (),
        arguments(case, inputs, state.detach().zero_().requires_grad_()),
    )


def test_opcheck_of_generation():
    case = Step(v=2, K=3, T=2)
    inputs = case.inputs()
    carry = torch.zeros(1, 2, case.d)
    torch.library.opcheck(
        torch.ops.ddl.residual_step, (), arguments(case, inputs, inputs["stored_state"], carry)
    )


@pytest.mark.parametrize(
    "case", [OPERATORS[0], Step(v=2, K=2, T=2, store=False, pending=1)], ids=str
)
def test_opcheck_of_the_steps_backward(case, monkeypatch):
    call_backward = residual_step_module.residual_step_backward
    calls = []

    def record_call(**arguments):
        calls.append(arguments)
        return call_backward(**arguments)

    monkeypatch.setattr(residual_step_module, "residual_step_backward", record_call)
    run(case)
    arguments = torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, calls[0])
    torch.library.opcheck(torch.ops.ddl.residual_step_backward, (), arguments)
