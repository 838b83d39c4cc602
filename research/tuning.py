"""The search for the learning rates of a model, in sweep.py and in the track.

A point has one or two numbers, one for each rate: powers of two over the rate at which the search starts.
The search tries a cross around the start, and moves it to the best point until the best is in its
middle. On each line through the best point, the minimum of a parabola through the three lowest losses
gives the rate.
"""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

Point = tuple[float, ...]
Losses = Mapping[Point, float]  # of the points that were tried; infinity of a run that diverged


class Search(NamedTuple):
    """The state of a search: the losses of its complete crosses, and the points to try next."""

    losses: dict[Point, float]
    missing: list[Point]


def to_rate(start: float, power: float) -> float:
    """Return the rate at a power of two over the start, with four digits, as files and tables show it."""
    return float(f"{start * 2**power:.4g}")


def has_converged(losses: Losses) -> bool:
    """Return whether any run has a finite loss."""
    return any(map(math.isfinite, losses.values()))


def find_best(losses: Losses) -> Point:
    """Return the point with the lowest loss."""
    return min(losses, key=lambda point: losses[point])


def list_neighbors(point: Point) -> list[Point]:
    """Return the points that are a step away in one of the rates."""
    neighbors = []
    for index, power in enumerate(point):
        for moved_power in (power - 1, power + 1):
            neighbors.append((*point[:index], moved_power, *point[index + 1 :]))
    return neighbors


def is_inside(losses: Losses) -> bool:
    """Return whether the best point was tried with all its neighbors."""
    return all(point in losses for point in list_neighbors(find_best(losses)))


def follow_cross(
    get_loss: Callable[[Point], float | None], num_rates: int, max_tries: int
) -> Search:
    """Follow a search that tries a cross around its start and moves it to the best point.

    It ends when the best point is in the middle of a cross, or when the next cross would need more
    than max_tries. Losses decide only when a cross is complete, so the points depend neither on
    stops nor on the number of jobs.

    Args:
        get_loss: returns the loss at a point, infinity of a run that diverged, or None
    """
    center: Point = (0.0,) * num_rates
    losses: dict[Point, float] = {}
    while True:
        cross = [center, *list_neighbors(center)]
        new_points = [point for point in cross if point not in losses]
        if not new_points or len(losses) + len(new_points) > max_tries:
            return Search(losses, missing=[])
        new_losses = {point: get_loss(point) for point in new_points}
        missing = [point for point, loss in new_losses.items() if loss is None]
        if missing:
            return Search(losses, missing)
        losses.update(new_losses)
        center = find_best(losses)


def fit_axis(losses: Losses, axis: int) -> tuple[float, float]:
    """Fit a parabola to the three lowest losses on the line through the best point along an axis.

    Returns:
        the power at its minimum, at most one step beside the best point, and its curvature c: at a
        distance of x powers of two, the loss is higher by c * x**2. If the three losses have no
        minimum, that is the power of the best point, and nan.
    """
    best = find_best(losses)
    line = {}
    for point, loss in losses.items():
        is_on_line = all(point[i] == best[i] for i in range(len(best)) if i != axis)
        if is_on_line and math.isfinite(loss):
            line[point[axis]] = loss
    lowest = sorted(sorted(line, key=lambda power: line[power])[:3])
    if len(lowest) < 3:
        return best[axis], math.nan
    a, b, c = lowest
    left_slope = (line[b] - line[a]) / (b - a)
    right_slope = (line[c] - line[b]) / (c - b)
    curvature = (right_slope - left_slope) / (c - a)
    if curvature <= 0:
        return best[axis], math.nan
    minimum = (a + b) / 2 - left_slope / (2 * curvature)
    return min(max(minimum, best[axis] - 1), best[axis] + 1), curvature


def find_minimum(losses: Losses) -> Point:
    """Return the minimum of the parabolas along all axes of a search."""
    num_rates = len(next(iter(losses)))
    return tuple(fit_axis(losses, axis)[0] for axis in range(num_rates))
