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


@pytest.mark.parametrize("name", OPERATORS)
def test_every_operator_has_a_rule_once_the_kernels_are_in_use(name, fresh):
    without = fresh[name]["without"]
    assert not without, f"without a rule: {', '.join(without)}"
    forward = OPERATORS[name].split()
    backward = [f"{operator}_backward" for operator in forward]
    assert {*forward, *backward} <= set(fresh[name]["operators"])


def test_layers_are_lowered_kernel_by_kernel(fresh):
    """Two steps of the stream a block, and the readout; what is between does not grow by layer."""
    without = fresh["calls"]["without"]
    assert not without, f"without a rule: {', '.join(without)}"
    for way, suffix, products, fused in (("forward", "", 1, 4), ("backward", "_backward", 2, 7)):
        counts = fresh["calls"][way]
        ours = {name: count for name, count in counts.items() if ".ddl." in name}
        wanted = {"residual_step": 2 * LAYERS + 1, "rope_norm": LAYERS, "expand": 1}
        names = {name: f"torch.ops.ddl.{name}{suffix}.default" for name in wanted}
        assert ours == {names[name]: count for name, count in wanted.items()}
        # Of a block seven matrices: queries, keys, values, their output, and the MLP's three.
        matrices = [count for name, count in counts.items() if name.startswith("extern_kernels.")]
        assert sum(matrices) == products * (7 * LAYERS + 1)
        assert counts["cpp_fused"] <= fused * LAYERS


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="imports it, for the rules")
def test_inductor_is_not_imported_where_it_needs_no_rules(fresh):
    assert not fresh["imports"]
