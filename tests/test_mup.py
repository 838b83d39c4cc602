"""muP's coordinate check: sizes that stay level with width under muP, and grow without it."""

import pytest
from test_model import PAPER

from analyze import coordinate_check, slope


def test_slope():
    assert slope([1, 2, 4], [3.0, 6.0, 12.0]) == pytest.approx(1)
    assert slope([64, 128], [5.0, 5.0]) == pytest.approx(0)


@pytest.mark.parametrize("stem", PAPER)
def test_coordinates_do_not_grow_with_width(stem):
    result = coordinate_check(stem, [64, 128, 256], steps=4, learning_rate=1e-2)
    for quantity in ("h", "c", "logits"):
        assert result[True, quantity][1] < 0.1, quantity
    assert result[False, "h"][1] > 0.3
    assert result[False, "logits"][1] > 0.3
