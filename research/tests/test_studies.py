"""The studies: their commands plan runs, and their tables are those of the stored rows."""

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import ROOT, SMALL
from pages import commands_of

from model import build
from research import sweep

STUDIES = ROOT / "research" / "studies"
RESULTS = ROOT / "results"
stats = pytest.importorskip("scipy.stats")


def read_rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def list_sweeps() -> list[str]:
    """Return the sweep commands of all study pages."""
    commands = []
    for page in sorted(STUDIES.glob("*/README.md")):
        commands += commands_of(page.read_text(encoding="utf-8"))
    return [command for command in commands if "research/sweep.py" in command]


@pytest.mark.parametrize("command", list_sweeps())
def test_the_sweeps_of_the_study_pages_plan_their_cells(command, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    arguments = [word for word in shlex.split(command)[2:] if not word.startswith("--out=")]
    planned = sweep.read_arguments([*arguments, f"--out={tmp_path}"])
    cells = sweep.make_cells(*planned)
    assert len(cells) == np.prod([len(values) for values in planned.swept.values()])


def test_the_losses_of_the_controlled_comparison_are_those_of_its_rows():
    """The mean over seeds, and half the width of its 95% interval."""
    page = (STUDIES / "residual_streams" / "README.md").read_text(encoding="utf-8")
    rows = read_rows(RESULTS / "residual_streams" / "language.jsonl")
    table = re.findall(
        r"^\| `(\w+)` \|[^|]*\| ([\d.]+ ± [\d.]+) \| ([\d.]+ ± [\d.]+) \|", page, re.M
    )
    assert len(table) == 9
    for arm, *cells in table:
        for rung, cell in zip(("short", "long"), cells):
            losses = [
                np.mean(row["group_losses"])
                for row in rows
                if (row["arm"], row["rung"], row["phase"]) == (arm, rung, "report")
            ]
            half_width = stats.t.ppf(0.975, len(losses) - 1) * stats.sem(losses)
            assert f"{np.mean(losses):.3f} ± {half_width:.3f}" == cell, arm


def test_the_ablation_of_mgt_is_that_of_its_rows():
    stored = json.loads((RESULTS / "mgt" / "study.json").read_text(encoding="utf-8"))
    verdicts = {
        result["hypothesis"]: result
        for result in stored["verdicts"]
        if result["experiment"] == "ablation"
    }
    losses: dict[str, dict[int, float]] = {}
    for row in read_rows(RESULTS / "mgt" / "ablation.jsonl"):
        if row["kind"] == "seed":
            losses.setdefault(row["arm"], {})[row["seed"]] = row["val_loss"]

    def get_losses(arm: str) -> np.ndarray:
        return np.array([losses[arm][seed] for seed in range(8)])

    synergy = get_losses("mhc") + get_losses("ddl") - get_losses("standard") - get_losses("full")
    expected = {
        "`full` has a lower loss than `additive`": get_losses("full") - get_losses("additive"),
        "the two gates are synergistic (S > 0), paper's arms (eq. 9)": synergy,
    }
    for claim, values in expected.items():
        result = verdicts[claim]
        assert result["values"] == pytest.approx(values.tolist(), abs=1e-12)
        interval = stats.ttest_1samp(values, 0).confidence_interval()
        assert result["mean"] - result["ci95"] == pytest.approx(interval.low)
        assert result["mean"] + result["ci95"] == pytest.approx(interval.high)


@torch.no_grad()
def test_the_sign_of_beta_is_not_identified_without_erasure():
    """Flipping a feature's beta and its row of the sublayer's output leaves the bits of the logits."""
    torch.manual_seed(1)
    model = build("MGT-gpt-mha", **SMALL)
    ids = torch.randint(0, 260, (2, 16))
    logits = model(ids)[0]
    block = model.transformer.h[1]
    for write, sublayer in ((block.write_attn, block.attn), (block.write_mlp, block.mlp)):
        write.beta.weight[5].neg_()
        write.beta.bias[5].neg_()
        sublayer.c_proj.weight[5].neg_()
    assert torch.equal(model(ids)[0], logits)
    block.write_mlp.alpha.fill_(0.1)
    with_erasure = model(ids)[0]
    block.write_mlp.beta.weight[5].neg_()
    block.write_mlp.beta.bias[5].neg_()
    block.mlp.c_proj.weight[5].neg_()
    assert not torch.equal(model(ids)[0], with_erasure)
