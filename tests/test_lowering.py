"""Without a rule for each of our operators, Inductor of torch before 2.13 may not finish."""

import importlib.util
import json

import pytest
import torch
from helpers import ROOT, run_script

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")

# For each setting of `kernels`, and the models that get it in one process: the operators that they
# call. The backward pass calls one for each.
SEVERAL = "HC-gpt-mha-rope gpt-mha-rope DDL-gpt-mha-rope-CC-EC"
OPERATORS = {
    "auto DDL-gpt-mha-rope-CC-EC": "rope_norm residual_step expand",
    f"auto {SEVERAL}": "rope_norm add_norm residual_step expand",
    f"off {SEVERAL}": "sinkhorn_knopp",
}
if importlib.util.find_spec("liger_kernel"):
    OPERATORS["auto mHC-gpt-mha-rope"] = "rope_norm fused_sinkhorn_knopp"
LAYERS = 3


@pytest.fixture(scope="module")
def fresh() -> dict:
    """Return what `fresh_lowering.py` prints; it runs once for all tests."""
    tasks = {name: ["rules", *name.split()] for name in OPERATORS}
    tasks["calls"] = ["calls", "DDL-gpt-mha-rope-CC-EC", LAYERS]
    env = {"PYTHONPATH": str(ROOT), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    result = run_script(ROOT / "tests" / "fresh_lowering.py", json.dumps(tasks), env=env)
    assert result.returncode == 0, result.stderr.decode()
    return json.loads(result.stdout)


def assert_every_operator_has_a_rule(operators_without_rule: list[str]) -> None:
    assert not operators_without_rule, f"without a rule: {', '.join(operators_without_rule)}"


@pytest.mark.parametrize("name", OPERATORS)
def test_every_operator_has_a_rule_once_the_kernels_are_in_use(name, fresh):
    assert_every_operator_has_a_rule(fresh[name]["without"])
    forward = OPERATORS[name].split()
    backward = [f"{operator}_backward" for operator in forward]
    assert {*forward, *backward} <= set(fresh[name]["operators"])


def test_every_operator_of_a_lowered_model_has_a_rule(fresh):
    assert_every_operator_has_a_rule(fresh["calls"]["without"])


@pytest.mark.parametrize(
    ("direction", "suffix", "products_per_matrix", "max_fused_per_layer"),
    [("forward", "", 1, 4), ("backward", "_backward", 2, 7)],
)
def test_layers_are_lowered_kernel_by_kernel(
    direction, suffix, products_per_matrix, max_fused_per_layer, fresh
):
    """Each block calls two steps of the stream, and the readout one more.

    The number of fused C++ kernels between these calls is at most proportional to the layers.
    """
    calls = fresh["calls"][direction]
    our_calls = {name: count for name, count in calls.items() if ".ddl." in name}
    expected_calls = {
        f"torch.ops.ddl.residual_step{suffix}.default": 2 * LAYERS + 1,
        f"torch.ops.ddl.rope_norm{suffix}.default": LAYERS,
        f"torch.ops.ddl.expand{suffix}.default": 1,
    }
    assert our_calls == expected_calls
    # a block has seven matrices: of queries, keys, values and their output, and the MLP's three
    products = [count for name, count in calls.items() if name.startswith("extern_kernels.")]
    assert sum(products) == products_per_matrix * (7 * LAYERS + 1)
    assert calls["cpp_fused"] <= max_fused_per_layer * LAYERS


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="imports it, for the rules")
def test_inductor_is_not_imported_where_it_needs_no_rules(fresh):
    assert not fresh["imports"]
