"""The runs of each stage of the study, as cells of sweep.py, by what the stages before have decided."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median

import sweep
from reporting.runs import Run, load
from studies.residual_streams.arms import ARMS, BASELINE, GRID, PRESETS, SEARCH_SEED, SEEDS
from training import stopping

STAGES = "rates", "tokens", "seconds", "eager"
MOST_RATES = 8  # tried of an arm before its grid ends, edge or not
EAGER, EAGER_SEEDS = 0.12, SEEDS[:2]  # share of the steps, and seeds, of runs that are timed alone


def cell(preset: str, stage: str, problem: str, arm: str, runs: Path, own: dict[str, str], **keys: str) -> sweep.Cell:
    """One run; `own`: the keys that name its folder among those of its stage, problem and arm."""
    of = PRESETS[preset][problem]
    folder = runs / preset / stage / problem / arm.replace(", ", "_").replace(" ", "_")
    made = sweep.make_cell(0, own, [of.config, *sweep.as_options(of.keys | ARMS[arm] | keys | own)], folder)
    return replace(made, about=f"{problem}, {arm}")


def scaled(preset: str, problem: str, share: float) -> dict[str, str]:
    """The keys of the run's length, times a share."""
    keys = PRESETS[preset][problem].keys
    return {key: str(max(round(int(keys[key]) * share), 1)) for key in ("max_steps", "warmup_steps")}


# ---- learning rates ----


def rate_cells(preset: str, problem: str, arm: str, runs: Path) -> list[sweep.Cell]:
    """The runs of an arm's learning rates that are known to be needed so far: half as long, on a seed and half of the
    validation split that no result uses."""
    keys = {"seed": str(SEARCH_SEED), "eval_part": "first", **scaled(preset, problem, 0.5)}
    rates = list(GRID)
    while True:
        cells = [cell(preset, "rates", problem, arm, runs, {"learning_rate": f"{rate:g}"}, **keys) for rate in rates]
        beyond = next_rate(rates, [final_loss(each) for each in cells])
        if beyond is None:
            return cells
        rates = sorted([*rates, beyond])


def next_rate(rates: list[float], losses: list[float | None]) -> float | None:
    """A factor of two beyond the best of the rates where it is at an edge; None where it has a worse one on either
    side, a loss is missing, or enough was tried."""
    if None in losses or len(rates) >= MOST_RATES:
        return None
    best = losses.index(min(losses))
    if best == 0:
        return rates[0] / 2
    return rates[-1] * 2 if best == len(rates) - 1 else None


def final_loss(of: sweep.Cell) -> float | None:
    """Validation loss after the last step; inf of a run that diverged, None of one that is not finished."""
    if (record := sweep.final_evaluation(of)) is not None:
        return record["val_loss"] if math.isfinite(record["val_loss"]) else math.inf
    return math.inf if stopping.read_status(of.folder)["ended"] == "failed" else None


def best_rate(cells: list[sweep.Cell]) -> float | None:
    """The learning rate of the lowest loss; None while a run is missing."""
    losses = [final_loss(each) for each in cells]
    return None if None in losses else cells[losses.index(min(losses))].values["learning_rate"]


def chosen_rates(results: Path, preset: str) -> dict[str, dict[str, dict]]:
    """{problem: {arm: what the stage rates has found}}; empty before it."""
    path = results / f"{preset}_rates.json"
    return json.loads(path.read_text(encoding="utf-8"))["chosen"] if path.is_file() else {}


def chosen_rate(results: Path, preset: str, problem: str, arm: str) -> str:
    """ValueError: there is none yet."""
    if arm not in (found := chosen_rates(results, preset).get(problem, {})):
        raise ValueError(f"no learning rate was chosen for {arm} on {problem}: run the stage rates on it first")
    return f"{found[arm]['learning_rate']:g}"


# ---- results ----


def token_cells(preset: str, problem: str, arm: str, runs: Path, results: Path) -> list[sweep.Cell]:
    """Every seed, with the length that all arms share."""
    keys = {"learning_rate": chosen_rate(results, preset, problem, arm), "eval_part": "second"}
    return [cell(preset, "tokens", problem, arm, runs, {"seed": str(seed)}, **keys) for seed in SEEDS]


def second_cells(preset: str, problem: str, arm: str, runs: Path, results: Path) -> list[sweep.Cell]:
    """Every seed, with as many steps as take the baseline's seconds; none of the baseline, whose runs are there."""
    if arm == BASELINE:
        return []
    keys = {"learning_rate": chosen_rate(results, preset, problem, arm), "eval_part": "second"}
    keys |= scaled(preset, problem, relative_speed(results, preset, problem, arm))
    return [cell(preset, "seconds", problem, arm, runs, {"seed": str(seed)}, **keys) for seed in SEEDS]


def eager_cells(preset: str, problem: str, arm: str, runs: Path, results: Path) -> list[sweep.Cell]:
    """Short runs without compilation, of which the speed alone is of use."""
    keys = {"learning_rate": chosen_rate(results, preset, problem, arm), "eval_part": "second", "compile": "False"}
    keys |= scaled(preset, problem, EAGER)
    return [cell(preset, "eager", problem, arm, runs, {"seed": str(seed)}, **keys) for seed in EAGER_SEEDS]


def relative_speed(results: Path, preset: str, problem: str, arm: str) -> float:
    """Tokens per second over the baseline's, from the stage tokens. ValueError: a run of it is missing."""
    there = {(arm_of(run), run.seed) for run in kept(results, preset, "tokens", problem)}
    missing = [seed for seed in SEEDS if not {(arm, seed), (BASELINE, seed)} <= there]
    if missing:
        raise ValueError(f"{arm} on {problem}: finish the stage tokens first, which has no run of seeds {missing}")
    return speeds(results, preset, "tokens", problem)[arm]


def speeds(results: Path, preset: str, stage: str, problem: str) -> dict[str, float]:
    """{arm: tokens per second over the baseline's} of a stage whose runs of all arms came in turns; empty before it."""
    return ratios(kept(results, preset, stage, problem), lambda run: run.tokens_per_second)


def ratios(runs: list[Run], number: Callable) -> dict[str, float]:
    """{arm: median over seeds of number(run) over the baseline's of the same seed}."""
    found = {(arm_of(run), run.seed): value for run in runs if (value := number(run))}
    by_arm: dict[str, list[float]] = {}
    for (arm, seed), value in found.items():
        if (BASELINE, seed) in found:
            by_arm.setdefault(arm, []).append(value / found[BASELINE, seed])
    return {arm: median(values) for arm, values in by_arm.items()}


def packed_file(results: Path, preset: str, stage: str, problem: str) -> Path:
    return results / f"{preset}_{stage}_{problem}.jsonl"


def kept(results: Path, preset: str, stage: str, problem: str) -> list[Run]:
    """The runs that the results hold; none where there is no file."""
    path = packed_file(results, preset, stage, problem)
    return load([str(path)])[0] if path.is_file() else []


def named(of: sweep.Cell, arm: str) -> Run:
    """A finished cell as a run with the arm in its name. ValueError: it cannot be read."""
    runs, faults = load([str(of.folder)])
    if faults:
        raise ValueError(faults[0])
    return replace(runs[0], name=f"{arm} | {of.title}")


def arm_of(run: Run) -> str:
    return run.name.partition(" | ")[0]
