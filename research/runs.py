"""Read runs as data: run folders of train.py, folders that contain some, or a runs.csv.

A run folder is too large for git, so runs.csv stores a row for each run. A column has the name of a
setting (`max_steps`) or of a score (`val_loss`). The columns of a nested field have the field's name
as a prefix (`totals.tokens`, `machine.machine`). A cell is text or JSON, and empty if its value is
not known.
"""

import contextlib
import csv
import hashlib
import io
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import cache, partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from configurator import collect_options
from evaluation.published import Published
from evaluation.published import find as find_published
from model import build, make_config, model_class
from training import checkpoint, metrics
from training.config import TrainConfig
from training.optimizer import get_learning_rate
from training.settings import saved_settings
from utils import errors, files

if TYPE_CHECKING:
    import polars as pl

MAX_CURVE_POINTS = 2000  # of a training curve
AXES = {"steps": "step", "tokens": "tokens", "flops": "flops", "seconds": "seconds"}
COMMON_COLUMNS = tuple(AXES.values())  # every line of metrics.jsonl has them
TRAINING_COLUMNS = ("loss", "grad_norm", "tokens_per_second", "memory")
SCORE_PREFIXES = ("val_", "ema_val_")  # of trained and of averaged weights
INTEGER_COLUMNS = ("tokens", "flops", "val_sequences")
# settings that do not distinguish one run from another
HIDDEN_SETTINGS = {
    "out_dir",
    "resume",
    "dry_run",
    "device",
    "max_seconds",
    "tracker",
    "wandb_log",
    "wandb_project",
    "wandb_entity",
    "wandb_group",
    "wandb_tags",
    "wandb_run_name",
    "tensorboard",
    "max_epochs",
}
# the keys of a record of eval.py that reports need
ACCURACY_KEYS = (
    "settings",
    "shown",
    "weights",
    "dataset",
    "validation",
    "tokens",
    "commit",
    "date",
    "machine",
)
# the fields of Run that are columns of runs.csv, and those that are dicts with a column per key
PLAIN_FIELDS = (
    "name",
    "step",
    "parameters",
    "commit",
    "processes",
    "first_seconds",
    "notes",
    "accuracy",
)
NESTED_FIELDS = ("totals", "machine", "corpus")
OMITTED_KEYS = {"packages"}  # a long list of a corpus, which its sha256 stands for


@dataclass(frozen=True)
class Run:
    """A run; a value that is not known is None or empty.

    path: the run folder or the runs.csv. settings: the keys of the run and of its model. corpus:
    `Corpus.identity`. machine: the result of `utils.provenance.machine` at the last start.
    training: float64 columns COMMON_COLUMNS and TRAINING_COLUMNS, a row for each step; long runs
    have the means of groups of equally many steps (of `memory` the maximum). evaluations:
    COMMON_COLUMNS and the numbers `val_*`. residual_records: the lines of metrics.jsonl that
    `statistics_interval` writes. totals: the last tokens, flops and seconds, the median
    `tokens_per_second` and the maximum `memory` of all steps. first_seconds: the duration of the
    first step, which includes compilation. published: the paper's results for the model. accuracy:
    the records of eval.py for the newest checkpoint.

    A run from a row of runs.csv has no training curve, and only the last evaluation.
    """

    name: str
    path: Path
    model_name: str | None
    settings: dict[str, Any]
    seed: int | None
    parameters: int | None
    corpus: dict[str, Any]
    commit: str | None
    machine: dict[str, Any] | None
    processes: int
    training: "pl.DataFrame"
    evaluations: "pl.DataFrame"
    residual_records: list[dict] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    published: Published | None = None
    accuracy: list[dict] = field(default_factory=list)
    first_seconds: float | None = None
    step: int = 0
    totals: dict[str, float] = field(default_factory=dict)

    @property
    def final_evaluation(self) -> dict[str, Any] | None:
        """The last evaluation without unknown values, or None before the first evaluation."""
        evaluation = {}
        for row in self.evaluations.tail(1).to_dicts():
            for key, value in row.items():
                if value is not None:
                    evaluation[key] = int(value) if key in INTEGER_COLUMNS else value
        return evaluation or None

    @property
    def finished(self) -> bool | None:
        """True if the last step was evaluated, None if the number of steps is not known."""
        max_steps = self.settings.get("max_steps")
        if max_steps is None:
            return None
        evaluation = self.final_evaluation
        return evaluation is not None and evaluation["step"] >= max_steps

    @property
    def flops_per_token(self) -> float | None:
        """The FLOPs of training per token."""
        flops = self.totals.get("flops")
        tokens = self.totals.get("tokens")
        return flops / tokens if flops is not None and tokens else None

    @property
    def device_seconds(self) -> float | None:
        """The seconds of all training steps but the first, times the number of processes."""
        seconds = self.totals.get("seconds")
        if seconds is None:
            return None
        return (seconds - (self.first_seconds or 0)) * self.processes

    @property
    def bytes_per_token(self) -> float | None:
        """The UTF-8 bytes of the training text per token."""
        counts = self.corpus.get("train", {})
        if "bytes" not in counts or not counts.get("tokens"):
            return None
        return counts["bytes"] / counts["tokens"]

    def get_x_values(self, frame: "pl.DataFrame", axis: str) -> "pl.Series":
        """Return a frame's column of one of AXES.

        Seconds are multiplied by the processes, and do not count the first step, which compiles.
        """
        values = frame[AXES[axis]]
        if axis != "seconds":
            return values
        return (values - (self.first_seconds or 0)) * self.processes


# ---- which runs ----


class RunSource(NamedTuple):
    """The source of a run: its folder, or a file and the name of a row in it."""

    path: Path
    row_name: str | None


def load(paths: list[str | Path]) -> tuple[list[Run], list[str]]:
    """Read runs, each once.

    Returns:
        the runs that can be read, and an error line for each run that cannot
    """
    import_polars()  # otherwise a missing package would be reported as an error of every run
    run_by_source: dict[RunSource, Run] = {}
    error_lines = []
    for path in map(Path, paths):
        # `runs/*` also names the figures of earlier reports
        if path.suffix == ".png" and len(paths) > 1:
            continue
        try:
            readers = make_readers(path)
        except ValueError as error:
            error_lines.append(str(error))
            continue
        for source, read in readers.items():
            if source in run_by_source:
                continue
            try:
                run_by_source[source] = read()
            except ValueError as error:
                error_lines.append(f"{source.row_name or source.path.name}: {error}")
    return make_names_unique(list(run_by_source.values())), error_lines


def import_polars() -> ModuleType:
    """Return polars, or raise ValueError if it is not installed."""
    return errors.import_optional("polars", "a report of runs")


def make_readers(path: Path) -> dict[RunSource, Callable[[], Run]]:
    """Return, for each run at a path, a function that reads it.

    Raises:
        ValueError: there is no run at the path
    """
    if path.is_file():
        return {
            RunSource(path.resolve(), row["name"]): partial(make_run, row, path)
            for row in read_rows(path)
        }
    if not path.is_dir():
        raise ValueError(f"{path} does not exist: give a run folder made by train.py")
    folders = find_run_folders(path)
    if not folders:
        raise ValueError(f"{path} holds no metrics.jsonl: give a run folder made by train.py")
    return {RunSource(folder.resolve(), None): partial(read_run, folder) for folder in folders}


def find_run_folders(path: Path) -> list[Path]:
    """Return the folder itself if it is a run folder, otherwise all run folders in it, by name."""
    if any((path / name).exists() for name in ("metrics.jsonl", "checkpoints")):
        return [path]
    run_folders = []
    for folder in sorted(path.iterdir()):
        if folder.is_dir() and not folder.name.startswith("."):
            run_folders += find_run_folders(folder)
    return run_folders


def make_names_unique(runs: list[Run]) -> list[Run]:
    """Prefix names that occur twice with as many of their parent folders as distinguish them."""
    names = [run.name for run in runs]
    parents_by_run = []
    for run in runs:
        path = run.path.resolve()
        parents = list(path.parent.parts)
        if path.is_file():
            parents.append(path.stem)
        parents_by_run.append(parents)
    while True:
        repeated = [
            index
            for index, name in enumerate(names)
            if names.count(name) > 1 and parents_by_run[index]
        ]
        if not repeated:
            break
        for index in repeated:
            names[index] = f"{parents_by_run[index].pop()}/{names[index]}"
    return [replace(run, name=name) for run, name in zip(runs, names)]


# ---- run folders ----


def read_run(folder: Path) -> Run:
    """Read the run of a folder.

    Raises:
        ValueError: its metrics.jsonl is missing or has no step
    """
    records, notes = read_records(folder / "metrics.jsonl")
    training_records = [record for record in records if is_finite(record.get("loss"))]
    evaluation_records = [record for record in records if is_finite(record.get("val_loss"))]
    evaluation_columns = list(COMMON_COLUMNS)
    for record in evaluation_records:
        for key in record:
            if key.startswith(SCORE_PREFIXES) and key not in evaluation_columns:
                evaluation_columns.append(key)
    first_seconds = None
    if training_records and training_records[0]["step"] == 1:
        first_seconds = training_records[0].get("seconds")
    checkpoint_folder, state = read_newest_state(folder, notes)
    parameters = count_parameters(state, notes) if state else None
    accuracy = []
    if checkpoint_folder is not None:
        accuracy = read_accuracy(folder, checkpoint_folder, notes)
    settings = read_settings(state)
    machine = state.get("trained_on")
    steps = make_frame(training_records, (*COMMON_COLUMNS, *TRAINING_COLUMNS))
    notes += describe_other_schedule(training_records, settings)
    return Run(
        name=folder.resolve().name,
        path=folder,
        model_name=state.get("model"),
        settings=settings,
        seed=settings.get("seed"),
        parameters=parameters,
        corpus=state.get("corpus", {}),
        commit=state.get("commit"),
        machine=machine,
        processes=(machine or {}).get("processes", 1),
        training=average_rows(steps),
        evaluations=make_frame(evaluation_records, tuple(evaluation_columns)),
        residual_records=[record for record in records if "residual" in record],
        notes=notes,
        published=find_published_results(state) if state else None,
        accuracy=accuracy,
        first_seconds=first_seconds,
        step=records[-1]["step"],
        totals=compute_totals(steps),
    )


def describe_other_schedule(records: list[dict], settings: dict[str, object]) -> list[str]:
    """Return a note if learning rates are not those of the settings, which were changed during the run.

    Args:
        records: of training steps
        settings: those of the run, {} if they are not known
    """
    if "learning_rate" not in settings:
        return []
    config = SimpleNamespace(**settings)
    other_steps = [
        record["step"]
        for record in records
        if "lr" in record
        and not math.isclose(record["lr"], get_learning_rate(record["step"] - 1, config))
    ]
    if not other_steps:
        return []
    return [
        f"its learning rate followed another schedule until step {other_steps[-1]}; max_steps or "
        "decay_steps was changed later"
    ]


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


def read_records(path: Path) -> tuple[list[dict], list[str]]:
    """Read the valid lines of metrics.jsonl.

    A kill can cut the last line, and a run that resumed from an earlier step repeats steps: of a
    step that occurs twice, the later line is valid.

    Returns:
        the valid records, and notes on the other lines

    Raises:
        ValueError: the file cannot be read, or has no valid line
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ValueError(f"metrics.jsonl is missing or unreadable ({error.strerror})") from error
    notes = []
    records = []
    damaged_lines = []
    for number, line in enumerate(lines, 1):
        try:
            record = metrics.parse_record(line)
            record["step"] + 0  # is a TypeError unless it is a number
            records.append(record)
        except (ValueError, TypeError, KeyError):
            damaged_lines.append(number)
    if damaged_lines:
        notes.append(
            f"not a record of a step: {format_numbers('line', damaged_lines)} of metrics.jsonl"
        )
    valid_records = drop_repeated_steps(records)
    if len(valid_records) < len(records):
        notes.append(
            f"{len(records) - len(valid_records)} lines of metrics.jsonl are of steps that were "
            "repeated later"
        )
    steps_without_loss = []
    for record in valid_records:
        for key in ("val_loss", "loss"):
            if not is_finite(record.get(key, 0.0)):
                steps_without_loss.append(record["step"])
    if steps_without_loss:
        notes.append(f"no finite loss: {format_numbers('step', steps_without_loss)}")
    if not valid_records:
        raise ValueError("; ".join(["metrics.jsonl has no step yet", *notes]))
    return valid_records, notes


def drop_repeated_steps(records: list[dict]) -> list[dict]:
    """Return the records without those that a later record of the same or a lower step replaces."""
    valid_records = []
    lowest_step = math.inf
    lowest_training_step = math.inf
    for record in reversed(records):
        # a step has one training record and can have several others
        is_training = "loss" in record
        is_repeated = is_training and record["step"] >= lowest_training_step
        if record["step"] <= lowest_step and not is_repeated:
            valid_records.append(record)
            lowest_step = record["step"]
            if is_training:
                lowest_training_step = record["step"]
    return valid_records[::-1]


def is_finite(value: Any) -> bool:
    """Return whether a value is a finite number."""
    return isinstance(value, int | float) and math.isfinite(value)


def format_numbers(unit: str, numbers: list) -> str:
    """Format numbers with their unit: `line 5`, or `steps 5, 6, 7 and 20 more`."""
    if len(numbers) > 1:
        unit = f"{unit}s"
    text = f"{unit} {', '.join(map(str, numbers[:3]))}"
    if len(numbers) > 3:
        text += f" and {len(numbers) - 3:,} more"
    return text


def make_frame(records: list[dict], columns: tuple[str, ...]) -> "pl.DataFrame":
    """Return float64 columns of records, including `step`; a value that is no number is null."""
    pl = import_polars()
    data = {}
    for column in columns:
        values = [record.get(column) for record in records]
        data[column] = [float(value) if is_finite(value) else None for value in values]
    return pl.DataFrame(data, schema=dict.fromkeys(columns, pl.Float64))


def average_rows(frame: "pl.DataFrame") -> "pl.DataFrame":
    """Return the means of at most MAX_CURVE_POINTS equal groups of rows; of `memory` the maximum."""
    pl = import_polars()
    if frame.height <= MAX_CURVE_POINTS:
        return frame
    group = (pl.int_range(pl.len()) * MAX_CURVE_POINTS // pl.len()).alias("group")
    averages = []
    for name in frame.columns:
        averages.append(pl.col(name).max() if name == "memory" else pl.col(name).mean())
    return frame.group_by(group, maintain_order=True).agg(averages).drop("group")


def compute_totals(steps: "pl.DataFrame") -> dict[str, float]:
    """Return `Run.totals` of the training steps; a column without any value is left out."""
    totals = {}
    for name in ("tokens", "flops", "seconds", "tokens_per_second", "memory"):
        column = steps[name].drop_nulls()
        if not len(column):
            continue
        if name == "tokens_per_second":
            totals[name] = column.median()
        elif name == "memory":
            totals[name] = column.max()
        else:
            totals[name] = column[-1]
    return totals


def read_newest_state(folder: Path, notes: list[str]) -> tuple[Path | None, dict[str, Any]]:
    """Return the newest checkpoint that can be read and its state.json, or (None, {}).

    A note is appended for each checkpoint that cannot be read.
    """
    for path in reversed(checkpoint.list_checkpoints(folder)):
        try:
            return path, checkpoint.read_state(path)
        except ValueError as error:
            notes.append(str(error).removesuffix("; use another checkpoint"))
    notes.append("no checkpoint can be read, so its settings are not known")
    return None, {}


def count_parameters(state: dict[str, Any], notes: list[str]) -> int | None:
    """Return the number of parameters of a state's model; if it cannot be built, append a note."""
    try:
        return count_model_parameters(state["model"], json.dumps(state["model_config"]))
    except (ValueError, TypeError) as error:
        notes.append(f"its model cannot be built: {error}")
        return None


@cache
def count_model_parameters(model_name: str, model_config: str) -> int:
    """Return the number of parameters of a model; `model_config` is JSON."""
    with torch.device("meta"):
        return build(model_name, make_config(model_name, json.loads(model_config))).num_parameters()


def find_published_results(state: dict[str, Any]) -> Published | None:
    """Return the paper's results, or None if this code has no such model or lacks its keys."""
    try:
        config = model_class(state["model"]).Config(**state["model_config"])
        return find_published(state["model"], config, state)
    except (ValueError, TypeError):
        return None


def read_accuracy(folder: Path, checkpoint_folder: Path, notes: list[str]) -> list[dict]:
    """Return the records of eval.py for a checkpoint (eval.py).

    They are in eval/ in the folder of the run, and in the folders beside the run in which it was
    evaluated with others, eval_*/. Newer records come later. A note is appended for each results
    file that cannot be read.
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
    for path in results_files:
        try:
            record = files.read_json(path)
        except ValueError as error:
            notes.append(f"{path} is left out: {error}")
            continue
        if record.get("weights") == weights:
            accuracy.append({key: record[key] for key in ACCURACY_KEYS if key in record})
    # a task that was evaluated twice has the newer result in a report
    return sorted(accuracy, key=lambda record: record.get("date", ""))


# ---- runs.csv ----


def write_csv(runs: list[Run], path: Path) -> tuple[int, int]:
    """Add a row for each run to a runs.csv; it replaces a row with the same name.

    Returns:
        the number of rows added and of rows replaced

    Raises:
        ValueError: the existing file is no runs.csv, or has another run of the same name
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    old_rows = {}
    if path.exists():
        old_rows = {parse_cell(row["name"]): row for row in read_rows(path)}
    new_rows = {run.name: make_row(run) for run in runs}
    # a run that goes on may have other values of changeable keys
    options = collect_options(TrainConfig)
    fixed_keys = ["model", *(key for key in options if not options[key].changeable)]
    for name in new_rows.keys() & old_rows.keys():
        old_row = old_rows[name]
        new_row = new_rows[name]
        for key in fixed_keys:
            # a run without a checkpoint has no settings
            if old_row.get(key) != new_row.get(key) and (key == "model" or key in old_row):
                raise ValueError(
                    f"{path} has a run {name} with {key}={old_row.get(key)}, and this run {name} has "
                    f"{new_row.get(key)}; give another --out, or all runs in one command"
                )
    rows = list({**old_rows, **new_rows}.values())
    columns = sorted({key for row in rows for key in row}, key=make_column_sort_key)
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    files.write_text(path, text.getvalue())
    num_replaced = len(new_rows.keys() & old_rows.keys())
    return len(new_rows) - num_replaced, num_replaced


def make_column_sort_key(column: str) -> tuple:
    """Sort the name first, then scores, fields of the run, settings and nested fields, by name."""
    is_field = column in (*PLAIN_FIELDS, "model", "seed")
    return (
        column != "name",
        not column.startswith(SCORE_PREFIXES),
        not is_field,
        "." in column,
        column,
    )


def make_row(run: Run) -> dict[str, str]:
    """Return the cells of a run's row by column; unknown values, except settings, have no cell."""
    evaluation = run.final_evaluation or {}
    values = {
        **{name: getattr(run, name) for name in PLAIN_FIELDS},
        "model": run.model_name,
        **{key: value for key, value in evaluation.items() if key.startswith(SCORE_PREFIXES)},
        **run.settings,
        **{f"val_{key}": evaluation.get(key) for key in COMMON_COLUMNS},
        "notes": run.notes or None,
        "accuracy": run.accuracy or None,
    }
    for name in NESTED_FIELDS:
        for key, value in (getattr(run, name) or {}).items():
            if key not in OMITTED_KEYS:
                values[f"{name}.{key}"] = value
    return {
        column: format_cell(value)
        for column, value in values.items()
        if value is not None or column in run.settings
    }


def format_cell(value: Any) -> str:
    """Return text as it is, unless it could be read as JSON; all other values as JSON."""
    if value and isinstance(value, str) and parse_cell(value) == value:
        return value
    return json.dumps(value)


def parse_cell(text: str) -> Any:
    """Return the value of a cell: that of JSON, otherwise the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def read_rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of a runs.csv without their empty cells.

    Raises:
        ValueError: the file is no runs.csv, or has two rows with the same name
    """
    with open(path, encoding="utf-8", newline="") as file:
        try:
            rows = [
                {column: text for column, text in row.items() if text}
                for row in csv.DictReader(file)
            ]
        except (UnicodeDecodeError, csv.Error):
            rows = []
    names = [row.get("name") for row in rows]
    if not rows or None in names:
        raise ValueError(
            f"{path} was not written by report.py runs: give a run folder, or a runs.csv"
        )
    repeated_names = [name for name in names if names.count(name) > 1]
    if repeated_names:
        raise ValueError(f"{path} has two rows named {repeated_names[0]!r}: remove one of them")
    return rows


def make_run(row: dict[str, str], path: Path) -> Run:
    """Return the run of a row of the runs.csv at `path`.

    Raises:
        ValueError: the row is damaged
    """
    pl = import_polars()
    values = {column: parse_cell(text) for column, text in row.items()}
    plain = {name: values.pop(name, None) for name in PLAIN_FIELDS}
    nested: dict[str, dict] = {}
    for name in NESTED_FIELDS:
        columns = [column for column in values if column.startswith(f"{name}.")]
        nested[name] = {column.removeprefix(f"{name}."): values.pop(column) for column in columns}
    evaluation = {}
    for column in [column for column in values if column.startswith(SCORE_PREFIXES)]:
        name = column.removeprefix("val_")  # val_step is the step of the evaluation
        evaluation[name if name in COMMON_COLUMNS else column] = values.pop(column)
    training_columns = (*COMMON_COLUMNS, *TRAINING_COLUMNS)
    try:
        run = Run(
            name=plain["name"],
            path=path,
            model_name=values.get("model"),
            settings=values,  # all other columns are settings
            seed=values.get("seed"),
            parameters=plain["parameters"],
            corpus=nested["corpus"],
            commit=plain["commit"],
            machine=nested["machine"] or None,
            processes=plain["processes"] or 1,
            training=pl.DataFrame(schema=dict.fromkeys(training_columns, pl.Float64)),
            evaluations=pl.DataFrame([evaluation] if evaluation else None),
            notes=plain["notes"] or [],
            accuracy=plain["accuracy"] or [],
            first_seconds=plain["first_seconds"],
            step=int(plain["step"]),
            totals=nested["totals"],
        )
        if run.model_name is None:
            return run
        model_keys = {key.name for key in fields(model_class(run.model_name).Config)}
        state = {
            "model": run.model_name,
            "corpus": run.corpus,
            "step": run.step,
            "model_config": {k: v for k, v in run.settings.items() if k in model_keys},
            "run_config": {k: v for k, v in run.settings.items() if k not in model_keys},
        }
        settings = read_settings(state)
        return replace(run, settings=settings, published=find_published_results(state))
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"damaged: write its row again with report.py runs ({error})") from error
