"""metrics.jsonl as data frames, whatever has happened to the file.

polars reads a file that is whole: it refuses what is no JSON, NaN among it, or of another type. What it refuses is read
line by line, and every line or number that is left out is named.
"""

import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import configurator
from research.reporting import checks

if TYPE_CHECKING:
    import polars as pl

COMMON = "step", "tokens", "flops", "seconds"  # of every line
CURVE = "loss", "grad_norm", "tokens_per_second", "memory"  # of a training step
NUMBERS = (*COMMON, *CURVE, "lr", "val_loss")
RATES = 1000  # learning rates kept of a run
NAMED = 3  # lines or steps that a note names; of the others it says how many they are


def polars():
    """ValueError: the package is missing."""
    return configurator.optional("polars", "a report of runs")


@dataclass
class Metrics:
    """A metrics.jsonl. Steps count from 1, seconds are of training steps, loss is in nats per token.

    training: columns COMMON and CURVE, all float64, a row for each step that was taken, or the means over equal groups
    of them (of `memory` the largest). evaluations: COMMON and all numbers `val_*`. residual: the records of
    `statistics_interval`. step: the last one. totals: `totals_of` all steps. first_seconds: of the first step, None
    where its line is gone. rates: {step: learning rate} of some steps. notes: what was left out.
    """

    training: "pl.DataFrame"
    evaluations: "pl.DataFrame"
    residual: list[dict]
    step: int
    totals: dict = field(default_factory=dict)
    first_seconds: float | None = None
    rates: dict[int, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def read(path: Path, points: int) -> Metrics:
    """The file with at most `points` rows of training. ValueError: it is not there, or has no step."""
    pl = polars()
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"metrics.jsonl is missing or unreadable ({error.strerror})") from error
    data, notes = without_cut_line(data)
    lines, evaluated, residual, faults = parsed(data)
    notes += faults
    if not lines.height:
        raise ValueError("metrics.jsonl has no step yet" + "".join(f"; {note}" for note in notes))
    return metrics_of(pl, lines, evaluated, residual, points, notes)


def parsed(data: bytes) -> tuple:
    """(frame of NUMBERS, records of evaluations, records of statistics, notes) of whole lines."""
    pl = polars()
    lines = whole(pl, data)
    if lines is not None:
        return lines, list(lines_with(data, b'"val_loss"')), list(lines_with(data, b'"residual"')), []
    records, notes = mended(data)
    evaluated, residual = ([record for record in records if key in record] for key in ("val_loss", "residual"))
    return frame_of(pl, records, dict.fromkeys(NUMBERS, pl.Float64)), evaluated, residual, notes


def without_cut_line(data: bytes) -> tuple[bytes, list[str]]:
    """The file without a last line that a kill, or a run that is just writing, has cut short, and a note of it."""
    start = data.rfind(b"\n") + 1
    try:
        json.loads(data[start:] or b"0")
    except ValueError:
        number = data.count(b"\n") + 1
        return data[:start], [f"the last line of metrics.jsonl, {number}, is cut short"]
    return data, []


def whole(pl, data: bytes):
    """The frame of a file in which nothing is wrong, else None."""
    try:
        lines = pl.read_ndjson(data, schema=dict.fromkeys(NUMBERS, pl.Float64)) if data.strip() else None
    except pl.exceptions.ComputeError:
        return None
    if lines is None or lines["step"].null_count() or not lines["step"].is_sorted():
        return None
    steps = lines.filter(pl.col("loss").is_not_null())["step"]
    integers = (lines["step"] == lines["step"].floor()).all()
    return lines if integers and steps.n_unique() == len(steps) else None


def lines_with(data: bytes, word: bytes) -> Iterator[dict]:
    """The records of the lines that hold a word."""
    position = data.find(word)
    while position >= 0:
        begin, end = data.rfind(b"\n", 0, position) + 1, data.find(b"\n", position)
        end = len(data) if end < 0 else end
        yield json.loads(data[begin:end])
        position = data.find(word, end)


def metrics_of(pl, lines, evaluated: list[dict], residual: list[dict], points: int, notes: list[str]) -> Metrics:
    training = lines.filter(pl.col("loss").is_not_null())
    every = max(training.height // RATES, 1)
    rates = training.gather_every(every).filter(pl.col("lr").is_not_null()).select("step", "lr").rows()
    first = training.row(0, named=True) if training.height else {"step": None}
    return Metrics(
        thinned(pl, training.select(*COMMON, *CURVE), points),
        evaluations_of(pl, evaluated, notes),
        statistics_of(residual, notes),
        int(lines["step"][-1]),
        totals_of(training),
        first["seconds"] if first["step"] == 1 else None,
        {int(step): rate for step, rate in rates},
        notes,
    )


def totals_of(training) -> dict[str, float]:
    """What a run came to, of all of its steps: its last tokens, FLOPs and seconds, the median of `tokens_per_second`,
    the most `memory`. What no step has is left out."""
    columns = {name: training[name].drop_nulls() for name in (*COMMON[1:], "tokens_per_second", "memory")}
    taken = {"tokens_per_second": lambda column: column.median(), "memory": lambda column: column.max()}
    return {name: taken.get(name, lambda c: c[-1])(column) for name, column in columns.items() if len(column)}


def thinned(pl, frame, points: int):
    """Means of at most `points` equal groups of rows; of `memory` the largest."""
    if frame.height <= points:
        return frame
    group = (pl.int_range(pl.len()) * points // pl.len()).alias("group")
    means = [pl.col(name).max() if name == "memory" else pl.col(name).mean() for name in frame.columns]
    return frame.group_by(group, maintain_order=True).agg(means).drop("group")


def evaluations_of(pl, records: list[dict], notes: list[str]):
    """A frame of the evaluations whose loss is a finite number."""
    names = list(dict.fromkeys([*COMMON, "val_loss", *(k for r in records for k in r if k.startswith("val_"))]))
    faults: dict[str, list] = {}
    rows = [{k: v for k, v in r.items() if k in names and is_number(r, k, faults, r.get("step"))} for r in records]
    notes += [f"{what}: {listed('step', steps)}" for what, steps in faults.items()]
    types = {name: pl.Int64 if name == "step" else pl.Float64 for name in names}
    return frame_of(pl, [row for row in rows if "val_loss" in row], types).unique(
        "step", keep="last", maintain_order=True
    )


def frame_of(pl, records: list[dict], types: dict):
    """A frame with these columns; what a record lacks is null."""
    columns = {name: [r.get(name) for r in records] for name in types}
    for name, values in columns.items():
        convert = int if types[name] == pl.Int64 else float
        columns[name] = [None if value is None else convert(value) for value in values]
    return pl.DataFrame(columns, schema=types)


def statistics_of(records: list[dict], notes: list[str]) -> list[dict]:
    """Records of {name: a finite number per block}."""
    bad = [record["step"] for record in records if not checks.is_residual(record["residual"])]
    notes += [f"statistics of the stream that are not finite numbers: {listed('step', bad)}"] if bad else []
    return [{"step": r["step"], "residual": r["residual"]} for r in records if r["step"] not in bad]


# ---- a file that is not whole ----


def mended(data: bytes) -> tuple[list[dict], list[str]]:
    """(the records that can be used, notes on the others)."""
    faults: dict[str, list[int]] = {}
    records = []
    for number, line in enumerate(data.split(b"\n"), 1):
        if line.strip() and (record := record_of(line, number, faults)) is not None:
            records.append(record)
    notes = [f"{what}: {listed('line', numbers)} of metrics.jsonl" for what, numbers in faults.items()]
    kept = rising(records)
    if len(kept) < len(records):
        used = {id(record) for record in kept}
        gone = [record["step"] for record in records if id(record) not in used]
        notes.append(f"steps that come again later in the file, whose later lines count: {listed('step', gone)}")
    return kept, notes


def record_of(line: bytes, number: int, faults: dict[str, list[int]]) -> dict | None:
    """The line's record without what is no finite number; None where it cannot be used."""
    try:
        record = json.loads(line)
    except ValueError:  # no JSON, or no UTF-8
        faults.setdefault("no JSON", []).append(number)
        return None
    if not isinstance(record, dict):
        faults.setdefault("no JSON object", []).append(number)
        return None
    if type(record.get("step")) is not int:
        faults.setdefault("step is no whole number", []).append(number)
        return None
    numbers = [key for key in record if key in NUMBERS and key != "val_loss"]  # which evaluations_of looks at
    bad = [key for key in numbers if not is_number(record, key, faults, number)]
    return {key: value for key, value in record.items() if key not in bad}


def is_number(record: dict, key: str, faults: dict[str, list], where) -> bool:
    """Whether a record's value is a finite number; one that is neither that nor null is noted with where it is."""
    value = record[key]
    if value is None:
        return False
    if type(value) in (int, float) and abs(value) <= sys.float_info.max:
        return True
    what = "no number" if type(value) is not float else "NaN" if math.isnan(value) else "infinite"
    faults.setdefault(f"{key} is {what}", []).append(where)
    return False


def rising(records: list[dict]) -> list[dict]:
    """Without what a run did before it went on from an earlier step; of a step that comes twice the later counts."""
    kept, lowest, trained = [], math.inf, math.inf
    for record in reversed(records):
        step, trains = record["step"], "loss" in record
        if step > lowest or (trains and step >= trained):
            continue
        kept.append(record)
        lowest, trained = step, step if trains else trained
    return kept[::-1]


def listed(unit: str, numbers: list) -> str:
    """line 5; steps 5, 6, 7 and 20 more."""
    shown = ", ".join(map(str, numbers[:NAMED]))
    more = f" and {len(numbers) - NAMED:,} more" if len(numbers) > NAMED else ""
    return f"{unit}{'s' * (len(numbers) > 1)} {shown}{more}"
