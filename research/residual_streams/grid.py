"""The runs of each stage of the study, as cells of sweep.py, by what the stages before have decided."""

import functools
import json
import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from research import sweep
from research.residual_streams.arms import (
    BASELINE,
    PRESETS,
    SEARCH_SEED,
    SEEDS,
    SWAPPED,
    Problem,
    keys_of,
)
from research.runs import UNSHOWN, Run, load, write_csv
from training import stopping
from training.provenance import store

STAGES = "rates", "tokens", "again", "swapped", "alone", "seconds", "eager"
TIMES = "alone", "eager"  # stages whose runs are timed
MOST_RATES = 8  # tried of an arm before its grid ends, edge or not
TIMED = 0.12  # share of the steps of runs of which the speed alone is of use
ALONE, EAGER = SEEDS[:3], SEEDS[:2]  # their seeds, compiled and not
FASTEST = 0.95  # quantile of the speeds of an arm's steps that counts: what else a machine does can only slow a step


@dataclass(frozen=True)
class Grid:
    """runs: where they are trained; results: what is kept of them, so that a run counts as finished without its folder.

    A kept run is that of a cell where arm, seed and all settings are the same.
    """

    preset: str
    runs: Path
    results: Path

    def problem(self, name: str) -> Problem:
        return PRESETS[self.preset][name]

    def cell(
        self, stage: str, problem: str, arm: str, own: dict[str, str], **keys: str
    ) -> sweep.Cell:
        """One run; `own`: the keys that name its folder among those of its stage, problem and arm."""
        of = self.problem(problem)
        folder = (
            self.runs / self.preset / stage / problem / arm.replace(", ", "_").replace(" ", "_")
        )
        made = sweep.make_cell(
            0,
            own,
            [of.config, *sweep.as_options(of.keys | keys_of(self.preset, arm) | keys | own)],
            folder,
        )
        return replace(made, about=f"{problem}, {arm}")

    def cells(self, stage: str, problem: str, arm: str) -> list[sweep.Cell]:
        """The runs of a stage that are known to be needed so far. ValueError: a stage before is not finished."""
        return getattr(self, f"_{stage}")(problem, arm)

    def scaled(self, problem: str, share: float) -> dict[str, str]:
        """The keys of the run's length, times a share."""
        keys = self.problem(problem).keys
        return {
            key: str(max(round(int(keys[key]) * share), 1)) for key in ("max_steps", "warmup_steps")
        }

    def _rates(self, problem: str, arm: str) -> list[sweep.Cell]:
        """Half as long, on a seed and half of the validation split that no result uses."""
        keys = {"seed": str(SEARCH_SEED), "eval_part": "first", **self.scaled(problem, 0.5)}
        rates = list(self.problem(problem).rates)
        while True:
            cells = [
                self.cell("rates", problem, arm, {"learning_rate": f"{rate:g}"}, **keys)
                for rate in rates
            ]
            beyond = next_rate(rates, self.losses("rates", problem, arm, cells))
            if beyond is None:
                return cells
            rates = sorted([*rates, beyond])

    def _tokens(self, problem: str, arm: str) -> list[sweep.Cell]:
        """Every seed, with the length that all arms share."""
        return self.seeds("tokens", problem, arm, SEEDS)

    def _again(self, problem: str, arm: str) -> list[sweep.Cell]:
        """The first of the stage tokens once more, to see that it ends with the same bits."""
        return self.seeds("again", problem, arm, SEEDS[:1])

    def _swapped(self, problem: str, arm: str) -> list[sweep.Cell]:
        """Every seed once more, with the learning rate of the arm that it is compared with."""
        return self.seeds(
            "swapped", problem, arm, SEEDS, learning_rate=self.chosen_rate(problem, SWAPPED[arm])
        )

    def _seconds(self, problem: str, arm: str) -> list[sweep.Cell]:
        """Every seed, with as many steps as take the baseline's seconds; none of the baseline, whose runs are there."""
        if arm == BASELINE:
            return []
        share = self.relative_speed(problem, arm)
        return self.seeds("seconds", problem, arm, SEEDS, **self.scaled(problem, share))

    def _alone(self, problem: str, arm: str) -> list[sweep.Cell]:
        """Short runs, to be timed one at a time: runs beside each other do not slow each other alike."""
        return self.seeds("alone", problem, arm, ALONE, **self.timed(problem))

    def _eager(self, problem: str, arm: str) -> list[sweep.Cell]:
        """The same without compilation."""
        return self.seeds("eager", problem, arm, EAGER, compile="False", **self.timed(problem))

    def timed(self, problem: str) -> dict[str, str]:
        return {"eval_batches": "1", **self.scaled(problem, TIMED)}

    def seeds(self, stage: str, problem: str, arm: str, seeds, **keys: str) -> list[sweep.Cell]:
        keys = {"learning_rate": self.chosen_rate(problem, arm), "eval_part": "second", **keys}
        return [self.cell(stage, problem, arm, {"seed": str(seed)}, **keys) for seed in seeds]

    # ---- what is finished ----

    def losses(
        self, stage: str, problem: str, arm: str, cells: list[sweep.Cell]
    ) -> list[float | None]:
        """Of each the validation loss after the last step; inf where it diverged, None of one that is not finished."""
        kept = {run.name: run for run in self.kept(stage, problem)}
        return [final_loss(cell, kept.get(name_of(stage, problem, arm, cell))) for cell in cells]

    def kept(self, stage: str, problem: str) -> list[Run]:
        """The runs that the results hold; none where there is no file."""
        if not self.file.is_file():
            return []
        every = read(self.file, self.file.stat().st_mtime_ns)
        return [run for run in every if run.name.startswith(f"{stage}/{problem}/")]

    @property
    def file(self) -> Path:
        """A row for each run that is kept."""
        return self.results / f"{self.preset}_runs.csv"

    def keep(self, stage: str, problem: str, arm: str, cell: sweep.Cell) -> None:
        """Add a finished run to the results. ValueError: it cannot be read."""
        runs, faults = load([str(cell.folder)])
        if faults:
            raise ValueError(faults[0])
        write_csv([replace(runs[0], name=name_of(stage, problem, arm, cell))], self.file)
        if stage in TIMES:
            self.keep_speed(stage, problem, arm, runs[0])

    # ---- what the stages decide ----

    def keep_speed(self, stage: str, problem: str, arm: str, run: Run) -> None:
        """Add the speeds of its steps to those of the arm's other runs, of which `speeds` takes a quantile."""
        stored = self.timed_steps()
        of_arm = stored.setdefault(stage, {}).setdefault(problem, {}).setdefault(arm, {})
        of_arm[str(run.seed)] = run.training["tokens_per_second"].drop_nulls().to_list()
        store(self.results / f"{self.preset}_speeds.json", {"steps": stored})

    def timed_steps(self) -> dict:
        """{stage: {problem: {arm: {seed: tokens per second of each step}}}}; empty before a stage that measures."""
        path = self.results / f"{self.preset}_speeds.json"
        return json.loads(path.read_text(encoding="utf-8"))["steps"] if path.is_file() else {}

    def chosen(self) -> dict[str, dict[str, dict]]:
        """{problem: {arm: what the stage rates has found}}; empty before it."""
        path = self.results / f"{self.preset}_rates.json"
        return json.loads(path.read_text(encoding="utf-8"))["chosen"] if path.is_file() else {}

    def chosen_rate(self, problem: str, arm: str) -> str:
        """ValueError: there is none yet."""
        if arm not in (found := self.chosen().get(problem, {})):
            raise ValueError(
                f"no learning rate was chosen for {arm} on {problem}: run the stage rates on it first"
            )
        return f"{found[arm]['learning_rate']:g}"

    def relative_speed(self, problem: str, arm: str) -> float:
        """Tokens per second over the baseline's. ValueError: a run that would tell it is missing."""
        there = {(arm_of(run), run.seed) for run in self.kept("alone", problem)}
        missing = [seed for seed in ALONE if not {(arm, seed), (BASELINE, seed)} <= there]
        if missing:
            raise ValueError(
                f"{arm} on {problem}: finish the stage alone first, which has no run of seeds {missing}"
            )
        return self.speeds("alone", problem)[arm]

    def speeds(self, stage: str, problem: str) -> dict[str, float]:
        """{arm: tokens per second over the baseline's, each of its fastest steps}; empty before the stage."""
        of_arms = self.timed_steps().get(stage, {}).get(problem, {})
        steps = {
            arm: [speed for own in seeds.values() for speed in own]
            for arm, seeds in of_arms.items()
        }
        return over_baseline(
            {arm: float(np.quantile(own, FASTEST)) for arm, own in steps.items() if own}
        )


@functools.lru_cache(maxsize=16)
def read(path: Path, changed: int) -> tuple[Run, ...]:
    """The runs of a file, which takes a while; changed: when it was."""
    return tuple(load([str(path)])[0])


def next_rate(rates: list[float], losses: list[float | None]) -> float | None:
    """A factor of two beyond the best of the rates where it is at an edge; None where it has a worse one on either
    side, a loss is missing, or enough was tried."""
    if None in losses or len(rates) >= MOST_RATES:
        return None
    best = losses.index(min(losses))
    if best == 0:
        return rates[0] / 2
    return rates[-1] * 2 if best == len(rates) - 1 else None


def final_loss(of: sweep.Cell, kept: Run | None = None) -> float | None:
    """Validation loss after the last step, of the cell's folder or else of the kept run, if that is the same; inf of a
    run that diverged, None of one that is not finished."""
    if (record := sweep.final_evaluation(of)) is not None:
        return finite(record["val_loss"])
    if stopping.read_status(of.folder)["ended"] == "failed":
        return math.inf
    if kept is None or not is_of(kept, of):
        return None
    return finite(kept.final["val_loss"]) if kept.finished else math.inf


def finite(loss: float) -> float:
    return loss if math.isfinite(loss) else math.inf


def is_of(run: Run, cell: sweep.Cell) -> bool:
    """Whether the run had all settings of the cell."""
    return all(
        run.settings.get(key) == value for key, value in cell.settings.items() if key not in UNSHOWN
    )


def over_baseline(numbers: dict[str, float | None]) -> dict[str, float]:
    """Each arm's that is known over the baseline's; empty without that."""
    base = numbers.get(BASELINE)
    return {arm: number / base for arm, number in numbers.items() if number} if base else {}


def name_of(stage: str, problem: str, arm: str, cell: sweep.Cell) -> str:
    """Of its run in the results."""
    return f"{stage}/{problem}/{arm}/{cell.title}"


def arm_of(run: Run) -> str:
    return run.name.split("/")[2]
