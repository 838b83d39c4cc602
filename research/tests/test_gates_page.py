"""What the audit of gates says of several runs: which are one group, what is told from 0, how far runs differ."""

import json
from pathlib import Path

import pytest
from helpers import small_run
from in_process import call

from evaluation.subjects import Subject
from research.analysis import gates_page

SETTINGS = {"learning_rate": 1e-3, "model": "m", "out_dir": "somewhere"}


def subject(identity, seed, step=8, **settings):
    run = {**SETTINGS, "seed": seed, **settings}
    state = {"model": "m", "step": step, "run_config": run, "model_config": {"hidden_size": 8}}
    return Subject(f"run {identity}, step {step}", Path(identity), state, identity)


def grouped(*subjects):
    """Labels of the runs of each group."""
    rows = [
        {"label": "stored", "model": "m", "seed": each.state["run_config"]["seed"]}
        for each in subjects
    ]
    return [
        [row["label"] for row in group.rows] for group in gates_page.groups(rows, list(subjects))
    ]


def test_runs_of_one_setting_and_step_are_one_group():
    """Where they write and on what device is no setting; a rate is."""
    runs = (
        subject("a", 0),
        subject("b", 1, out_dir="elsewhere", device="cuda"),
        subject("c", 2, learning_rate=2e-3),
    )
    assert grouped(*runs) == [["run a, step 8", "run b, step 8"], ["run c, step 8"]]


def test_checkpoints_of_one_run_are_no_seeds():
    early, late = subject("a", 0, step=4), subject("b", 0, step=8)
    assert grouped(early, late) == [["run a, step 4"], ["run b, step 8"]]
    assert grouped(early, subject("c", 1, step=8)) == [["run a, step 4"], ["run c, step 8"]]


def test_a_seed_that_comes_twice_gives_no_interval(capsys):
    again = subject("a", 0), subject("b", 1), subject("c", 1)
    assert grouped(*again) == [["run a, step 8"], ["run b, step 8"], ["run c, step 8"]]
    assert capsys.readouterr().out == ""


def test_the_same_weights_are_counted_once(capsys):
    assert grouped(subject("a", 0), subject("a", 0), subject("b", 1)) == [
        ["run a, step 8", "run b, step 8"]
    ]
    assert "run a, step 8: these weights are there already: counted once" in capsys.readouterr().out


def test_the_command_keeps_checkpoints_of_a_run_apart(corpus, tmp_path):
    keys = {"max_steps": 2, "warmup_steps": 1, "checkpoint_interval": 1, "keep_last": 2}
    assert call("train.py", *small_run(corpus, tmp_path / "a", **keys)).returncode == 0
    folders = sorted(
        folder for folder in (tmp_path / "a" / "checkpoints").iterdir() if folder.is_dir()
    )
    assert len(folders) == 2
    out = tmp_path / "gates.json"
    result = call(
        "research/analyze.py",
        "gates",
        *folders,
        folders[0],
        "--windows=3",
        "--edits=no erase",
        f"--json={out}",
    )
    assert result.returncode == 0, result.stderr.decode()
    first, last = json.loads(out.read_text())["summary"].values()
    assert [len(first["runs"]), first["interval_over"]] == [1, "3 sequences"]
    assert [last["runs"], last["interval_over"]] == [["a, step 2"], "3 sequences"]


def three_runs(effects: dict[str, list[float]], betas=((1.0, 1.0), (1.0, 1.0), (1.0, 1.0))):
    """A group of three runs with two sites; effects {edit: its change in each run}, at all at once and at the first."""
    rows = []
    for run, means in enumerate(betas):
        about = [{"mean": mean, "quantiles": {"0.05": mean, "0.95": mean}} for mean in means]
        sites = [{"layer": n, "site": "attn", "statistics": {"beta": each}, "details": {}}
                 for n, each in enumerate(about)]  # fmt: skip
        tried = [
            {"layer": layer, "site": site, "edit": edit, "difference": changes[run]}
            for edit, changes in effects.items()
            for layer, site in ((None, "all"), (0, "attn"))
        ]
        rows.append(
            {"label": f"run {run}", "sites": sites, "sequences": 4, "tokens": 40, "effects": tried}
        )
    return gates_page.Group("m", rows)


# Changes in three runs; Student's t at two degrees has p = 1 - t / sqrt(t^2 + 2): .0001 and three of .035.
CHANGES = {
    "beta=0": [5.0, 5.1, 5.2],
    "beta=1": [0.3, 0.4, 0.2],
    "beta=2": [0.6, 0.4, 0.8],
    "no erase": [0.9, 0.6, 1.2],
}


def p_value(changes):
    mean = sum(changes) / 3
    t = mean / (sum((x - mean) ** 2 for x in changes) / 2 / 3) ** 0.5
    return 1 - t / (t * t + 2) ** 0.5


def test_edits_at_all_sites_at_once_are_corrected_for_their_number():
    p = sorted(map(p_value, CHANGES.values()))
    assert 4 * p[0] < 0.05 < 3 * p[1]
    assert p[3] < 0.05  # by Holm the first holds alone, each by itself all would
    group = three_runs(CHANGES)
    assert {edit: word for edit, (_, word) in group.at_once.items()} == {
        "beta=0": "worse", "beta=1": "undecided", "beta=2": "undecided", "no erase": "undecided"}  # fmt: skip
    first = next(
        line for line in gates_page.table_of_edits(group).splitlines() if "all at once" in line
    )
    cells = [cell.strip() for cell in first.strip("|").split("|")][1:]
    assert [cell.startswith("(") for cell in cells] == [False, True, True, True]
    alone = three_runs({"beta=1": CHANGES["beta=1"]})
    assert alone.at_once["beta=1"][1] == "worse"  # nothing to correct for
    assert p_value(CHANGES["beta=1"]) == pytest.approx(
        alone.at_once["beta=1"][0].compute_p_value(), rel=1e-9
    )


# Means of three runs at two sites: alike at the first, not at the second.
BETAS = (1.57, 0.035), (1.62, 0.1), (1.73, 1.278)


def test_where_runs_differ_most_is_said():
    group = three_runs({}, BETAS)
    assert gates_page.extremes(group, "beta") == "0.471 (block 1 attn) to 1.64 (block 0 attn)"
    row = gates_page.table_of_statistics(group).splitlines()[2]
    assert row.strip("| ").endswith("0.035 to 1.278 (block 1 attn)")
    alone = gates_page.Group("m", group.rows[:1])
    assert "runs differ" not in gates_page.table_of_statistics(alone)


def test_a_course_shows_every_run_beside_the_mean():
    figure = gates_page.course(three_runs({}, BETAS))
    lines = sorted((line.get_linewidth(), list(line.get_ydata())) for line in figure.axes[0].lines)
    assert [values for _, values in lines[:3]] == [list(means) for means in BETAS]
    assert lines[3][1] == pytest.approx([(1.57 + 1.62 + 1.73) / 3, (0.035 + 0.1 + 1.278) / 3])
    assert lines[3][0] > lines[2][0]
    assert not figure.axes[0].collections  # no band over tokens
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["attn"]
    assert gates_page.course(three_runs({}, BETAS[:1])).axes[0].collections
