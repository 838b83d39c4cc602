"""The noise of a tier of the track, and the rule that says which differences it decides.

The loss of an entry varies with its seeds (sigma, the standard deviation of one run) and with the
rates that its tuning happened to choose (tau). Both were estimated from the additive stream, once for
the tier, and hold for every entry. The rule is that of research/track.md.
"""

import math
from dataclasses import dataclass

from research.compare import import_stats

FALSE_DECISIONS = 0.002  # two-sided error probability of a verdict
CONFIDENCE = 0.95  # of the intervals that are shown


@dataclass(frozen=True)
class Noise:
    """The noise of a tier, in nats.

    sigma: standard deviation of the loss of one run with other seeds; sigma_df: its degrees of
    freedom. tau: standard deviation of what the choice of rates adds; tau_df: its degrees of
    freedom. num_baseline_seeds: the number of seeds that the baseline's loss is the mean of.
    """

    sigma: float
    sigma_df: int
    tau: float
    tau_df: int
    num_baseline_seeds: int

    def get_standard_error(self, num_seeds: int, entry_sigma: float | None = None) -> float:
        """Return the standard error of an entry's difference from the baseline.

        entry_sigma: standard deviation of the entry's seeds, by default that of the baseline's
        """
        standard_error = math.sqrt(sum(self._list_variances(num_seeds)))
        if entry_sigma is None:
            return standard_error
        return math.sqrt(standard_error**2 + (entry_sigma**2 - self.sigma**2) / num_seeds)

    def get_degrees_of_freedom(self, num_seeds: int) -> float:
        """Return Satterthwaite's degrees of freedom of that standard error."""
        seed_variance, rate_variance = self._list_variances(num_seeds)
        spread = seed_variance**2 / self.sigma_df + rate_variance**2 / self.tau_df
        return (seed_variance + rate_variance) ** 2 / spread

    def get_quantile(self, num_seeds: int, error: float = FALSE_DECISIONS) -> float:
        """Return the two-sided quantile of t for these degrees of freedom."""
        degrees = self.get_degrees_of_freedom(num_seeds)
        return float(import_stats().t.ppf(1 - error / 2, degrees))

    def get_half_width(self, num_seeds: int) -> float:
        """Return half the width of the 95% interval of a difference."""
        return self.get_quantile(num_seeds, 1 - CONFIDENCE) * self.get_standard_error(num_seeds)

    def _list_variances(self, num_seeds: int) -> tuple[float, float]:
        """Return the parts of the squared standard error that sigma and tau cause."""
        seed_variance = self.sigma**2 * (1 / num_seeds + 1 / self.num_baseline_seeds)
        return seed_variance, 2 * self.tau**2


def judge(difference: float, standard_error: float, quantile: float) -> str:
    """Return the verdict on a difference from the baseline in nats; a lower loss is better."""
    if abs(difference) <= quantile * standard_error:
        return "undecided"
    return "better" if difference < 0 else "worse"


def compute_error_with_own_sigma(
    noise: Noise, entry_sigma: float, num_seeds: int, smallest_decided: float
) -> float:
    """Return the probability of a verdict on an entry that equals the baseline.

    Args:
        entry_sigma: the true standard deviation of the entry's seeds; the noise is that of the
            baseline's
        smallest_decided: the smallest difference that the rule decides, in nats
    """
    standard_error = noise.get_standard_error(num_seeds, entry_sigma)
    return 2 * float(import_stats().norm.cdf(-smallest_decided / standard_error))
