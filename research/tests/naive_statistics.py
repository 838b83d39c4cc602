"""Statistics of the studies by other formulas: a mixed model by likelihood, Holm step by step."""

from typing import NamedTuple

import numpy as np
from scipy import linalg, optimize, stats


class MixedModelFit(NamedTuple):
    """The mean of a table over all seeds and groups that could have been drawn."""

    mean: float
    standard_error: float
    degrees_of_freedom: float

    def p_value(self) -> float:
        """Return the two-sided p-value of a mean of 0."""
        return float(2 * stats.t.sf(abs(self.mean) / self.standard_error, self.degrees_of_freedom))

    def interval(self) -> tuple[float, float]:
        """Return the 95% interval of the mean."""
        return stats.t.interval(
            0.95, self.degrees_of_freedom, loc=self.mean, scale=self.standard_error
        )


def fit_by_likelihood(table: np.ndarray) -> tuple[float, float]:
    """Return the mean of a table and its standard error by restricted maximum likelihood.

    Args:
        table: float64 (seeds, groups), a random effect for each seed and one for each group
    """
    num_seeds, num_groups = table.shape
    seed_blocks = np.kron(np.eye(num_seeds), np.ones((num_groups, num_groups)))
    group_blocks = np.kron(np.ones((num_seeds, num_seeds)), np.eye(num_groups))
    ones = np.ones(table.size)
    values = table.ravel()

    def solve(log_variances: np.ndarray) -> tuple[float, float, float]:
        """Return minus the restricted log likelihood, the mean and its variance."""
        seed_variance, group_variance, residual_variance = np.exp(log_variances)
        covariance = seed_variance * seed_blocks + group_variance * group_blocks
        covariance += residual_variance * np.eye(table.size)
        factor, is_lower = linalg.cho_factor(covariance)
        weights = linalg.cho_solve((factor, is_lower), ones)
        mean = weights @ values / weights.sum()
        deviations = values - mean
        square = deviations @ linalg.cho_solve((factor, is_lower), deviations)
        log_determinant = 2 * np.log(np.diag(factor)).sum()
        return 0.5 * (log_determinant + square + np.log(weights.sum())), mean, 1 / weights.sum()

    start = np.log(table.var()) - np.ones(3)
    best = optimize.minimize(
        lambda log_variances: solve(log_variances)[0], start, method="Nelder-Mead"
    )
    _, mean, mean_variance = solve(best.x)
    return float(mean), float(mean_variance**0.5)


def fit_mixed_model(table: np.ndarray) -> MixedModelFit:
    """Fit the mean by restricted maximum likelihood, with Satterthwaite's degrees of freedom.

    The sums of squares are differences between the residuals of nested regressions.
    """
    num_seeds, num_groups = table.shape
    seed_columns = np.kron(np.eye(num_seeds), np.ones((num_groups, 1)))
    group_columns = np.kron(np.ones((num_seeds, 1)), np.eye(num_groups))
    values = table.ravel()

    def residual_sum(columns: np.ndarray) -> float:
        coefficients = np.linalg.lstsq(columns, values, rcond=None)[0]
        return float(((values - columns @ coefficients) ** 2).sum())

    both_sum = residual_sum(np.hstack([seed_columns, group_columns]))
    freedoms = np.array([num_seeds - 1, num_groups - 1, (num_seeds - 1) * (num_groups - 1)])
    sums = [
        residual_sum(group_columns) - both_sum,
        residual_sum(seed_columns) - both_sum,
        both_sum,
    ]
    mean_squares = np.array(sums) / freedoms
    mean, standard_error = fit_by_likelihood(table)
    variance = standard_error**2 * table.size
    return MixedModelFit(
        mean, standard_error, float(variance**2 / (mean_squares**2 / freedoms).sum())
    )


def naive_holm(p_values: list[float]) -> list[float]:
    """Return Holm's p-values by the definition of his step-down procedure."""
    corrected = {}
    largest = 0.0
    for step, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - step) * p_values[index]))
        corrected[index] = largest
    return [corrected[index] for index in range(len(p_values))]
