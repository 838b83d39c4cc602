"""Contrasts of arms, as a mixed model of variance over seeds and validation sequences sees them.

The loss of an arm with a seed on a group of sequences is

    loss[arm, seed, group] = mean[arm] + seed effects + group effects + residual,

where both effects are random and differ between arms. Arms are compared on the same seeds (the same
order of the data) and the same sequences, so a contrast of arms, such as one minus another, is taken
for every pair (seed, group) first. What is left is a table with two crossed random effects. Its
mean has the variance (MS_seed + MS_group - MS_residual) / (seeds x groups), where MS are the mean
squares of the analysis of variance (Searle, Casella, McCulloch, Variance Components, chapter 4),
and Satterthwaite's degrees of freedom.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from scipy import stats

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Contrast:
    """The estimate of a contrast of arms, in nats."""

    mean: float
    standard_error: float
    degrees_of_freedom: float

    @property
    def half_width(self) -> float:
        """Return half the width of the 95% interval."""
        quantile = stats.t.ppf((1 + CONFIDENCE) / 2, self.degrees_of_freedom)
        return float(quantile * self.standard_error)

    @property
    def low(self) -> float:
        return self.mean - self.half_width

    @property
    def high(self) -> float:
        return self.mean + self.half_width

    def p_value(self, bound: float = 0.0) -> float:
        """Return the two-sided p-value of the hypothesis that the contrast equals the bound."""
        distance = abs(self.mean - bound) / self.standard_error
        return float(2 * stats.t.sf(distance, self.degrees_of_freedom))


def combine_arms(losses: Mapping[str, np.ndarray], weights: Mapping[str, float]) -> np.ndarray:
    """Return the weighted sum of the losses of arms, float64 (seeds, groups).

    Args:
        losses: of every arm, (seeds, groups); the same seeds and groups in the same order
        weights: of the arms in the contrast, such as {"ddl": 1, "additive": -1}

    Raises:
        ValueError: arms have different numbers of seeds or groups
    """
    shapes = {losses[arm].shape for arm in weights}
    if len(shapes) != 1:
        raise ValueError(f"{', '.join(weights)} have losses of different shapes: {shapes}")
    return sum(weight * losses[arm].astype(np.float64) for arm, weight in weights.items())


def estimate(table: np.ndarray) -> Contrast:
    """Estimate the mean of a contrast over all seeds and sequences that could have been drawn.

    Args:
        table: the contrast for every seed and group, (seeds, groups), two or more of each
    """
    num_seeds, num_groups = table.shape
    mean = table.mean()
    seed_deviations = table.mean(1) - mean  # (seeds,)
    group_deviations = table.mean(0) - mean  # (groups,)
    residuals = table - mean - seed_deviations[:, None] - group_deviations

    seed_freedom = num_seeds - 1
    group_freedom = num_groups - 1
    residual_freedom = seed_freedom * group_freedom
    seed_square = num_groups * (seed_deviations**2).sum() / seed_freedom
    group_square = num_seeds * (group_deviations**2).sum() / group_freedom
    residual_square = (residuals**2).sum() / residual_freedom

    # An effect whose estimated variance would be negative counts as none, so that the variance of
    # the mean is never below that with the other effect alone.
    total_square = max(seed_square + group_square - residual_square, seed_square, group_square)
    approximation = (
        seed_square**2 / seed_freedom
        + group_square**2 / group_freedom
        + residual_square**2 / residual_freedom
    )
    return Contrast(
        mean=float(mean),
        standard_error=float(np.sqrt(total_square / table.size)),
        degrees_of_freedom=float(total_square**2 / approximation),
    )
