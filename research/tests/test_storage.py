"""Stored figures say where they are from."""

import json

from research.storage import store_figures


def test_figures_are_stored_with_the_origin_that_is_given(tmp_path):
    origin = {"commit": "0123456789ab", "date": "2026-01-02"}
    figures = tmp_path / "figures.json"
    for value in (1, 2):  # the file is replaced
        store_figures(figures, {"rows": [value]}, origin)
    assert json.loads(figures.read_text()) == {**origin, "rows": [2]}


def test_uncommitted_changes_are_reported_once_per_file(tmp_path, capsys):
    figures = tmp_path / "figures.json"
    for _ in range(2):
        store_figures(figures, {"rows": []}, {"commit": "0123456789ab-dirty"})
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("note: figures.json names commit 0123456789ab-dirty")
