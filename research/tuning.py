"""The search for the learning rates of a model: every model gets the same number of tries.

A point has one or two numbers, one for each rate: powers of two over the rate at which the search starts.
The search tries a cross around the start, moves the cross to the best point until the best is in its
middle, and spends the remaining tries around the best of all, in steps that become smaller. As long
as every run diverges, it lowers all rates, in steps that become larger.
"""

import math
from collections.abc import Mapping
from itertools import product

Point = tuple[float, ...]
# of the search as long as every run diverges, in powers of two
LARGEST_STEP = 32
Losses = Mapping[Point, float]  # of the points that were tried; infinity of a run that diverged


def to_rate(start: float, power: float) -> float:
    """Return the rate at a power of two over the start, with four digits, as files and tables show it."""
    return float(f"{start * 2**power:.4g}")


def has_converged(losses: Losses) -> bool:
    """Return whether any run has a finite loss."""
    return any(map(math.isfinite, losses.values()))


def find_best(losses: Losses) -> Point:
    """Return the point with the lowest loss."""
    return min(losses, key=lambda point: losses[point])


def find_best_whole_step(losses: Losses) -> Point:
    """Return the best point among those on the grid of whole steps."""
    return find_best(
        {
            point: loss
            for point, loss in losses.items()
            if all(float(power).is_integer() for power in point)
        }
    )


def list_neighbors(point: Point, step: float = 1) -> list[Point]:
    """Return the points that are a step away in one of the rates."""
    neighbors = []
    for index, power in enumerate(point):
        for moved_power in (power - step, power + step):
            neighbors.append((*point[:index], moved_power, *point[index + 1 :]))
    return neighbors


def list_corners(point: Point, step: float = 1) -> list[Point]:
    """Return the points that are a step away in every rate."""
    return list(product(*((power - step, power + step) for power in point)))


def next_point(losses: Losses, num_rates: int) -> Point:
    """Return the next point that the search tries.

    Args:
        losses: of the points that were tried, in the order of the tries
        num_rates: 1 or 2
    """
    if not has_converged(losses):
        power = -sum(min(2**index, LARGEST_STEP) for index in range(1, len(losses) + 1))
        return (power,) * num_rates
    best_whole_step = find_best_whole_step(losses)
    for point in list_neighbors(best_whole_step):
        if point not in losses:
            return point
    # The best whole step is inside. Smaller steps around the best of all points follow.
    best = find_best(losses)
    step = 0.5
    while True:
        finer_points = [*list_neighbors(best, step), *list_corners(best, step)]
        if step == 0.5:
            finer_points += list_corners(best_whole_step)
        for point in finer_points:
            if point not in losses:
                return point
        step /= 2


def is_inside(losses: Losses) -> bool:
    """Return whether the best point on the grid of whole steps was tried with all its neighbors.

    The best of all points may be a half step beside it.
    """
    best = find_best_whole_step(losses)
    return math.isfinite(losses[best]) and all(point in losses for point in list_neighbors(best))
