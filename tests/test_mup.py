"""muP's coordinate check: training changes as much in wide models as in narrow ones, and wrong rates are seen."""

import math

import pytest
import torch
from conftest import one_line_error
from in_process import call
from test_model import PAPER
from torch import nn

from benchmarks import coordinates, transfer
from benchmarks.coordinates import Contributions, check, not_level, slope
from model import layers, residual
from model.parameters import FIXED, HIDDEN, INPUT, OUTPUT, Kind

CASES = [*PAPER, *coordinates.VARIANTS]
WIDTHS = [64, 256]


def test_slope():
    assert slope([1, 2, 4], [3.0, 6.0, 12.0]) == pytest.approx(1)
    assert slope([64, 128], [5.0, 5.0]) == pytest.approx(0)


def checked(case: str, name: str = "adamw", seeds: int = 3) -> dict:
    stem, keys = coordinates.stem_and_keys(case)
    return check(stem, {**keys, "mup": True}, name, WIDTHS, seeds)


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("case", CASES)
def test_changes_are_level(case, name):
    result = checked(case, name)
    assert not_level(result) == {}
    stem, keys = coordinates.stem_and_keys(case)
    model = coordinates.made(stem, keys, 64, {})
    kinds = {".".join(parameter.split(".")[-2:]) for parameter, _ in model.named_parameters()}
    assert kinds == {what.partition(":")[0] for what in result if not what.startswith("change")}


def powers(kind: Kind, factor: float) -> Kind:
    return Kind(kind.adam * factor, kind.muon * factor)


V_MAP = "DDL-vdim1-gpt-mha-rope+ddl_map=v"
ATTENTION = "DDL-gpt-mha-rope-CC+ddl_map=v+ddl_k_branch=attention"
SINGLE = {"c_q.weight", "c_k.weight", "c_v.weight", "c_proj.weight", "c_fc1.weight", "c_fc2.weight"}


@pytest.mark.parametrize(
    ("case", "name", "where", "changed", "expected"),
    [
        *((V_MAP, "adamw", (layers, "HIDDEN"), powers(HIDDEN, factor), SINGLE) for factor in (0, 2, 4)),
        *(("gpt-mha-rope", "muon", (layers, "HIDDEN"), powers(HIDDEN, factor), SINGLE) for factor in (0, 2, 4)),
        *((V_MAP, "adamw", (residual, "OUTPUT"), powers(OUTPUT, factor), {"beta.weight", "k_in.weight", "v_proj.weight"})
          for factor in (0, 2)),
        *((V_MAP, "adamw", (residual, "INPUT"), powers(INPUT, factor), {"k_out.weight"}) for factor in (0, 2)),
        (ATTENTION, "adamw", (residual, "HIDDEN"), powers(HIDDEN, 0), {"k_key.weight", "k_out.weight"}),
        (ATTENTION, "adamw", (residual, "FIXED"), HIDDEN, None),
    ],
)  # fmt: skip
def test_wrong_rates_are_seen_in_either_direction(monkeypatch, case, name, where, changed, expected):
    monkeypatch.setattr(*where, changed)
    found = {what.partition(":")[0] for what in not_level(checked(case, name, seeds=1))}
    assert expected <= found
