"""The planning table of docs/cluster.md is what the estimates give."""

import pytest
from helpers import ROOT

from research.benchmarks import cluster

PAGE = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "path",
    [
        cluster.CONFIGS[0],
        *(pytest.param(path, marks=pytest.mark.slow) for path in cluster.CONFIGS[1:]),
    ],
)
def test_the_table_of_the_page_is_computed(path):
    header, _, *rows = cluster.make_table([[path]]).splitlines()
    assert len(rows) == len(cluster.LAYOUTS)
    lines = PAGE.splitlines()
    assert header in lines
    for row in rows:
        assert row in lines


def test_the_page_has_no_other_rows():
    rows = [line for line in PAGE.splitlines() if line.startswith("| gpt_")]
    assert len(rows) == len(cluster.CONFIGS) * len(cluster.LAYOUTS)
