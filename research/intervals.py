"""Means over seeds with intervals, and what they allow to say of a comparison.

The n values of a setting, one a seed, are taken as independent and normally distributed. An interval covers what the
seed changes, nothing else: not the choice of a corpus, a size or a learning rate.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

import configurator

LEVEL = 0.95  # of every interval
ERROR = 1 - LEVEL


def student():
    """scipy's special functions, with Student's distribution among them. ValueError: scipy is missing."""
    return configurator.optional("scipy.special", "an interval over seeds")


@dataclass(frozen=True)
class Estimate:
    """A mean, or a difference of means, from `n` values (of a difference: from the fewer of the two).

    mean, standard_error: in the unit of the values; degrees: degrees of freedom. A single value has no spread: its
    standard error is inf, its degrees are 0.
    """

    mean: float
    standard_error: float
    degrees: float
    n: int

    @property
    def half(self) -> float:
        """Half the width of the two-sided 95% interval, by Student's distribution; inf from a single value."""
        if self.n == 1:
            return math.inf
        return float(student().stdtrit(self.degrees, 1 - ERROR / 2)) * self.standard_error

    @property
    def low(self) -> float:
        return self.mean - self.half

    @property
    def high(self) -> float:
        return self.mean + self.half

    def p(self, smallest: float = 0.0) -> float:
        """p-value against a true value within +-smallest: below 0.05 where the whole interval lies beyond."""
        beyond = abs(self.mean) - smallest
        if beyond <= 0 or self.n == 1:
            return 1.0
        if self.standard_error == 0:
            return 0.0
        return float(2 * student().stdtr(self.degrees, -beyond / self.standard_error))

    def text(self, form: str = ".3f") -> str:
        """`1.345 ± 0.012 (3)`: mean, half the interval, number of values; `1.345 (1)` of a single one."""
        half = f" ± {self.half:{form.lstrip('+')}}" if self.n > 1 else ""
        return f"{self.mean:{form}}{half} ({self.n})"


def interval(values: Sequence[float]) -> Estimate:
    """The mean of values from one setting; its error is s / sqrt(n), with n - 1 degrees. ValueError: no value."""
    if not len(values):
        raise ValueError("no value: a mean needs one, its interval two or more")
    n = len(values)
    error = float(np.std(values, ddof=1)) / math.sqrt(n) if n > 1 else math.inf
    return Estimate(float(np.mean(values)), error, n - 1, n)


def summary(values: Sequence[float]) -> dict:
    """The mean as it is stored: count, mean, half the width of its 95% interval (None of a single value), values."""
    estimate = interval(values)
    half = estimate.half if estimate.n > 1 else None
    return {"n": estimate.n, "mean": estimate.mean, "ci95": half, "values": list(values)}


def paired(own: Sequence[float], base: Sequence[float]) -> Estimate:
    """The mean of own - base, where values at one place share a seed. ValueError: not as many of one as of the other.

    What a seed does to both, as by the order of the data, falls out.
    """
    if len(own) != len(base):
        raise ValueError(f"{len(own)} and {len(base)} values are no pairs: give the same seeds of both")
    return interval(np.subtract(own, base))


def unpaired(own: Sequence[float], base: Sequence[float]) -> Estimate:
    """Mean of own minus mean of base, from independent seeds and with spreads of their own (Welch 1947)."""
    one, two = interval(own), interval(base)
    squares = [each.standard_error**2 for each in (one, two)]
    degrees = min(one.degrees, two.degrees)
    if degrees and sum(squares):
        degrees = sum(squares) ** 2 / sum(s**2 / each.degrees for s, each in zip(squares, (one, two)))
    return Estimate(one.mean - two.mean, math.sqrt(sum(squares)), degrees, min(one.n, two.n))


def verdict(difference: Estimate, smallest: float = 0.0, lower_is_better: bool = True) -> str:
    """A word for own - base: "better" or "worse" where the whole 95% interval lies beyond +-smallest, the smallest
    difference of interest; "level" where all of it lies within; else "undecided".

    Where there is no difference beyond `smallest`, "better" and "worse" together come up in at most 5% of studies.
    """
    if difference.p(smallest) < ERROR:
        return "better" if (difference.mean < 0) == lower_is_better else "worse"
    return "level" if max(-difference.low, difference.high) < smallest else "undecided"


def verdicts(differences: Sequence[Estimate], smallest: float = 0.0, lower_is_better: bool = True) -> list[str]:
    """`verdict` of every one of many comparisons: a false "better" or "worse" among all of them in at most 5%."""
    words = [verdict(each, smallest, lower_is_better) for each in differences]
    corrected = holm([each.p(smallest) for each in differences])
    return ["undecided" if word in ("better", "worse") and p >= ERROR else word for word, p in zip(words, corrected)]


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values corrected for their number, in the order given: those below 0.05 hold together (Holm 1979)."""
    order = np.argsort(p_values, kind="stable")
    steps = np.asarray(p_values, dtype=float)[order] * np.arange(len(order), 0, -1)
    corrected = np.empty(len(order))
    corrected[order] = np.minimum(np.maximum.accumulate(steps), 1)
    return corrected.tolist()


def hypothesis(difference: Estimate, below: float) -> str:
    """Whether the true difference is below a number named in advance: "supported" where the whole 95% interval is,
    "refuted" where none of it is, else "undecided"."""
    if difference.high < below:
        return "supported"
    return "refuted" if difference.low > below else "undecided"


def detectable(n: int, deviation: float, power: float = 0.8, pairs: bool = True) -> float:
    """The smallest true difference that n seeds find, its 95% interval free of 0, with probability `power`.

    deviation: standard deviation of the paired differences or, of independent runs, of each of the two settings.
    inf for a single seed.
    """
    if n == 1:
        return math.inf
    degrees, error = (n - 1, deviation / math.sqrt(n)) if pairs else (2 * n - 2, deviation * math.sqrt(2 / n))
    critical = student().stdtrit(degrees, 1 - ERROR / 2)
    return float(student().nctdtrinc(degrees, 1 - power, critical)) * error
