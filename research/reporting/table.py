"""`report.py table`: the last evaluation of each run, a row for each setting over its seeds, and differences."""

import numpy as np

from evaluation import tables
from research import intervals
from research.reporting.groups import METRICS, SHARES, Comparison, Group, shown, validated_on
from research.reporting.runs import Run

FIGURES = "val_loss", "val_bits_per_byte", *SHARES


def row_of(run: Run) -> dict:
    """A run as it is stored."""
    about = {"run": run.name, "model": run.stem, "parameters": run.parameters}
    about["trained_at"] = run.commit  # None in checkpoints from before they said so
    return {**about, "seed": run.seed, **run.final}


def group_row(group: Group) -> dict:
    """A group as it is stored: what its runs share, the mean seconds, and every figure over its runs."""
    rows = [row_of(run) for run in group.runs]
    about = {"name": group.name, "model": group.stem, "parameters": rows[0]["parameters"], "step": group.step}
    seconds = [row.get("seconds") for row in rows]
    about |= {"seconds": None if None in seconds else float(np.mean(seconds))}
    about |= {"runs": [row["run"] for row in rows], "seeds": group.seeds}
    found = {metric: group.values(metric) for metric in FIGURES}
    return about | {metric: intervals.summary(values) for metric, values in found.items() if values}


def comparison_row(comparison: Comparison) -> dict:
    """A comparison as it is stored."""
    estimate = comparison.estimate
    return {
        "baseline": comparison.baseline.name,
        "metric": comparison.metric,
        "n": estimate.n,
        "mean": estimate.mean,
        "ci95": estimate.half if estimate.n > 1 else None,
        "text": shown(estimate, comparison.metric).text("+" + form(comparison.metric))
        + ("" if comparison.paired else " unpaired"),
        "verdict": comparison.verdict,
        "paired": comparison.paired,
    }


def rows_of(groups: list[Group], comparisons: list[Comparison]) -> list[dict]:
    """The table as it is stored."""
    against = {id(each.group): comparison_row(each) for each in comparisons if each.estimate}
    rows = [group_row(group) for group in groups]
    return [row | ({"against": against[id(group)]} if id(group) in against else {}) for group, row in zip(groups, rows)]


def notes_on(groups: list[Group], comparisons: list[Comparison]) -> list[str]:
    """What a reader of the table must know, a line each."""
    notes = [f"{group.name}: {line}" for group in groups for line in group.cautions]
    names: dict[str, list[str]] = {}
    for group in groups:
        for run in group.runs:
            names.setdefault(str(validated_on(run, "val_loss")), []).append(group.name)
    if len(names) > 1:
        texts = " | ".join(", ".join(dict.fromkeys(each)) for each in names.values())
        notes.append(f"validated on other text or in other tokens, their losses are no comparison: {texts}")
    for each in comparisons:
        if each.estimate is None:
            notes.append(f"{each.group.name} is not compared: {each.reason}")
        elif not each.paired:
            notes.append(f"{each.group.name} is compared unpaired: {each.reason}")
    return notes


def markdown(groups: list[dict]) -> str:
    """A row for each group, as stored; a single run's figures stand alone. Seconds are shown where all runs are single:
    those of a sweep may have shared their machine. What no group has is no column."""
    figures = [key for key in FIGURES if any(key in group for group in groups)]
    timed = all(len(group["runs"]) == 1 for group in groups)
    header = ["model", "parameters", "steps", *["seconds"] * timed, *(METRICS[key] for key in figures)]
    rows = []
    for group in groups:
        parameters = group["parameters"] and f"{group['parameters']:,}"
        seconds = None if group["seconds"] is None else f"{group['seconds']:.0f}"
        about = [f"`{group['name']}`", parameters, group["step"], *[seconds] * timed]
        rows.append([*about, *(figure(group, key) for key in figures)])
    if compared := [group["against"] for group in groups if "against" in group]:
        what = METRICS[compared[0]["metric"]]
        header += [f"{what} less that of `{compared[0]['baseline']}`", "that is"]
        for row, group in zip(rows, groups):
            row += [group.get("against", {}).get(key) for key in ("text", "verdict")]
    return tables.markdown(header, rows)


def figure(group: dict, key: str) -> str | None:
    """Mean ± half the 95% interval (number of runs) of a figure; a single run's alone, None where there is none."""
    if not (values := group.get(key, {}).get("values")):
        return None
    estimate = shown(intervals.interval(values), key)
    return f"{estimate.mean:{form(key)}}" if len(values) == 1 else estimate.text(form(key))


def form(key: str) -> str:
    return ".2f" if key in SHARES else ".3f"
