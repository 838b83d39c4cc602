"""Contrasts of arms: the analysis of variance against independent computations."""

import numpy as np
import pytest
from scipy import stats

from research.residual_streams import variance


def draw_table(
    rng: np.random.Generator, num_seeds: int, num_groups: int, seed_std: float, group_std: float
) -> np.ndarray:
    """Draw a table with crossed random effects around 0, and residuals of deviation 1."""
    seed_effects = seed_std * rng.standard_normal((num_seeds, 1))
    group_effects = group_std * rng.standard_normal((1, num_groups))
    return seed_effects + group_effects + rng.standard_normal((num_seeds, num_groups))


def test_one_effect_alone_is_a_t_test_over_it():
    """Without a group effect or residuals, the seeds are all that varies."""
    seed_effects = np.array([0.1, -0.3, 0.25, 0.7])
    contrast = variance.estimate(np.tile(seed_effects[:, None], (1, 6)))
    expected = stats.ttest_1samp(seed_effects, 0.2)
    interval = expected.confidence_interval(0.95)
    assert contrast.degrees_of_freedom == pytest.approx(3)
    assert (contrast.low, contrast.high) == pytest.approx((interval.low, interval.high))
    assert contrast.p_value(0.2) == pytest.approx(expected.pvalue)


def test_mean_squares_are_those_of_an_analysis_of_variance():
    """Compare with sums of squares from least squares on indicator variables."""
    table = draw_table(np.random.default_rng(0), 4, 7, seed_std=2.0, group_std=3.0)
    seeds, groups = np.indices(table.shape)
    ones = np.ones((table.size, 1))
    seed_columns = np.eye(4)[seeds.ravel()]
    group_columns = np.eye(7)[groups.ravel()]

    def explain(columns: np.ndarray) -> float:
        """Return the sum of squares that is left after a regression on the columns."""
        fit, *_ = np.linalg.lstsq(columns, table.ravel(), rcond=None)
        return ((table.ravel() - columns @ fit) ** 2).sum()

    left_by_mean = explain(ones)
    seed_square = (left_by_mean - explain(np.hstack([ones, seed_columns]))) / 3
    group_square = (left_by_mean - explain(np.hstack([ones, group_columns]))) / 6
    residual_square = explain(np.hstack([ones, seed_columns, group_columns])) / 18
    expected_variance = (seed_square + group_square - residual_square) / 28
    contrast = variance.estimate(table)
    assert contrast.standard_error**2 == pytest.approx(expected_variance)
    expected_freedom = (28 * expected_variance) ** 2 / (
        seed_square**2 / 3 + group_square**2 / 6 + residual_square**2 / 18
    )
    assert contrast.degrees_of_freedom == pytest.approx(expected_freedom)


@pytest.mark.parametrize(("seed_std", "group_std"), [(1.0, 0.0), (0.0, 1.0), (1.0, 2.0)])
def test_intervals_cover_the_truth_as_often_as_they_say(seed_std, group_std):
    rng = np.random.default_rng(1)
    contrasts = [
        variance.estimate(draw_table(rng, 5, 64, seed_std, group_std)) for _ in range(1000)
    ]
    coverage = np.mean([contrast.low < 0 < contrast.high for contrast in contrasts])
    assert 0.93 < coverage < 0.985


def test_seeds_alone_would_be_too_sure_where_sequences_differ():
    """A t-test over the seeds' means does not cover the effect of the sequences."""
    rng = np.random.default_rng(2)
    num_covered = 0
    num_covered_by_seeds = 0
    for _ in range(300):
        table = draw_table(rng, 5, 16, seed_std=0.0, group_std=3.0)
        contrast = variance.estimate(table)
        num_covered += contrast.low < 0 < contrast.high
        interval = stats.ttest_1samp(table.mean(1), 0).confidence_interval(0.95)
        num_covered_by_seeds += interval.low < 0 < interval.high
    assert num_covered > 270
    assert num_covered_by_seeds < 200


def test_a_contrast_weighs_arms():
    losses = {arm: np.random.default_rng(i).random((3, 4)) for i, arm in enumerate("abcd")}
    weights = {"a": 0.5, "b": -0.5, "c": 0.5, "d": -0.5}
    expected = (losses["a"] - losses["b"] + losses["c"] - losses["d"]) / 2
    assert variance.combine_arms(losses, weights) == pytest.approx(expected)


def test_arms_with_other_seeds_are_refused():
    losses = {"a": np.zeros((3, 4)), "b": np.zeros((5, 4))}
    with pytest.raises(ValueError, match="a, b have losses of different shapes"):
        variance.combine_arms(losses, {"a": 1, "b": -1})
