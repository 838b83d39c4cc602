"""The commands of analyze.py from end to end, on two runs that differ in their seed."""

import json

import pytest
from helpers import one_line_error, small_run
from in_process import call

from training import checkpoint


def analyze(*words) -> str:
    """Return what a command prints."""
    result = call("research/analyze.py", *words)
    assert result.returncode == 0, result.stderr.decode()
    return result.stdout.decode()


def test_the_commands_store_rows_draw_them_and_refuse_mistakes(corpus, tmp_path):
    runs = [tmp_path / "a", tmp_path / "b"]
    for seed, run in enumerate(runs):
        keys = {"max_steps": 2, "warmup_steps": 1, "ema_half_life": 1, "seed": seed}
        assert call("train.py", *small_run(corpus, run, **keys)).returncode == 0
    no_run = call("research/analyze.py", "rank", tmp_path)
    assert "no checkpoint" in one_line_error(no_run)

    # the averaged weights of a run are another row
    file = tmp_path / "rank.json"
    averaged = checkpoint.find(runs[0]) / "ema"
    printed = analyze("rank", runs[0], averaged, "--windows=3", f"--json={file}")
    assert "a, step 2: effective rank 0." in printed
    trained_row, averaged_row = json.loads(file.read_text())["rows"]
    assert averaged_row["label"] == "a, step 2, averaged weights"
    assert trained_row["rank"] != averaged_row["rank"]

    file = tmp_path / "lens.json"
    assert "a, step 2: loss " in analyze("lens", *runs, "--windows=2", "--text=ab")
    stored = file.read_bytes()
    for row in json.loads(stored)["rows"]:
        assert row["tokens"] == 32
        assert sum(row["settles"]) == pytest.approx(1)
    long_text = call("research/analyze.py", "lens", *runs, f"--text={'a' * 99}")
    message = "the text has 100 tokens: give at most block_size=16"
    assert message in one_line_error(long_text)
    assert file.read_bytes() == stored

    file = tmp_path / "gates.json"
    printed = analyze("gates", *runs, "--windows=3", "--rows=2")
    rows = json.loads(file.read_text())["rows"]
    # of each edit, at all sites and at each
    assert [len(row["effects"]) for row in rows] == [4 * (1 + 4)] * 2
    assert "interval over 2 seeds" in printed

    pictures = sorted(tmp_path.glob("*.png"))
    names = ["gates_course.png", "gates_edits.png", "lens.png", "rank.png"]
    assert [picture.name for picture in pictures] == names
    assert all(picture.read_bytes().startswith(b"\x89PNG") for picture in pictures)
