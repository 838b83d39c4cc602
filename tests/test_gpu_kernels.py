"""The fused kernels compiled, by the checks of test_kernels.py and test_kernel_streams.py; run with
`pytest -m gpu`.

Few combinations, because each is another kernel to compile; test_kernels.py has them all,
interpreted.
"""

import copy

import pytest
import torch
from models import PAPER, TINY

from model.causality import move_parameters

pytest.importorskip("triton")

import fused
from fused import INTERPRETED, Step

from model import build, products

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(INTERPRETED, reason="TRITON_INTERPRET=1: nothing would be compiled"),
]
CC, TC = "DDL-gpt-mha-rope-CC", "DDL-gpt-mha-rope"
# Two or three tokens a program, and a last program with fewer: 1,100 rows on 132 multiprocessors.
STEPS = [
    *(Step(768, v, 1, 2, 550, "bf16", pending=v % 2) for v in (1, 2, 4, 8)),
    # a float32 state, as in config/*_small.py
    *(Step(768, v, K, 2, 550, "mixed", pending=1) for v, K in ((1, 1), (4, 1), (4, 4))),
    Step(768, 4, 4, 3, 60, "bf16", store=False),
    Step(37, 8, 4, 2, 60),
    Step(96, 2, 3, 2, 40, "fp16", form="raw", value_input="context"),
    Step(T=1100),
    Step(logits=40.0),
    Step(form="constant", heads="gate", erase=False, zero_h=True),
    Step(h_scale=1e-20, with_x_in=False, heads=""),
    Step(K=3, v=2, write=False, store=False, pending=1, repeated=True, T=40),
]


# Loads that run ahead, in each way that they can, and vectors of several pieces, of which the last
# is not full.
LONG = [
    *(Step(768, v, 1, 2, 550, "bf16", pending=1, store=False) for v in (1, 4)),
    Step(1024, 4, 4, 2, 300, "bf16"),
    Step(1024, 4, 1, 1, 500, "bf16", store=False),
    Step(600, 2, 3, 2, 200, "bf16"),
    Step(768, 8, 1, 1, 300, "bf16"),
]


def tiny(model_name, **changes):
    return move_parameters(build(model_name, **{**TINY, **changes}))


@pytest.mark.parametrize("case", STEPS, ids=str)
def test_step(case):
    fused.check_step(case)


@pytest.mark.parametrize("case", LONG, ids=str)
def test_step_of_programs_with_many_tokens(case, monkeypatch):
    fused.set_num_processors(monkeypatch, 4)
    fused.check_step(case)


def test_two_runs_give_the_same_bits():
    first_results, first_gradients = fused.run(STEPS[4])
    second_results, second_gradients = fused.run(STEPS[4])
    # this state is not stored: it has no memory, and its only number is undefined
    del first_results["new_state"]
    for name, first in first_results.items():
        assert torch.equal(second_results[name], first), name
    for name, first in first_gradients.items():
        assert torch.equal(second_gradients[name], first), name


def test_generation_carries_the_reads_that_are_under_way():
    fused.check_generation(Step(K=4, T=40, B=2), (2, 1, 37))


@pytest.mark.parametrize("shape", [(2, 1024, 6, 128), (2, 300, 3, 6), (1, 1, 1, 2)])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_rotation_and_norm(shape, dtype):
    fused.check_heads(*shape, dtype)


@pytest.mark.parametrize("shape", [(16, 1024, 2048), (3, 500)])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_swiglu(shape, dtype):
    fused.check_swiglu(*shape, dtype=dtype)


@pytest.mark.parametrize("model_name", PAPER)
def test_model(model_name):
    fused.check_model(tiny(model_name))


def test_fused_model_of_joined_products(monkeypatch):
    monkeypatch.setattr(products, "MIN_TOKENS_FOR_COPIED_WEIGHTS", 1)
    fused.check_model(tiny("gpt-mha-rope"))


def test_plain_model_of_joined_products(monkeypatch):
    monkeypatch.setattr(products, "MIN_TOKENS_FOR_COPIED_WEIGHTS", 1)
    model = tiny("gpt-mha-rope")
    ids, targets = fused.tokens_of(model)
    _, expected_loss = copy.deepcopy(model).double()(ids, targets)
    model.to("cuda")
    _, loss = model(ids.to("cuda"), targets.to("cuda"))
    torch.testing.assert_close(loss.cpu().double(), expected_loss, rtol=1e-5, atol=1e-6)


def test_two_layer_gate_and_v_map():
    fused.check_model(tiny(CC, ddl_map="v", ddl_beta_single_linear=False))


def test_intervals_change_no_bit():
    fused.check_intervals(tiny(TC), torch.bfloat16, (1, 2, 4))


@pytest.mark.parametrize("model_name", ["DDL-gpt-mha-rope-EC", "gpt-mha-rope"])
def test_compiled_by_inductor(model_name):
    fused.check_compiled(tiny(model_name, num_hidden_layers=1), "inductor", 1e-3)


def test_activation_checkpointing():
    fused.check_checkpointing(tiny(CC))


@pytest.mark.parametrize("model_name", [TC, CC])
def test_autocast(model_name):
    fused.check_autocast(tiny(model_name), torch.bfloat16)


def test_cached_generation():
    fused.check_cached(tiny("DDL-gpt-mha-rope-EC"), (2, 1, 3, 1))
