"""The claims of the controlled comparison: verdicts, token multipliers and figures of made-up runs."""

import math

import numpy as np
import pytest
from naive_statistics import fit_mixed_model

from research.residual_streams import claims, rates, single_rate, study, study_report, variance
from research.residual_streams.claims import Claim, Losses
from research.residual_streams.streams import ARMS, BASELINE


def make_losses(means: dict[str, float], num_seeds: int = 5, noise: float = 0.001) -> Losses:
    """Return losses of arms at both rungs, with a little noise on every seed and group."""
    rng = np.random.default_rng(0)
    return Losses(
        {
            (arm, rung): dict(enumerate(mean + drop + noise * rng.standard_normal((num_seeds, 8))))
            for arm, mean in means.items()
            for rung, drop in (("short", 0.5), ("long", 0.0))
        }
    )


# ---- verdicts ----


@pytest.mark.parametrize(
    ("mean", "corrected_p", "needs_proof", "verdict"),
    [
        (-0.1, 0.01, False, "supported"),
        (-0.1, 0.2, False, "undecided"),
        (0.1, 0.01, False, "refuted"),
        (0.0, 0.9, False, "undecided"),
        (0.0, 0.9, True, "refuted"),
        (0.1, 0.01, True, "refuted"),
        (-0.1, 0.2, True, "undecided"),
    ],
)
def test_the_verdict_on_a_claim(mean, corrected_p, needs_proof, verdict):
    claim = Claim(1, "", {}, needs_proof=needs_proof)
    contrast = variance.Contrast(mean=mean, standard_error=0.01, degrees_of_freedom=10)
    assert claims.judge(claim, contrast, corrected_p) == verdict


def test_weights_of_a_contrast_sum_to_zero():
    all_weights = [claim.weights for claim in claims.list_claims(("base", "deep"))]
    for weights in [*all_weights, *claims.list_effects().values()]:
        assert sum(weights.values()) == pytest.approx(0)


def test_claims_name_arms_with_five_seeds():
    for claim in claims.list_claims(tuple(single_rate.REGISTERS.sizes)):
        for arm, condition in claim.weights:
            if claim.problem == "registers":
                assert single_rate.REGISTERS.seeds[arm] == single_rate.FIVE_SEEDS
                assert condition in single_rate.REGISTERS.sizes
            else:
                assert study.count_runs("long", arm) == 3 + 5


def test_claims_are_judged_together():
    """An arm that is far ahead supports its claims; those without runs count with p = 1."""
    losses = make_losses({**dict.fromkeys(ARMS, 3.3), "ddl_tc": 3.1})
    results = claims.judge_all(
        claims.list_claims(("base",)), {"language": losses, "registers": Losses()}
    )
    verdicts = {result["number"]: result["verdict"] for result in results}
    assert verdicts[9] == "not run"
    assert [verdicts[number] for number in (2, 4, 5, 6, 8)] == ["supported"] * 5
    assert verdicts[1] == "refuted"  # level with the baseline, so that it saves nothing
    assert all(result["p_holm"] >= result["p"] for result in results)


def test_a_claim_whose_seeds_are_not_all_there_is_not_judged():
    losses = make_losses(dict.fromkeys(ARMS, 3.3), num_seeds=4)
    results = claims.judge_all(claims.list_claims(()), {"language": losses, "registers": losses})
    assert {result["verdict"] for result in results} == {"not run"}


def test_diverged_runs_are_left_out():
    rows = [
        {"arm": "hc", "rung": "short", "phase": "report", "seed": 0, "val_loss": None},
        {"arm": "hc", "rung": "short", "phase": "report", "seed": 1, "val_loss": 4.0}
        | {"group_losses": [3.0, 5.0]},
        {"arm": "hc", "rung": "short", "phase": "try", "seed": 2, "val_loss": 4.0},
    ]
    losses = Losses.from_rows(rows, "rung")
    assert losses.list_seeds([("hc", "short")]) == [1]
    assert losses.mean(("hc", "short")) == 4.0


def test_arms_are_compared_on_the_seeds_that_both_have():
    by_seed = {seed: np.array([seed, seed + 1.0]) for seed in range(4)}
    losses = Losses({("hc", "long"): by_seed, ("conv", "long"): {**by_seed, 7: np.zeros(2)}})
    del losses.runs["hc", "long"][1]
    assert losses.list_seeds([("hc", "long"), ("conv", "long")]) == [0, 2, 3]
    table = losses.table(("hc", "long"), [0, 3])
    assert table.tolist() == [[0, 1], [3, 4]]


# ---- tokens and seconds ----


def power_law(tokens: float) -> float:
    """Return a loss that is linear in the logarithm of tokens."""
    return 10 - 0.4 * math.log(tokens)


@pytest.mark.parametrize("factor", [0.5, 0.8, 1.0, 1.25, 2.0])
def test_an_arm_that_learns_from_tokens_faster_has_that_multiplier(factor):
    rungs = (800.0, 3200.0)
    arm_losses = tuple(power_law(factor * tokens) for tokens in rungs)
    baseline_losses = tuple(power_law(tokens) for tokens in rungs)
    multiplier = claims.compute_token_multiplier(arm_losses, baseline_losses)
    assert multiplier == pytest.approx(factor)


@pytest.mark.parametrize(("factor", "is_below"), [(1 / 0.94, True), (1 / 0.96, False)])
def test_saving_of_tokens_is_judged_at_95_percent_of_them(factor, is_below):
    tables = {}
    for arm, speedup in ((BASELINE, 1.0), ("ddl_1", factor)):
        for rung, steps in study.RUNGS.items():
            tables[arm, rung] = np.full((5, 4), power_law(speedup * steps))
    weights = claims.list_claims(())[0].weights
    table = variance.combine_arms(tables, weights)
    assert (table.mean() < 0) == is_below


def test_the_multiplier_is_resampled_over_seeds_and_groups():
    means = {BASELINE: 3.3, "conv": 3.25}
    result = claims.resample_token_multiplier(make_losses(means, noise=0.02), "conv")
    assert result["low"] < result["mean"] < result["high"]
    exact = math.exp(0.05 / (0.5 / claims.LOG_RUNGS))
    assert result["low"] < exact < result["high"]


def test_a_slower_arm_is_compared_after_fewer_tokens():
    losses = make_losses({BASELINE: 3.3, "hc": 3.3}, noise=0.0)
    for group_losses in losses.runs["hc", "long"].values():
        group_losses += 1e-9 * np.arange(8)
    contrast = claims.compare_at_equal_seconds(losses, "hc", 0.5)
    assert contrast.mean == pytest.approx(0.5 * math.log(2) / claims.LOG_RUNGS)


def test_speeds_are_relative_to_the_baselines_in_the_same_round():
    speeds = {BASELINE: [100, 50, 100], "hc": [80, 50, 90]}
    rows = [
        {"arm": arm, "round": number, "tokens_per_second": speed}
        for arm, values in speeds.items()
        for number, speed in enumerate(values)
    ]
    # a round in which the baseline is not measured yet
    rows.append({"arm": "hc", "round": 3, "tokens_per_second": 1000})
    assert claims.compute_relative_speeds(rows) == {
        BASELINE: [1.0, 1.0, 1.0],
        "hc": [0.8, 1.0, 0.9],
    }


def test_a_size_at_chance_decides_nothing():
    rows = []
    for size in single_rate.REGISTERS.sizes:
        for arm in single_rate.REGISTERS.seeds:
            loss = 2.1 if (size, arm) == ("deep", "additive") else 1.5
            row = {"arm": arm, "size": size, "phase": "report", "val_loss": loss}
            rows += [{**row, "seed": seed, "group_losses": [loss, loss]} for seed in range(5)]
    assert claims.list_sizes_below_chance(rows, study_report.CHANCE) == ("base", "wide")


def test_the_width_of_rates_is_interpolated():
    losses = {(power, 0.0): 0.02 * power**2 for power in (-3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0)}
    # 0.05 nats above 0 lie between the powers 1 (0.02) and 2 (0.08), in the middle
    width = study_report.measure_width(losses, 0)
    assert width["factor"] == pytest.approx(2**3, rel=0.01)
    assert study_report.format_width(width) == "8.0"


def test_a_width_that_reaches_an_edge_of_the_rates_is_a_lower_limit():
    losses = {(power, 0.0): 0.02 * power**2 for power in (-1.0, 0.0, 1.0, 2.0)}
    assert study_report.format_width(study_report.measure_width(losses, 0)) == "≥ 5.7"


def test_a_width_is_that_of_the_range_around_the_minimum_on_the_grid():
    losses = {(power, 0.0): 0.02 * power**2 for power in (-3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0)}
    # a second minimum, beyond losses that are too high
    losses[(4.0, 0.0)] = 0.01
    # half steps, which were tried with fewer values of the other rate
    losses[(0.5, 0.0)] = 0.3
    losses[(4.5, 0.0)] = 0.0
    width = study_report.measure_width(losses, 0)
    assert width["factor"] == pytest.approx(2**3, rel=0.02)


# ---- statistics ----


def test_the_contrast_is_that_of_a_mixed_model():
    """In a balanced table, restricted maximum likelihood gives the analysis of variance."""
    rng = np.random.default_rng(3)
    table = rng.standard_normal((5, 1)) + 2 * rng.standard_normal((1, 12))
    table = table + rng.standard_normal((5, 12))
    fit = fit_mixed_model(table)
    contrast = variance.estimate(table)
    assert contrast.mean == pytest.approx(fit.mean)
    assert contrast.standard_error == pytest.approx(fit.standard_error, rel=1e-3)
    assert contrast.degrees_of_freedom == pytest.approx(fit.degrees_of_freedom, rel=1e-3)


# ---- the report ----

# losses of a trigram on both halves of the validation split
TRIGRAMS = {"short": {"first": 4.6, "second": 3.9}, "long": {"first": 4.2, "second": 3.6}}


def make_rows() -> dict[str, list[dict]]:
    """Return rows of all runs of the comparison, with made-up losses."""
    rng = np.random.default_rng(0)
    rows = {"language": []}
    for stage in ("short", "long", "tolerance", "edge", "halves"):
        for arm in study.list_arms(stage):
            while (run := study.next_run(stage, arm, rows["language"])) is not None:
                loss = 3.8 if run.rung == "short" else 3.3
                loss += 0.01 * list(ARMS).index(arm) + 0.05 * sum(map(abs, run.point))
                row = {**vars(run), "point": list(run.point), "val_loss": loss}
                row["group_losses"] = list(loss + 0.01 * rng.standard_normal(6))
                rows["language"].append(row)
    for name, problem in single_rate.PROBLEMS.items():
        rows[name] = []
        for size in problem.sizes:
            for arm in problem.seeds:
                while (run := single_rate.next_run(problem, arm, size, rows[name])) is not None:
                    loss = 1.8 + 0.05 * abs(run.power)
                    row = {**vars(run), "val_loss": loss, "val_accuracy": 0.5}
                    row["group_losses"] = list(loss + 0.01 * rng.standard_normal(6))
                    rows[name].append(row)
    return rows


def test_the_report_of_finished_runs_has_every_table_and_figure(tmp_path):
    speeds = [{"arm": arm, "round": 0, "tokens_per_second": 1e4} for arm in ARMS]
    report = study_report.summarize(make_rows(), speeds, TRIGRAMS)
    missing = {command for command, number in report["missing"].items() if number}
    assert missing == {"study.py speed", "study.py again"}
    assert len(report["tolerance"]) == 2
    page = study_report.format_page(report)
    assert "not run" not in page
    assert "Beyond the edge" in page
    for arm in ARMS:
        assert f"| `{arm}`" in page
    study_report.save_figures(report, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        "study_losses.png",
        "study_effects.png",
        "study_rates.png",
        "study_registers.png",
    }


def test_figures_name_the_loss_of_the_trigram(monkeypatch, tmp_path):
    figures = {}
    monkeypatch.setattr(
        study_report.plots, "save", lambda figure, path: figures.update({path.stem: figure})
    )
    report = study_report.summarize(make_rows(), [], TRIGRAMS)
    study_report.save_figures(report, tmp_path)
    [effects] = figures["study_effects"].axes
    [additive] = [group for group in report["language"] if group["arm"] == BASELINE]
    difference = TRIGRAMS["long"]["second"] - additive["long"]["mean"]
    assert effects.get_xlabel().endswith(f"{difference:+.3f}")
    for panel in figures["study_rates"].axes:
        assert panel.get_title().endswith("(trigram: 4.600)")


def test_differences_of_a_problem_are_over_the_seeds_that_both_arms_have():
    rows = make_rows()["registers"]
    means = {BASELINE: [], "ddl_1": []}
    for row in rows:
        if row["seed"] > 2:
            row["group_losses"] = [100.0] * 6
        elif (row["arm"] in means, row["size"], row["phase"]) == (True, "base", "report"):
            means[row["arm"]].append(np.mean(row["group_losses"]))
    groups = study_report.summarize_problem(rows, single_rate.REGISTERS)
    [group] = [group for group in groups if (group["arm"], group["size"]) == ("ddl_1", "base")]
    expected = np.mean(means["ddl_1"]) - np.mean(means[BASELINE])
    assert group["difference"]["mean"] == pytest.approx(expected)


def test_the_report_of_a_study_that_has_begun_says_what_is_missing():
    rows = {name: [] for name in study_report.PROBLEMS}
    report = study_report.summarize(rows, [], TRIGRAMS)
    page = study_report.format_page(report)
    assert page.count("**not run**") == 9
    num_runs = 10 * (rates.NUM_TRIES + 5) + 5 * (rates.NUM_TRIES + 3)
    assert f"{num_runs} runs: `python research/residual_streams/study.py short`" in page


def test_registers_are_judged_when_all_of_their_runs_are_finished():
    rows = make_rows()
    report = study_report.summarize(rows, [], TRIGRAMS)
    assert report["verdicts"][8]["verdict"] != "not run"
    rows["registers"] = [row for row in rows["registers"] if row["size"] != "deep"]
    report = study_report.summarize(rows, [], TRIGRAMS)
    assert report["verdicts"][8]["verdict"] == "not run"


@pytest.mark.parametrize(
    ("losses", "is_inside"),
    [([3.0, 3.1, 3.2], False), ([3.1, 3.0, 3.2], True), ([3.2, 3.1, 3.0], False)],
)
def test_best_rates_at_an_edge_of_the_checks_are_named(losses, is_inside):
    rows = [
        {"arm": "hc", "rung": "long", "phase": "check", "point": [power, power], "val_loss": loss}
        for power, loss in zip(study.CHECKED_POWERS, losses, strict=True)
    ]
    group = study_report.summarize_checks(rows, "hc")
    best_power = study.CHECKED_POWERS[losses.index(3.0)]
    best_rates = (group["long_muon_rate"], group["long_adamw_rate"])
    assert best_rates == rates.to_rates((best_power, best_power))
    assert group["is_long_inside"] == is_inside


def test_figures_of_the_longer_rung_wait_for_all_of_its_runs(tmp_path):
    rows = make_rows()
    rows["language"] = [
        row for row in rows["language"] if (row["arm"], row["rung"]) != ("wide", "long")
    ]
    report = study_report.summarize(rows, [], TRIGRAMS)
    assert report["missing"]["study.py long"] > 0
    [wide] = [group for group in report["language"] if group["arm"] == "wide"]
    assert "token_multiplier" not in wide
    study_report.save_figures(report, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"study_rates.png", "study_registers.png"}
    assert "Effects at 3.3 million tokens" not in study_report.format_page(report)
