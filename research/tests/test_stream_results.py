"""The stored results of the controlled comparison, computed again from its stored rows."""

import json
import math
import re
from collections import Counter

import numpy as np
import pytest
from helpers import ROOT
from naive_statistics import MixedModelFit, fit_mixed_model, naive_holm

from research.residual_streams import study
from research.residual_streams.streams import LONG, PLANNED

RESULTS = ROOT / "results" / "residual_streams"
# of steps, 0.8 and 3.3 million tokens
LOG_RATIO_OF_RUNGS = math.log(3200 / 800)


def read_rows(name: str) -> list[dict]:
    path = RESULTS / f"{name}.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def read_losses(rows: list[dict], arm: str, condition: str) -> np.ndarray:
    """Return the losses of an arm's reported runs (seeds, groups) at a rung or a size."""
    by_seed = {
        row["seed"]: row["group_losses"]
        for row in rows
        if row["phase"] == "report" and row["arm"] == arm
        if condition in (row.get("rung"), row.get("size"))
    }
    return np.array([by_seed[seed] for seed in sorted(by_seed)])


@pytest.fixture(scope="module")
def stored() -> dict:
    return json.loads((RESULTS / "study.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def language_rows() -> list[dict]:
    return read_rows("language")


def assert_equals_fit(result: dict, fit: MixedModelFit) -> None:
    """Compare a stored mean and its interval with a fit, whose variances are found by a search."""
    low, high = fit.interval()
    assert result["mean"] == pytest.approx(fit.mean, abs=1e-9)
    assert result["high"] - result["low"] == pytest.approx(high - low, rel=0.01)
    assert result["low"] == pytest.approx(low, abs=0.01 * (high - low))


# ---- claims ----


def make_claim_tables(sizes: list[str]) -> dict[int, np.ndarray]:
    """Return the table of every claim whose runs are finished, written as PLAN2.md says it.

    sizes: of registers, at which every arm is below chance; none before these runs are finished
    """
    language = read_rows("language")

    def at_long(arm: str) -> np.ndarray:
        return read_losses(language, arm, "long")

    def at_95_percent(arm: str) -> np.ndarray:
        short = read_losses(language, arm, "short")
        slope = (short - at_long(arm)) / LOG_RATIO_OF_RUNGS
        return at_long(arm) + slope * math.log(1 / 0.95)

    tables = {
        1: at_95_percent("ddl_1") - at_long("additive"),
        2: at_95_percent("ddl_tc") - at_long("additive"),
        3: at_95_percent("ddl_cc_ec") - at_long("additive"),
        4: at_long("ddl_tc") - at_long("main_gain"),
        5: at_long("ddl_tc") - at_long("conv"),
        6: at_long("ddl_tc") - at_long("wide"),
        7: at_long("ddl_1") - at_long("ddl_1_no_erase"),
        8: at_long("ddl_tc") - at_long("ddl_tc_no_erase"),
    }
    if sizes:
        registers = read_rows("registers")
        effects = [
            read_losses(registers, arm, size) - read_losses(registers, f"{arm}_no_erase", size)
            for arm in ("ddl_1", "ddl_tc")
            for size in sizes
        ]
        tables[9] = np.mean(effects, axis=0)
    return tables


def test_a_mixed_model_gives_the_stored_verdicts(stored):
    tables = make_claim_tables(stored["registers_sizes"])
    fits = {number: fit_mixed_model(table) for number, table in tables.items()}
    results = {result["number"]: result for result in stored["verdicts"]}
    # a claim whose runs are not finished has p = 1
    p_values = [fits[number].p_value() if number in fits else 1.0 for number in results]
    corrected_p_values = dict(zip(results, naive_holm(p_values), strict=True))
    for number in results.keys() - fits.keys():
        assert results[number]["verdict"] == "not run"
    for number, fit in fits.items():
        result = results[number]
        corrected_p = corrected_p_values[number]
        assert_equals_fit(result, fit)
        low, high = fit.interval()
        verdict = "undecided"
        if high < 0 and corrected_p < 0.05:
            verdict = "supported"
        elif (result["number"] == 9 and high >= 0) or (low > 0 and corrected_p < 0.05):
            verdict = "refuted"
        assert result["verdict"] == verdict


# ---- what is shown without a verdict ----


@pytest.mark.parametrize("arm", [arm for arm in PLANNED if arm != "additive"])
@pytest.mark.parametrize("rung", ["short", "long"])
def test_a_mixed_model_gives_the_stored_differences(arm, rung, stored, language_rows):
    (group,) = [group for group in stored["language"] if group["arm"] == arm]
    arm_losses = read_losses(language_rows, arm, rung)
    baseline_losses = read_losses(language_rows, "additive", rung)
    assert arm_losses.shape == (5, 90)
    assert_equals_fit(group[f"{rung}_difference"], fit_mixed_model(arm_losses - baseline_losses))


def test_token_multipliers_are_those_of_the_mean_losses(stored, language_rows):
    for group in stored["language"]:
        if "token_multiplier" not in group:
            continue
        short, long = (
            read_losses(language_rows, group["arm"], rung).mean() for rung in ("short", "long")
        )
        baseline_short, baseline_long = (
            read_losses(language_rows, "additive", rung).mean() for rung in ("short", "long")
        )
        # the curve of whichever is ahead is followed back to the loss of the other
        slope = short - long if long <= baseline_long else baseline_short - baseline_long
        # the rungs differ by a factor of four
        multiplier = 4 ** ((baseline_long - long) / slope)
        assert group["token_multiplier"]["mean"] == pytest.approx(multiplier)


# ---- the titles of the figures, which name findings (study_report.TITLES) ----


def get_group(stored: dict, arm: str) -> dict:
    """Return what is stored of an arm on language."""
    (group,) = [group for group in stored["language"] if group["arm"] == arm]
    return group


@pytest.mark.parametrize("arm", ["ddl_tc", "ddl_cc_ec"])
def test_the_lead_of_ddl_with_four_columns_is_gone(arm, stored):
    group = get_group(stored, arm)
    assert group["short_difference"]["high"] < 0
    assert group["long_difference"]["high"] > 0


def test_the_write_to_four_columns_raises_the_loss_and_erase_has_no_measurable_effect(stored):
    (write,) = [
        e for name, e in stored["effects"].items() if name.startswith("DDL's write to four")
    ]
    assert write["low"] > 0
    for name, effect in stored["effects"].items():
        if name.startswith("erase"):
            assert effect["low"] < 0 < effect["high"]


def test_the_best_rates_of_ddl_tc_are_a_corner(stored):
    (group,) = [group for group in stored["tolerance"] if group["arm"] == "ddl_tc"]
    assert min(loss for *_, loss in group["corners"]) == group["minimum"]


def test_erase_does_not_lower_the_loss_on_registers_and_no_arm_learned_them(stored):
    (verdict,) = [verdict for verdict in stored["verdicts"] if verdict["number"] == 9]
    assert verdict["high"] > 0
    accuracies = [group["val_accuracy"] for group in stored["groups"] if "val_accuracy" in group]
    # a model that overlooks swaps gives half of the answers
    assert max(value for accuracy in accuracies for value in accuracy["values"]) < 0.5


# ---- the runs ----


def list_reported_arms(rows: list[dict], rung: str) -> list[str]:
    """Return the arms whose reported runs of a rung are finished, which those of claims are."""
    counts = Counter(row["arm"] for row in rows if (row["rung"], row["phase"]) == (rung, "report"))
    arms = [arm for arm, count in counts.items() if count == (5 if arm in LONG else 3)]
    assert set(PLANNED) <= set(arms)
    return arms


def test_every_arm_had_the_same_number_of_tries(language_rows):
    for arm in list_reported_arms(language_rows, "short"):
        tries = [row for row in language_rows if row["arm"] == arm and row["phase"] == "try"]
        assert len({tuple(row["point"]) for row in tries}) == len(tries) == 12
        assert {row["seed"] for row in tries} == {study.TUNING_SEED}


@pytest.mark.parametrize(("rung", "tuning_phase"), [("short", "try"), ("long", "check")])
def test_reported_runs_have_the_best_rates_and_other_seeds(rung, tuning_phase, language_rows):
    for arm in list_reported_arms(language_rows, rung):
        rows = [row for row in language_rows if (row["arm"], row["rung"]) == (arm, rung)]
        tuned = [row for row in rows if row["phase"] == tuning_phase]
        reported = [row for row in rows if row["phase"] == "report"]
        best = min(
            (row for row in tuned if row["val_loss"] is not None), key=lambda row: row["val_loss"]
        )
        assert {tuple(row["point"]) for row in reported} == {tuple(best["point"])}
        assert sorted(row["seed"] for row in reported) == list(range(len(reported)))


def test_no_reported_run_diverged_and_each_has_losses_of_2_880_sequences(language_rows):
    for row in language_rows:
        if row["phase"] == "report":
            assert row["val_loss"] is not None
            assert len(row["group_losses"]) == 90


def test_two_runs_were_repeated_to_the_bit(stored):
    assert len(stored["repeats"]) >= 2
    assert all(repeat["same_bits"] for repeat in stored["repeats"])


def test_the_page_names_the_commands_with_missing_runs(stored):
    page = (ROOT / "research" / "residual_streams" / "README.md").read_text(encoding="utf-8")
    sentences = re.findall(r"^Not finished are.*?\.$", page, flags=re.MULTILINE | re.DOTALL)
    named = {command for sentence in sentences for command in re.findall(r"`([^`]+)`", sentence)}
    assert named == {command for command, number in stored["missing"].items() if number}


def test_additive_passes_the_trigram_at_both_rungs(stored):
    (group,) = [group for group in stored["language"] if group["arm"] == "additive"]
    for rung, losses in stored["trigrams"].items():
        assert np.mean(group[rung]["values"]) < losses["second"]
