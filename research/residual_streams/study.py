"""The runs of the controlled comparison that Muon and AdamW train, one stage per command.

    python research/residual_streams/python_library.py
    python research/residual_streams/study.py short         # tune all arms, and train them with 0.8 million tokens
    python research/residual_streams/study.py long          # the same with 3.3 million tokens, for nine claims
    python research/residual_streams/study.py tolerance     # complete the learning rates of two arms to a 3 x 3 grid
    python research/residual_streams/study.py edge          # one run per arm with rates beyond the best ones at an edge
    python research/residual_streams/study.py halves        # evaluate five arms on the other half of validation
    python research/residual_streams/study.py speed         # measure all arms' tokens per second, three times in turns
    python research/residual_streams/study.py again         # repeat two reported runs, and compare their bits
    python research/residual_streams/study.py short --mode=show          # show how many runs are finished
    python research/residual_streams/study.py short --arms=conv,wide     # only these arms

A command trains what is not trained yet, one run after another, each with one thread, and appends a row to
language.jsonl (or speeds.jsonl) in --results=FOLDER (default: results/residual_streams) as each run ends. A run that
was stopped resumes from its last checkpoint in --runs=FOLDER (default: sweeps/residual_streams), except in the stage
speed. Two processes may share a stage other than speed if they are given different arms.
"""

import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from utils import errors

if __name__ == "__main__":
    errors.end_quietly_on_interrupt()  # before the slow imports

# isort: split
import numpy as np

import configurator
from research.residual_streams import rates, runner
from research.residual_streams.rates import Point
from research.residual_streams.streams import ARMS, EDGE, HALVES, LONG, TOLERANCE
from research.rows import append_row, read_rows
from training import metrics
from training.provenance import collect_provenance, describe_machine

CONFIG = "research/residual_streams/demo_size.py"
DATASET = "python_library"
DATASET_COMMAND = "research/residual_streams/python_library.py"
STAGES = ("short", "long", "tolerance", "edge", "halves", "speed", "again")

TOKENS_PER_STEP = 1024
# a rung is a length of training: steps for 0.8 and for 3.3 million tokens
RUNGS = {"short": 800, "long": 3200}
WARMUP_FRACTION = 0.1
TUNING_SEED = 1000
PLANNED_SEEDS = (0, 1, 2, 3, 4)
OTHER_SEEDS = (0, 1, 2)
# what the best point of the shorter rung is multiplied by at the longer one, as powers of two
CHECKED_POWERS = (0.0, -0.5, -1.0)

NUM_REPEATED = 2  # runs that the stage again trains once more

SPEED_ROUNDS = 3
SPEED_STEPS = 80
SPEED_WARMUP = 20  # first steps, which compile and warm up


@dataclass(frozen=True)
class Run:
    """One training run of an arm."""

    arm: str
    rung: str
    phase: str  # "try", "check", "corner", "edge", "report" or "first_half"
    seed: int
    point: Point

    @property
    def name(self) -> str:
        powers = "_".join(f"{power:+g}" for power in self.point)
        return f"{self.arm}-{self.rung}-{self.phase}-{self.seed}-{powers}"


# ---- which run is next ----


def select_losses(rows: list[dict], arm: str, rung: str, phase: str) -> dict[Point, float]:
    """Return the losses of the tuning runs of an arm by point, in the order of the runs."""
    return {
        tuple(row["point"]): np.inf if row["val_loss"] is None else row["val_loss"]
        for row in rows
        if (row["arm"], row["rung"], row["phase"]) == (arm, rung, phase)
    }


def next_report(
    rows: list[dict], arm: str, rung: str, point: Point, phase: str = "report"
) -> Run | None:
    """Return the next reported run of an arm, None if every seed has one."""
    finished = {
        row["seed"] for row in rows if (row["arm"], row["rung"], row["phase"]) == (arm, rung, phase)
    }
    for seed in PLANNED_SEEDS if arm in LONG else OTHER_SEEDS:
        if seed not in finished:
            return Run(arm, rung, phase, seed, point)
    return None


def next_run(stage: str, arm: str, rows: list[dict]) -> Run | None:
    """Return the next run of an arm in a stage, None if all are finished.

    Raises:
        ValueError: the stage needs the rates that another stage finds, which is not finished
    """
    tries = select_losses(rows, arm, "short", "try")
    point = rates.next_point(tries)
    if stage == "short":
        if point is not None:
            return Run(arm, "short", "try", TUNING_SEED, point)
        return next_report(rows, arm, "short", rates.find_best(tries))
    if point is not None:
        raise ValueError(
            f"the stage {stage} needs the rates of {arm}: finish the stage short first"
        )
    if stage == "tolerance":
        corners = rates.list_corners(rates.find_best_whole_step(tries))
        tried = {**tries, **select_losses(rows, arm, "short", "corner")}
        for point in corners:
            if point not in tried:
                return Run(arm, "short", "corner", TUNING_SEED, point)
        return None
    best = rates.find_best(tries)
    if stage == "edge":
        # It is not in the plan and chooses nothing: it shows what the arm would gain.
        is_finished = bool(select_losses(rows, arm, "long", "edge"))
        point = (best[0] + EDGE[arm], best[1] + EDGE[arm])
        return None if is_finished else Run(arm, "long", "edge", TUNING_SEED, point)
    checks = select_losses(rows, arm, "long", "check")
    for power in CHECKED_POWERS:
        point = (best[0] + power, best[1] + power)
        if point not in checks:
            if stage == "halves":
                raise ValueError(
                    f"the stage halves needs the rates of {arm}: finish the stage long first"
                )
            return Run(arm, "long", "check", TUNING_SEED, point)
    phase = "first_half" if stage == "halves" else "report"
    return next_report(rows, arm, "long", rates.find_best(checks), phase)


def list_arms(stage: str) -> list[str]:
    """Return the arms of a stage."""
    if stage == "long":
        return list(LONG)
    if stage == "tolerance":
        return list(TOLERANCE)
    if stage == "edge":
        return list(EDGE)
    if stage == "halves":
        return list(HALVES)
    return list(ARMS)


def count_runs(stage: str, arm: str) -> int:
    """Return how many runs an arm has in a stage."""
    num_seeds = len(PLANNED_SEEDS if arm in LONG else OTHER_SEEDS)
    return {
        "short": rates.NUM_TRIES + num_seeds,
        "long": len(CHECKED_POWERS) + num_seeds,
        "tolerance": len(rates.CORNERS),
        "edge": 1,
        "halves": num_seeds,
        "speed": SPEED_ROUNDS,
    }[stage]


def count_all_runs(stage: str, arms: list[str]) -> int:
    """Return how many runs a stage has for some arms."""
    if stage == "again":
        return NUM_REPEATED
    return sum(count_runs(stage, arm) for arm in arms)


# ---- one run ----


def make_arguments(run: Run) -> list[str]:
    """Return the arguments of train.py for a run."""
    muon_rate, adamw_rate = rates.to_rates(run.point)
    steps = RUNGS[run.rung]
    keys = {
        **ARMS[run.arm],
        "muon_learning_rate": muon_rate,
        "learning_rate": adamw_rate,
        "max_steps": steps,
        "warmup_steps": round(WARMUP_FRACTION * steps),
        "seed": run.seed,
        # rates are chosen on one half of the validation split, and results are of the other
        "eval_part": "second" if run.phase == "report" else "first",
        "resume": "auto",
    }
    return runner.format_arguments(CONFIG, keys)


def train_run(run: Run, folder: Path) -> dict:
    """Train a run to its end, and return its row."""
    is_reported = run.phase in ("report", "first_half")
    result = runner.train(make_arguments(run), folder, is_reported=is_reported)
    return {**asdict(run), **result}


# ---- the commands ----


def missing_runs(stage: str, arms: list[str], path: Path) -> Iterator[Run]:
    """Yield the runs that have no row, each after the row of the one before is stored."""
    for arm in arms:
        while (run := next_run(stage, arm, read_rows(path))) is not None:
            yield run


def count_finished(stage: str, arms: list[str], rows: list[dict]) -> int:
    """Return how many runs of a stage are finished."""
    if stage == "speed":
        return sum(row["arm"] in arms for row in rows)
    # the pairs of rung and phase that the rows of a stage have
    pairs_by_stage = {
        "short": [("short", "try"), ("short", "report")],
        "long": [("long", "check"), ("long", "report")],
        "tolerance": [("short", "corner")],
        "edge": [("long", "edge")],
        "halves": [("long", "first_half")],
        "again": [("short", "again"), ("long", "again")],
    }
    pairs = pairs_by_stage[stage]
    return sum(row["arm"] in arms and (row["rung"], row["phase"]) in pairs for row in rows)


def train_missing(stage: str, arms: list[str], path: Path, folder: Path) -> None:
    """Train the runs of a stage that have no row."""
    total = count_all_runs(stage, arms)
    runner.store_runs(
        missing_runs(stage, arms, path),
        train_run,
        lambda: total - count_finished(stage, arms, read_rows(path)),
        path=path,
        folder=folder,
    )


def measure_speeds(arms: list[str], path: Path, folder: Path) -> None:
    """Store the median of tokens per second of every arm in each round, in which all take turns.

    A run that was stopped starts anew.
    """
    for number in range(SPEED_ROUNDS):
        for arm in arms:
            finished = [(row["arm"], row["round"]) for row in read_rows(path)]
            if (arm, number) in finished:
                continue
            run_folder = folder / f"{arm}-speed-{number}"
            shutil.rmtree(run_folder, ignore_errors=True)
            keys = {
                **ARMS[arm],
                "max_steps": SPEED_STEPS,
                "warmup_steps": 8,
                "eval_full": False,
                "eval_batches": 1,
            }
            runner.call_train(runner.format_arguments(CONFIG, keys), run_folder)
            records = list(metrics.read(run_folder / "metrics.jsonl"))
            speeds = [r["tokens_per_second"] for r in records if "tokens_per_second" in r]
            median = float(np.median(speeds[SPEED_WARMUP:]))
            row = {"arm": arm, "round": number, "tokens_per_second": median}
            append_row(path, {**row, **collect_provenance()})
            shutil.rmtree(run_folder)
            print(f"round {number} | {arm} | {median:,.0f} tokens/s", flush=True)


def train_again(path: Path, folder: Path) -> None:
    """Train two reported runs again, and store whether their bits are the same.

    Both are runs of this kind of machine, because other processors round sums differently.

    Raises:
        ValueError: there are not two such runs
    """
    rows = read_rows(path)
    machine = describe_machine()["machine"]
    candidates = [
        row
        for row in rows
        if row["phase"] == "report"
        and row["seed"] == 0
        and row["val_loss"] is not None
        and row["machine"] == machine
    ]
    if len(candidates) < NUM_REPEATED:
        raise ValueError(
            f"the stage again repeats {NUM_REPEATED} reported runs with seed 0 of a machine like "
            f"this one ({machine}), and {path} has {len(candidates)}; train other arms here first"
        )
    finished = [
        (row["arm"], row["rung"])
        for row in rows
        if row["phase"] == "again" and row["machine"] == machine
    ]
    for old in sorted(candidates, key=lambda row: RUNGS[row["rung"]])[:NUM_REPEATED]:
        if (old["arm"], old["rung"]) in finished:
            continue
        run = Run(old["arm"], old["rung"], "report", 0, tuple(old["point"]))
        row = train_run(run, folder / f"{run.name}-again")
        shutil.rmtree(folder / f"{run.name}-again")
        keys = ("val_loss", "train_loss", "group_losses")
        same_bits = all(row[key] == old[key] for key in keys)
        append_row(path, {**row, **collect_provenance(), "phase": "again", "same_bits": same_bits})
        print(f"{run.name} again: {row['val_loss']!r}, same bits: {same_bits}", flush=True)


def read_options(argv: list[str]) -> tuple[str, list[str], dict[str, str]]:
    """Return the stage, its arms and the options.

    Raises:
        ValueError: a mistake in them
    """
    names, command_line = configurator.split_arguments(argv)
    if "help" in command_line:
        print(__doc__.strip())
        sys.exit(0)
    if len(names) != 1 or names[0] not in STAGES:
        mistake = f"'{' '.join(names)}' is not a stage" if names else "no stage is given"
        raise ValueError(f"{mistake}; the stages are {', '.join(STAGES)}")
    stage = names[0]
    if stage == "again" and "arms" in command_line:
        raise ValueError("--arms has no effect on the stage again; omit it")
    arms, options = runner.read_options(command_line, f"the stage {stage}", list_arms(stage))
    return stage, arms, options


def main() -> None:
    with errors.one_line_errors(ValueError, OSError, RuntimeError):
        stage, arms, options = read_options(sys.argv[1:])
        results = Path(options["results"])
        folder = Path(options["runs"])
        path = results / ("speeds.jsonl" if stage == "speed" else "language.jsonl")
        if options["mode"] == "train":
            runner.check_dataset(DATASET, DATASET_COMMAND)
        if options["mode"] == "show":
            finished = count_finished(stage, arms, read_rows(path))
            print(f"{stage}: {finished} of {count_all_runs(stage, arms)} runs are finished")
        elif stage == "speed":
            measure_speeds(arms, path, folder)
        elif stage == "again":
            train_again(path, folder)
        else:
            train_missing(stage, arms, path, folder)


if __name__ == "__main__":
    main()
