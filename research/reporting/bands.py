"""The runs of a group as one curve: the mean over seeds, and the band of its 95% interval."""

from dataclasses import dataclass

import numpy as np

from research.intervals import ERROR, student
from research.reporting.runs import AXES, Run

POINTS = 300  # of a curve at most: more than a column of a page can show


@dataclass(frozen=True)
class Series:
    """Of one run: `steps` rising (n,), `x` the other axes by name (n,), `values` (n,), all float64."""

    steps: np.ndarray
    x: dict[str, np.ndarray]
    values: np.ndarray


@dataclass(frozen=True)
class Curve:
    """Of `runs` runs. steps, mean, half (n,): half the width of the 95% interval of the mean, NaN where it is of one.

    x: the other axes by name, means over the runs as well, where these differ in them, as they do in seconds.
    """

    steps: np.ndarray
    x: dict[str, np.ndarray]
    mean: np.ndarray
    half: np.ndarray
    runs: int


def series(run: Run, frame, column: str, axes=tuple(AXES), first_step: bool = False) -> Series:
    """Of a frame's rows that have the column and these axes; of a step that comes twice the last one counts.

    first_step=False: the seconds are those after the first step.
    """
    needed = list(dict.fromkeys(["step", *(AXES[axis] for axis in axes), column]))
    have = [name for name in needed if name in frame.columns]
    frame = frame.drop_nulls(have).unique("step", keep="last", maintain_order=True) if have == needed else frame.clear()
    x = {axis: run.x(frame, axis, first_step).to_numpy().astype(float) for axis in axes}
    values = frame[column].to_numpy().astype(float) if column in frame.columns else np.empty(0)
    return Series(frame["step"].to_numpy().astype(float), x, values)


def smooth(values, window: int) -> np.ndarray:
    """Centred moving average; at the ends over what is there."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    low, high = np.maximum(index - window // 2, 0), np.minimum(index + window // 2 + 1, len(values))
    return (sums[high] - sums[low]) / (high - low)


def smoothed(run: Series) -> np.ndarray:
    """Over 2% of its points."""
    return smooth(run.values, max(len(run.values) // 100, 1) * 2)


def band(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(runs, n) -> mean (n,), half the width of its interval (n,): Student's, runs - 1 degrees; NaN of one run."""
    runs = len(values)
    half = np.full(values.shape[1], np.nan)
    if runs > 1:
        half = student().stdtrit(runs - 1, 1 - ERROR / 2) * values.std(axis=0, ddof=1) / np.sqrt(runs)
    return values.mean(axis=0), half


def training_curve(runs: list[Series]) -> Curve | None:
    """Over the steps that all runs have, `POINTS` of them; every run smoothed over 2% of its points, and straight
    between them. None: there are no such steps."""
    if not all(len(run.steps) for run in runs):
        return None
    first, last = max(run.steps[0] for run in runs), min(run.steps[-1] for run in runs)
    if first > last:
        return None
    grid = np.unique(np.linspace(first, last, POINTS).round())

    def on_grid(rows):
        return np.stack([np.interp(grid, run.steps, row) for run, row in zip(runs, rows)])

    x = {name: on_grid([run.x[name] for run in runs]).mean(axis=0) for name in runs[0].x}
    return Curve(grid, x, *band(on_grid(map(smoothed, runs))), len(runs))


def validation_curve(runs: list[Series]) -> Curve | None:
    """Of the steps at which all runs were evaluated; None: there are none."""
    shared = shared_steps(runs)
    if not len(shared):
        return None
    rows = [np.searchsorted(run.steps, shared) for run in runs]
    x = {name: np.mean([run.x[name][row] for run, row in zip(runs, rows)], axis=0) for name in runs[0].x}
    return Curve(shared, x, *band(np.stack([run.values[row] for run, row in zip(runs, rows)])), len(runs))


def shared_steps(runs: list[Series]) -> np.ndarray:
    """The steps that all have; of more than `POINTS` as many, evenly, the last among them."""
    shared = runs[0].steps
    for run in runs[1:]:
        shared = np.intersect1d(shared, run.steps)
    if len(shared) > POINTS:
        shared = shared[np.linspace(0, len(shared) - 1, POINTS).round().astype(int)]
    return shared
