"""Finished runs in a file of JSON lines, small enough to be committed: `report.py pack`.

A line holds all that a `Run` holds, with fewer points of its training curve and numbers of six digits; the last
evaluation and the totals, of which tables are made, are as they were.
"""

import dataclasses
import json
from pathlib import Path

import configurator
from evaluation.published import Published
from research.reporting import checks, records

FORMAT = 1  # of a line, its `packed`
POINTS = 200
DIGITS = 6


def pack(runs: list, out: Path, points: int = POINTS) -> tuple[int, int]:
    """Write the runs to a file, in the place of those of the same name that it has; the file is replaced whole.

    Returns (how many are new, how many were there under the same name). ValueError: the file holds something else.
    """
    before = {record["name"]: record for record in read(out)} if out.exists() else {}
    new = {run.name: record_of(run, points) for run in runs}
    assert len(new) == len(runs), "runs have names of their own"
    out.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(record, allow_nan=False) + "\n" for record in {**before, **new}.values()]
    configurator.replace_text(out, "".join(lines))
    return len(new.keys() - before.keys()), len(new.keys() & before.keys())


def record_of(run, points: int) -> dict:
    """A run as JSON."""
    pl = records.polars()
    record = {"packed": FORMAT, "name": run.name}
    for field in dataclasses.fields(run):
        if field.name not in ("name", "path", "training", "evaluations", "residual", "published"):
            record[field.name] = getattr(run, field.name)
    published = run.published and {k: v for k, v in dataclasses.asdict(run.published).items() if k != "corpus"}
    training, evaluations = records.thinned(pl, run.training, points), columns_of(run.evaluations)
    last = run.evaluations.tail(1).to_dict(as_series=False)
    return record | {
        "published": published,
        "training": rounded(columns_of(training)),
        "evaluations": {key: rounded(values[:-1]) + last[key] for key, values in evaluations.items()},
        "residual": rounded(run.residual),
    }


def columns_of(frame) -> dict[str, list]:
    return frame.to_dict(as_series=False)


def rounded(value):
    """Numbers of six significant digits, in lists and objects as well; whole ones as they are."""
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    if not isinstance(value, float):
        return value
    short = float(f"{value:.{DIGITS}g}")
    return int(short) if short.is_integer() and abs(short) < 2**53 else short


def read(path: Path) -> list[dict]:
    """The lines of a packed file. ValueError: it is another file, or damaged."""
    found, names = [], set()
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ValueError(f"line {number} of {path} is no JSON: make the file again by report.py pack") from error
        if not isinstance(record, dict) or record.get("packed") != FORMAT:
            hint = ": give its folder" if path.name == "metrics.jsonl" else ""
            raise ValueError(f"{path} is no file of report.py pack{hint}")
        name = str(record.get("name"))
        if name in names:
            raise ValueError(f"line {number} of {path} is a second run {name!r}: rename it, or take it out")
        names.add(name)
        found.append(record)
    return found


def unpacked(record: dict) -> dict:
    """The fields of the Run of a line, its path aside. ValueError: it is damaged."""
    pl = records.polars()
    if fault := checks.fault_of_packed(record):
        raise ValueError(f"damaged: pack it again ({fault})")
    try:
        fields = {key: value for key, value in record.items() if key != "packed"}
        types = dict.fromkeys((*records.COMMON, *records.CURVE), pl.Float64)
        fields["training"] = pl.DataFrame(fields["training"], schema=types, strict=False)
        types = {name: pl.Int64 if name == "step" else pl.Float64 for name in fields["evaluations"]}
        fields["evaluations"] = pl.DataFrame(fields["evaluations"], schema=types, strict=False)
        if fields["evaluations"].select("step", "val_loss").null_count().sum_horizontal()[0]:
            raise ValueError("an evaluation without a step or a loss")
        if fields["published"]:
            texts = {key: tuple(fields["published"][key]) for key in ("reasons", "notes")}
            fields["published"] = Published(**{**fields["published"], **texts}, corpus=fields["corpus"])
    except (TypeError, KeyError, ValueError, pl.exceptions.PolarsError) as error:
        raise ValueError(f"damaged: pack it again ({type(error).__name__}: {error})") from error
    return fields
