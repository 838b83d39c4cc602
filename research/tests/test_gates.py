"""The audit of gates: every statistic against loops over tokens and numpy, and the command from end to end."""

import itertools
import math
from types import SimpleNamespace

import naive_gates
import numpy as np
import pytest
import torch
from gates_helpers import build_moved, open_run

from model import MODEL_NAMES
from research.analysis import gates

CLOSE = {"rel": 1e-6, "abs": 1e-6}
SITES = [(0, "attn"), (0, "mlp"), (1, "attn"), (1, "mlp")]


def audit(model, corpus) -> tuple[dict, torch.Tensor]:
    """Return the audit of a model over three validation sequences, and their ids (3, T)."""
    run = open_run(model, corpus, num_sequences=3)
    figures = gates.measure_run(run, SimpleNamespace(rows=2, edits=False))
    ids, _ = run.batches.get(run.sequences, 3)
    return figures, ids


@torch.no_grad()
def record_writes(model, ids) -> dict:
    """Return {(layer, site name): [sequence][token] -> TokenWrite}."""
    recorder = naive_gates.Recorder()
    with model.through(recorder):
        model.hidden(ids)
    return recorder.writes


@pytest.mark.parametrize(
    "model_name",
    ["DDL-gpt-mha-rope", "DDL-gpt-mha-rope-CC", "DDL-gpt-mha-rope-EC", "DDL-vdim1-gpt-mha-rope"],
)
def test_statistics_are_those_of_loops_over_tokens(model_name, corpus):
    model = build_moved(model_name)
    figures, ids = audit(model, corpus)
    recorded = record_writes(model, ids)
    assert [(site["layer"], site["site"]) for site in figures["sites"]] == SITES
    for index, (site, key) in enumerate(zip(figures["sites"], SITES)):
        expected: dict[str, list[float]] = {}
        for sequence, writes in enumerate(recorded[key]):
            previous_writes = recorded[SITES[index - 1]][sequence] if index > 0 else None
            statistics = naive_gates.compute_statistics(writes, previous_writes)
            for name, values in statistics.items():
                expected.setdefault(name, []).extend(values)
        beta = np.array(expected["beta"])
        expected["skips"] = beta < 0.5
        expected["matches"] = (beta >= 0.5) & (beta <= 1.5)
        expected["over-relaxes"] = beta > 1.5
        expected["reflects"] = beta > 1
        assert site["statistics"].keys() == expected.keys()
        for name, values in expected.items():
            assert site["statistics"][name] == pytest.approx(np.mean(values), **CLOSE), (key, name)


@pytest.mark.parametrize(
    ("keys", "can_reflect"),
    [({"residual_branch_mult": 0.8}, True), ({"residual_branch_mult": 0.4}, False)],
)
def test_the_share_of_reflections_is_that_of_the_maps(keys, can_reflect, corpus):
    model = build_moved("DDL-gpt-mha-rope", **keys)
    figures, ids = audit(model, corpus)
    recorded = record_writes(model, ids)
    shares = []
    for site in figures["sites"]:
        writes = itertools.chain(*recorded[site["layer"], site["site"]])
        shares.append(np.mean([np.linalg.eigvalsh(write.A.numpy()).min() < 0 for write in writes]))
        assert site["statistics"]["reflects"] == pytest.approx(shares[-1], abs=1e-12)
    assert any(shares) == can_reflect


def test_a_write_without_an_erase_has_no_statistics_of_one(corpus):
    figures, _ = audit(build_moved("DDL-gpt-mha-rope", ddl_update="write_only"), corpus)
    statistics = figures["sites"][0]["statistics"]
    assert "written" in statistics
    assert not statistics.keys() & {"erased", "contraction", "reflects"}


@pytest.mark.parametrize("model_name", [*MODEL_NAMES, "momentum-gpt-mha-rope"])
def test_every_stream_is_audited_and_has_a_page_and_a_figure(
    model_name, corpus, example_streams, tmp_path
):
    figures, _ = audit(build_moved(model_name).float(), corpus)
    row = {"label": model_name, "model": model_name, "sequences": 3, **figures}
    group = gates.Group(model_name, [row])
    page = gates.format_page([group])
    assert all(f"| {name} " in page for name in group.statistics)
    assert "cosine_tokens" in group.statistics
    assert "nan" not in page
    gates.draw_group(group, tmp_path / "gates")
    [picture] = tmp_path.iterdir()
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_numbers_that_are_not_finite_stop_the_audit(corpus):
    model = build_moved("DDL-vdim1-gpt-mha-rope")
    torch.nn.init.constant_(model.transformer.h[0].ddl_attn.beta.bias, math.nan)
    with pytest.raises(ValueError, match="not finite"):
        audit(model, corpus)


# ---- several runs ----

# Student's 97.5% quantile at two degrees of freedom
T_2 = 4.302653
MEANS = (1.0, 2.0, 6.0)
# the means' standard deviation is sqrt(7)
HALF_WIDTH = T_2 * math.sqrt(7 / 3)


def make_row(mean: float, seed: int = 0, step: int = 8, **settings) -> dict:
    """Return the row of a run, whose gate and effect at its only site have this mean."""
    effect = {
        "layer": 0,
        "site": "attn",
        "edit": "beta=0",
        "difference": mean,
        "ci95": 0.01,
        "p_value": 0.001,
        "windows": 4,
    }
    return {
        "label": f"run {mean}",
        "model": "m",
        "seed": seed,
        "step": step,
        "settings": settings,
        "sites": [{"layer": 0, "site": "attn", "statistics": {"beta": mean}}],
        "sequences": 4,
        "effects": [effect],
    }


def test_several_runs_give_intervals_over_their_means():
    group = gates.Group("runs", [make_row(mean) for mean in MEANS])
    assert f"| beta      | 3 ± {HALF_WIDTH:.4g} (3)" in gates.format_statistics_table(group)
    effect, verdict = group.judge_effects("beta=0")[0, "attn"]
    assert (effect.mean, effect.half_width) == pytest.approx((3, HALF_WIDTH), rel=1e-6)
    assert verdict == "undecided"
    assert "| (+3.0000 ± 6.5724) |" in gates.format_edit_table(group)


def test_the_effect_of_an_edit_in_one_run_has_an_interval_over_sequences():
    group = gates.Group("run", [make_row(1.0)])
    effect, verdict = group.judge_effects("beta=0")[0, "attn"]
    assert (effect.half_width, effect.n, verdict) == (0.01, 4, "worse")
    assert "| +1.0000 ± 0.0100 |" in gates.format_edit_table(group)


def test_runs_of_one_setting_and_step_are_one_group():
    rows = [
        make_row(1.0, seed=0),
        make_row(2.0, seed=1),
        make_row(3.0, seed=2, step=4),
        make_row(4.0, seed=0, learning_rate=0.1),
        make_row(5.0, seed=0, learning_rate=0.1),  # a repeated seed
    ]
    groups = gates.group_rows(rows)
    means = [[row["sites"][0]["statistics"]["beta"] for row in group.rows] for group in groups]
    assert means == [[1.0, 2.0], [3.0], [4.0], [5.0]]
