"""The search for the learning rates of an arm: the same number of tries for every arm.

A point is a pair (Muon's rate, AdamW's rate), written as powers of two over START. The search tries
a cross of five points, moves the cross to the best point until the best is in its middle, and
spends the tries that are left around the best of all.
"""

import math
from collections.abc import Mapping

Point = tuple[float, float]

START = (0.02, 0.04)  # in the middle between the demo's best rates of additive and of DDL
NUM_TRIES = 12
STEPS = ((-1, 0), (1, 0), (0, -1), (0, 1))
CORNERS = ((-1, -1), (-1, 1), (1, -1), (1, 1))


def to_rates(point: Point) -> tuple[float, float]:
    """Return the learning rates of Muon and of AdamW at a point."""
    muon, adamw = (start * 2**power for start, power in zip(START, point))
    return muon, adamw


def find_best(losses: Mapping[Point, float]) -> Point:
    """Return the point with the lowest loss; a run that diverged has the loss infinity."""
    return min(losses, key=lambda point: losses[point])


def find_best_whole_step(losses: Mapping[Point, float]) -> Point:
    """Return the best point among those on the grid of whole steps."""
    return find_best({point: loss for point, loss in losses.items() if is_whole(point)})


def list_neighbors(point: Point, step: float = 1) -> list[Point]:
    """Return the four points that are a step away in one of the two rates."""
    return [(point[0] + step * muon, point[1] + step * adamw) for muon, adamw in STEPS]


def list_corners(point: Point, step: float = 1) -> list[Point]:
    """Return the four points that complete a cross to nine points."""
    return [(point[0] + step * muon, point[1] + step * adamw) for muon, adamw in CORNERS]


def next_point(losses: Mapping[Point, float]) -> Point | None:
    """Return the next point that the search tries; None after NUM_TRIES of them.

    Args:
        losses: of the points that were tried, in the order of the tries
    """
    if len(losses) >= NUM_TRIES:
        return None
    if not losses:
        return (0, 0)
    best_whole_step = find_best_whole_step(losses)
    for point in list_neighbors(best_whole_step):
        if point not in losses:
            return point
    # The best whole step is inside. Half steps around the best of all points follow: a cross, its
    # corners, and the corners of the whole steps.
    best = find_best(losses)
    finer_points = [
        *list_neighbors(best, step=0.5),
        *list_corners(best, step=0.5),
        *list_corners(best_whole_step),
    ]
    for point in finer_points:
        if point not in losses:
            return point
    return None


def is_whole(point: Point) -> bool:
    """Return whether a point is on the grid of whole steps."""
    return all(float(power).is_integer() for power in point)


def is_inside(losses: Mapping[Point, float]) -> bool:
    """Return whether the best point on the grid of whole steps was tried with all its neighbors.

    The best of all points may be a half step beside it.
    """
    best = find_best_whole_step(losses)
    return math.isfinite(losses[best]) and all(point in losses for point in list_neighbors(best))


# ---- one rate ----


def find_best_power(losses: Mapping[float, float]) -> float:
    """Return the power of two with the lowest loss; a run that diverged has the loss infinity."""
    return min(losses, key=lambda power: losses[power])


def next_power(losses: Mapping[float, float]) -> float:
    """Return the next power of two that the search for a single rate tries.

    The search moves by whole powers until the best of them has been tried with both neighbors, and
    then halves the step around the best of all.

    Args:
        losses: of the powers that were tried, in the order of the tries
    """
    if not losses:
        return 0.0
    whole = {power: loss for power, loss in losses.items() if power.is_integer()}
    best_whole = find_best_power(whole)
    best = find_best_power(losses)
    step = 1.0
    candidates = [best_whole - step, best_whole + step]
    while all(power in losses for power in candidates):
        step /= 2
        candidates = [best - step, best + step]
    return next(power for power in candidates if power not in losses)
