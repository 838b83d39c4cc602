"""Runs as data: run folders of train.py, folders that hold some, or a runs.csv.

A run folder is too large for git. runs.csv keeps a row for each run: a column has the name of a
setting (`max_steps`) or of a score (`val_loss`), and what else is known has its field's name before
it (`totals.tokens`, `machine.machine`). A cell is text or JSON, empty where nothing is known.
"""

import csv
import fcntl
import hashlib
import io
import json
import math
import os
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from evaluation.published import Published
from evaluation.published import find as find_published
from model import build, model_class
from training import checkpoint
from utils import errors, files

if TYPE_CHECKING:
    import polars as pl

POINTS = 2000  # of a training curve
AXES = {"steps": "step", "tokens": "tokens", "flops": "flops", "seconds": "seconds"}
COMMON = tuple(AXES.values())  # of every line of metrics.jsonl
CURVE = ("loss", "grad_norm", "tokens_per_second", "memory")  # of a training step
COUNTS = ("tokens", "flops", "val_sequences")
# Settings that tell no two runs apart.
UNSHOWN = {"out_dir", "resume", "dry_run", "device", "wandb_log", "wandb_project"}
UNSHOWN |= {"wandb_run_name", "tensorboard"}
# Of an entry of eval.py, what reports need.
ENTRY = "task shots settings shown averaged weights record tokens commit date machine".split()
PLAIN = "name step parameters commit processes first_seconds notes accuracy".split()
NESTED = ("totals", "machine", "corpus")
LONG = {"packages"}  # of a corpus: a list that its sha256 stands for


@dataclass(frozen=True)
class Run:
    """A run; what is not known is None or empty.

    path: its folder, or the runs.csv. settings: keys of the run and its model. corpus:
    `Corpus.identity`. machine: what `training.provenance.machine` says, at the last start.
    training: float64 columns COMMON and CURVE, a row for each step, or the means of equal groups of
    steps (the largest `memory`). evaluations: COMMON and the numbers `val_*`. residual: the records
    of `statistics_interval`. totals: last tokens, flops and seconds, median `tokens_per_second` and
    largest `memory` of all steps. first_seconds: those of the first step, which compiles.
    published: the paper's results for its model. accuracy: what eval.py stored of its newest
    checkpoint. A row of runs.csv has no training curve, and of the evaluations the last.
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
        """The last evaluation, None before the first one."""
        rows = self.evaluations.tail(1).to_dicts()
        known = {key: value for key, value in rows[0].items() if value is not None} if rows else {}
        return {k: int(v) if k in COUNTS else v for k, v in known.items()} or None

    @property
    def finished(self) -> bool | None:
        """Whether the last evaluation is that of the last step; None where that is not known."""
        steps = self.settings.get("max_steps")
        return None if steps is None else bool(self.final) and self.final["step"] >= steps

    @property
    def flops_per_token(self) -> float | None:
        flops, tokens = self.totals.get("flops"), self.totals.get("tokens")
        return flops / tokens if flops is not None and tokens else None

    @property
    def device_seconds(self) -> float | None:
        """Of training steps, without the first one."""
        seconds = self.totals.get("seconds")
        return None if seconds is None else (seconds - (self.first_seconds or 0)) * self.processes

    @property
    def bytes_per_token(self) -> float | None:
        """UTF-8 bytes of the training text per token."""
        counts = self.corpus.get("train", {})
        known = "bytes" in counts and counts.get("tokens")
        return counts["bytes"] / counts["tokens"] if known else None

    def x(self, frame, axis: str, first_step: bool = True):
        """A frame's column of one of AXES; seconds times the processes.

        first_step=False: without the seconds of the first step.
        """
        values = frame[AXES[axis]]
        if axis != "seconds":
            return values
        return (values - (0 if first_step else self.first_seconds or 0)) * self.processes


# ---- which runs ----


def load(paths: list) -> tuple[list[Run], list[str]]:
    """(the runs that can be read, each once; a line for each that cannot)."""
    import_polars()  # a missing package is no fault of a run
    found, faults = {}, []
    for path in map(Path, paths):
        try:
            readers = readers_of(path)
        except ValueError as error:
            faults.append(str(error))
            continue
        for where, read in readers.items():
            try:
                if where not in found:
                    found[where] = read()
            except ValueError as error:
                faults.append(f"{where[1] or where[0].name}: {error}")
    return with_own_names(list(found.values())), faults


def import_polars():
    return errors.import_optional("polars", "a report of runs")


def readers_of(path: Path) -> dict:
    """{what identifies a run: a function that reads it}. ValueError: there is none."""
    if path.is_file():
        where = path.resolve()
        return {
            (where, row["name"]): lambda row=row: run_of_row(row, path) for row in rows_of(path)
        }
    if not path.is_dir():
        raise ValueError(f"{path} is not there: give a run folder made by train.py")
    folders = run_folders(path)
    if not folders:
        raise ValueError(f"{path} holds no metrics.jsonl: give a run folder made by train.py")
    return {(each.resolve(), None): lambda each=each: read_run(each) for each in folders}


def run_folders(path: Path) -> list[Path]:
    """The folder itself, or all run folders below it, by name."""
    if any((path / name).exists() for name in ("metrics.jsonl", "checkpoints", "status.json")):
        return [path]
    below = sorted(each for each in path.iterdir() if each.is_dir() and each.name[0] != ".")
    return [folder for child in below for folder in run_folders(child)]


def with_own_names(runs: list[Run]) -> list[Run]:
    """Names that come twice have as many of their parents before them as tell them apart."""
    names, parents = [run.name for run in runs], []
    for run in runs:
        path = run.path.resolve()
        parents.append([*path.parent.parts, *([path.stem] if path.is_file() else [])])
    while again := [i for i, name in enumerate(names) if names.count(name) > 1 and parents[i]]:
        for index, parent in [(i, parents[i].pop()) for i in again]:
            names[index] = f"{parent}/{names[index]}"
    return [replace(run, name=name) for run, name in zip(runs, names)]


# ---- run folders ----


def read_run(folder: Path) -> Run:
    """The Run of a folder. ValueError: its metrics.jsonl is missing or has no step."""
    records, notes = read_records(folder / "metrics.jsonl")
    trained = [each for each in records if is_finite(each.get("loss"))]
    evaluated = [each for each in records if is_finite(each.get("val_loss"))]
    names = dict.fromkeys([*COMMON, *(k for each in evaluated for k in each if k[:4] == "val_")])
    saved, state = newest_state(folder, notes)
    settings = state.get("run_config", {}) | state.get("model_config", {})
    machine, steps = state.get("trained_on"), frame_of(trained, (*COMMON, *CURVE))
    return Run(
        name=folder.resolve().name,
        path=folder,
        stem=state.get("model"),
        settings={key: value for key, value in settings.items() if key not in UNSHOWN},
        seed=settings.get("seed"),
        parameters=parameters_of(state, notes) if state else None,
        corpus=state.get("corpus", {}),
        commit=state.get("commit"),
        machine=machine,
        processes=(machine or {}).get("processes", 1),
        training=thinned(steps),
        evaluations=frame_of(evaluated, tuple(names)),
        residual=[each for each in records if "residual" in each],
        notes=notes,
        published=published_of(state) if state else None,
        accuracy=accuracy_of(folder, saved, notes) if saved else [],
        first_seconds=trained[0].get("seconds") if trained and trained[0]["step"] == 1 else None,
        step=records[-1]["step"],
        totals=totals_of(steps),
    )


def read_records(path: Path) -> tuple[list[dict], list[str]]:
    """(the lines of metrics.jsonl that count, notes on the others). ValueError: there is none.

    A kill cuts the last line, and a run that went on from an earlier step does steps again: of a
    step that comes twice the later line counts.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ValueError(f"metrics.jsonl is missing or unreadable ({error.strerror})") from error
    records, damaged = [], []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            record["step"] + 0
            records.append(record)
        except (ValueError, TypeError, KeyError):
            damaged.append(number)
    notes = [f"no record of a step: {listed('line', damaged)} of metrics.jsonl"] if damaged else []
    counting, lowest, trained = [], math.inf, math.inf
    for record in reversed(records):
        if record["step"] <= lowest and not ("loss" in record and record["step"] >= trained):
            counting.append(record)
            lowest, trained = record["step"], record["step"] if "loss" in record else trained
    if len(counting) < len(records):
        notes.append(f"{len(records) - len(counting)} lines of metrics.jsonl were done again later")
    bad = [
        e["step"] for e in counting for k in ("loss", "val_loss") if not is_finite(e.get(k, 0.0))
    ]
    notes += [f"no finite loss: {listed('step', bad[::-1])}"] if bad else []
    if not counting:
        raise ValueError("; ".join(["metrics.jsonl has no step yet", *notes]))
    return counting[::-1], notes


def is_finite(value) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def listed(unit: str, numbers: list) -> str:
    """line 5; steps 5, 6, 7 and 20 more."""
    more = f" and {len(numbers) - 3:,} more" if len(numbers) > 3 else ""
    return f"{unit}{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers[:3]))}{more}"


def frame_of(records: list[dict], columns: tuple):
    """float64 columns (`step` of evaluations too); what a record lacks, or is no number, is null."""
    pl = import_polars()

    def number(value):
        return float(value) if is_finite(value) else None

    data = {name: [number(record.get(name)) for record in records] for name in columns}
    return pl.DataFrame(data, schema=dict.fromkeys(columns, pl.Float64))


def thinned(frame):
    """Means of at most POINTS equal groups of rows; of `memory` the largest."""
    pl = import_polars()
    if frame.height <= POINTS:
        return frame
    group = (pl.int_range(pl.len()) * POINTS // pl.len()).alias("group")
    means = [pl.col(n).max() if n == "memory" else pl.col(n).mean() for n in frame.columns]
    return frame.group_by(group, maintain_order=True).agg(means).drop("group")


def totals_of(steps) -> dict[str, float]:
    how = {"tokens_per_second": lambda c: c.median(), "memory": lambda c: c.max()}
    columns = {n: steps[n].drop_nulls() for n in (*COMMON[1:], *how)}
    return {n: how.get(n, lambda c: c[-1])(column) for n, column in columns.items() if len(column)}


def newest_state(folder: Path, notes: list[str]) -> tuple[Path | None, dict]:
    """(checkpoint, its state.json) of the newest one that can be read."""
    for path in reversed(checkpoint.list_checkpoints(folder)):
        try:
            return path, checkpoint.read_state(path)
        except ValueError as error:
            notes.append(str(error).removesuffix("; take another checkpoint"))
    notes.append("no checkpoint that can be read: its settings are not known")
    return None, {}


def parameters_of(state: dict, notes: list[str]) -> int | None:
    try:
        return count_of(state["model"], json.dumps(state["model_config"]))
    except (ValueError, TypeError) as error:
        notes.append(f"its model cannot be made: {error}")


@cache
def count_of(stem: str, model_config: str) -> int:
    with torch.device("meta"):
        return build(stem, **json.loads(model_config)).num_parameters()


def published_of(state: dict) -> Published | None:
    """None where this code does not have the stem or its keys."""
    try:
        config = model_class(state["model"]).Config(**state["model_config"])
        return find_published(state["model"], config, state)
    except (ValueError, TypeError):
        return None


def accuracy_of(folder: Path, saved: Path, notes: list[str]) -> list[dict]:
    """What eval.py has stored of the checkpoint, in the run or in the folder that holds it."""
    sums, entries = saved / checkpoint.CHECKSUMS, []
    weights = hashlib.sha256(sums.read_bytes()).hexdigest() if sums.is_file() else None
    for path in (folder / "eval/results.json", folder.resolve().parent / "eval/results.json"):
        try:
            stored = files.read_json(path).get("entries", []) if path.exists() else []
            own = [entry for entry in stored if entry.get("weights") == weights]
            entries += [{key: entry[key] for key in ENTRY if key in entry} for entry in own]
        except (ValueError, AttributeError) as error:
            notes.append(f"{path} is left out: {error}")
    return entries


# ---- runs.csv ----


def write_csv(runs: list[Run], path: Path) -> tuple[int, int]:
    """Add a row for each run, in the place of the row of the same name; processes take turns.

    Returns (rows added, rows replaced). ValueError: the file is no runs.csv.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        before = {row["name"]: row for row in rows_of(path)} if path.exists() else {}
        new = {run.name: row_of(run) for run in runs}
        rows = list({**before, **new}.values())
        text = io.StringIO()
        columns = sorted({key for row in rows for key in row}, key=column_order)
        table = csv.DictWriter(text, columns, lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
        files.write_text(path, text.getvalue())
    finally:
        os.close(folder)
    return len(new.keys() - before.keys()), len(new.keys() & before.keys())


def column_order(column: str) -> tuple:
    """Name, scores, what the run was and cost, settings, what is nested; each by name."""
    about = column in (*PLAIN, "model", "seed")
    return column != "name", not column.startswith("val_"), not about, "." in column, column


def row_of(run: Run) -> dict[str, str]:
    final = run.final or {}
    known = {name: getattr(run, name) for name in PLAIN} | {"model": run.stem}
    known |= {key: value for key, value in final.items() if key.startswith("val_")}
    known |= run.settings | {f"val_{key}": final.get(key) for key in COMMON}
    known["notes"], known["accuracy"] = run.notes or None, run.accuracy or None
    for name in NESTED:
        inner = getattr(run, name) or {}
        known |= {f"{name}.{key}": value for key, value in inner.items() if key not in LONG}
    return {k: cell(v) for k, v in known.items() if v is not None or k in run.settings}


def cell(value) -> str:
    """Text as it is, unless it reads as JSON; all else as JSON."""
    return (
        value if value and isinstance(value, str) and parsed(value) == value else json.dumps(value)
    )


def parsed(text: str):
    try:
        return json.loads(text)
    except ValueError:
        return text


def rows_of(path: Path) -> list[dict[str, str]]:
    """The rows without their empty cells. ValueError: no runs.csv, or a name comes twice."""
    with open(path, encoding="utf-8", newline="") as file:
        try:
            rows = [{k: v for k, v in row.items() if v} for row in csv.DictReader(file)]
        except (UnicodeDecodeError, csv.Error):
            rows = []
    names = [row.get("name") for row in rows]
    if not rows or None in names:
        fix = "give a run folder, or a runs.csv"
        raise ValueError(f"{path} is no file of report.py runs: {fix}")
    if again := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"{path} has two rows named {again[0]!r}: take one out")
    return rows


def run_of_row(row: dict[str, str], path: Path) -> Run:
    """The Run of a row of runs.csv. ValueError: it is damaged."""
    pl, values = import_polars(), {key: parsed(text) for key, text in row.items()}
    known = {name: values.pop(name, None) for name in PLAIN}
    for name in NESTED:
        inner = [key for key in values if key.startswith(f"{name}.")]
        known[name] = {key.partition(".")[2]: values.pop(key) for key in inner} or None
    final = {key: values.pop(key) for key in list(values) if key.startswith("val_")}
    final = {k[4:] if k[4:] in COMMON else k: value for k, value in final.items()}
    try:
        for name, empty in (("notes", []), ("accuracy", []), ("corpus", {}), ("totals", {})):
            known[name] = known[name] or empty
        known |= {"step": int(known["step"]), "processes": known["processes"] or 1, "path": path}
        known |= {"stem": values.get("model"), "settings": values, "seed": values.get("seed")}
        types = dict.fromkeys((*COMMON, *CURVE), pl.Float64)
        evaluations = pl.DataFrame([final] if final else None)
        run = Run(**known, training=pl.DataFrame(schema=types), evaluations=evaluations)
        if run.stem is None:
            return run
        of_model = {key.name for key in fields(model_class(run.stem).Config)}
        state: dict = {"model": run.stem, "corpus": run.corpus, "step": run.step}
        state["model_config"] = {k: v for k, v in values.items() if k in of_model}
        state["run_config"] = {k: v for k, v in values.items() if k not in of_model}
        return replace(run, published=published_of(state))
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"damaged: make its row again by report.py runs ({error})") from error
