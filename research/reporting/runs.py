"""Runs as data: a run folder, a folder of them, or a runs.csv (`reporting/runs_csv.py`) -> `Run`."""

import hashlib
import json
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch

import configurator
from evaluation.published import Published
from evaluation.published import find as find_published
from model import build, model_class
from research.reporting import checks, records, runs_csv
from training import checkpoint

if TYPE_CHECKING:
    import polars as pl

POINTS = 2000  # of a training curve
# Settings that tell no two runs apart.
UNSHOWN = {"out_dir", "resume", "dry_run", "device", "wandb_log", "wandb_project", "wandb_run_name", "tensorboard"}
AXES = {"steps": "step", "tokens": "tokens", "flops": "flops", "seconds": "seconds"}
COUNTS = {"tokens", "flops", "val_sequences"}
ACCURACY = (
    "task",
    "shots",
    "settings",
    "shown",
    "averaged",
    "weights",
    "record",
    "tokens",
    "commit",
    "date",
    "machine",
)


@dataclass(frozen=True)
class Run:
    """A run; what nothing is known of is None or empty.

    path: its folder, or the runs.csv. settings: run and model keys. corpus: `Corpus.identity`. machine: what it was
    trained on at its last start; processes: how many, 1 where `machine` is None. training, evaluations, residual,
    first_seconds, step, totals, notes: as in `records.Metrics`. published: which published figures stand beside it.
    accuracy: entries of eval.py of its newest checkpoint. A row of runs.csv has no training curve,
    and of the evaluations the last alone.
    """

    name: str
    path: Path
    stem: str | None
    settings: dict
    seed: int | None
    parameters: int | None
    corpus: dict
    commit: str | None
    machine: dict | None
    processes: int
    training: "pl.DataFrame"
    evaluations: "pl.DataFrame"
    residual: list[dict] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    published: Published | None = None
    accuracy: list[dict] = field(default_factory=list)
    first_seconds: float | None = None
    step: int = 0
    totals: dict = field(default_factory=dict)

    @property
    def final(self) -> dict | None:
        """The last evaluation, None before the first one; keys that it lacks are left out."""
        rows = self.evaluations.tail(1).to_dicts()
        found = {key: value for key, value in rows[0].items() if value is not None} if rows else {}
        return {key: int(value) if key in COUNTS else value for key, value in found.items()} or None

    @property
    def finished(self) -> bool | None:
        """Whether the last evaluation is that after the last step; None where nobody knows how many were to be done."""
        steps = self.settings.get("max_steps")
        return None if steps is None else bool(self.final) and self.final["step"] >= steps

    @property
    def has_curve(self) -> bool:
        return self.training.height > 0

    def x(self, frame, axis: str, first_step: bool = True):
        """A frame's column of an axis of AXES, seconds as device-seconds: those of training times the processes.

        first_step=False: less the seconds of the first step, in which the model is compiled.
        """
        values = frame[AXES[axis]]
        if axis != "seconds":
            return values
        return (values - (0.0 if first_step else self.first_seconds or 0.0)) * self.processes

    @property
    def tokens_per_second(self) -> float | None:
        """The median over all steps: compiling and what else stops a run now and then count little."""
        return self.totals.get("tokens_per_second")

    @property
    def memory(self) -> float | None:
        """Peak bytes of the main process: allocated on a GPU, resident on a CPU."""
        return self.totals.get("memory")

    @property
    def flops_per_token(self) -> float | None:
        """Of training."""
        flops, tokens = self.totals.get("flops"), self.totals.get("tokens")
        return flops / tokens if flops is not None and tokens else None

    @property
    def device_seconds(self) -> float | None:
        """Of training, those of the first step left out, in which the model is compiled."""
        seconds = self.totals.get("seconds")
        return None if seconds is None else (seconds - (self.first_seconds or 0.0)) * self.processes

    @property
    def bytes_per_token(self) -> float | None:
        """UTF-8 bytes of the training text per token, where the corpus knows them."""
        counts = self.corpus.get("train", {})
        return counts["bytes"] / counts["tokens"] if "bytes" in counts and counts.get("tokens") else None


def load(paths: list[str], points: int = POINTS) -> tuple[list[Run], list[str]]:
    """(the runs that can be read, each once, and a line for each that cannot: "NAME: why").

    A path is a run folder, a folder that holds some at any depth, or a runs.csv.
    """
    records.polars()  # a missing package is no fault of a run
    found, faults, seen = [], [], set()
    for path in map(Path, paths):
        for read, where in readers(path, points, faults):
            if where in seen:
                continue
            seen.add(where)
            try:
                found.append(read())
            except ValueError as error:
                faults.append(f"{where[0].name if where[1] is None else where[1]}: {error}")
    return distinct(found), faults


def readers(path: Path, points: int, faults: list[str]):
    """(a function that makes the Run, what identifies it) of every run that a path names."""
    if path.is_file():
        try:
            rows = runs_csv.rows_of(path)
            return [(lambda row=row: of_row(row, path), (path.resolve(), row["name"])) for row in rows]
        except ValueError as error:
            faults.append(f"{path.name}: {error}")
            return []
    folders = run_folders(path) if path.is_dir() else []
    if not folders:
        what = "holds no metrics.jsonl" if path.is_dir() else "is not there"
        faults.append(f"{path} {what}: give a run folder made by train.py")
    return [(lambda folder=folder: read_run(folder, points), (folder.resolve(), None)) for folder in folders]


def of_row(row: dict, path: Path) -> Run:
    """The Run of a row of runs.csv. ValueError: it is damaged."""
    try:
        run = Run(path=path, **runs_csv.fields_of(row))
        if run.stem is None:
            return run
        of_model = {key.name for key in fields(model_class(run.stem).Config)}
        state: dict = {"model": run.stem, "corpus": run.corpus, "step": run.step, "model_config": {}, "run_config": {}}
        for key, value in run.settings.items():
            state["model_config" if key in of_model else "run_config"][key] = value
        return replace(run, published=published_of(path, state, {}))
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"damaged: make its row again by report.py runs ({error})") from error


def is_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("metrics.jsonl", "checkpoints", "status.json"))


def run_folders(path: Path) -> list[Path]:
    """The folder itself, or all run folders below it, by name."""
    if is_run(path):
        return [path]
    below = sorted(child for child in path.iterdir() if child.is_dir() and not child.name.startswith("."))
    return [folder for child in below for folder in run_folders(child)]


def read_run(folder: Path, points: int = POINTS) -> Run:
    """The Run of a folder. ValueError: its metrics.jsonl is missing or has no step."""
    return run_of(folder, records.read(folder / "metrics.jsonl", points))


def run_of(folder: Path, metrics: records.Metrics) -> Run:
    """The Run of a folder whose metrics are read."""
    saved, state, notes = newest_state(folder)
    settings = {**state.get("run_config", {}), **state.get("model_config", {})}
    settings = {key: value for key, value in settings.items() if key not in UNSHOWN}
    stem, machine = state.get("model"), state.get("trained_on")
    parameters = parameters_of(stem, json.dumps(state["model_config"]), notes) if state else None
    accuracy = accuracy_of(folder, saved, notes)
    return Run(
        name=folder.resolve().name,
        path=folder,
        stem=stem,
        settings=settings,
        seed=settings.get("seed"),
        parameters=parameters,
        corpus=state.get("corpus", {}),
        commit=state.get("commit"),
        machine=machine,
        processes=(machine or {}).get("processes", 1),
        training=metrics.training,
        evaluations=metrics.evaluations,
        residual=metrics.residual,
        notes=metrics.notes + notes,
        published=published_of(saved, state, metrics.rates) if state else None,
        accuracy=accuracy,
        first_seconds=metrics.first_seconds,
        step=metrics.step,
        totals=metrics.totals,
    )


def newest_state(folder: Path) -> tuple[Path | None, dict, list[str]]:
    """(checkpoint, its state.json, notes) of the newest one whose state can be read; tensors are not looked at."""
    notes = []
    for path in reversed(checkpoint.all_of(folder)):
        try:
            return path, checkpoint.read_state(path), notes
        except ValueError as error:
            notes.append(str(error).removesuffix("; take another checkpoint"))
    return None, {}, [*notes, "no checkpoint that can be read: its settings are not known"]


def parameters_of(stem: str, model_config: str, notes: list[str]) -> int | None:
    """How many the model has; None, with a note, where this code cannot make it."""
    try:
        return count_of(stem, model_config)
    except (ValueError, TypeError) as error:
        notes.append(f"its model cannot be made: {error}")
        return None


@cache
def count_of(stem: str, model_config: str) -> int:
    with torch.device("meta"):
        return build(stem, **json.loads(model_config)).num_parameters()


def published_of(folder: Path, state: dict, rates: dict[int, float]) -> Published | None:
    """None where this code does not have the stem or its keys."""
    try:
        config = model_class(state["model"]).Config(**state["model_config"])
        return find_published(SimpleNamespace(state=state, folder=folder), state["model"], config, rates)
    except (ValueError, TypeError):
        return None


def accuracy_of(folder: Path, saved: Path | None, notes: list[str]) -> list[dict]:
    """What eval.py has stored of the checkpoint, in the run or in the folder that holds it."""
    sums = saved / checkpoint.SUMS if saved else None
    if not sums or not sums.is_file():
        return []
    weights, entries = hashlib.sha256(sums.read_bytes()).hexdigest(), []
    for path in (folder / "eval/results.json", folder.resolve().parent / "eval/results.json"):
        try:
            found = configurator.read_json(path).get("entries", []) if path.exists() else []
            own = [{k: e[k] for k in ACCURACY if k in e} for e in found if e.get("weights") == weights]
            entries += [entry for entry in own if checks.is_accuracy(entry)]
            bad = len(own) - sum(map(checks.is_accuracy, own))
            notes += [f"{path}: {bad} entries are damaged, evaluate again"] if bad else []
        except (ValueError, AttributeError, TypeError) as error:
            notes.append(f"{path} is left out: {error}")
    return entries


def distinct(runs: list[Run]) -> list[Run]:
    """With names of their own: those that come twice have as many of their parents before them as tell them apart, of a
    row of runs.csv the file's name first."""
    names, above = [run.name for run in runs], [parents(run) for run in runs]
    while again := [i for i, name in enumerate(names) if names.count(name) > 1 and above[i]]:
        for index, parent in [(i, above[i].pop()) for i in again]:
            names[index] = f"{parent}/{names[index]}"
    return [replace(run, name=name) for run, name in zip(runs, names)]


def parents(run: Run) -> list[str]:
    """Names of what holds a run, the nearest last."""
    path = run.path.resolve()
    return [*path.parent.parts, path.stem] if path.is_file() else list(path.parent.parts)
