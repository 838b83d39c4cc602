"""Hypotheses of PLAN.md, and the words that the results give them."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import fmean

from research.compare import ERROR, Estimate, holm, paired, verdict
from research.residual_streams.arms import BASELINE, Problem
from research.residual_streams.grid import arm_of
from research.runs import Run

SMALLEST = 0.01  # nats per token, or share of right answers: within it two arms are level
OTHERS = tuple(("DDL", other) for other in ("HC", "mHC", "AttnRes"))
ERASE = tuple((arm, f"{arm}, no erase") for arm in ("DDL, 1 column", "DDL", "DDL-CC"))
Values = dict[str, dict[int, float]]  # by arm and seed


@dataclass(frozen=True)
class Hypothesis:
    """pairs: (arm, the arm that it is compared with); each: they are judged one by one, else all must hold;
    differs: worse supports it as well."""

    name: str
    text: str
    pairs: tuple[tuple[str, str], ...]
    at: str = "tokens"
    each: bool = True
    differs: bool = False


def of_both_starts(control: str) -> tuple[tuple[str, str], ...]:
    return ("DDL", control), ("DDL", f"{control}, identity")


OF_LANGUAGE = (
    Hypothesis("L1", "scalar DDL beats additive", (("DDL, 1 column", BASELINE),)),
    Hypothesis("L2", "the expanded state beats additive", (("DDL", BASELINE),)),
    Hypothesis(
        "L3",
        "the expanded state beats the same width without erase",
        of_both_starts("wide"),
        each=False,
    ),
    Hypothesis(
        "L4", "DDL beats additive with the same convolution", of_both_starts("conv"), each=False
    ),
    Hypothesis("L5", "erase matters beyond write-only", ERASE),
    Hypothesis("L6", "EC helps", (("DDL-EC", "DDL"), ("DDL-CC-EC", "DDL-CC"))),
    Hypothesis("L7", "CC helps", (("DDL-CC", "DDL"),)),
    Hypothesis("L8", "beta_init matters", (("DDL, beta 0.1", "DDL"),), differs=True),
    Hypothesis("L9", "DDL beats what the field would take", OTHERS, "seconds"),
    Hypothesis(
        "L10", "DDL beats additive", (("DDL", BASELINE), ("DDL, 1 column", BASELINE)), "seconds"
    ),
)
# Added after the stage rates had been seen, and corrected by themselves (PLAN.md, Changed since).
EXPLORED = (
    Hypothesis("X1", "the read's start matters", (("DDL, identity", "DDL"),), differs=True),
    Hypothesis(
        "X2", "from the identity, the expanded state beats additive", (("DDL, identity", BASELINE),)
    ),
    Hypothesis(
        "X3", "... and the same width without erase", (("DDL, identity", "wide, identity"),)
    ),
    Hypothesis("X4", "... and erase matters", (("DDL, identity", "DDL, identity, no erase"),)),
)
OF_TASKS = (
    Hypothesis("T1", "erase is what the task needs", ERASE),
    Hypothesis("T2", "DDL beats additive", (("DDL", BASELINE),)),
)

OTHER_RATE = ", other's rate"  # an arm of the stage swapped
AT_ONE_RATE = (
    ("DDL", f"DDL, no erase{OTHER_RATE}", "tokens"),
    (f"DDL{OTHER_RATE}", "DDL, no erase", "tokens"),
)
# Asked after results were seen, by problem: (arm, than, at equal). They have intervals, not corrected, and no words.
OF_LANGUAGE_AFTERWARDS = (
    ("DDL-CC", "wide, CC", "tokens"),
    ("DDL, identity, no erase", "DDL-CC-EC", "tokens"),
    ("DDL, identity", BASELINE, "seconds"),
    ("DDL, identity", "wide, identity", "seconds"),
    ("DDL, identity", "DDL, identity, no erase", "seconds"),
    ("DDL, identity", "AttnRes", "seconds"),
    ("HC", BASELINE, "seconds"),
    ("AttnRes", BASELINE, "seconds"),
    ("DDL-CC-EC", "AttnRes", "seconds"),
    ("DDL, identity, no erase", "AttnRes", "seconds"),
)
AFTERWARDS = {"language": OF_LANGUAGE_AFTERWARDS, "permutations": AT_ONE_RATE, "k_hop": AT_ONE_RATE}


@dataclass(frozen=True)
class Finding:
    """One comparison; estimate: None where a run is missing, the word then "pending"; p: corrected."""

    problem: str
    hypothesis: Hypothesis
    arm: str
    than: str
    estimate: Estimate | None
    p: float = 1.0
    word: str = "pending"


def final_values(runs: Iterable[Run], metric: str, guess: float) -> Values:
    """The metric after the last step, by arm and seed; of a run that diverged that of a uniform guess."""
    found: Values = {}
    for run in runs:
        value = run.final[metric] if run.finished else guess
        found.setdefault(arm_of(run), {})[run.seed] = value if math.isfinite(value) else guess
    return found


def compare(
    name: str,
    problem: Problem,
    hypotheses: tuple[Hypothesis, ...],
    values: dict[str, Values],
    seeds: Iterable[int],
) -> list[Finding]:
    """One for every pair of every hypothesis, corrected for their number, those to come included.

    values: by what is equal.
    """
    seeds, found = list(seeds), []
    for hypothesis in hypotheses:
        by_arm = values.get(hypothesis.at, {})
        for arm, than in hypothesis.pairs:
            found.append(Finding(name, hypothesis, arm, than, difference(by_arm, arm, than, seeds)))
    corrected = holm([each.estimate.p() if each.estimate else 1.0 for each in found])
    judged = []
    for each, p in zip(found, corrected):
        if each.estimate:
            by_arm = values[each.hypothesis.at]
            means = [fmean(by_arm[arm][seed] for seed in seeds) for arm in (each.arm, each.than)]
            word = end_of_scale(problem, means) or word_of(
                each.estimate, p, problem.lower_is_better
            )
            each = replace(each, p=p, word=word)
        judged.append(each)
    return judged


def end_of_scale(problem: Problem, means: list[float]) -> str:
    """Where two arms both have all answers, or both no more than a guess has: nothing was compared. "" elsewhere."""
    if problem.lower_is_better:
        return ""
    if min(means) > 1 - SMALLEST:
        return "ceiling"
    return "floor" if max(means) < problem.guess + SMALLEST else ""


def difference(by_arm: Values, arm: str, than: str, seeds: Iterable[int]) -> Estimate | None:
    """Of the same seeds; None where a run is missing."""
    own, base = ([by_arm.get(name, {}).get(seed) for seed in seeds] for name in (arm, than))
    return None if None in own + base else paired(own, base)


def word_of(estimate: Estimate, p: float, lower: bool) -> str:
    """ "better" or "worse" where the corrected p-value is below 0.05; else "level" where the whole interval lies within
    the smallest difference of interest, else "undecided"."""
    if p < ERROR:
        return verdict(estimate, 0.0, lower)
    return "level" if max(-estimate.low, estimate.high) < SMALLEST else "undecided"


def outcome(findings: list[Finding]) -> str:
    """What comparisons that must all hold say of their hypothesis on one problem (PLAN.md)."""
    words, hypothesis = [each.word for each in findings], findings[0].hypothesis
    for word in ("pending", "ceiling", "floor"):
        if word in words:
            return word
    if hypothesis.differs:
        words = ["better" if word == "worse" else word for word in words]
    if all(word == "better" for word in words):
        return "supported"
    return "refuted" if {"worse", "level"} & set(words) else "undecided"
