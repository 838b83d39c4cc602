"""Run train.py for the controlled comparison, and read what a run found."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

import numpy as np

from research.rows import append_row
from training import metrics, stopping
from training.provenance import collect_provenance
from utils.units import format_duration

ROOT = Path(__file__).resolve().parents[2]
# consecutive sequences whose mean loss is stored
GROUP_SIZE = 32
# options of the scripts that train runs, with their defaults
OPTIONS = {
    "results": "results/residual_streams",
    "runs": "sweeps/residual_streams",
    "arms": "",
    "mode": "train",
}


class NamedRun(Protocol):
    """A run of one of the comparison's scripts."""

    @property
    def name(self) -> str:
        """Return the name of the run's folder, which tells it from all other runs."""


def format_arguments(config: str, keys: Mapping[str, object]) -> list[str]:
    """Return the arguments of train.py for a config file and values of keys."""
    return [config, *(f"--{key}={value}" for key, value in keys.items())]


def call_train(arguments: list[str], folder: Path) -> bool:
    """Run train.py with one thread, and return whether it finished; False if it diverged.

    Args:
        folder: of the run

    Raises:
        RuntimeError: it ended otherwise; the message has the exit code and the last line of output
    """
    # more threads would sum products in another order, so that the bits would differ
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, "train.py", *arguments, f"--out_dir={folder.resolve()}"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode == 0:
        return True
    # train.py also fails if the disk is full, which says nothing about the model
    if stopping.read_status(folder).ended == "failed" and (folder / "nonfinite").is_dir():
        return False
    lines = (result.stderr.strip() or result.stdout.strip()).splitlines()
    last_line = lines[-1] if lines else "it printed nothing"
    raise RuntimeError(
        f"{folder.name}: train.py ended with exit code {result.returncode}: {last_line}"
    )


def read_group_losses(folder: Path) -> list[float]:
    """Return the mean loss of every GROUP_SIZE consecutive sequences of the last evaluation."""
    losses = np.load(folder / "losses.npz")["loss"].astype(np.float64)
    num_groups = len(losses) // GROUP_SIZE
    means = losses[: num_groups * GROUP_SIZE].reshape(num_groups, GROUP_SIZE).mean(1)
    return [round(float(mean), 6) for mean in means]


def read_scores(folder: Path) -> dict[str, float]:
    """Return the last losses of a run, its seconds and, of a task, its accuracy."""
    scores = {}
    for record in metrics.read(folder / "metrics.jsonl"):
        if "loss" in record:
            scores["train_loss"] = record["loss"]
        for key in ("val_loss", "val_accuracy", "seconds"):
            if key in record:
                scores[key] = record[key]
    return scores


def train(arguments: list[str], folder: Path, *, is_reported: bool) -> dict:
    """Train a run to its end, and return what its row says about the result.

    Args:
        is_reported: whether the losses of sequences are wanted, too

    Returns:
        "val_loss" (None if the run diverged), "train_loss", "val_accuracy" of a task, "seconds" of
        training (including those before the run was stopped and resumed), and "group_losses" of a
        reported run
    """
    start = time.perf_counter()
    is_finished = call_train(arguments, folder)
    result = {"val_loss": None, "seconds": round(time.perf_counter() - start, 1)}
    if is_finished:
        result.update(read_scores(folder))
        if is_reported:
            result["group_losses"] = read_group_losses(folder)
    return result


def store_runs(
    runs: Iterator[NamedRun],
    train_run: Callable[[NamedRun, Path], dict],
    count_missing: Callable[[], int],
    *,
    path: Path,
    folder: Path,
) -> None:
    """Train runs one after another, append a row for each, and print how long the rest will take.

    Args:
        runs: yields the runs that have no row, each after the row of the one before is stored
        train_run: trains a run in a folder and returns its row
        count_missing: returns how many runs have no row
        path: of the rows
        folder: in which each run has a folder until its row is stored
    """
    seconds = []
    for run in runs:
        row = train_run(run, folder / run.name)
        append_row(path, {**row, **collect_provenance()})
        shutil.rmtree(folder / run.name)
        seconds.append(row["seconds"])
        num_missing = count_missing()
        loss = "diverged" if row["val_loss"] is None else f"loss {row['val_loss']:.4f}"
        remaining = num_missing * sum(seconds) / len(seconds)
        print(
            f"{run.name} | {loss} | {row['seconds']:.0f} s | {num_missing} left, "
            f"{format_duration(remaining)}",
            flush=True,
        )


def read_options(
    command_line: Mapping[str, str], group: str, available: list[str]
) -> tuple[list[str], dict[str, str]]:
    """Return the arms and the options of a command line, with the defaults of OPTIONS.

    Args:
        group: the stage or problem that was asked for, for messages
        available: its arms

    Raises:
        ValueError: a mistake in the command line
    """
    unknown = command_line.keys() - OPTIONS.keys()
    if unknown:
        raise ValueError(
            f"--{min(unknown)} is not an option of the study; its options are "
            f"{', '.join(f'--{name}' for name in OPTIONS)}"
        )
    options = {**OPTIONS, **command_line}
    if options["mode"] not in ("train", "show"):
        raise ValueError(f"--mode={options['mode']}: give --mode=train or --mode=show")
    arms = [arm.strip() for arm in options["arms"].split(",")] if options["arms"] else available
    for arm in arms:
        if arm not in available:
            raise ValueError(
                f"--arms={options['arms']}: {group} has no arm '{arm}'; give some of "
                f"{','.join(available)}"
            )
    return [arm for arm in available if arm in arms], options


def check_dataset(name: str, command: str) -> None:
    """Raise ValueError if a data set is not prepared.

    Args:
        command: that prepares it, without `python`
    """
    folder = ROOT / "data" / name
    if not (folder / "meta.json").is_file():
        raise ValueError(f"{folder} is not prepared yet; run `python {command}`")
