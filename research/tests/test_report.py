"""report.py: its numbers agree with plain Python on metrics.jsonl; its figures."""

import hashlib
import json

import matplotlib.image
import numpy as np
import pytest
from helpers import ROOT, SMALL
from in_process import call
from report_helpers import (
    BASE,
    DDL,
    by_hand,
    edit_state,
    load,
    smoothed_by_hand,
    write_lines,
    write_run,
)

from evaluation import published, tasks
from research import compare, plots, runs, tables
from training import checkpoint

# ---- tables ----

LOSSES = {BASE: [2.0, 2.1, 2.05], DDL: [1.8, 1.95, 1.9]}  # by seed


def test_the_table_has_means_intervals_and_paired_differences(tmp_path):
    for model_name, losses in LOSSES.items():
        for seed, loss in enumerate(losses):
            scores = {"ema_val_loss": loss + 1, "val_bits_per_byte": loss / 2}
            write_run(tmp_path / f"{model_name}-{seed}", model_name, seed, val=loss, scores=scores)
    runs_file = tmp_path / "runs.csv"
    assert call("research/report.py", "runs", tmp_path, f"--out={runs_file}").returncode == 0
    tables_printed = []
    for source in (tmp_path, runs_file):
        out = tmp_path / "table.json"
        result = call("research/report.py", "table", source, f"--against={BASE}", f"--json={out}")
        tables_printed.append(result.stdout.decode())
        groups = {group["model"]: group for group in json.loads(out.read_text())["groups"]}
        for model_name, losses in LOSSES.items():
            mean, half_width = by_hand(losses)
            assert groups[model_name]["ema_val_loss"] == pytest.approx(mean + 1)
            assert groups[model_name]["val_loss_ci95"] == pytest.approx(half_width, rel=1e-6)
            assert f"| {mean:.4f} ± {half_width:.4f} (3) |" in tables_printed[-1]
        mean, half_width = by_hand(np.subtract(LOSSES[DDL], LOSSES[BASE]).tolist())
        assert groups[DDL]["difference"] == pytest.approx(mean / 2)
        assert f"{mean / 2:+.4f} ± {half_width / 2:.4f}" in tables_printed[-1]
        assert (groups[DDL]["verdict"], groups[DDL]["n"]) == ("better", 3)
    assert tables_printed[0] == tables_printed[1]
    stored = json.loads(out.read_text())
    assert stored.keys() >= {"commit", "machine", "date", "torch"}


def test_synthetic_tasks_are_compared_by_their_accuracy_in_percent(tmp_path):
    accuracies = {BASE: [0.50, 0.53, 0.51], DDL: [0.70, 0.74, 0.69]}  # by seed
    for model_name, values in accuracies.items():
        for seed, value in enumerate(values):
            folder = tmp_path / f"{model_name}-{seed}"
            write_run(folder, model_name, seed, scores={"val_accuracy": value})
    groups = compare.group_runs(load(tmp_path))
    baseline = compare.find_baseline(groups, BASE)
    table = tables.make_loss_table(groups, compare.compare_groups(groups, baseline))
    mean, half = by_hand(np.subtract(accuracies[DDL], accuracies[BASE]).tolist())
    assert f"{100 * mean:+.2f} ± {100 * half:.2f}" in table.format()
    [numbers] = [group for group in table.numbers if group["model"] == DDL]
    assert numbers["difference"] == pytest.approx(100 * mean)
    assert numbers["val_accuracy"] == pytest.approx(100 * np.mean(accuracies[DDL]))
    assert numbers["verdict"] == "better"


@pytest.fixture
def publish(monkeypatch):
    """Return a function that gives models the paper's small results of the baseline."""

    def give(*model_names: str) -> None:
        results = published.read_results()[BASE, "small"]
        papers = {
            name: published.Published(results, name, "x.py", ("block_size=64 (paper: 1024)",))
            for name in model_names
        }
        find = runs.find_published
        monkeypatch.setattr(runs, "find_published", lambda row: papers.get(row["model"], find(row)))

    return give


def test_published_losses_stand_beside_models_of_the_paper_alone(tmp_path, publish):
    write_run(tmp_path / "a", val=2.5)
    write_run(tmp_path / "b", DDL)
    write_run(tmp_path / "c", steps=3, learning_rate=1.0)  # not finished
    publish(BASE)
    table = tables.make_loss_table(compare.group_runs(load(tmp_path)))
    cells = {row[0].partition(" ")[0] + row[3]: row[-2:] for row in table.rows}
    assert cells == {
        f"{BASE}4": ["2.8543", f"{2.5 - 2.85426:+.4f}"],
        f"{DDL}4": [None, None],
        f"{BASE}2 of 4": ["2.8543", None],
    }
    assert any(f"The paper reports no results for {DDL} (" in note for note in table.notes)
    assert any(f"Settings of {BASE}" in n and "block_size=64" in n for n in table.notes)


def write_accuracy(folder, results: list[tasks.Result]) -> None:
    """Write results of eval.py into a run folder."""
    [sums] = folder.glob(f"checkpoints/*/{checkpoint.CHECKSUMS}")
    record = {
        "weights": hashlib.sha256(sums.read_bytes()).hexdigest(),
        "settings": {"dtype": "float32", "limit": None},
        "shown": [result._asdict() for result in results],
    }
    (folder / "eval").mkdir()
    (folder / "eval" / "results_1.json").write_text(json.dumps(record))


def test_the_papers_tables_have_its_accuracies_beside_means_over_seeds(tmp_path, publish):
    values = {f"{BASE}-0": 60.0, f"{BASE}-1": 62.0, f"{DDL}-0": 70.0}
    for name, value in values.items():
        model_name, _, seed = name.rpartition("-")
        folder = write_run(tmp_path / name, model_name, int(seed))
        results = [
            tasks.Result(task, 1, metric, value, 1.5)
            for task, metric in tasks.PAPER_METRICS.items()
        ]
        write_accuracy(folder, results)
    write_run(tmp_path / "without", f"{DDL}-EC")
    publish(BASE)
    groups = compare.group_runs(load(tmp_path))
    [table] = tables.make_accuracy_tables(groups)
    assert table.title == "Accuracy in %, 1-shot, float32"
    rows = {row[0]: row[1:] for row in table.rows}
    mean, half = by_hand([60.0, 62.0])
    # a seed changes all tasks together, so that the average varies as much as each of them
    assert rows[f"{BASE} (2)"] == [f"{mean:.2f} ± {half:.2f}"] * 9
    assert rows[f"{DDL} (1)"][0] == "70.00 ± 1.50"
    assert rows[f"{DDL}-EC (1)"][0] == "not evaluated"
    assert "65.94" in rows["published"]
    out = tmp_path / "paper.md"
    ended = call("research/report.py", "paper", tmp_path, f"--out={out}")
    assert ended.stdout.decode() == f"wrote {out}\n"
    text = out.read_text()
    assert text.startswith("## Validation\n\n| model ")
    assert f"## {table.title}\n\n| model " in text
    assert f"| {BASE} (2) " in text


def test_the_stored_table_of_the_demo_is_made_from_its_stored_runs(tmp_path):
    out = tmp_path / "table.json"
    runs_file = ROOT / "results" / "demo" / "runs.csv"
    words = [runs_file, "--by=model,init", f"--against={BASE} init=spectral", f"--json={out}"]
    assert call("research/report.py", "table", *words).returncode == 0
    stored = json.loads((ROOT / "results" / "demo_variants.json").read_text())["groups"]
    groups = json.loads(out.read_text())["groups"]
    assert len(groups) == len(stored) == 6
    for group, stored_group in zip(groups, stored):
        for key, value in stored_group.items():
            expected = pytest.approx(value, rel=1e-9) if isinstance(value, float) else value
            assert group[key] == expected, key


# ---- curves ----


def draw_lines(monkeypatch, *arguments):
    """Return the lines that report.py curves draws, and the axis, the output file and the title."""
    drawings = []

    def record(lines, x_axis, out, title):
        drawings.append((lines, x_axis, out, title))

    monkeypatch.setattr(plots, "plot_losses", record)
    ended = call("research/report.py", "curves", *arguments)
    assert ended.returncode == 0, ended.stderr
    return drawings[0]


def test_curves_of_every_axis(tmp_path, monkeypatch):
    run = write_run(tmp_path / "a")
    positions = {
        "steps": [1, 2, 3, 4],
        "tokens": [10, 20, 30, 40],
        "flops": [1e6, 2e6, 3e6, 4e6],
        "seconds": [0, 0.5, 1, 1.5],
    }
    for x, expected in positions.items():
        [line], axis, out, title = draw_lines(monkeypatch, run, f"--x={x}")
        column = runs.AXES[axis]
        assert line.training[column].to_list() == expected
        smoothed = smoothed_by_hand([4.0, 3.0, 2.0, 1.0])
        assert line.training["value"].to_list() == pytest.approx(smoothed)
        assert line.evaluations[column].to_list() == [expected[1], expected[3]]
        assert line.evaluations["value"].to_list() == [2, 2]
        assert (out, title) == (run / "curves.png", "a")
    edit_state(run, trained_on={"processes": 2})
    [line], *_ = draw_lines(monkeypatch, run, "--x=seconds")
    assert line.training["seconds"].to_list() == [0, 1, 2, 3]


def test_a_long_curve_is_smoothed_over_2_percent(tmp_path, monkeypatch):
    losses = np.random.default_rng(0).standard_normal(1000).tolist()
    lines = [{"step": step, "loss": loss} for step, loss in enumerate(losses, 1)]
    [line], *_ = draw_lines(monkeypatch, write_lines(tmp_path / "run", lines))
    assert line.training["value"].to_list() == pytest.approx(smoothed_by_hand(losses))


def test_a_band_is_the_mean_of_seeds_as_far_as_all_of_them_are(tmp_path, monkeypatch):
    """Also where runs were not equally fast: both axes are means at a step."""
    for seed, steps in enumerate((4, 3, 4)):
        folder = write_run(tmp_path / f"seed={seed}", seed=seed, val=2.0 + seed, steps=steps)
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for line in lines:
            line["seconds"] = line["step"] * (1 + seed)
            if "loss" in line:
                line["loss"] *= 1 + seed
        write_lines(folder, lines)
    [line], *_ = draw_lines(monkeypatch, tmp_path, "--band", "--x=seconds")
    curve = line.training
    assert line.num_runs == 3
    assert curve["step"].to_list() == [1, 2, 3]
    assert curve["seconds"].to_list() == [0, 2, 4]
    for index in range(3):
        longer, shorter = (smoothed_by_hand(np.arange(4, 4 - n, -1.0)) for n in (4, 3))
        mean, half = by_hand([longer[index], 2 * shorter[index], 3 * longer[index]])
        point = (curve["value"][index], curve["half_width"][index])
        assert point == pytest.approx((mean, half), rel=1e-6)
    assert line.evaluations["value"].to_list() == [3.0]


def test_the_baseline_is_black_and_all_looks_differ(tmp_path, monkeypatch):
    """Whatever the order of the runs, models come in the paper's order."""
    model_names = (DDL, "DDL-vdim1-gpt-mha-rope", BASE, f"{DDL}-EC")
    for index, model_name in enumerate(model_names):
        write_run(tmp_path / f"{index}", model_name)
    for words in ([], ["--band"]):
        lines, *_ = draw_lines(monkeypatch, tmp_path, *words)
        assert [line.name for line in lines] == [BASE, "DDL-vdim1-gpt-mha-rope", DDL, f"{DDL}-EC"]
        assert lines[0].style["color"] == "#000000"
        assert len({line.style["color"] for line in lines}) == len(model_names)
    looks = [tuple(plots.get_line_style(number).values()) for number in range(29)]
    assert len(set(looks)) == len(looks)


def test_curves_are_files_beside_the_runs_or_where_they_were_asked_for(tmp_path):
    folders = [write_run(tmp_path / name) for name in ("a", "b")]
    ended = call("research/report.py", "curves", *folders, "--band")
    assert ended.stdout.decode() == f"drew {tmp_path / 'curves.png'}\n"
    assert matplotlib.image.imread(tmp_path / "curves.png").std() > 0.05  # something is drawn
    out = tmp_path / "figures" / "loss.pdf"
    assert call("research/report.py", "curves", *folders, f"--out={out}").returncode == 0
    assert [path.name for path in out.parent.iterdir()] == [out.name]


def test_mistakes_end_in_one_line(tmp_path):
    run = write_run(tmp_path / "a")
    out = tmp_path / "new"
    empty = write_lines(tmp_path / "empty", [])
    early = write_run(tmp_path / "early", steps=1)
    for message, *words in (
        ("has no step yet", "curves", empty),
        ("ends with .png", "curves", run, f"--out={out}"),
        ("early has no evaluation yet", "table", early),
        ("none of the rows", "table", run, "--against=nobody"),
        ("sead", "paper", run, f"--out={out}", "--by=sead"),
    ):
        ended = call("research/report.py", *words)
        assert ended.returncode == 2, words
        assert message in ended.stderr.decode().strip().splitlines()[-1], words
    assert not out.exists()


def test_runs_without_a_commit_or_settings_are_tabulated(tmp_path):
    """A run before its first checkpoint has a row of its own, with its name."""
    run = write_run(tmp_path / "early")
    (run / "checkpoints").rename(tmp_path / "gone")
    edit_state(write_run(tmp_path / "other", config=SMALL), commit=None)
    groups = compare.group_runs(load(tmp_path))
    assert sorted(group.name for group in groups) == ["early", BASE]
    assert "| early " in tables.make_loss_table(groups).format()
