"""research/mgt/study.py: its tries and rows, its measures, and the statistics of what it stored."""

import dataclasses
import json
import math
from collections import Counter

import numpy as np
import pytest
import torch
from helpers import ROOT, SMALL, one_line_error
from in_process import call
from naive_statistics import naive_holm

from model import build
from research.mgt import arms, comparisons, ngrams, small_measures, study
from research.rows import read_rows
from training import metrics

RESULTS = ROOT / "results" / "mgt"
EXPERIMENTS = arms.make_experiments()


# ---- tuning ----


def tune(best_rate: float) -> list[tuple[float, float]]:
    """Return the tries of a setting whose loss grows with the distance to a rate."""
    setting = arms.Setting("full", 24, 32)
    rows = []
    while (run := study.next_try(setting, rows)) is not None:
        distance = abs(math.log(run.learning_rate / best_rate))
        rows.append({**run.key, "val_loss": distance + run.warmup_fraction})
    return [study.get_pair(row) for row in rows]


GRID = [(rate, warmup) for rate in (2e-3, 5e-3, 1e-2) for warmup in (0.1, 0.4)]


def test_a_best_rate_at_the_low_edge_extends_the_ladder_down():
    assert tune(1e-3) == [*GRID, (1e-3, 0.1), (1e-3, 0.4)]


def test_a_best_rate_at_the_high_edge_extends_the_ladder_up():
    assert tune(5e-2) == [*GRID, (2e-2, 0.1), (2e-2, 0.4)]


def test_a_best_rate_inside_is_refined_with_as_many_tries():
    assert tune(5e-3) == [*GRID, (3.16e-3, 0.1), (7.07e-3, 0.1)]


def test_a_diverged_try_counts_as_the_worst():
    rows = [{"val_loss": None}, {"val_loss": 9.0}]
    assert study.find_best(rows) == {"val_loss": 9.0}


# ---- runs and rows ----


@pytest.fixture
def tiny_experiment(corpus, monkeypatch) -> arms.Experiment:
    keys = {**SMALL, "dataset": corpus, "eval_batches": 2}
    del keys["num_hidden_layers"], keys["hidden_size"], keys["head_dim"]
    model_keys = arms.Setting.model_keys
    monkeypatch.setattr(arms.Setting, "model_keys", lambda self: {**model_keys(self), **keys})
    setting = arms.Setting("full_post", 2, 12, 8)
    return arms.Experiment("tiny", (setting,), steps=3, seeds=(0, 1))


def test_a_run_has_the_losses_of_train_py(tiny_experiment, tmp_path):
    run = study.Run(tiny_experiment.settings[0], "seed", 1, 1e-2, 0.4)
    row = study.train_run(tiny_experiment, run, tmp_path / "own")
    arguments = study.make_arguments(tiny_experiment, run, tmp_path / "plain")
    assert call("train.py", *arguments).returncode == 0
    records = list(metrics.read(tmp_path / "plain" / "metrics.jsonl"))
    assert row["val_loss"] == [r["val_loss"] for r in records if "val_loss" in r][-1]
    assert row["train_loss"] == [r["loss"] for r in records if "loss" in r][-1]


def test_a_stopped_command_trains_what_is_missing(tiny_experiment, tmp_path):
    path = tmp_path / "tiny.jsonl"
    settings = list(tiny_experiment.settings)
    study.train_missing(tiny_experiment, settings, path, tmp_path / "runs")
    lines = path.read_text().splitlines(keepends=True)
    assert len(lines) == study.NUM_TRIES + 2

    # stopped while the last row was being written
    path.write_text("".join(lines[:-1]) + lines[-1][:20])
    rows = read_rows(path)
    run = study.next_run(tiny_experiment, settings[0], rows)
    assert len(rows) == study.NUM_TRIES + 1
    assert (run.kind, run.seed) == ("seed", 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ranks"], "ranks: give one of rank, ablation"),
        (["rank", "--arms=mhc"], "the experiment has no mhc"),
        (["rank", "--seeds=3"], "--seeds is not an option of the study"),
        (["rank", "--mode=fast"], "--mode=fast: give train or show"),
    ],
)
def test_mistakes_are_one_line(arguments, message):
    assert message in one_line_error(call("research/mgt/study.py", *arguments))


def test_models_of_equal_size_differ_by_at_most_one_percent():
    for name, size in (("depth", 300_000), ("language", 367_948)):
        for setting in EXPERIMENTS[name].settings:
            if setting.equal == "size":
                # every block has the same size
                one, two = (
                    arms.count_size(dataclasses.replace(setting, num_layers=n)) for n in (1, 2)
                )
                counted = one + (setting.num_layers - 1) * (two - one)
                assert abs(counted - size) <= 0.01 * size, setting.name


# ---- measures ----


def test_losses_of_ngrams_are_those_of_counting_one_by_one():
    generator = np.random.default_rng(0)
    train = generator.integers(0, 5, 300)
    validation = generator.integers(0, 5, 40)
    losses = ngrams.score_ngrams(train, validation, 6)
    for index, position in enumerate(range(2, 40)):
        probability = 1 / 6
        for order in (1, 2, 3):
            grams = Counter(tuple(train[i : i + order]) for i in range(300 - order + 1))
            own = tuple(validation[position - order + 1 : position + 1])
            context = sum(count for gram, count in grams.items() if gram[:-1] == own[:-1])
            probability = (grams[own] + probability) / (context + 1)
            assert losses[order - 1, index] == pytest.approx(-math.log(probability))


def test_ranks_are_those_of_numpy():
    torch.manual_seed(1)
    model = build("MGT-gpt-mha", **SMALL)
    ids = torch.randint(0, 260, (3, 16))
    measured = small_measures.measure_ranks(model, ids)
    states = model.transformer.wte(ids).detach().double().numpy()
    ranks = []
    centered_ranks = []
    cosines = []
    for x in states:
        ranks.append(naive_rank(x))
        centered_ranks.append(naive_rank(x - x.mean(0)))
        unit = x / np.linalg.norm(x, axis=1, keepdims=True)
        cosines.append(np.mean([unit[i] @ unit[j] for i in range(16) for j in range(16) if i != j]))
    assert measured["rank"][0] == pytest.approx(np.mean(ranks), abs=1e-5)
    assert measured["centered_rank"][0] == pytest.approx(np.mean(centered_ranks), abs=1e-5)
    assert measured["cosine"][0] == pytest.approx(np.mean(cosines), abs=1e-5)
    assert len(measured["rank"]) == 3


def naive_rank(x: np.ndarray) -> float:
    values = np.linalg.svd(x, compute_uv=False)
    weights = values[values > 1e-12] / values.sum()
    return math.exp(-(weights * np.log(weights)).sum()) / min(x.shape)


def test_gates_are_those_of_blocks_run_by_hand():
    torch.manual_seed(1)
    model = build("MGT-gpt-mha", **SMALL, mgt_beta_bias_init=0.01, mgt_alpha_init=0.3)
    ids = torch.randint(0, 260, (2, 16))
    measured = small_measures.measure_gates(model, ids)
    state = model.transformer.wte(ids)
    positions = model.positions(ids)
    for layer, block in enumerate(model.transformer.h):
        varies = []
        erasure = []
        cosines = []
        for site, norm, write in (
            (block.attn, block.ln_1, block.write_attn),
            (block.mlp, block.ln_2, block.write_mlp),
        ):
            beta = (state @ write.beta.weight.T + write.beta.bias).tanh().flatten(0, 1)
            varies += [len({bool(value < 0) for value in column}) == 2 for column in beta.T]
            erasure.append((0.3 * beta).mean().item())
            new_state = write(state, site(norm(state), positions), state, None)
            x = state.flatten(0, 1)
            update = (new_state - state).flatten(0, 1)
            cosines.append((x * update).sum(1) / x.norm(dim=1) / update.norm(dim=1))
            state = new_state
        assert measured["sign_varies"][layer] == pytest.approx(np.mean(varies), abs=1e-5)
        assert measured["erasure"][layer] == pytest.approx(np.mean(erasure), abs=1e-5)
        assert measured["cosine"][layer] == pytest.approx(
            torch.cat(cosines).mean().item(), abs=1e-5
        )


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


# ---- statistics ----


def make_table(losses: dict[str, list[float]], bigram: float = 2.5) -> comparisons.Table:
    rows = [
        {"kind": "seed", "arm": arm, "layers": 24, "equal": "", "seed": seed, "val_loss": loss}
        for arm, values in losses.items()
        for seed, loss in enumerate(values)
    ]
    return comparisons.Table(rows, (0, 1, 2), bigram)


def test_an_arm_whose_interval_reaches_the_bigram_did_not_learn():
    table = make_table({"full": [2.0, 2.1, 2.2], "standard": [2.3, 2.4, 2.6]})
    [result] = comparisons.judge([comparisons.is_below(table, "full", "standard", 24)], table)
    assert result["verdict"] == "did not learn"


def test_an_arm_with_a_run_that_diverged_did_not_learn():
    table = make_table({"full": [2.0, 2.1, None], "standard": [2.3, 2.4, 2.2]})
    claims = [
        comparisons.is_below(table, "full", "standard", 24),
        comparisons.Comparison(
            "a figure",
            comparisons.combine([(1, table.by_seed("full", 24, lambda row: 2 * row["val_loss"]))]),
            settings=(("full", 24, ""),),
        ),
    ]
    for result in comparisons.judge(claims, table):
        assert result["verdict"] == "did not learn"
        assert result["mean"] is None


def test_an_arm_without_all_seeds_is_not_judged():
    table = make_table({"full": [2.0, 2.1, 2.2], "standard": [2.3, 2.4]})
    [result] = comparisons.judge([comparisons.is_below(table, "full", "standard", 24)], table)
    assert result["verdict"] == "not run"


@pytest.mark.parametrize(
    ("full", "verdict"),
    [
        ([2.0, 2.1, 2.2], "supported"),
        ([2.40, 2.51, 2.61], "refuted"),
        ([2.1, 2.4, 2.5], "undecided"),
    ],
)
def test_verdicts(full, verdict):
    table = make_table({"full": full, "standard": [2.2, 2.31, 2.41]}, bigram=9.0)
    [result] = comparisons.judge([comparisons.is_below(table, "full", "standard", 24)], table)
    assert result["verdict"] == verdict


def test_synergy_is_the_gain_of_both_beyond_the_sum_of_gains():
    losses = {"standard": [2.4] * 3, "mhc": [2.3] * 3, "ddl": [2.2] * 3, "full": [1.8] * 3}
    comparison = comparisons.has_synergy(make_table(losses), *losses, "")
    assert comparison.values == pytest.approx([0.6 - 0.1 - 0.2] * 3)


# ---- what is stored ----


@pytest.fixture(scope="module")
def stored() -> dict:
    return json.loads((RESULTS / "study.json").read_text(encoding="utf-8"))


def read_losses(name: str) -> dict[str, list[float]]:
    """Return the losses of every arm of an experiment, by seed, from its rows."""
    lines = (RESULTS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if row["kind"] == "seed"]
    losses: dict[str, dict[int, float]] = {}
    for row in rows:
        losses.setdefault(row["arm"], {})[row["seed"]] = row["val_loss"]
    return {arm: [by_seed[s] for s in sorted(by_seed)] for arm, by_seed in losses.items()}


def select_verdicts(stored: dict, name: str) -> list[dict]:
    return [result for result in stored["verdicts"] if result["experiment"] == name]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_scipy_gives_the_stored_statistics(name, stored):
    stats = pytest.importorskip("scipy.stats")
    verdicts = select_verdicts(stored, name)
    p_values = []
    for result in verdicts:
        p_value = 1.0
        if result["verdict"] in ("supported", "refuted", "undecided"):
            p_value = stats.ttest_1samp(result["values"], result["bound"]).pvalue
            half = stats.t.ppf(0.975, result["n"] - 1) * stats.sem(result["values"])
            assert result["ci95"] == pytest.approx(half)
        p_values.append(p_value)
    for result, corrected in zip(verdicts, naive_holm(p_values), strict=True):
        assert result["p_holm"] == pytest.approx(corrected, rel=1e-6)
        if result["verdict"] in ("supported", "refuted"):
            assert corrected < 0.05
            claimed = (np.mean(result["values"]) > result["bound"]) == result["above"]
            assert result["verdict"] == ("supported" if claimed else "refuted")
        else:
            assert corrected >= 0.05


def test_the_stored_comparisons_of_losses_are_those_of_the_rows(stored):
    num_seeds = len(EXPERIMENTS["ablation"].seeds)
    # an arm without all of its seeds has no comparison
    losses = {arm: np.full(num_seeds, np.nan) for arm in arms.ARMS}
    for arm, by_seed in read_losses("ablation").items():
        if len(by_seed) == num_seeds:
            losses[arm] = np.array(by_seed)
    values = [result["values"] for result in select_verdicts(stored, "ablation")]
    full = losses["full"]
    standard = losses["standard"]
    additive = losses["additive"]
    expected = [
        additive - standard,
        losses["mhc"] + losses["ddl"] - standard - full,
        losses["mhc_pre"] + losses["ddl"] - additive - full,
        losses["mhc"] + losses["ddl_post"] - standard - losses["full_post"],
        full - losses["additive_038"],
        full - standard,
        losses["mhc"] - standard,
        losses["ddl"] - standard,
        full - additive,
        losses["full_post"] - standard,
    ]
    missing = [None] * num_seeds
    values = [missing if value is None else value for value in values]
    np.testing.assert_allclose(np.array(values, dtype=float), expected, atol=1e-12)


def test_every_setting_has_the_same_number_of_tries(stored):
    reported = [setting for setting in stored["groups"] if setting["seeds"]]
    assert reported
    assert {setting["tries"] for setting in reported} == {study.NUM_TRIES}


def test_two_runs_were_repeated_to_the_bit(stored):
    assert len({repeat["setting"] for repeat in stored["repeats"]}) >= 2
    assert all(repeat["same_bits"] for repeat in stored["repeats"])
