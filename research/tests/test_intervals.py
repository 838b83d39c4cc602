"""Means over seeds, their intervals and the words for a comparison: closed forms, scipy's own tests, and simulation."""

import math

import numpy as np
import pytest
from scipy import stats

from research import intervals
from research.intervals import detectable, holm, hypothesis, interval, paired, unpaired, verdict, verdicts

A, B = [1.30, 1.35, 1.28, 1.41, 1.33], [1.36, 1.37, 1.33, 1.44, 1.41]


def draws(repeats: int, n: int, scale: float = 1.0, seed: int = 0) -> list:
    return (scale * np.random.default_rng(seed).standard_normal((repeats, n))).tolist()


def share(hits) -> float:
    return float(np.mean(list(hits)))


def test_intervals_and_p_values_are_those_of_scipys_tests():
    mean, pairs, welch = interval(A), paired(A, B), unpaired(A, B[:4])
    low, high = stats.t.interval(0.95, 4, np.mean(A), stats.sem(A))
    assert (mean.low, mean.high) == pytest.approx((low, high), rel=1e-9)
    for ours, theirs in (
        (pairs, stats.ttest_rel(A, B)),
        (welch, stats.ttest_ind(A, B[:4], equal_var=False)),
        (mean, stats.ttest_1samp(A, 0)),
    ):
        assert ours.p() == pytest.approx(theirs.pvalue, rel=1e-9)
        bounds = theirs.confidence_interval(0.95)
        assert (ours.low, ours.high) == pytest.approx((bounds.low, bounds.high), rel=1e-9)
    assert interval([1, 2, 4]).half == pytest.approx(4.302652729911275 * math.sqrt(7 / 3) / math.sqrt(3), rel=1e-9)
    assert paired(A, B).text() == "-0.048 ± 0.030 (5)"


def test_a_single_seed_decides_nothing():
    for each in (interval([2.0]), paired([2.0], [1.0]), unpaired([2.0], B), unpaired(A, [1.0])):
        assert (each.half, each.p(), verdict(each, 0.01), hypothesis(each, 0)) == (
            math.inf,
            1,
            "undecided",
            "undecided",
        )
    assert interval([2.0]).text() == "2.000 (1)"
    assert detectable(1, 1.0) == math.inf
    with pytest.raises(ValueError, match="no value"):
        interval([])
    with pytest.raises(ValueError, match="5 and 4 values are no pairs"):
        paired(A, B[:4])


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_95_percent_intervals_hold_the_truth_in_95_percent_of_studies(scale):
    """Five seeds of either setting; the effect of the seed, common to both, is larger than the rest."""
    own, base, common = draws(4000, 5, seed=1), draws(4000, 5, scale, seed=2), draws(4000, 5, 5.0, seed=3)
    covered = share(each.low <= 0 <= each.high for each in map(unpaired, own, base))
    assert 0.93 < covered < 0.97
    pairs = [paired(np.add(a, c), np.add(b, c)) for a, b, c in zip(own, base, common)]
    covered = share(each.low <= 0 <= each.high for each in pairs)
    assert 0.93 < covered < 0.97
    narrower = share(paired(np.add(a, c), np.add(b, c)).half < unpaired(np.add(a, c), np.add(b, c)).half
                     for a, b, c in zip(own[:200], base, common))  # fmt: skip
    assert narrower > 0.8


def test_words_without_a_difference_are_wrong_in_at_most_5_percent_of_studies():
    """At three and five seeds, and at the edge of a smallest difference of interest."""
    for n, shift in ((3, 0.0), (5, 0.0), (5, 0.7)):
        words = [verdict(interval(np.add(d, shift)), smallest=shift) for d in draws(4000, n, seed=n)]
        wrong = share(word in ("better", "worse") for word in words)
        assert wrong < 0.05 + 2.6 * math.sqrt(0.05 * 0.95 / 4000)  # one in two hundred true 5% are above it
        assert wrong > (0.04 if shift == 0 else 0.015)  # nor are the intervals too wide


def test_words():
    def of(mean, half):
        return intervals.Estimate(mean, half / stats.t.ppf(0.975, 4), 4, 5)

    assert [verdict(of(m, 0.1)) for m in (-0.2, 0.2, 0.05)] == ["better", "worse", "undecided"]
    assert [verdict(of(m, 0.1), lower_is_better=False) for m in (-0.2, 0.2)] == ["worse", "better"]
    assert [verdict(of(m, 0.1), 0.15) for m in (-0.26, -0.24, 0.04, 0.06)] == [
        "better",
        "undecided",
        "level",
        "undecided",
    ]
    assert [hypothesis(of(m, 0.1), -0.05) for m in (-0.2, -0.1, 0.1)] == ["supported", "undecided", "refuted"]


def test_many_comparisons_are_wrong_together_in_at_most_5_percent_of_studies():
    # Holm by hand: 0.01 x 4, then 0.02 x 3, then 0.03 x 2, which may not be below the one before, then 0.8 x 1.
    assert holm([0.03, 0.8, 0.01, 0.02]) == pytest.approx([0.06, 0.8, 0.04, 0.06])
    studies = [list(map(interval, draws(6, 5, seed=seed))) for seed in range(1000)]
    wrong = share(set(verdicts(study)) != {"undecided"} for study in studies)
    assert 0.025 < wrong < 0.07
    assert share({"better", "worse"} & set(map(verdict, study)) != set() for study in studies) > 0.2  # uncorrected
    clear = [interval([-1.0, -1.1, -0.9]), interval([1.0, -1.0, 0.0])]
    assert verdicts(clear) == ["better", "undecided"]


@pytest.mark.parametrize("pairs", [True, False])
def test_what_a_design_detects_it_finds_in_four_of_five_studies(pairs):
    shift = detectable(5, deviation=2.0, power=0.8, pairs=pairs)
    own, base = draws(3000, 5, 2.0, seed=7), draws(3000, 5, 2.0, seed=8)
    found = [interval(np.add(a, shift)) if pairs else unpaired(np.add(a, shift), b) for a, b in zip(own, base)]
    assert share(verdict(each) == "worse" for each in found) == pytest.approx(0.8, abs=0.025)
