"""What the page of gates says of several runs: which form one group, which edits matter, how far runs differ."""

import json
from types import SimpleNamespace

import pytest
from helpers import small_run
from in_process import call

from research.analysis import gates_page

# ---- groups ----


def make_subject(identity: str, seed: int, step: int = 8, **changes) -> SimpleNamespace:
    """Return a run of which only the description exists; changes: of its settings."""
    run_config = {
        "learning_rate": 1e-3,
        "model": "m",
        "out_dir": "somewhere",
        "seed": seed,
        **changes,
    }
    state = {
        "model": "m",
        "step": step,
        "run_config": run_config,
        "model_config": {"hidden_size": 8},
    }
    label = f"run {identity}, step {step}"
    return SimpleNamespace(label=label, state=state, identity=identity)


def group_labels(*subjects: SimpleNamespace) -> list[list[str]]:
    """Return the labels of the runs of each group."""
    rows = [
        {"label": "stored", "model": "m", "seed": subject.state["run_config"]["seed"]}
        for subject in subjects
    ]
    groups = gates_page.group_runs(rows, list(subjects))
    return [[row["label"] for row in group.rows] for group in groups]


def test_runs_of_one_setting_and_step_are_one_group():
    """The folder and the device are not part of a setting; a learning rate is."""
    labels = group_labels(
        make_subject("a", 0),
        make_subject("b", 1, out_dir="elsewhere", device="cuda"),
        make_subject("c", 2, learning_rate=2e-3),
    )
    assert labels == [["run a, step 8", "run b, step 8"], ["run c, step 8"]]


def test_checkpoints_of_one_run_are_not_grouped_as_seeds():
    early = make_subject("a", 0, step=4)
    late = make_subject("b", 0, step=8)
    assert group_labels(early, late) == [["run a, step 4"], ["run b, step 8"]]


def test_runs_at_different_steps_are_not_grouped_as_seeds():
    early = make_subject("a", 0, step=4)
    late = make_subject("c", 1, step=8)
    assert group_labels(early, late) == [["run a, step 4"], ["run c, step 8"]]


def test_runs_of_a_setting_with_a_repeated_seed_are_not_grouped(capsys):
    labels = group_labels(make_subject("a", 0), make_subject("b", 1), make_subject("c", 1))
    assert labels == [["run a, step 8"], ["run b, step 8"], ["run c, step 8"]]
    assert capsys.readouterr().out == ""


def test_the_same_weights_are_counted_once(capsys):
    labels = group_labels(make_subject("a", 0), make_subject("a", 0), make_subject("b", 1))
    assert labels == [["run a, step 8", "run b, step 8"]]
    assert "run a, step 8: another run has the same weights" in capsys.readouterr().out


def test_the_command_does_not_group_checkpoints_of_a_run(corpus, tmp_path):
    arguments = small_run(
        corpus,
        tmp_path / "a",
        max_steps=2,
        warmup_steps=1,
        checkpoint_interval=1,
        keep_last=2,
    )
    assert call("train.py", *arguments).returncode == 0
    checkpoints = tmp_path / "a" / "checkpoints"
    first_folder, last_folder = sorted(path for path in checkpoints.iterdir() if path.is_dir())
    out = tmp_path / "gates.json"
    result = call(
        "research/analyze.py",
        "gates",
        first_folder,
        last_folder,
        first_folder,
        "--windows=3",
        "--edits=no erase",
        f"--json={out}",
    )
    assert result.returncode == 0, result.stderr.decode()
    first, last = json.loads(out.read_text())["summary"].values()
    assert len(first["runs"]) == 1
    assert first["interval_over"] == "3 sequences"
    assert last["runs"] == ["a, step 2"]
    assert last["interval_over"] == "3 sequences"


# ---- what a group of three runs says ----


def make_group(
    effects: dict[str, list[float]],
    betas: tuple[tuple[float, float], ...] = ((1.0, 1.0), (1.0, 1.0), (1.0, 1.0)),
) -> gates_page.Group:
    """Return a group of runs with two sites.

    Args:
        effects: edit -> the change of the loss in each run, at all sites at once and at the first
        betas: the means of the gate at the two sites, for each run
    """
    rows = []
    for run, means in enumerate(betas):
        sites = []
        for layer, mean in enumerate(means):
            beta = {"mean": mean, "quantiles": {"0.05": mean, "0.95": mean}}
            sites.append(
                {"layer": layer, "site": "attn", "statistics": {"beta": beta}, "details": {}}
            )
        run_effects = []
        for edit, changes in effects.items():
            for layer, site in ((None, "all"), (0, "attn")):
                run_effects.append(
                    {"layer": layer, "site": site, "edit": edit, "difference": changes[run]}
                )
        rows.append(
            {
                "label": f"run {run}",
                "sites": sites,
                "sequences": 4,
                "tokens": 40,
                "effects": run_effects,
            }
        )
    return gates_page.Group("m", rows)


# Changes in three runs, with p-values of .0001 and three of .035.
CHANGES = {
    "beta=0": [5.0, 5.1, 5.2],
    "beta=1": [0.3, 0.4, 0.2],
    "beta=2": [0.6, 0.4, 0.8],
    "no erase": [0.9, 0.6, 1.2],
}


def compute_p_value(changes: list[float]) -> float:
    """Return the two-sided p-value of three changes, which is 1 - t / sqrt(t^2 + 2)."""
    mean = sum(changes) / 3
    variance = sum((change - mean) ** 2 for change in changes) / 2
    t = mean / (variance / 3) ** 0.5
    return 1 - t / (t * t + 2) ** 0.5


def test_the_changes_are_such_that_a_correction_decides():
    p_values = sorted(map(compute_p_value, CHANGES.values()))
    # by Holm the first one holds alone; without a correction all would
    assert 4 * p_values[0] < 0.05 < 3 * p_values[1]
    assert p_values[3] < 0.05


def test_edits_at_all_sites_at_once_are_corrected_for_their_number():
    verdicts = make_group(CHANGES).verdicts
    words = {edit: by_site[gates_page.ALL_SITES][1] for edit, by_site in verdicts.items()}
    assert words == {
        "beta=0": "worse",
        "beta=1": "undecided",
        "beta=2": "undecided",
        "no erase": "undecided",
    }


def test_undecided_changes_are_in_brackets():
    lines = gates_page.format_edit_table(make_group(CHANGES)).splitlines()
    [line] = [line for line in lines if "all at once" in line]
    cells = [cell.strip() for cell in line.strip("|").split("|")][1:]
    assert [cell.startswith("(") for cell in cells] == [False, True, True, True]


def test_one_edit_at_all_sites_at_once_is_not_corrected():
    group = make_group({"beta=1": CHANGES["beta=1"]})
    change, word = group.verdicts["beta=1"][gates_page.ALL_SITES]
    assert word == "worse"
    assert compute_p_value(CHANGES["beta=1"]) == pytest.approx(change.compute_p_value(), rel=1e-9)


# means of three runs at two sites: similar at the first, but not at the second
BETAS = ((1.57, 0.035), (1.62, 0.1), (1.73, 1.278))


def test_the_table_has_the_lowest_and_the_highest_site():
    extremes = gates_page.format_extremes(make_group({}, BETAS), "beta")
    assert extremes == "0.471 (block 1 attn) to 1.64 (block 0 attn)"


def test_the_table_has_the_site_at_which_runs_differ_most():
    table = gates_page.format_statistics_table(make_group({}, BETAS))
    row = table.splitlines()[2]
    assert row.strip("| ").endswith("0.035 to 1.278 (block 1 attn)")


def test_the_table_of_one_run_does_not_say_how_runs_differ():
    one_run = make_group({}, BETAS[:1])
    assert "runs differ" not in gates_page.format_statistics_table(one_run)


def test_a_figure_of_several_runs_has_a_thin_line_for_each_beside_the_mean():
    figure = gates_page.draw_course(make_group({}, BETAS))
    [panel] = figure.axes
    *run_lines, mean_line = sorted(
        panel.lines, key=lambda line: (line.get_linewidth(), list(line.get_ydata()))
    )
    assert [list(line.get_ydata()) for line in run_lines] == [list(means) for means in BETAS]
    means = [(1.57 + 1.62 + 1.73) / 3, (0.035 + 0.1 + 1.278) / 3]
    assert list(mean_line.get_ydata()) == pytest.approx(means)
    assert mean_line.get_linewidth() > run_lines[-1].get_linewidth()
    assert not panel.collections  # no band over tokens
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["attn"]


def test_a_figure_of_one_run_has_a_band_over_tokens():
    figure = gates_page.draw_course(make_group({}, BETAS[:1]))
    assert figure.axes[0].collections
