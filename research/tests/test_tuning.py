"""The search for learning rates, on surfaces whose best point is known."""

import json
import math
from collections.abc import Callable
from itertools import pairwise

import pytest
from helpers import ROOT

from research import tuning

NUM_TRIES = 12


def search(loss_at: Callable[[tuning.Point], float]) -> dict[tuning.Point, float]:
    """Run the search on a function of a point, and return the losses in the order of the tries."""
    losses = {}
    for _ in range(NUM_TRIES):
        point = tuning.next_point(losses, num_rates=2)
        assert point not in losses
        losses[point] = loss_at(point)
    return losses


def bowl(muon: float, adamw: float, coupling: float = 0.0) -> Callable[[tuning.Point], float]:
    """Return a loss with its minimum at a point."""

    def loss_at(point: tuning.Point) -> float:
        x = point[0] - muon
        y = point[1] - adamw
        return x**2 + y**2 + coupling * x * y

    return loss_at


@pytest.mark.parametrize("best", [(0, 0), (-1, 1), (1, -1), (2, 0), (0, -2), (1, 1)])
def test_the_best_whole_step_is_found_and_inside(best):
    losses = search(bowl(*best))
    assert tuning.find_best(losses) == best
    assert tuning.is_inside(losses)


def test_a_minimum_between_whole_steps_is_found_by_half_steps():
    losses = search(bowl(0.5, 0.0))
    assert tuning.find_best(losses) == (0.5, 0)


def test_coupled_rates_are_followed_diagonally():
    losses = search(bowl(1, -1, coupling=0.5))
    assert tuning.find_best(losses) == (1, -1)


def test_a_minimum_that_is_too_far_is_not_inside():
    losses = search(bowl(6, -6))
    assert not tuning.is_inside(losses)


def test_a_run_that_diverged_is_never_the_best():
    losses = search(lambda point: math.inf if point[0] > 0 else point[1] ** 2 - point[0])
    assert tuning.find_best(losses) == (0, 0)


@pytest.mark.parametrize("num_rates", [1, 2])
def test_rates_fall_by_larger_and_larger_factors_while_every_run_diverges(num_rates):
    losses = {}
    for _ in range(9):
        losses[tuning.next_point(losses, num_rates)] = math.inf
    assert all(len(set(point)) == 1 for point in losses)
    powers = [point[0] for point in losses]
    factors = [first - second for first, second in pairwise(powers)]
    assert powers[0] == 0
    assert factors == sorted(factors)
    assert factors[0] >= 2
    assert powers[-1] < -100  # a factor of 2^100


def test_a_search_from_a_rate_that_is_far_too_high_finds_the_best():
    """Runs above a power of -20 diverge, and the best is at -23."""
    losses = {}
    for _ in range(NUM_TRIES + 6):
        point = tuning.next_point(losses, num_rates=1)
        assert point not in losses
        losses[point] = math.inf if point[0] > -20 else abs(point[0] + 23)
    assert tuning.find_best(losses) == (-23,)
    assert tuning.is_inside(losses)


def test_the_search_does_not_depend_on_where_it_was_interrupted():
    losses = search(bowl(1, 0))
    for count in range(1, len(losses)):
        first = dict(list(losses.items())[:count])
        assert tuning.next_point(first, num_rates=2) == list(losses)[count]


def test_corners_complete_the_cross_to_nine_points():
    points = [(1, 0), *tuning.list_neighbors((1, 0)), *tuning.list_corners((1, 0))]
    assert sorted(points) == [(x, y) for x in (0, 1, 2) for y in (-1, 0, 1)]


def test_rates_are_powers_of_two_over_the_start():
    assert [tuning.to_rate(0.02, power) for power in (0, 1, -2, -0.5)] == [
        0.02,
        0.04,
        0.005,
        0.01414,
    ]


def read_tries(name: str, keys: tuple[str, ...]) -> list[list[dict]]:
    """Return the tries of each arm of the controlled comparison, in their order."""
    path = ROOT / "results" / "residual_streams" / f"{name}.jsonl"
    tries: dict[tuple, list[dict]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row["phase"] == "try":
            tries.setdefault(tuple(row[key] for key in keys), []).append(row)
    return list(tries.values())


STORED = {
    "language": read_tries("language", ("arm", "rung")),
    "registers": read_tries("registers", ("arm", "size")),
}


@pytest.mark.parametrize("name", STORED)
def test_the_search_makes_the_tries_that_the_controlled_comparison_made(name):
    assert len(STORED[name]) == 15
    for rows in STORED[name]:
        losses = {}
        for row in rows:
            point = row["point"] if name == "language" else [row["power"]]
            assert tuning.next_point(losses, num_rates=len(point)) == tuple(point), row["arm"]
            losses[tuple(point)] = math.inf if row["val_loss"] is None else row["val_loss"]
