"""The mean over seeds and its confidence interval."""

import math
import statistics


def t_quantile(freedom: int, confidence: float = 0.95) -> float:
    """t with P(|T| < t) = confidence for Student's distribution with `freedom` degrees of freedom."""

    # Abramowitz & Stegun 26.7.3 and 26.7.4, exact for whole degrees of freedom, in theta = atan(t / sqrt(freedom)).
    def probability(theta: float) -> float:
        odd = freedom % 2
        term = math.cos(theta) if odd else 1.0
        total = term if freedom > 1 else 0.0
        for k in range(2 + odd, freedom - 1, 2):
            term *= math.cos(theta) ** 2 * (k - 1) / k
            total += term
        return 2 / math.pi * (theta + math.sin(theta) * total) if odd else math.sin(theta) * total

    low, high = 0.0, math.pi / 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if probability(middle) < confidence else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def describe(values: list[float]) -> dict:
    """Count, mean, and half the width of the 95% confidence interval of the mean, None for a single value."""
    n, mean, half = len(values), statistics.fmean(values), None
    if n > 1:
        variance = sum((value - mean) ** 2 for value in values) / (n - 1)
        half = t_quantile(n - 1) * math.sqrt(variance / n)
    return {"n": n, "mean": mean, "ci95": half, "values": values}
