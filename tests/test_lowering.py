"""Compiling for a GPU that is not there, under the torch that GPU machines have; and what is predicted from it."""

import importlib.util
import json
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, one_line_error, script

import bench
from benchmarks import lowering
from model import STEMS

SIZE = {"vocab_size": 1024, "block_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 2, "head_dim": 64}
SIZE |= {"hidden_size": 128}


@pytest.mark.slow
@pytest.mark.skipif(not lowering.PYTHON.exists(), reason="needs torch 2.11 built for CUDA: make .venv-torch2.11")
@pytest.mark.parametrize("stem", STEMS)
def test_twelve_layers_compile(stem, tmp_path):
    """For operators without a rule, torch 2.11 takes minutes at five layers already (model/kernels/lowering.py)."""
    sizes = [f"--{key}={value}" for key, value in SIZE.items()]
    command = ["bench.py", "lowering", f"--models={stem}", *sizes, "--micro_batch_size=2"]
    command += [f"--json={tmp_path / 'out'}", f"--launches={tmp_path}"]
    result = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert result.returncode == 0, result.stderr
    stored = json.loads((tmp_path / "out").read_text())
    [row] = stored["rows"]
    assert stored["lowered_with"]["torch"].startswith("2.11.")
    assert row["lowering_cpu_seconds"] < 120
    for way in ("forward", "backward"):
        # Two steps of the stream a layer, and the heads; four products a layer forward.
        assert row[way]["operator"]["launches"] >= 36
        assert row[way]["attention"]["launches"] == 12
        assert row[way]["product"]["launches"] >= 48
        launches = json.loads((tmp_path / f"{stem}.json").read_text())[way]
        assert row[f"{way}_launches"] == len(launches) == sum(kind["launches"] for kind in row[way].values())
        assert all(each["bytes"] > 0 for each in launches if each["kind"] != "inductor")
        assert all(each["flops"] > 0 for each in launches if each["kind"] in ("product", "attention"))


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_every_operator_gets_a_rule():
    import model.kernels.stream  # noqa: F401
    from model.kernels import lowering, rope  # noqa: F401

    lowering.register_all()
    lowering.register_all()  # and once is enough
    from torch._inductor.lowering import lowerings

    names = {"residual_step", "add_norm", "expand", "rope_norm"}
    names |= {f"{name}_backward" for name in names}
    assert names <= set(torch.ops.ddl)
    assert all(getattr(torch.ops.ddl, name).default in lowerings for name in names)


def launch(kind, size, flops=0, **case):
    return {"kind": kind, "name": "", "bytes": size, "flops": flops} | ({"case": case} if case else {})


STEP = {"kernel": "step forward", "d": 768, "columns": 4, "tokens_of_read": 1, "writes_replayed": 1}
KNOWN = [{**STEP, "stored": True, "ceiling": 0.5}, {**STEP, "d": 1024, "ceiling": 0.9}]


def test_predicted_time_of_a_launch():
    """By hand: 4.3 GB take a millisecond, 546 GFLOP too."""
    known = pytest.approx
    assert lowering.seconds_of(launch("inductor", 43_000_000_000), KNOWN) == known(0.01)
    assert lowering.seconds_of(launch("product", 1, 546e9), KNOWN) == known(0.001)
    assert lowering.seconds_of(launch("product", 43_000_000_000, 546e9), KNOWN) == known(0.01)
    assert lowering.seconds_of(launch("inductor", 1000), KNOWN) == known(2e-6)
    assert lowering.seconds_of(launch("operator", 4_300_000_000, **STEP, stored=True), KNOWN) == known(0.002)
    assert lowering.seconds_of(launch("operator", 4_300_000_000, kernel="expand forward"), KNOWN) == known(0.001)


def test_ceilings_are_those_of_the_kernel():
    assert lowering.ceiling_of({**STEP, "stored": True}, KNOWN) == 0.5
    assert lowering.ceiling_of({**STEP, "stored": False}, KNOWN) == 0.5
    assert lowering.ceiling_of({**STEP, "stored": True, "columns": 2}, KNOWN) is None
    assert lowering.ceiling_of({**STEP, "d": 1024, "stored": False}, KNOWN) == 0.9  # the table does not tell them apart
    assert lowering.ceiling_of({"kernel": "expand forward", "d": 768}, KNOWN) is None


def test_a_row_of_the_table():
    setting = {"stem": "gpt-mha-rope", "size": {**SIZE, "block_size": 1000}, "rows": 10}
    step = launch("operator", 4_300_000_000, **STEP, stored=False)
    figures = {
        "seconds": 3.21,
        "cpu_seconds": 3.0,
        "parameters": 107_500_000,
        "forward": [step, launch("product", 1, 546e9)],
    }
    figures["backward"] = [launch("inductor", 4_300_000_000)]
    row = lowering.row_of(setting, figures, [])
    assert (row["launches"], row["forward_launches"], row["without_ceiling"]) == (3, 2, ["step forward"])
    assert row["forward"]["product"] == {"launches": 1, "bytes": 1, "flops": 546e9}
    assert row["predicted_step_milliseconds"] == pytest.approx(4)  # the optimizer: 40 bytes a parameter
    assert row["predicted_tokens_per_second"] == 2_500_000
    flops = 6 * 107_500_000 + 12 * SIZE["num_hidden_layers"] * SIZE["hidden_size"] * 1000
    assert row["predicted_mfu"] == pytest.approx(2_500_000 * flops / 989e12, rel=1e-2)
    assert "| `gpt-mha-rope` | 3.2 | 3.0 | 2 | 1 | 1 | 1 |" in lowering.markdown([row])


def test_what_cannot_be_lowered_is_said(tmp_path):
    assert "make .venv-torch2.11" in one_line_error(script("bench.py", "lowering", f"--python={tmp_path / 'python'}"))
    assert "gpt is none of" in one_line_error(script("bench.py", "lowering", "--models=gpt"))


def test_the_environment_is_described():
    wanted = (ROOT / "requirements-torch2.11.txt").read_text()
    assert "torch==2.11.0" in wanted
    assert "requirements-torch2.11.txt" in (ROOT / "Makefile").read_text()
    assert "lowering" in bench.COMMANDS
