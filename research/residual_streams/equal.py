"""Losses at equal cost: what each arm costs beside the baseline, and its loss at the baseline's FLOPs or seconds."""

import math
from dataclasses import dataclass

from research.residual_streams.arms import BASELINE
from research.residual_streams.findings import Values, final_values
from research.residual_streams.grid import Grid, arm_of, over_baseline


@dataclass(frozen=True)
class Cost:
    """Of an arm on a problem; all but `parameters` over the baseline's, None where it was not measured.

    flops: of training, per token; speed, eager: trained tokens per second, compiled and not.
    """

    parameters: int
    flops: float | None
    speed: float | None
    eager: float | None


def costs(grid: Grid, problem: str) -> dict[str, Cost]:
    """Of every arm that has a run of the stage tokens."""
    runs = grid.kept("tokens", problem)
    parameters = {arm_of(run): run.parameters for run in runs}
    flops = over_baseline({arm_of(run): run.flops_per_token for run in runs})
    fast, eager = (grid.speeds(stage, problem) for stage in ("alone", "eager"))
    return {
        arm: Cost(count, flops.get(arm), fast.get(arm), eager.get(arm))
        for arm, count in parameters.items()
    }


def values(grid: Grid, problem: str) -> dict[str, Values]:
    """The problem's metric after the last step, by what is equal: "tokens", and what the runs of two lengths allow of
    "seconds", "FLOPs" and "eager seconds"."""
    of = grid.problem(problem)
    whole, shorter = (
        final_values(grid.kept(stage, problem), of.metric, of.guess)
        for stage in ("tokens", "seconds")
    )
    if BASELINE not in whole:
        return {"tokens": whole}
    base = {BASELINE: whole[BASELINE]}
    found = {
        "tokens": whole,
        "seconds": base | shorter,
        "FLOPs": dict(base),
        "eager seconds": dict(base),
    }
    shares, of_arms = shares_of_steps(grid, problem), costs(grid, problem)
    for arm, share in shares.items():
        flops, eager = of_arms[arm].flops, of_arms[arm].eager
        for equal, target in (("FLOPs", flops and 1 / flops), ("eager seconds", eager)):
            if target and (between := interpolated(whole[arm], shorter[arm], share, target)):
                found[equal][arm] = between
    return found


def shares_of_steps(grid: Grid, problem: str) -> dict[str, float]:
    """{arm: steps of its equal-seconds runs over those of the others}."""
    whole, shorter = (
        {arm_of(run): run.settings["max_steps"] for run in grid.kept(stage, problem)}
        for stage in ("tokens", "seconds")
    )
    return {arm: steps / whole[arm] for arm, steps in shorter.items() if arm in whole}


def interpolated(
    whole: dict[int, float], shorter: dict[int, float], share: float, target: float
) -> dict[int, float]:
    """By seed the loss at `target` times the steps of the whole run: linear in the logarithm of the steps between it
    and the run of `share` times as many. Empty outside of the two, where nothing is known."""
    if not min(share, 1.0) <= target <= max(share, 1.0):
        return {}
    weight = math.log(target) / math.log(share) if share != 1 else 0.0
    return {
        seed: whole[seed] + weight * (shorter[seed] - whole[seed])
        for seed in whole.keys() & shorter.keys()
    }
