"""runs.csv: what a study keeps of its runs in git, a row each: settings, seed, last scores, cost, commit.

A column has the name of a setting (`max_steps`) or a score (`val_loss`); what else is known has its field's name before
it (`totals.tokens`, `machine.chip`, `corpus.sha256`). A cell is text or JSON, empty where there is nothing. Curves stay
in the run folders, which research/archive.py packs.
"""

import csv
import fcntl
import io
import json
import os
from pathlib import Path

import configurator
from research.reporting import records

PLAIN = "name", "step", "parameters", "commit", "processes", "first_seconds", "notes", "accuracy"  # fields as they are
NESTED = "totals", "machine", "corpus"
LONG = {"packages"}  # of a corpus: a list of them, which its sha256 stands for


def write(runs: list, path: Path) -> tuple[int, int]:
    """Add a row for each run, in the place of the row of the same name; other processes may do so at the same time.

    Returns (rows added, rows replaced). ValueError: the file is no runs.csv.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        before = {row["name"]: row for row in rows_of(path)} if path.exists() else {}
        new = {run.name: row_of(run) for run in runs}
        rows = list({**before, **new}.values())
        columns = sorted({key for row in rows for key in row}, key=order)
        text = io.StringIO()
        table = csv.DictWriter(text, columns, lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
        configurator.replace_text(path, text.getvalue())
    finally:
        os.close(folder)
    return len(new.keys() - before.keys()), len(new.keys() & before.keys())


def order(column: str) -> tuple:
    """Name, scores, what the run was and cost, then settings, then what is nested; by name within each."""
    groups = column == "name", column.startswith("val_"), column in (*PLAIN, "model", "seed"), "." not in column
    return (*(not each for each in groups), column)


def row_of(run) -> dict[str, str]:
    """A run as text by column."""
    final = {key: value for key, value in (run.final or {}).items() if key.startswith("val_")}
    known = {name: getattr(run, name) for name in PLAIN} | final | run.settings
    known["model"] = run.stem
    known |= {f"val_{key}": (run.final or {}).get(key) for key in records.COMMON}
    known["notes"], known["accuracy"] = run.notes or None, run.accuracy or None
    for name in NESTED:
        inner = getattr(run, name) or {}
        known |= {f"{name}.{key}": value for key, value in inner.items() if key not in LONG}
    missing = {key for key, value in known.items() if value is None and key not in run.settings}
    return {key: cell(value) for key, value in known.items() if key not in missing}


def cell(value) -> str:
    """Text as it is, unless it reads as JSON; all else as JSON."""
    return value if value and isinstance(value, str) and parsed(value) == value else json.dumps(value)


def parsed(text: str):
    try:
        return json.loads(text)
    except ValueError:
        return text


def rows_of(path: Path) -> list[dict[str, str]]:
    """The rows without their empty cells. ValueError: it is no runs.csv, or a name comes twice."""
    with open(path, encoding="utf-8", newline="") as file:
        rows = [{key: value for key, value in row.items() if value} for row in csv.DictReader(file)]
    names = [row.get("name") for row in rows]
    if not rows or None in names:
        raise ValueError(f"{path} is no file of report.py runs: give a run folder, or a runs.csv")
    if again := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"{path} has two rows named {again[0]!r}: take one out")
    return rows


def fields_of(row: dict[str, str]) -> dict:
    """The fields of the Run of a row, its path aside; it has no curve. ValueError: a column is missing."""
    pl = records.polars()
    values = {key: parsed(text) for key, text in row.items()}
    found: dict = {name: values.pop(name, None) for name in PLAIN}
    for name in NESTED:
        inner = {key.partition(".")[2]: values.pop(key) for key in list(values) if key.startswith(f"{name}.")}
        found[name] = inner or None
    final = {key: values.pop(key) for key in list(values) if key.startswith("val_")}
    final = {key.removeprefix("val_") if key[4:] in records.COMMON else key: value for key, value in final.items()}
    if found["step"] is None:
        raise ValueError("its row has no step")
    types = dict.fromkeys((*records.COMMON, *records.CURVE), pl.Float64)
    settings = {"settings": values, "stem": values.get("model"), "seed": values.get("seed")}
    lists = {key: found[key] or [] for key in ("notes", "accuracy")}
    frames = {"training": pl.DataFrame(schema=types), "evaluations": pl.DataFrame([final] if final else None)}
    return found | settings | lists | frames | {key: found[key] or {} for key in ("corpus", "totals")}
