"""The MGT study at a size where every arm learns (research/mgt/PLAN.md), one experiment a command.

    python data/shakespeare_char/prepare.py
    python research/mgt/study.py ablation                     # 2: nine arms, their synergy (eq. 9)
    python research/mgt/study.py rank                         # 1: effective rank over depth
    python research/mgt/study.py beta                         # 3: the gate beta over depth and training
    python research/mgt/study.py depth                        # 4: depth at 300,000 parameters
    python research/mgt/study.py language                     # 5: 1,500 steps, at equal width and size
    python research/mgt/study.py ablation --mode=show         # how many runs are finished
    python research/mgt/study.py ablation --arms=full,ddl     # only these arms
    python research/mgt/study.py ablation --repeat=2          # train two reported runs again

A command trains what is not trained yet, one run after another, and appends a row to
results/mgt/EXPERIMENT.jsonl as each run ends (or to --results=FOLDER). A run that was stopped is
trained again from its first step. A setting is an arm at one depth and width: eight runs of seed
100 tune its learning rate and warm-up, then every seed is trained with the best of them. Two
processes may share an experiment if they are given different arms.
"""

import contextlib
import io
import math
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from utils import errors

if __name__ == "__main__":
    errors.end_quietly_on_interrupt()  # before the slow imports

# isort: split
import torch

import configurator
import train
from research.mgt import small_measures
from research.mgt.arms import Experiment, Setting, make_experiments
from research.rows import append_row, read_rows
from training import metrics, setup
from training.provenance import collect_provenance
from utils.units import format_duration

CONFIG = Path(__file__).parent / "small.py"
OPTIONS = {
    "results": "results/mgt",
    "runs": "sweeps/mgt",
    "arms": "",
    "mode": "train",
    "repeat": "",
}

TUNING_SEED = 100
NUM_TRIES = 8
RATE_LADDER = (1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 1e-1)
FIRST_RATES = (2e-3, 5e-3, 1e-2)
WARMUP_FRACTIONS = (0.1, 0.4)


@dataclass(frozen=True)
class Run:
    """One training run: a setting with a learning rate, a warm-up and a seed."""

    setting: Setting
    kind: str  # "try" or "seed"
    seed: int
    learning_rate: float
    warmup_fraction: float

    @property
    def key(self) -> dict:
        """Return the entries of a row that tell this run from others."""
        return {
            "setting": self.setting.name,
            "kind": self.kind,
            "seed": self.seed,
            "learning_rate": self.learning_rate,
            "warmup_fraction": self.warmup_fraction,
        }


# ---- tuning ----


def next_try(setting: Setting, rows: list[dict]) -> Run | None:
    """Return the next run that tunes a setting; None after NUM_TRIES of them.

    The first six are FIRST_RATES x WARMUP_FRACTIONS. Then, while the best rate is the lowest or the
    highest tried, follow the next rate of the ladder beyond it with both warm-ups; otherwise the
    geometric means of the best rate and its neighbors, with the warm-up of the best.
    """
    tries = [row for row in rows if row["setting"] == setting.name and row["kind"] == "try"]
    if len(tries) >= NUM_TRIES:
        return None

    planned = [(rate, warmup) for rate in FIRST_RATES for warmup in WARMUP_FRACTIONS]
    while len(planned) <= len(tries):
        best = find_best([row for row in tries if (get_pair(row) in planned)])
        rates = sorted({rate for rate, _ in planned})
        position = rates.index(best["learning_rate"])
        if position == 0:
            lower_rate = max(rate for rate in RATE_LADDER if rate < rates[0])
            planned += [(lower_rate, warmup) for warmup in WARMUP_FRACTIONS]
        elif position == len(rates) - 1:
            higher_rate = min(rate for rate in RATE_LADDER if rate > rates[-1])
            planned += [(higher_rate, warmup) for warmup in WARMUP_FRACTIONS]
        else:
            planned += [
                (float(f"{math.sqrt(rates[position] * neighbor):.3g}"), best["warmup_fraction"])
                for neighbor in (rates[position - 1], rates[position + 1])
            ]
    rate, warmup = planned[len(tries)]
    return Run(setting, "try", TUNING_SEED, rate, warmup)


def get_pair(row: dict) -> tuple[float, float]:
    """Return learning rate and warm-up of a row."""
    return row["learning_rate"], row["warmup_fraction"]


def find_best(tries: list[dict]) -> dict:
    """Return the try with the lowest loss; a run that diverged counts as the worst."""
    return min(tries, key=lambda row: math.inf if row["val_loss"] is None else row["val_loss"])


def next_run(experiment: Experiment, setting: Setting, rows: list[dict]) -> Run | None:
    """Return the next run of a setting, None if it has all of its tries and seeds."""
    attempt = next_try(setting, rows)
    if attempt is not None:
        return attempt
    own = [row for row in rows if row["setting"] == setting.name]
    best = find_best([row for row in own if row["kind"] == "try"])
    finished = {row["seed"] for row in own if row["kind"] == "seed"}
    for seed in experiment.seeds:
        if seed not in finished:
            return Run(setting, "seed", seed, best["learning_rate"], best["warmup_fraction"])
    return None


# ---- one run ----


def make_arguments(experiment: Experiment, run: Run, folder: Path) -> list[str]:
    """Return the command line of train.py for a run."""
    keys = {
        **run.setting.model_keys(),
        "max_steps": experiment.steps,
        "warmup_steps": round(run.warmup_fraction * experiment.steps),
        "learning_rate": run.learning_rate,
        "seed": run.seed,
        # rates are chosen on one half of the validation split, and reported on the other
        "eval_part": "first" if run.kind == "try" else "second",
        **(experiment.keys if run.kind == "seed" else {}),
        "out_dir": folder,
    }
    return [str(CONFIG), *(f"--{key}={value}" for key, value in keys.items())]


def train_run(experiment: Experiment, run: Run, folder: Path) -> dict:
    """Train a run as train.py does, in this process, and return its row."""
    shutil.rmtree(folder, ignore_errors=True)
    started = time.perf_counter()
    output = sys.stdout
    error_stream = sys.stderr
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            plan = setup.plan_run(make_arguments(experiment, run, folder))
            started_run = setup.start_run(plan)
            failure = train.train(started_run)
            if failure is None:
                train.finish(started_run, failure)
    finally:
        # start_run replaces both
        sys.stdout = output
        sys.stderr = error_stream

    # it also fails if the disk is full, which says nothing about the model
    if failure is not None and not (folder / "nonfinite").is_dir():
        raise RuntimeError(f"{folder}: {failure}")
    records = list(metrics.read(folder / "metrics.jsonl"))
    evaluations = [[r["step"], r["val_loss"]] for r in records if "val_loss" in r]
    train_losses = [r["loss"] for r in records if "loss" in r]
    row = {
        **run.key,
        "arm": run.setting.arm,
        "layers": run.setting.num_layers,
        "width": run.setting.width,
        "equal": run.setting.equal,
        "parameters": sum(p.numel() for p in plan.model.parameters()),
        "steps": experiment.steps,
        "val_loss": evaluations[-1][1] if failure is None else None,
        "train_loss": train_losses[-1],
        "evaluations": evaluations[:-1],
        "seconds": round(time.perf_counter() - started, 1),
    }
    if failure is None and run.kind == "seed" and experiment.measure is not None:
        row.update(small_measures.MEASURES[experiment.measure](folder))
    return row


# ---- the command ----


def missing_runs(experiment: Experiment, settings: list[Setting], path: Path) -> Iterator[Run]:
    """Yield the runs that have no row, each after the rows of the one before are stored."""
    for setting in settings:
        while (run := next_run(experiment, setting, read_rows(path))) is not None:
            yield run


def count_runs(experiment: Experiment) -> int:
    """Return the number of runs of a setting."""
    return NUM_TRIES + len(experiment.seeds)


def read_options(argv: list[str]) -> tuple[str, dict[str, str]]:
    """Return the experiment and the options.

    Raises:
        ValueError: a mistake in them
    """
    names, command_line = configurator.split_arguments(argv)
    if "help" in command_line:
        print(__doc__.strip())
        sys.exit(0)
    experiments = make_experiments()
    if len(names) != 1 or names[0] not in experiments:
        raise ValueError(
            f"{' '.join(names) or 'no experiment'}: give one of {', '.join(experiments)}"
        )
    unknown = command_line.keys() - OPTIONS.keys()
    if unknown:
        raise ValueError(
            f"--{min(unknown)} is not an option of the study; give one of {', '.join(OPTIONS)}"
        )
    options = {**OPTIONS, **command_line}
    if options["mode"] not in ("train", "show"):
        raise ValueError(f"--mode={options['mode']}: give train or show")
    if options["repeat"] and not options["repeat"].isdecimal():
        raise ValueError(f"--repeat={options['repeat']}: give the number of runs to train again")
    return names[0], options


def select_settings(experiment: Experiment, arms: str) -> list[Setting]:
    """Return the settings of these arms, separated by commas; of all for "".

    Raises:
        ValueError: the experiment does not have an arm
    """
    available = {setting.arm for setting in experiment.settings}
    wanted = set(arms.split(",")) if arms else available
    if wanted - available:
        raise ValueError(
            f"--arms={arms}: the experiment has no {min(wanted - available)}; give some of "
            f"{','.join(sorted(available))}"
        )
    return [setting for setting in experiment.settings if setting.arm in wanted]


def train_missing(
    experiment: Experiment, settings: list[Setting], path: Path, folder: Path
) -> None:
    """Train what is missing, and say after each run how long the rest will take."""
    names = {setting.name for setting in settings}
    total = count_runs(experiment) * len(settings)
    for run in missing_runs(experiment, settings, path):
        row = train_run(experiment, run, folder / f"{run.setting.name}-{run.kind}-{run.seed}")
        append_row(path, {**row, **collect_provenance()})
        shutil.rmtree(folder / f"{run.setting.name}-{run.kind}-{run.seed}", ignore_errors=True)
        rows = [stored for stored in read_rows(path) if stored["setting"] in names]
        # seconds per block, because deep settings come last
        per_block = sum(r["seconds"] for r in rows) / sum(r["layers"] for r in rows)
        blocks = sum(s.num_layers for s in settings) * count_runs(experiment)
        remaining = per_block * (blocks - sum(r["layers"] for r in rows))
        loss = "diverged" if row["val_loss"] is None else f"{row['val_loss']:.4f}"
        print(
            f"{len(rows)} of {total} | {run.setting.name} {run.kind} seed {run.seed} "
            f"rate {run.learning_rate:g} warm-up {run.warmup_fraction:.0%} | loss {loss} | "
            f"{row['seconds']:.0f} s | {format_duration(remaining)} left",
            flush=True,
        )
    print(f"All {total} runs are in {path}. The report: python research/mgt/study_report.py")


def repeat_runs(
    experiment: Experiment, settings: list[Setting], path: Path, folder: Path, count: int
) -> None:
    """Train the first reported run of `count` settings again, and store whether the bits agree."""
    by_name = {setting.name: setting for setting in settings}
    reported = [
        row
        for row in read_rows(path)
        if row["kind"] == "seed" and row["seed"] == 0 and row["setting"] in by_name
    ]
    for old in reported[:count]:
        run = Run(by_name[old["setting"]], "seed", 0, *get_pair(old))
        row = train_run(experiment, run, folder / "repeat")
        shutil.rmtree(folder / "repeat", ignore_errors=True)
        same_bits = (row["val_loss"], row["train_loss"]) == (old["val_loss"], old["train_loss"])
        append_row(path, {**row, **collect_provenance(), "kind": "repeat", "same_bits": same_bits})
        print(f"{run.setting.name} again: {row['val_loss']!r}, same bits: {same_bits}", flush=True)


def main() -> None:
    with errors.one_line_errors(ValueError, OSError, RuntimeError):
        name, options = read_options(sys.argv[1:])
        experiment = make_experiments()[name]
        settings = select_settings(experiment, options["arms"])
        path = Path(options["results"]) / f"{name}.jsonl"
        folder = Path(options["runs"]) / name
        # more threads would sum products in another order, so that the bits would differ
        torch.set_num_threads(1)
        if options["mode"] == "show":
            names = {setting.name for setting in settings}
            rows = [row for row in read_rows(path) if row["setting"] in names]
            rows = [row for row in rows if row["kind"] != "repeat"]
            num_runs = count_runs(experiment) * len(settings)
            print(f"{name}: {len(rows)} of {num_runs} runs are finished")
        elif options["repeat"]:
            repeat_runs(experiment, settings, path, folder, int(options["repeat"]))
        else:
            train_missing(experiment, settings, path, folder)


if __name__ == "__main__":
    main()
