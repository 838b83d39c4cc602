"""The search for learning rates, on surfaces whose best point is known."""

import math
from collections.abc import Callable

import pytest

from research.residual_streams import rates


def search(loss_at: Callable[[rates.Point], float]) -> dict[rates.Point, float]:
    """Run the search on a function of a point, and return the losses in the order of the tries."""
    losses = {}
    while (point := rates.next_point(losses)) is not None:
        assert point not in losses
        losses[point] = loss_at(point)
    return losses


def bowl(muon: float, adamw: float, coupling: float = 0.0) -> Callable[[rates.Point], float]:
    """Return a loss with its minimum at a point."""

    def loss_at(point: rates.Point) -> float:
        x = point[0] - muon
        y = point[1] - adamw
        return x**2 + y**2 + coupling * x * y

    return loss_at


@pytest.mark.parametrize("best", [(0, 0), (-1, 1), (1, -1), (2, 0), (0, -2), (1, 1)])
def test_the_best_whole_step_is_found_and_inside(best):
    losses = search(bowl(*best))
    assert rates.find_best(losses) == best
    assert rates.is_inside(losses)


@pytest.mark.parametrize("best", [(0, 0), (-1, 1), (2, 1), (5, 5), (0.5, -0.5)])
def test_every_arm_gets_the_same_number_of_tries(best):
    assert len(search(bowl(*best))) == rates.NUM_TRIES


def test_a_minimum_between_whole_steps_is_found_by_half_steps():
    losses = search(bowl(0.5, 0.0))
    assert rates.find_best(losses) == (0.5, 0)


def test_coupled_rates_are_followed_diagonally():
    losses = search(bowl(1, -1, coupling=0.5))
    assert rates.find_best(losses) == (1, -1)


def test_a_minimum_that_is_too_far_is_not_inside():
    losses = search(bowl(6, -6))
    assert not rates.is_inside(losses)


def test_a_run_that_diverged_is_never_the_best():
    losses = search(lambda point: math.inf if point[0] > 0 else point[1] ** 2 - point[0])
    assert rates.find_best(losses) == (0, 0)


def test_the_search_does_not_depend_on_where_it_was_interrupted():
    losses = search(bowl(1, 0))
    for count in range(1, len(losses)):
        first = dict(list(losses.items())[:count])
        assert rates.next_point(first) == list(losses)[count]


def test_corners_complete_the_cross_to_nine_points():
    points = [(1, 0), *rates.list_neighbors((1, 0)), *rates.list_corners((1, 0))]
    assert sorted(points) == [(x, y) for x in (0, 1, 2) for y in (-1, 0, 1)]


def test_points_are_powers_of_two_over_the_start():
    assert rates.to_rates((0, 0)) == rates.START
    assert rates.to_rates((1, -2)) == (0.04, 0.01)
    assert rates.to_rates((-0.5, 0))[0] == pytest.approx(0.02 / math.sqrt(2))
