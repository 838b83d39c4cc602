"""Inductor of torch before 2.13 needs a rule for every operator of ours, or does not end with a deep model."""

import importlib.util
import json

import pytest
import torch
from conftest import ROOT, script

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")

# What each model calls, besides its backward; one line is one fresh process.
OPERATORS = {
    "gpt-mha-rope": "rope_norm add_norm",
    "DDL-gpt-mha-rope": "rope_norm residual_step",
    "DDL-gpt-mha-rope-CC-EC": "rope_norm residual_step expand",
    "DDL-vdim1-gpt-mha-rope": "rope_norm residual_step",
    "HC-gpt-mha-rope": "rope_norm",
}
if importlib.util.find_spec("liger_kernel"):
    OPERATORS |= {"mHC-gpt-mha-rope": "rope_norm fused_sinkhorn_knopp"}
SEVERAL = "HC-gpt-mha-rope gpt-mha-rope DDL-gpt-mha-rope-CC-EC"
OPERATORS |= {f"off {SEVERAL}": "sinkhorn_knopp", f"auto {SEVERAL}": "add_norm residual_step expand"}
LAYERS = 12


@pytest.fixture(scope="module")
def fresh() -> dict:
    """What `fresh_lowering.py` finds, for all tests from one start of Python."""
    tasks = {}
    for name in OPERATORS:
        setting, *stems = name.split() if " " in name else ("auto", name)
        tasks[name] = ["rules", setting, *stems]
    tasks["calls"] = ["calls", "DDL-gpt-mha-rope-CC-EC", LAYERS]
    env = {"PYTHONPATH": str(ROOT), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    result = script(ROOT / "tests" / "fresh_lowering.py", json.dumps(tasks), env=env)
    assert result.returncode == 0, result.stderr.decode()
    return json.loads(result.stdout)


@pytest.mark.parametrize("name", OPERATORS)
def test_every_operator_has_a_rule_once_the_kernels_are_in_use(name, fresh):
    found = fresh[name]
    assert not found["without"], f"without a rule: {', '.join(found['without'])}"
    wanted = {f"{operator}{way}" for operator in OPERATORS[name].split() for way in ("", "_backward")}
    assert wanted <= set(found["operators"])


def test_twelve_layers_are_lowered_kernel_by_kernel(fresh):
    """Two steps of the stream a block, and the readout; what is between them does not grow from layer to layer."""
    without = fresh["calls"]["without"]
    assert not without, f"without a rule: {', '.join(without)}"
    for way, suffix, products, fused in (("forward", "", 1, 4), ("backward", "_backward", 2, 6)):
        counts = fresh["calls"][way]
        ours = {name: count for name, count in counts.items() if ".ddl." in name}
        wanted = {"residual_step": 2 * LAYERS + 1, "rope_norm": LAYERS, "expand": 1}
        assert ours == {f"torch.ops.ddl.{name}{suffix}.default": count for name, count in wanted.items()}
        # Of a block seven matrices: queries, keys, values, their output, and the MLP's three.
        matrices = sum(count for name, count in counts.items() if name.startswith("extern_kernels."))
        assert matrices == products * (7 * LAYERS + 1)
        assert counts["cpp_fused"] <= fused * LAYERS


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="imports it, for the rules")
def test_inductor_is_not_imported_where_it_needs_no_rules(fresh):
    assert not fresh["imports"]
