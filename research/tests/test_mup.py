"""muP's coordinate check: training changes as much in wide models as in narrow ones, and wrong rates are seen."""

import json
import math

import pytest
import torch
from helpers import ROOT, one_line_error
from in_process import call
from torch import nn

from model import MODEL_NAMES
from model.parameters import Kind, collect_rules
from research.analysis import coordinates
from research.analysis.coordinates import (
    ProductRecorder,
    find_not_level,
    fit_slope,
    measure_slopes,
    parse_case,
)
from training import optimizer

# settings with which a variant has other matrices than by default
OTHER_CASES = (
    "DDL-gpt-mha-rope+ddl_map=v",
    "DDL-gpt-mha-rope-CC+ddl_beta_single_linear=False",
    "DDL-gpt-mha-rope-CC+ddl_map=v+ddl_k_branch=attention",
    "DDL-gpt-mha-rope-CC+ddl_map=v+ddl_k_input=flat+ddl_beta_input=flat",
    "GatedResidual-gpt-mha-rope+hc_streams=2+gated_residual_rank=3",
    "NormPlacement-gpt-mha-rope+norm_placement=deepnorm",
    "NormPlacement-gpt-mha-rope+norm_placement=keel",
    "Lambdas-gpt-mha-rope+lambda_values=head+lambda_value_embeddings=True",
    "mHC-gpt-mha-rope+mhc_readout=sigmoid",
)
MUON_MODELS = ("gpt-mha-rope", "DDL-vdim1-gpt-mha-rope", "HC-gpt-mha-rope", "MGT-gpt-mha")
V_MAP = "DDL-gpt-mha-rope+ddl_map=v"
LEVEL = [(case, "adamw") for case in (*MODEL_NAMES, *OTHER_CASES)]
LEVEL += [(case, "muon") for case in MUON_MODELS]
WIDTHS = {"adamw": [64, 256], "muon": [64, 192]}  # a step of Muon takes three times as long


def test_slope_is_the_power_of_the_width():
    assert fit_slope([1, 2, 4], [3.0, 6.0, 12.0]) == pytest.approx(1)
    assert fit_slope([64, 128], [5.0, 5.0]) == pytest.approx(0)
    assert math.isnan(fit_slope([64, 128], [0.0, 0.0]))


def measure_with_mup(case: str, optimizer_name: str = "adamw", num_seeds: int = 3) -> dict:
    model_name, keys = parse_case(case)
    return measure_slopes(
        model_name, {**keys, "mup": True}, optimizer_name, WIDTHS[optimizer_name], num_seeds
    )


@pytest.mark.parametrize(("case", "optimizer_name"), LEVEL)
def test_changes_are_level(case, optimizer_name):
    assert find_not_level(measure_with_mup(case, optimizer_name)) == {}


def wrong_rules(power: float):
    """Return a `collect_rules` in which the power of every learning rate in 1 / width is too high by `power`."""

    def wrong_rules_of(model):
        rules = {}
        for name, rule in collect_rules(model).items():
            adam, muon = rule.kind
            if muon is not None:
                muon += power
            rules[name] = rule._replace(kind=Kind(adam + power, muon))
        return rules

    return wrong_rules_of


# whether the check notices is a matter of the check, not of the stream
WRONG = [(case, "adamw") for case in ("gpt-mha-rope", "DDL-gpt-mha-rope-CC-EC", "HC-gpt-mha-rope")]
WRONG += [(case, "muon") for case in ("gpt-mha-rope", V_MAP)]


@pytest.mark.parametrize("power", [-0.5, 0.5])
@pytest.mark.parametrize(("case", "optimizer_name"), WRONG)
def test_wrong_rates_are_noticed_in_either_direction(monkeypatch, case, optimizer_name, power):
    """At every matrix that meets data by itself."""
    monkeypatch.setattr(optimizer, "collect_rules", wrong_rules(power))
    changes = measure_with_mup(case, optimizer_name, num_seeds=1)
    expected = {name for name in changes if name.endswith(": linear")}
    assert {"c_q.weight: linear", "c_fc2.weight: linear"} <= expected
    assert expected <= find_not_level(changes).keys()


@pytest.mark.usefixtures("example_streams")
def test_a_stream_that_comes_later_is_checked_by_the_same_code():
    assert find_not_level(measure_with_mup("gated-gpt-mha-rope")) == {}


def test_a_recorded_product_is_that_of_the_change_alone():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4)).double()
    x = 7 * torch.randn(1, 3, 6).double()
    old_weights = {"1.weight": torch.randn(4, 5).double()}
    with torch.no_grad(), ProductRecorder(module, old_weights) as recorder:
        module(x)
        hidden = (x @ module[0].weight.T + module[0].bias)[0, -1]
        change = (module[1].weight - old_weights["1.weight"]) @ hidden
    [(name, size)] = recorder.sizes
    assert name == "1.weight"
    ratio = math.sqrt((change.square().sum() / 4) / (hidden.square().sum() / 5))
    assert size == pytest.approx(ratio)


def test_the_command_stores_its_figures_and_does_not_measure_them_again(tmp_path):
    def run_command():
        return call(
            "research/analyze.py",
            "mup",
            "--widths=32,64",
            "--seeds=1",
            "--models=gpt-mha-rope",
            f"--json={tmp_path / 'mup.json'}",
        )

    first = run_command()
    assert first.returncode == 0, first.stderr.decode()
    assert (tmp_path / "mup.png").read_bytes().startswith(b"\x89PNG")
    stored = json.loads((tmp_path / "mup.json").read_text())
    assert [(row["optimizer"], row["mup"]) for row in stored["rows"]] == [
        ("adamw", True),
        ("adamw", False),
        ("muon", True),
        ("muon", False),
    ]
    assert stored["commit"]
    again = run_command()
    assert again.stdout.decode().splitlines()[-8:] == first.stdout.decode().splitlines()[-8:]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["mup", "--widths=64"], "--widths=64: give two or more multiples of 32"),
        (["mup", "--models=gpt-mha-rope+ddl_map=v"], "unknown key ddl_map"),
        (["mup", "--models=gpt"], "--models=gpt: give one of"),
        (["mup", "--seeds=0"], "--seeds=0: give a number at least 1"),
    ],
)
def test_mistakes_are_one_line(arguments, message, tmp_path):
    assert message in one_line_error(
        call("research/analyze.py", *arguments, f"--json={tmp_path / 'x' / 'x.json'}")
    )
    assert not (tmp_path / "x").exists()


def test_the_page_has_what_the_stored_rows_say():
    stored = json.loads((ROOT / "results" / "mup.json").read_text())
    page = (ROOT / "research/docs/mup.md").read_text(encoding="utf-8")
    not_level: dict[str, set[str]] = {}
    for row in stored["rows"]:
        if row["mup"]:
            not_level.setdefault(row["optimizer"], set()).update(find_not_level(row["changes"]))
    # these act through a softmax over value channels, and have a row of their own on the page
    names = {"ddl_attn.k_query", "ddl_mlp.k_query", "k_key.weight"}
    assert not_level == {"adamw": set(), "muon": {f"{name}: mul, softmax" for name in names}}
    lines = coordinates.format_table([row for row in stored["rows"] if not row["mup"]]).splitlines()
    counts = [line.rstrip("| ").rpartition("| ")[2].strip() for line in lines[2:]]
    assert len(counts) == 4
    assert all(count in page for count in counts)
