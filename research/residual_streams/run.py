"""The study of residual streams (PLAN.md), stage by stage; each goes on where it was stopped.

    python research/residual_streams/run.py rates      the learning rate of every arm, on one seed
    python research/residual_streams/run.py tokens     every arm and seed, the same number of tokens
    python research/residual_streams/run.py again      one run of two problems again: the same bits?
    python research/residual_streams/run.py swapped    tasks: two arms, with each other's rate
    python research/residual_streams/run.py alone --jobs=1    every arm's speed, on a quiet machine
    python research/residual_streams/run.py eager --jobs=1    the same without compilation
    python research/residual_streams/run.py seconds    every arm and seed, the same seconds
    python research/residual_streams/run.py tokens --problem=recall --arm=additive --arm=DDL
    python research/residual_streams/run.py tokens --mode=show    which runs are finished

Runs go to sweeps/residual_streams/ (--runs). What the report needs of them goes to
results/residual_streams/ (--results) as soon as a run is finished, and is not trained again, even
where its folder is gone. --preset=gpu: the sizes for a GPU (gpu.sh).
"""

import functools
import json
import math
import os
import shlex
import sys
import threading
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from utils import errors

if __name__ == "__main__":
    errors.end_quietly_on_interrupt()  # before the slow imports

# isort: split
import numpy as np

import configurator
from research import runs, sweep
from research.residual_streams import arms
from research.residual_streams.arms import ARMS, BASELINE, PRESETS
from training import stopping
from training.provenance import store_figures

STAGES = ("rates", "tokens", "again", "swapped", "alone", "seconds", "eager")
TIMED = ("alone", "eager")  # stages whose runs are timed, and as short a share of the steps:
TIMED_SHARE, TIMED_SEEDS = 0.12, {"alone": range(3), "eager": range(2)}
MOST_RATES = 8  # tried of an arm before its grid ends, edge or not
FASTEST = 0.95  # quantile of the speeds of an arm's steps: what else a machine does only slows


@dataclass(frozen=True)
class Study:
    """runs: where they are trained; results: rows, speeds and rates of finished ones."""

    preset: str
    runs: Path
    results: Path

    def problem(self, name: str) -> arms.Problem:
        return PRESETS[self.preset][name]

    def file(self, name: str) -> Path:
        return self.results / f"{self.preset}_{name}"

    def stored(self, stage: str, problem: str) -> list[runs.Run]:
        """Finished runs that the results hold."""
        path = self.file("runs.csv")
        every = read_runs(path, path.stat().st_mtime_ns) if path.is_file() else ()
        return [run for run in every if run.name.startswith(f"{stage}/{problem}/")]

    def speeds(self, stage: str) -> dict:
        """{problem: {arm: {seed: tokens per second of each step}}}."""
        path = self.file("speeds.json")
        return json.loads(path.read_text())["steps"].get(stage, {}) if path.is_file() else {}

    def relative_speeds(self, stage: str, problem: str) -> dict[str, float]:
        """{arm: tokens per second over the baseline's}; empty before the stage."""
        fastest = {}
        for arm, by_seed in self.speeds(stage).get(problem, {}).items():
            steps = [speed for own in by_seed.values() for speed in own]
            fastest[arm] = float(np.quantile(steps, FASTEST)) if steps else None
        return over_baseline(fastest)

    def rates(self) -> dict[str, dict[str, dict]]:
        """{problem: {arm: {"learning_rate", "tried": {rate: loss}}}}; empty before the stage."""
        path = self.file("rates.json")
        return json.loads(path.read_text())["chosen"] if path.is_file() else {}

    def rate(self, problem: str, arm: str) -> str:
        """The chosen learning rate. ValueError: there is none yet."""
        chosen = self.rates().get(problem, {})
        if arm not in chosen:
            reason = f"no learning rate was chosen for {arm} on {problem}"
            raise ValueError(f"{reason}: run the stage rates on it first")
        return f"{chosen[arm]['learning_rate']:g}"


@functools.lru_cache(maxsize=16)
def read_runs(path: Path, changed: int) -> tuple[runs.Run, ...]:
    """changed: when the file was, so that what is remembered is not an older one."""
    return tuple(runs.load([path])[0])


def over_baseline(numbers: dict[str, float | None]) -> dict[str, float]:
    base = numbers.get(BASELINE)
    return {arm: number / base for arm, number in numbers.items() if number} if base else {}


def arm_of(run: runs.Run) -> str:
    return run.name.split("/")[2]


# ---- the runs of a stage ----


def cells_of(study: Study, stage: str, problem: str, arm: str) -> list[sweep.Cell]:
    """Those known to be needed so far. ValueError: a stage before is not finished."""
    of = study.problem(problem)

    def cell(own: dict, **keys: str) -> sweep.Cell:
        name = arm.replace(", ", "_").replace(" ", "_")
        every = of.keys | arms.keys_of(study.preset, arm) | keys | own
        folder = study.runs / study.preset / stage / problem / name
        made = sweep.make_cell(0, own, [of.config, *sweep.format_options(every)], folder)
        return replace(made, description=f"{problem}, {arm}")

    def length(share: float) -> dict[str, str]:
        keys = ("max_steps", "warmup_steps")
        return {key: str(max(round(int(of.keys[key]) * share), 1)) for key in keys}

    if stage == "rates":  # half as long, on a seed and half of the validation that no result uses
        keys = {"seed": str(arms.SEARCH_SEED), "eval_part": "first", **length(0.5)}
        rates = list(of.rates)
        while True:
            cells = [cell({"learning_rate": f"{rate:g}"}, **keys) for rate in rates]
            beyond = next_rate(rates, losses_of(study, stage, problem, arm, cells))
            if beyond is None:
                return cells
            rates = sorted([*rates, beyond])
    seeds, rate, keys = (
        arms.SEEDS,
        study.rate(problem, arms.SWAPPED[arm] if stage == "swapped" else arm),
        {},
    )
    if stage == "again":
        seeds = seeds[:1]
    elif stage in TIMED:
        seeds, keys = TIMED_SEEDS[stage], {"eval_batches": "1", **length(TIMED_SHARE)}
        keys |= {"compile": "False"} if stage == "eager" else {}
    elif stage == "seconds":
        if arm == BASELINE:
            return []  # its runs of equal tokens are those of equal seconds
        keys = length(relative_speed(study, problem, arm))
    keys = {"learning_rate": rate, "eval_part": "second", **keys}
    return [cell({"seed": str(seed)}, **keys) for seed in seeds]


def relative_speed(study: Study, problem: str, arm: str) -> float:
    there = {(arm_of(run), run.seed) for run in study.stored("alone", problem)}
    needed = TIMED_SEEDS["alone"]
    missing = [seed for seed in needed if not {(arm, seed), (BASELINE, seed)} <= there]
    if missing:
        reason = f"which has no run of seeds {missing}"
        raise ValueError(f"{arm} on {problem}: finish the stage alone first, {reason}")
    return study.relative_speeds("alone", problem)[arm]


def next_rate(rates: list[float], losses: list[float | None]) -> float | None:
    """A factor of two beyond the best rate where that is at an edge; None: enough was tried."""
    if None in losses or len(rates) >= MOST_RATES:
        return None
    best = losses.index(min(losses))
    if best == 0:
        return rates[0] / 2
    return rates[-1] * 2 if best == len(rates) - 1 else None


def losses_of(study: Study, stage: str, problem: str, arm: str, cells: list) -> list[float | None]:
    """Losses after the last step: inf of a run that diverged, None of one not finished."""
    stored = {run.name: run for run in study.stored(stage, problem)}
    return [loss_of(cell, stored.get(name_of(stage, problem, arm, cell))) for cell in cells]


def loss_of(cell: sweep.Cell, stored: runs.Run | None = None) -> float | None:
    if (record := sweep.read_final_evaluation(cell)) is not None:
        return finite(record["val_loss"])
    if stopping.read_status(cell.folder).ended == "failed":
        return math.inf
    if stored is None or not is_of(stored, cell):
        return None
    return finite(stored.final_evaluation["val_loss"]) if stored.finished else math.inf


def finite(loss: float) -> float:
    return loss if math.isfinite(loss) else math.inf


def is_of(run: runs.Run, cell: sweep.Cell) -> bool:
    """Whether the run had all settings of the cell."""
    settings = {k: v for k, v in cell.settings.items() if k not in runs.HIDDEN_SETTINGS}
    return all(run.settings.get(key) == value for key, value in settings.items())


def name_of(stage: str, problem: str, arm: str, cell: sweep.Cell) -> str:
    return f"{stage}/{problem}/{arm}/{cell.title}"


# ---- training ----


def pairs_of(args) -> list[tuple[str, str]]:
    """(problem, arm) of the stage. ValueError: one is not there."""
    problems = {name: each.arms for name, each in PRESETS[args.preset].items()}
    if args.stage in ("seconds", *TIMED):
        problems = {"language": problems["language"]}
    elif args.stage == "swapped":
        problems = {name: tuple(arms.SWAPPED) for name in arms.SWAPPED_ON if name in problems}
    elif args.stage == "again":
        problems = {name: (arm,) for name, arm in arms.AGAIN.items() if name in problems}
    for name, given, known in (("problem", args.problem, problems), ("arm", args.arm, ARMS)):
        for each in given or ():
            if each not in known:
                raise ValueError(f"--{name}={each}: give one of {'; '.join(known)}")
    chosen = [name for name in problems if name in (args.problem or problems)]
    return [(name, arm) for name in chosen for arm in problems[name] if arm in (args.arm or ARMS)]


def in_turns(cells: dict) -> list[sweep.Cell]:
    """Problem by problem the first run of every arm, then the second of each.

    What else the machine does falls on all arms alike.
    """
    problems = list(dict.fromkeys(problem for problem, _ in cells))
    turns = [
        (problems.index(p), turn, c) for (p, _), own in cells.items() for turn, c in enumerate(own)
    ]
    return [cell for *_, cell in sorted(turns, key=lambda item: item[:2])]


def train(args, study: Study) -> None:
    """Run what is left until no further run is known to be needed; store each that finishes."""
    again, lock = shlex.join(["python", *sys.argv]), threading.Lock()
    while True:
        cells = {pair: cells_of(study, args.stage, *pair) for pair in pairs_of(args)}
        for (problem, arm), own in cells.items():  # of a call that was killed between the two
            stored = {run.name: run for run in study.stored(args.stage, problem)}
            for cell in own:
                run = stored.get(name_of(args.stage, problem, arm, cell))
                if loss_of(cell) is not None and (run is None or not is_of(run, cell)):
                    store_run(study, args.stage, problem, arm, cell)
        if args.stage == "rates":
            store_rates(study, cells)
        pair_of = {cell.folder: pair for pair, own in cells.items() for cell in own}
        losses = {}
        for pair, own in cells.items():
            found = losses_of(study, args.stage, *pair, own)
            losses |= dict(zip((cell.folder for cell in own), found))
        every = in_turns(cells)
        left = [cell for cell in every if losses[cell.folder] is None]
        left = [replace(cell, index=index) for index, cell in enumerate(left)]
        about = f"{len(every)} runs in all, {len(left)} to do, {args.jobs} at a time"
        print(f"{args.stage}: {about}", flush=True)
        if not left:
            return

        def ended(cell: sweep.Cell, pair_of=pair_of) -> None:
            if loss_of(cell) is not None:  # else it failed, and did not diverge
                with lock:  # a file holds many runs
                    store_run(study, args.stage, *pair_of[cell.folder], cell)

        code = sweep.run_cells(left, sweep.SweepConfig(jobs=args.jobs), again, ended)
        if code not in (0, 1) or (code and any(loss_of(cell) is None for cell in left)):
            sys.exit(code)  # trying again would find the same failure


def store_run(study: Study, stage: str, problem: str, arm: str, cell: sweep.Cell) -> None:
    found, faults = runs.load([cell.folder])
    if faults:
        raise ValueError(faults[0])
    named = replace(found[0], name=name_of(stage, problem, arm, cell))
    runs.write_csv([named], study.file("runs.csv"))
    if stage in TIMED:
        every = {each: study.speeds(each) for each in TIMED if study.speeds(each)}
        of_arm = every.setdefault(stage, {}).setdefault(problem, {}).setdefault(arm, {})
        of_arm[str(named.seed)] = named.training["tokens_per_second"].drop_nulls().to_list()
        store_figures(study.file("speeds.json"), {"steps": every})


def store_rates(study: Study, cells: dict) -> None:
    """The rate of every arm whose runs are all there."""
    chosen = study.rates()
    for (problem, arm), own in cells.items():
        losses = losses_of(study, "rates", problem, arm, own)
        if None not in losses:
            rates = [cell.values["learning_rate"] for cell in own]
            tried = {f"{r:g}": x if math.isfinite(x) else None for r, x in zip(rates, losses)}
            best = rates[losses.index(min(losses))]
            chosen.setdefault(problem, {})[arm] = {"learning_rate": best, "tried": tried}
    if chosen != study.rates():
        study.results.mkdir(parents=True, exist_ok=True)
        store_figures(study.file("rates.json"), {"chosen": chosen})


def show(args, study: Study) -> None:
    for problem, arm in pairs_of(args):
        cells = cells_of(study, args.stage, problem, arm)
        for cell, loss in zip(cells, losses_of(study, args.stage, problem, arm, cells)):
            text = "to do" if loss is None else "diverged" if loss == math.inf else f"{loss:.4f}"
            print(f"{problem} | {arm} | {cell.title} | {text}")


def arguments():
    parser = configurator.Parser(description=__doc__)
    add = parser.add_argument
    add("stage", choices=STAGES)
    add("--preset", choices=PRESETS, default="cpu")
    add("--problem", action="append", help="only this one, or several (default: all)")
    add("--arm", action="append", help="only this one, or several (default: all)")
    add("--jobs", type=int, default=2, help="runs at a time, which share the machine (default: 2)")
    add("--runs", type=Path, default=Path("sweeps/residual_streams"))
    add("--results", type=Path, default=Path("results/residual_streams"))
    add("--mode", choices=("run", "show"), default="run")
    return parser.parse_args()


def main():
    with errors.one_line_errors():
        args = arguments()
        if args.jobs < 1:
            raise ValueError(f"--jobs={args.jobs}: give 1 or more")
        os.environ["WORLD_SIZE"] = "1"  # train.configure divides the batch
        if args.preset == "cpu":  # also of a run that has the machine to itself (PLAN.md)
            os.environ.setdefault("OMP_NUM_THREADS", "1")
        study = Study(args.preset, args.runs, args.results)
        (show if args.mode == "show" else train)(args, study)


if __name__ == "__main__":
    main()
