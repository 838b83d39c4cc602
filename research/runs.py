"""Read runs into one frame: run folders of train.py, folders that contain some, or a runs.csv.

A row is a run. A column has the name of a setting (`max_steps`) or of a score of the last evaluation
(`val_loss`). The columns of a nested field have its name as a prefix (`corpus.val`).
Lists and dicts are JSON. A run folder is too large for git, so runs.csv stores the frame.
"""

import contextlib
import csv
import hashlib
import json
import math
import os
from collections.abc import Iterable
from dataclasses import fields
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from configurator import collect_options
from evaluation import published
from model import MODEL_NAMES, build, make_config, model_class
from training import checkpoint, metrics
from training.config import TrainConfig
from training.settings import saved_settings
from utils import errors, files

if TYPE_CHECKING:
    import polars as pl

# axes of curves, and their columns, which every line of metrics.jsonl has
AXES = {"steps": "step", "tokens": "tokens", "flops": "flops", "seconds": "seconds"}
SCORE_PREFIXES = ("val_", "ema_val_")  # of trained and of averaged weights
# settings that do not distinguish one run from another
HIDDEN_SETTINGS = set(
    "out_dir resume dry_run device max_seconds max_epochs tracker tensorboard wandb_log wandb_project "
    "wandb_entity wandb_group wandb_tags wandb_run_name".split()
)
# the keys of a record of eval.py that reports need
ACCURACY_KEYS = "settings shown weights dataset validation tokens commit date machine".split()
# Columns that are no settings. step: the last one. first_seconds: the duration of the first step,
# which includes compilation. accuracy: the records of eval.py for the newest checkpoint. path: the
# run folder, or the runs.csv; it is not stored.
FIELDS = "name path model seed step parameters commit processes first_seconds accuracy".split()
MAX_INTEGER = 2**53  # FLOPs of large runs do not fit into the integers of polars
OMITTED_KEYS = {"packages"}  # a long list of a corpus, which its sha256 stands for

Row = dict[str, Any]  # the columns of a run


def import_polars() -> ModuleType:
    """Return polars, or raise ValueError if it is not installed."""
    return errors.import_optional("polars", "a report of runs")


def is_setting(column: str) -> bool:
    """Return whether a column of the frame is a setting of the run or of its model."""
    return column not in FIELDS and not column.startswith(SCORE_PREFIXES) and "." not in column


# ---- which runs ----


def load(paths: list[str | Path]) -> tuple["pl.DataFrame", list[str]]:
    """Read runs, each once.

    Returns:
        the frame of the runs that can be read, and an error line for each run that cannot
    """
    import_polars()  # otherwise a missing package would be reported as an error of every run
    row_by_source: dict[tuple[Path, str], Row] = {}
    error_lines = []
    for path in map(Path, paths):
        if path.is_file():
            try:
                for row in read_csv(path):
                    row_by_source.setdefault((path.resolve(), row["name"]), row)
            except ValueError as error:
                error_lines.append(str(error))
            continue
        folders = find_run_folders(path) if path.is_dir() else []
        if not folders:
            error_lines.append(f"{path} has no metrics.jsonl: give a run folder made by train.py")
        for folder in folders:
            source = (folder.resolve(), "")
            if source in row_by_source:
                continue
            try:
                row_by_source[source] = read_run(folder)
            except ValueError as error:
                error_lines.append(f"{folder.name}: {error}")
    rows = list(row_by_source.values())
    make_names_unique(rows)
    return make_frame(rows), error_lines


def find_run_folders(path: Path) -> list[Path]:
    """Return the folder itself if it is a run folder, otherwise all run folders in it, by name."""
    if any((path / name).exists() for name in ("metrics.jsonl", "checkpoints")):
        return [path]
    run_folders = []
    for folder in sorted(path.iterdir()):
        if folder.is_dir() and not folder.name.startswith("."):
            run_folders += find_run_folders(folder)
    return run_folders


def find_common_folder(paths: Iterable[str | Path]) -> Path:
    """Return the folder of a single run, or the one that contains the folders of several runs."""
    folders = {Path(path).resolve() for path in paths}
    if len(folders) == 1:
        return folders.pop()
    return Path(os.path.commonpath([folder.parent for folder in folders]))


def make_names_unique(rows: list[Row]) -> None:
    """Name runs whose name occurs twice by their paths in the folder that contains all of these."""
    names = [row["name"] for row in rows]
    paths_by_index = {}
    for index, row in enumerate(rows):
        if names.count(row["name"]) > 1:
            path = Path(row["path"]).resolve()
            paths_by_index[index] = path.with_suffix("") / row["name"] if path.is_file() else path
    if paths_by_index:
        folder = find_common_folder(paths_by_index.values())
        for index, path in paths_by_index.items():
            rows[index]["name"] = str(path.relative_to(folder))


def make_frame(rows: list[Row]) -> "pl.DataFrame":
    """Return the frame of runs; a value that a run does not have is null."""
    pl = import_polars()
    cells = [
        # every frame has the columns of FIELDS
        {**dict.fromkeys(FIELDS), **{column: make_cell(value) for column, value in row.items()}}
        for row in rows
    ]
    # strict=False makes text of a column in which some runs have a number and others a word
    return pl.from_dicts(cells, infer_schema_length=None, strict=False) if cells else pl.DataFrame()


def make_cell(value: Any) -> Any:
    """Return a value as polars can hold it."""
    if isinstance(value, list | tuple | dict):
        return json.dumps(value)
    if isinstance(value, int) and abs(value) > MAX_INTEGER:
        return float(value)
    return value


# ---- run folders ----


def read_run(folder: Path) -> Row:
    """Read the row of a run folder.

    Raises:
        ValueError: its metrics.jsonl is missing or has no step, or results of eval.py are damaged
    """
    records = read_records(folder)
    steps = [record for record in records if is_finite(record.get("loss"))]
    checkpoint_folder, state = read_newest_state(folder)
    settings = read_settings(state)
    trained_on = state.get("trained_on") or {}
    row = {
        "name": folder.resolve().name,
        "path": str(folder),
        "model": state.get("model"),
        **settings,
        "step": records[-1]["step"],
        "parameters": count_parameters(state),
        "commit": state.get("commit"),
        "processes": trained_on.get("processes", 1),
        "accuracy": read_accuracy(folder, checkpoint_folder) if checkpoint_folder else [],
        **read_last_evaluation(records),
    }
    if steps and steps[0]["step"] == 1:
        row["first_seconds"] = steps[0].get("seconds")
    nested = {
        "machine": trained_on,
        "corpus": state.get("corpus", {}),
    }
    for name, values in nested.items():
        for key, value in values.items():
            if key not in OMITTED_KEYS:
                row[f"{name}.{key}"] = value
    return row


def read_last_evaluation(records: list[dict]) -> Row:
    """Return the scores of the last evaluation, with its step, tokens and so on as `val_step`, ..."""
    for record in reversed(records):
        if not is_finite(record.get("val_loss")):
            continue
        scores = {
            key: value
            for key, value in record.items()
            if key.startswith(SCORE_PREFIXES) and is_finite(value)
        }
        return {**scores, **{f"val_{key}": record.get(key) for key in AXES.values()}}
    return {}


def read_settings(state: dict) -> dict[str, object]:
    """Return the settings of a run that say what it computed, in the names of today.

    Keys that were added after the run was saved have the value that reproduces it, so that it is
    in a group with later runs. A run of a model that is not in this repository keeps its own keys.

    Args:
        state: state.json of the run; empty if it has none
    """
    settings = {**state.get("run_config", {}), **state.get("model_config", {})}
    if state:
        with contextlib.suppress(ValueError):
            saved = saved_settings(state)
            settings = {**saved, **settings, **saved}  # in the order of the options
    if "dataset" in settings:
        # a copy on other storage is the same corpus, which `corpus` identifies
        settings["dataset"] = Path(settings["dataset"]).name
    return {key: value for key, value in settings.items() if key not in HIDDEN_SETTINGS}


def read_records(folder: Path) -> list[dict]:
    """Read the metrics.jsonl of a run folder.

    Raises:
        ValueError: the file cannot be read, or has no step
    """
    try:
        records = metrics.read(folder / "metrics.jsonl")
    except OSError as error:
        raise ValueError(f"metrics.jsonl is missing or unreadable ({error.strerror})") from error
    if not records:
        raise ValueError("metrics.jsonl has no step yet")
    return records


def is_finite(value: Any) -> bool:
    """Return whether a value is a finite number."""
    return isinstance(value, int | float) and math.isfinite(value)


def read_newest_state(folder: Path) -> tuple[Path | None, dict[str, Any]]:
    """Return the newest checkpoint that can be read and its state.json, or (None, {})."""
    for path in reversed(checkpoint.list_checkpoints(folder)):
        with contextlib.suppress(ValueError):
            return path, checkpoint.read_state(path)
    return None, {}


def count_parameters(state: dict[str, Any]) -> int | None:
    """Return the number of parameters of a state's model, or None if it cannot be built."""
    try:
        return count_model_parameters(state["model"], json.dumps(state["model_config"]))
    except (ValueError, TypeError, KeyError):
        return None


@cache  # the runs of a sweep have few models
def count_model_parameters(model_name: str, model_config: str) -> int:
    """Return the number of parameters of a model; `model_config` is JSON."""
    with torch.device("meta"):
        return build(model_name, make_config(model_name, json.loads(model_config))).num_parameters()


def read_accuracy(folder: Path, checkpoint_folder: Path) -> list[dict]:
    """Return the records of eval.py for a checkpoint, newer ones later.

    They are in eval/ in the folder of the run, and in the folders beside the run in which it was
    evaluated with others, eval_*/.
    """
    checksums_file = checkpoint_folder / checkpoint.CHECKSUMS
    weights = None
    if checksums_file.is_file():
        weights = hashlib.sha256(checksums_file.read_bytes()).hexdigest()
    results_files = [
        *sorted(folder.glob("eval/results_*.json")),
        *sorted(folder.resolve().parent.glob("eval_*/results_*.json")),
        # of runs of several sweeps
        *sorted(folder.resolve().parent.parent.glob("eval_*/results_*.json")),
    ]
    accuracy = []
    for record in map(files.read_json, results_files):
        if record.get("weights") == weights:
            accuracy.append({key: record[key] for key in ACCURACY_KEYS if key in record})
    # a task that was evaluated twice has the newer result in a report
    return sorted(accuracy, key=lambda record: record.get("date", ""))


# ---- what a row says ----


def has_finished(row: Row) -> bool | None:
    """Return whether the last step was evaluated; None if the number of steps is not known."""
    if row.get("max_steps") is None:
        return None
    return row.get("val_step") is not None and row["val_step"] >= row["max_steps"]


def find_published(row: Row) -> published.Published | None:
    """Return the paper's results, or None if this code has no such model or lacks its keys."""
    if row.get("parameters") is None:
        return None
    try:
        options = collect_options(TrainConfig, model_class(row["model"]).Config)
        # the frame has the keys of all models
        state = make_state(
            {key: value for key, value in row.items() if key in options}, row["step"]
        )
        config = model_class(state["model"]).Config(**state["model_config"])
        return published.find(state["model"], config, state)
    except (ValueError, TypeError, KeyError):
        return None


def make_state(settings: Row, step: int) -> dict[str, Any]:
    """Return what state.json says of a run with these settings, its model among them.

    Raises:
        ValueError: this code has no such model
    """
    model_keys = {key.name for key in fields(model_class(settings["model"]).Config)}
    return {
        "model": settings["model"],
        "step": step,
        "corpus": {},
        "model_config": {key: settings[key] for key in settings if key in model_keys},
        "run_config": {key: settings[key] for key in settings if key not in model_keys},
    }


# ---- curves ----


def read_curves(row: Row) -> "pl.DataFrame":
    """Return the records of a run's metrics.jsonl: a row for each record, a column for each number.

    The column of an axis (AXES) is its position in a figure: seconds are multiplied by the
    processes, and do not count the first step, which compiles.
    """
    pl = import_polars()
    rows = []
    for record in read_records(Path(row["path"])):
        numbers = {key: float(value) for key, value in record.items() if is_finite(value)}
        if "seconds" in numbers:
            numbers["seconds"] -= row.get("first_seconds") or 0
            numbers["seconds"] *= row["processes"]
        rows.append(numbers)
    frame = pl.from_dicts(rows, infer_schema_length=None, strict=False)
    missing = [pl.lit(None, pl.Float64).alias(key) for key in AXES.values() if key not in frame]
    return frame.with_columns(missing)


# ---- runs.csv ----


def write_csv(frame: "pl.DataFrame", path: Path) -> None:
    """Write the rows of a frame to a runs.csv."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [make_csv_row(row) for row in frame.iter_rows(named=True)]
    columns = sorted(
        {key for row in rows for key in row}, key=lambda column: (column != "name", column)
    )
    stored = import_polars().from_dicts(rows, schema=dict.fromkeys(columns, str))
    files.write_text(path, stored.write_csv())


def make_csv_row(row: Row) -> dict[str, str]:
    """Return the cells of a row of runs.csv; what the run does not have has no cell."""
    own_keys = set()
    if row["model"] in MODEL_NAMES:
        own_keys = set(collect_options(TrainConfig, model_class(row["model"]).Config))
    return {
        column: format_cell(value)
        for column, value in row.items()
        # null in the column of a key of another model is not a value
        if column != "path" and value != "[]" and (value is not None or column in own_keys)
    }


def format_cell(value: Any) -> str:
    """Return text as it is, unless it could be read as another value; all other values as JSON."""
    if isinstance(value, str) and value and (parse_cell(value) == value or value[0] in "[{"):
        return value
    return json.dumps(value)


def parse_cell(text: str) -> Any:
    """Return the value of a cell: that of JSON, otherwise the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def read_csv(path: Path) -> list[Row]:
    """Read the rows of a runs.csv, with the settings in the names of today.

    Raises:
        ValueError: the file is no runs.csv, or has two rows with the same name
    """
    try:
        with open(path, encoding="utf-8", newline="") as file:
            rows = [complete_row(cells, path) for cells in csv.DictReader(file)]
    except (UnicodeDecodeError, csv.Error, TypeError, KeyError, AttributeError):
        rows = []
    if not rows:
        raise ValueError(
            f"{path} was not written by report.py runs: give a run folder, or a runs.csv"
        )
    if len({row["name"] for row in rows}) < len(rows):
        raise ValueError(f"{path} has two rows with the same name: remove one of them")
    return rows


def complete_row(cells: dict[str, str], path: Path) -> Row:
    """Return the row of a run in the runs.csv at `path`; it has no empty cells."""
    row = {column: parse_cell(text) for column, text in cells.items() if text}
    row["path"] = str(path)
    row["name"] = str(row["name"])
    row.setdefault("processes", 1)
    if row.get("model") is None:
        return row
    settings = {
        column: value
        for column, value in row.items()
        if is_setting(column) or column in ("model", "seed")
    }
    others = {column: value for column, value in row.items() if not is_setting(column)}
    return {**others, **read_settings(make_state(settings, row["step"]))}
