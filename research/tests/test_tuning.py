"""The search for learning rates, on surfaces whose best point is known."""

import math
from collections.abc import Callable

import pytest

from research import tuning


def bowl(x: float, y: float, coupling: float = 0.0) -> Callable[[tuning.Point], float]:
    """Return a loss with its minimum at a point."""

    def loss_at(point: tuning.Point) -> float:
        dx = point[0] - x
        dy = point[1] - y
        return dx**2 + dy**2 + coupling * dx * dy

    return loss_at


def search(loss_at: Callable[[tuning.Point], float], max_tries: int = 12) -> tuning.Losses:
    """Run the search on a function of a point, and return the losses."""
    return tuning.follow_cross(loss_at, num_rates=2, max_tries=max_tries).losses


@pytest.mark.parametrize("best", [(0, 0), (-1, 1), (1, -1), (2, 0), (0, -2), (1, 1)])
def test_the_best_point_is_found_and_inside(best):
    losses = search(bowl(*best))
    assert tuning.find_best(losses) == best
    assert tuning.find_minimum(losses) == pytest.approx(best)
    assert tuning.is_inside(losses)


def test_a_minimum_between_points_is_that_of_a_parabola():
    assert tuning.find_minimum(search(bowl(0.4, -0.25))) == pytest.approx((0.4, -0.25))


def test_a_minimum_that_is_too_far_is_not_inside():
    losses = search(bowl(6, -6))
    assert not tuning.is_inside(losses)
    # the next cross would need three tries
    assert len(search(bowl(6, -6), max_tries=7)) == 5


def test_a_fitted_rate_is_at_most_a_step_beside_what_was_tried():
    losses = {(0.0,): 2.0, (1.0,): 1.0, (2.0,): 0.1}
    assert tuning.fit_axis(losses, 0)[0] == 3.0


def test_a_run_that_diverged_is_never_the_best():
    losses = search(lambda point: math.inf if point[0] > 0 else point[1] ** 2 - point[0])
    assert tuning.find_best(losses)[0] <= 0
    assert tuning.has_converged(losses)
    assert not tuning.has_converged({(0.0,): math.inf})


def test_the_search_waits_for_a_whole_cross():
    """So it does not depend on which of the tries finished first, nor on stops."""
    finished = {(0.0, 0.0): 1.0, (-1.0, 0.0): 0.5}
    state = tuning.follow_cross(finished.get, num_rates=2, max_tries=12)
    assert state.losses == {}
    assert sorted(state.missing) == [(0.0, -1.0), (0.0, 1.0), (1.0, 0.0)]
