"""Losses at equal cost: what each arm costs beside the baseline, and its loss at the baseline's FLOPs or seconds."""

import math
from dataclasses import dataclass
from pathlib import Path

from studies.residual_streams import grid
from studies.residual_streams.arms import BASELINE, PRESETS
from studies.residual_streams.findings import Values, final_values
from studies.residual_streams.grid import arm_of, kept


@dataclass(frozen=True)
class Cost:
    """Of an arm on a problem; all but `parameters` over the baseline's, None where it was not measured.

    flops: of training, per token; speed, eager: trained tokens per second, as the runs of the stage tokens were
    compiled, and without compilation.
    """

    parameters: int
    flops: float | None
    speed: float | None
    eager: float | None


def costs(results: Path, preset: str, problem: str) -> dict[str, Cost]:
    """Of every arm that has a run of the stage tokens."""
    runs = kept(results, preset, "tokens", problem)
    parameters = {arm_of(run): run.parameters for run in runs}
    flops = grid.ratios(runs, lambda run: run.flops_per_token)
    fast, eager = (grid.speeds(results, preset, stage, problem) for stage in ("tokens", "eager"))
    return {arm: Cost(count, flops.get(arm), fast.get(arm), eager.get(arm)) for arm, count in parameters.items()}


def values(results: Path, preset: str, problem: str) -> dict[str, Values]:
    """The problem's metric after the last step, by what is equal: "tokens", and what the runs of two lengths allow of
    "seconds", "FLOPs" and "eager seconds"."""
    of = PRESETS[preset][problem]
    whole, shorter = (
        final_values(kept(results, preset, stage, problem), of.metric, of.guess) for stage in ("tokens", "seconds")
    )
    if BASELINE not in whole:
        return {"tokens": whole}
    found = {"tokens": whole, "seconds": {BASELINE: whole[BASELINE]} | shorter}
    shares = shares_of_steps(results, preset, problem)
    of_arms = costs(results, preset, problem)
    for equal in ("FLOPs", "eager seconds"):
        found[equal] = {BASELINE: whole[BASELINE]}
        for arm, share in shares.items():
            target = 1 / of_arms[arm].flops if equal == "FLOPs" else of_arms[arm].eager
            if target and (between := interpolated(whole[arm], shorter[arm], share, target)):
                found[equal][arm] = between
    return found


def shares_of_steps(results: Path, preset: str, problem: str) -> dict[str, float]:
    """{arm: steps of its equal-seconds runs over those of the others}."""
    whole, shorter = (
        {arm_of(run): run.settings["max_steps"] for run in kept(results, preset, stage, problem)}
        for stage in ("tokens", "seconds")
    )
    return {arm: steps / whole[arm] for arm, steps in shorter.items() if arm in whole}


def interpolated(whole: dict[int, float], shorter: dict[int, float], share: float, target: float) -> dict[int, float]:
    """By seed the loss at `target` times the steps of the whole run: linear in the logarithm of the steps between it
    and the run of `share` times as many. Empty outside of the two, where nothing is known."""
    if not min(share, 1.0) <= target <= max(share, 1.0):
        return {}
    weight = math.log(target) / math.log(share) if share != 1 else 0.0
    return {seed: whole[seed] + weight * (shorter[seed] - whole[seed]) for seed in whole.keys() & shorter.keys()}
