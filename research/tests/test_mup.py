"""muP's coordinate check: training changes as much in wide models as in narrow ones, and wrong rates are seen."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from helpers import ROOT, one_line_error
from in_process import call
from torch import nn

from model import MODEL_NAMES, model_class
from model.parameters import Kind, rules_of
from research.analysis import coordinates, transfer
from research.analysis.coordinates import Contributions, bound, check, not_level, slope
from research.benchmarks.figures import Figures
from training import optimizer

CASES = coordinates.all_cases()
V_MAP, OVER_COLUMNS = (
    "DDL-vdim1-gpt-mha-rope+ddl_map=v",
    "DDL-gpt-mha-rope-CC+ddl_map=v+ddl_k_branch=attention",
)
# A form's Muon has the same matrices as its stem's.
MUON = [
    pytest.param(case, "muon", marks=() if case in MODEL_NAMES else pytest.mark.slow)
    for case in CASES
]
# A slope of one seed has a standard deviation of 0.08 where a direction is normalized. The first three
# of this case average 0.159, above the bound; its sixteen 0.088 +- 0.019, those of one gate 0.083 +- 0.017.
SEEDS = {"DDL-gpt-mha-rope+ddl_erase_gate=own": 8}
WIDTHS = {"adamw": [64, 256], "muon": [64, 192]}  # a step of Muon takes three times as long


def test_slope():
    assert slope([1, 2, 4], [3.0, 6.0, 12.0]) == pytest.approx(1)
    assert slope([64, 128], [5.0, 5.0]) == pytest.approx(0)


def checked(case: str, name: str = "adamw", seeds: int = 3) -> dict:
    stem, keys = coordinates.stem_and_keys(case)
    return check(stem, {**keys, "mup": True}, name, WIDTHS[name], seeds)


@pytest.mark.parametrize(("case", "name"), [(case, "adamw") for case in CASES] + MUON)
def test_changes_are_level(case, name):
    assert not_level(checked(case, name, SEEDS.get(case, 3))) == {}


def rates_off_by(power: float):
    """`rules_of`, with all learning rates times the `power`th power of hidden_size_base / hidden_size."""

    def changed(model):
        rules = {}
        for name, rule in rules_of(model).items():
            adam, muon = rule.kind
            rules[name] = rule._replace(
                kind=Kind(adam + power, None if muon is None else muon + power)
            )
        return rules

    return changed


WRONG = [(case, "adamw", power) for case in CASES for power in (-0.5, 0.5)]
WRONG += [(case, "muon", power) for case in ("gpt-mha-rope", V_MAP) for power in (-0.5, 0.5)]
WRONG += [(OVER_COLUMNS, "adamw", power) for power in (-1, 1)]


@pytest.mark.parametrize(("case", "name", "power"), WRONG)
def test_wrong_rates_are_seen_in_either_direction(monkeypatch, case, name, power):
    """At every parameter; what goes through a softmax over columns is held to more, and seen from a whole power on."""
    monkeypatch.setattr(optimizer, "rules_of", rates_off_by(power))
    result = checked(case, name, seeds=1)
    expected = {
        what for what in result if not what.startswith("change") and bound(what) < abs(power)
    }
    norm = "gated_attn.norm_weight" if case.startswith("GatedResidual") else "ln_1.weight"
    assert {contribution.partition(":")[0] for contribution in expected} >= {"c_q.weight", norm}
    assert expected <= not_level(result).keys()


def ignores_its_scale(write, state, h, *rest):
    return state + h


def never_learns_its_scale(write, state, h, *rest):
    """It stays 0, and silences what is before it."""
    return state + write.scale.detach() * h


@pytest.mark.parametrize(
    ("write", "seen"),
    [
        (ignores_its_scale, {"write_attn.scale: meets no data", "write_mlp.scale: meets no data"}),
        (never_learns_its_scale, {"write_attn.scale: mul", "c_q.weight: linear"}),
    ],
)
def test_what_does_nothing_is_not_level(monkeypatch, write, seen):
    monkeypatch.setattr(model_class("ReZero-gpt-mha-rope").Block.Write, "forward", write)
    found = not_level(checked("ReZero-gpt-mha-rope", seeds=1))
    assert seen <= found.keys()
    assert all(math.isnan(found[what]) for what in seen)


@pytest.mark.usefixtures("example_streams")
def test_a_stream_that_comes_later_is_checked_by_the_same_code():
    result = checked("gated-gpt-mha-rope")
    assert not_level(result) == {}
    assert "write_mlp.gate: mul" in result


class Parts(nn.Module):
    """Ways in which parameters meet data."""

    def __init__(self):
        super().__init__()
        self.matrix, self.unit = nn.Linear(6, 5), nn.Linear(6, 5, bias=False)
        self.query, self.key = nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(6, 6))
        self.taps, self.read = nn.Parameter(torch.randn(6, 1)), nn.Parameter(torch.randn(3))
        self.left, self.right = nn.Linear(6, 5, bias=False), nn.Linear(6, 5, bias=False)

    def forward(self, x):
        """x (1, 1, 3, 6)."""
        scores = ((x * (self.query @ self.key)).sum(-1) / 4).softmax(-1)
        taps = (x * (self.taps * self.read).T).sum(2)
        return (
            self.matrix(x),
            F.rms_norm(self.unit(x), (5,)),
            scores,
            taps,
            self.left(x) * self.right(x),
        )


def test_contributions_are_those_of_the_change_alone():
    torch.manual_seed(0)
    parts, x = Parts().double(), 7 * torch.randn(1, 1, 3, 6).double()
    old = {name: torch.randn_like(parameter) for name, parameter in parts.named_parameters()}
    before = {name: (parameter, old[name]) for name, parameter in parts.named_parameters()}
    with torch.no_grad(), Contributions(before) as watched:
        parts(x)
    found = {note["name"]: note["size"] for note in watched.found}
    now = {name: parameter.detach() for name, parameter in parts.named_parameters()}

    def rms(value):
        return value.square().mean().sqrt().item()

    def scores(query, key):
        return torch.softmax(torch.einsum("btji,k,ki->btj", x, query, key) / 4, -1)

    def direction(weight):
        return F.normalize(x @ weight.T, dim=-1) * math.sqrt(5)

    assert found["matrix.weight"] == pytest.approx(
        rms(x @ (now["matrix.weight"] - old["matrix.weight"]).T) / rms(x)
    )
    assert found["matrix.bias"] == pytest.approx(rms(now["matrix.bias"] - old["matrix.bias"]))
    turned = direction(now["unit.weight"]) - direction(old["unit.weight"])
    assert found["unit.weight"] == pytest.approx(rms(turned), rel=1e-6)
    whole = scores(now["query"], now["key"])
    assert found["query"] == pytest.approx(rms(whole - scores(old["query"], now["key"])))
    assert found["key"] == pytest.approx(rms(whole - scores(now["query"], old["key"])))
    read = torch.einsum("btji,i,j->bti", x, now["taps"][:, 0], now["read"] - old["read"])
    assert found["read"] == pytest.approx(rms(read) / rms(x) / rms(now["taps"]))
    right = x @ now["right.weight"].T
    left = x @ (now["left.weight"] - old["left.weight"]).T * right
    assert found["left.weight"] == pytest.approx(rms(left) / rms(x) / rms(right))


def test_the_check_as_a_command(tmp_path):
    options = [
        "--widths=32,64",
        "--seeds=1",
        "--models=gpt-mha-rope",
        f"--json={tmp_path / 'mup.json'}",
    ]
    first = call("research/analyze.py", "mup", *options)
    assert first.returncode == 0, first.stderr.decode()
    assert (tmp_path / "mup.png").read_bytes().startswith(b"\x89PNG")
    stored = json.loads((tmp_path / "mup.json").read_text())
    assert [(row["optimizer"], row["mup"]) for row in stored["rows"]] == [
        *(("adamw", True), ("adamw", False), ("muon", True), ("muon", False))
    ]
    assert stored["commit"]
    again = call("research/analyze.py", "mup", *options)
    assert again.stdout.decode().splitlines()[-8:] == first.stdout.decode().splitlines()[-8:]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["mup", "--widths=64"], "--widths=64: give two or more multiples of 32"),
        (["mup", "--models=gpt-mha-rope+ddl_map=v"], "unknown key ddl_map"),
        (["mup", "--models=gpt"], "--models=gpt: give one of"),
        (["mup", "--seeds=0"], "--seeds=0: give 1 or more"),
        (["transfer", "--dataset=nowhere"], "nowhere"),
        (["transfer", "--optimizers=sgd"], "invalid optimizers value: 'sgd'"),
    ],
)
def test_mistakes_are_one_line(arguments, message, tmp_path):
    assert message in one_line_error(
        call("research/analyze.py", *arguments, f"--json={tmp_path / 'x' / 'x.json'}")
    )
    assert not (tmp_path / "x").exists()


def test_with_mup_every_stored_change_is_level():
    stored = json.loads((ROOT / "results" / "mup.json").read_text())
    assert all(not_level(row["changes"]) == {} for row in stored["rows"] if row["mup"])


# ---- transfer ----


def test_the_lowest_point_is_that_of_the_parabola():
    assert transfer.lowest({p: 3 + (p - 0.3) ** 2 for p in range(-2, 3)}) == pytest.approx(2**0.3)
    assert transfer.lowest({0: 2.0, 1: 1.0, 2: math.inf}) == 2
    assert transfer.drift([64, 128, 256], [0.4, 0.2, 0.1]) == pytest.approx(-1)


def test_the_table_of_best_rates_is_the_stored_result():
    """Of the widths whose grids are complete, each with its best rate inside."""
    file = ROOT / "results" / "mup_transfer_cpu.json"
    stored = json.loads(file.read_text())
    figures = Figures(None, torch.device("cpu"), {"base": stored["base"]})
    figures.rows = stored["rows"]
    widths = sorted({row["width"] for row in figures.rows})
    search = transfer.Search(figures, torch.device("cpu"), widths, ["adamw", "muon"])
    done = {width: True for width in widths}
    for line in search.lines():
        done[line[1]] &= search.next_power(*line) is None
    search.widths = [width for width in widths if done[width]]
    assert transfer.markdown(search) in (ROOT / "research/docs/mup.md").read_text(encoding="utf-8")


def test_a_search_ends_with_the_best_rate_inside_its_grid(tmp_path, monkeypatch):
    """Losses made up as parabolas, whose best rates are known; what is stored is not measured again."""
    asked = []

    def loss(settings, row, device):
        asked.append((row["width"], row["mup"], row["learning_rate"]))
        best = 2.0**-3 if row["mup"] else 2.0**-3 * 64 / row["width"]
        away = math.log2(row["learning_rate"] / best)
        return None if away > 2 else 5 + away**2

    monkeypatch.setattr(transfer, "trained_loss", loss)
    file = tmp_path / "transfer.json"
    widths = [64, 128, 1024]

    def search():
        figures = Figures(file, torch.device("cpu"), {"base": 64}, resume=True)
        return transfer.Search(figures, torch.device("cpu"), widths, ["adamw"])

    first = search()
    first.run()
    assert len(asked) == len(set(asked))
    assert first.best("adamw", True) == pytest.approx([2**-3] * 3)
    assert first.best("adamw", False) == pytest.approx([2**-3, 2**-4, 2**-7])
    for width in widths:
        for mup in (True, False):
            losses = first.losses("adamw", width, mup)
            assert min(losses) < min(losses, key=losses.get) < max(losses)
    count = len(asked)
    search().run()
    assert len(asked) == count


def test_transfer_trains_and_draws(tmp_path, corpus, monkeypatch):
    monkeypatch.setattr(transfer, "AROUND", 1)
    options = [
        "--widths=32,64",
        "--optimizers=muon",
        f"--dataset={corpus}",
        "--steps=2",
        "--layers=1",
        "--device=cpu",
    ]
    result = call(
        "research/analyze.py",
        "transfer",
        *options,
        "--block_size=8",
        f"--json={tmp_path / 'transfer.json'}",
    )
    assert result.returncode == 0, result.stderr.decode()
    assert "| muon | plain |" in result.stdout.decode()
    rows = json.loads((tmp_path / "transfer.json").read_text())["rows"]
    assert len(rows) >= 9
    assert all(row["loss"] > 0 for row in rows)
    assert (tmp_path / "transfer.png").stat().st_size > 10_000
