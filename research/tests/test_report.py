"""report.py: its numbers agree with plain Python on metrics.jsonl; its figures; its folder."""

import csv
import io
import json
import math
import re
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import matplotlib.image
import numpy as np
import pytest
from helpers import SMALL, one_line_error
from in_process import call
from matplotlib.backends.backend_agg import FigureCanvasAgg
from report_helpers import (
    BASE,
    CORPUS,
    DDL,
    by_hand,
    load,
    smoothed_by_hand,
    write_lines,
    write_run,
)

from evaluation import published, tasks
from research import compare, paper, plots, tables
from utils import tables as texts

STEPS = 40


def write_long_run(
    folder, model_name, seed, improvement=0.0, steps=STEPS, config=SMALL, **settings
):
    """Write a run of forty steps with an evaluation and statistics at every tenth step.

    improvement: is subtracted from the losses.
    """
    write_run(folder, model_name, seed, max_steps=STEPS, steps=steps, config=config, **settings)
    rng = np.random.default_rng([seed, len(model_name)])
    num_tokens = settings.get("corpus", CORPUS)["val"]["tokens"]
    num_sequences = math.ceil((num_tokens - 1) / config["block_size"])
    lines = []
    for step in range(1, steps + 1):
        common = {
            "step": step,
            "tokens": 50 * step,
            "flops": 1.5e5 * step,
            "seconds": 7.0 + 0.5 * step,
        }
        loss = 3.0 + 2.0 / step - improvement + 0.1 * rng.standard_normal()
        speed = {"tokens_per_second": 90.0 + rng.random(), "memory": 1000 + step}
        lines.append({**common, "loss": loss, **speed})
        if step % 10 == 0:
            lines.append(
                {
                    **common,
                    "val_loss": loss,
                    "val_perplexity": math.exp(loss),
                    "val_sequences": num_sequences,
                    "val_bits_per_byte": loss / math.log(2) / 4,
                }
            )
            statistics = {
                "attn.beta_mean": [rng.random(), 1.0],
                "mlp.beta_mean": [0.5, rng.random()],
            }
            if model_name.startswith("DDL"):
                lines.append({**common, "residual": statistics})
    return write_lines(folder, lines)


def lines_with(folder, key):
    """Return the lines of metrics.jsonl that have a key."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if key in line]


def last_value(folder, key="val_loss"):
    """Return the last value of a key in metrics.jsonl."""
    return lines_with(folder, key)[-1][key]


def read_csv(table):
    """Return the rows of a table's CSV by model."""
    return {row["model"]: row for row in csv.DictReader(io.StringIO(table.to_csv()))}


class Report(NamedTuple):
    """The sizes of a report, its tables by name, and its lines by name."""

    sizes: list
    tables: dict
    lines: dict


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """Return folders by model: three seeds of the baseline, two of DDL, a single run of a variant."""
    folder = tmp_path_factory.mktemp("sweep")
    return {
        BASE: [write_long_run(folder / f"a{seed}", BASE, seed) for seed in range(3)],
        DDL: [write_long_run(folder / f"b{seed}", DDL, seed, improvement=0.5) for seed in (2, 0)],
        f"{DDL}-EC": [write_long_run(folder / "c", f"{DDL}-EC", 1)],
    }


@pytest.fixture(scope="module")
def report(sweep):
    """Return the report of all runs, which are given in another order than the paper's."""
    loaded = load(*sweep[DDL], *sweep[f"{DDL}-EC"], *sweep[BASE])
    sizes = paper.make_sizes(loaded, [], None)
    return Report(
        sizes=sizes,
        tables={table.name: table for table in paper.make_tables(sizes)},
        lines={line.name: line for line in paper.make_lines(sizes)},
    )


# ---- tables ----


def test_validation_is_that_of_the_last_lines(sweep, report):
    table = report.tables["validation"]
    stored = read_csv(table)
    assert list(stored) == [BASE, DDL, f"{DDL}-EC"]  # the paper's order, the baseline first
    for (model_name, folders), row in zip(sweep.items(), table.rows):
        for key, digits in (("val_loss", 4), ("val_perplexity", 3), ("val_bits_per_byte", 4)):
            values = [last_value(folder, key) for folder in folders]
            stored_interval = stored[model_name][f"{key}_ci95"]
            if len(values) > 1:
                mean, half_width = by_hand(values)
                assert float(stored_interval) == pytest.approx(half_width, rel=1e-5)
                cell = f"{mean:.{digits}f} ± {half_width:.{digits}f} ({len(values)})"
            else:
                [mean] = values
                assert stored_interval == ""
                cell = f"{mean:.{digits}f}"
            assert float(stored[model_name][key]) == pytest.approx(mean)
            assert cell in row


def test_differences_are_those_of_the_same_seeds(sweep, report):
    table = report.tables["differences"]
    baseline = [last_value(folder) for folder in sweep[BASE]]
    seed_2, seed_0 = sweep[DDL]
    mean, half_width = by_hand([last_value(seed_2) - baseline[2], last_value(seed_0) - baseline[0]])
    stored = read_csv(table)[DDL]
    assert (stored["baseline"], stored["n"], stored["paired"]) == (BASE, "2", "True")
    assert float(stored["val_loss"]) == pytest.approx(mean)
    assert float(stored["val_loss_ci95"]) == pytest.approx(half_width, rel=1e-5)
    assert float(stored["difference"]) == pytest.approx(mean / math.log(2) / 4)
    # the other of the two comparisons has no interval, so that there is nothing to correct
    verdict = "better" if mean + half_width < 0 else "undecided"
    first, second = table.rows
    assert first[2] == f"{mean:+.4f} ± {half_width:.4f} (2 pairs)"  # of three runs of the baseline
    assert first[4:] == [verdict, "2 pairs"]
    assert second[-1] == "1 pair"
    assert "±" not in second[2]


def test_costs_are_measured_ones_beside_the_baselines(sweep, report):
    table = report.tables["costs"]
    stored = read_csv(table)
    speeds = {}
    for model_name, folders in sweep.items():
        lines_by_run = [lines_with(folder, "loss") for folder in folders]
        medians = [
            np.median([line["tokens_per_second"] for line in lines]) for lines in lines_by_run
        ]
        speeds[model_name] = np.mean(medians)
        row = stored[model_name]
        assert float(row["tokens_per_second"]) == pytest.approx(speeds[model_name])
        assert float(row["memory"]) == max(line["memory"] for line in lines_by_run[0])
        # without the first step, which took 7.5 seconds
        assert float(row["device_seconds"]) == pytest.approx(0.5 * (STEPS - 1))
        assert float(row["flops_per_token"]) == pytest.approx(3e3)
    factor = float(stored[DDL]["tokens_per_second_factor"])
    assert factor == pytest.approx(speeds[DDL] / speeds[BASE])
    ratio = int(float(stored[DDL]["parameters"])) / int(float(stored[BASE]["parameters"]))
    assert f"({ratio:.2f}\N{MULTIPLICATION SIGN})" in table.rows[1][1]


def test_costs_of_different_machines_have_no_factors(sweep):
    # as utils.provenance.machine describes machines in checkpoints
    one, other = load(sweep[BASE][0], sweep[DDL][0])
    one = replace(one, machine={"machine": "2 x H200"}, processes=2)
    other = replace(other, machine={"machine": "4 x Xeon"})
    table = tables.make_cost_table(paper.make_sizes([one, other], [], None))
    assert f"(2 x H200, 2 processes: {BASE}; 4 x Xeon, 1 process: {DDL})" in table.notes[-1]
    factors = {key for key in table.numbers[1] if key.endswith("_factor")}
    assert factors == {"parameters_factor", "flops_per_token_factor"}
    assert table.numbers[0]["device_seconds"] == pytest.approx(2 * 0.5 * (STEPS - 1))


def make_published(model_name: str, *differences: str) -> published.Published:
    results = published.read_results()[model_name, "small"]
    return published.Published(results, model_name, "x.py", differences)


def test_published_figures_stand_beside_models_of_the_paper_alone(sweep):
    one, other = load(sweep[BASE][0], sweep[DDL][0])
    one = replace(one, published=make_published(BASE, "block_size=64 (paper: 1024)"))
    sizes = paper.make_sizes([one, other], [], None)
    table = tables.make_loss_table(sizes[0].groups)
    assert table.rows[0][-2:] == ["2.8543", f"{last_value(sweep[BASE][0]) - 2.85426:+.4f}"]
    assert table.rows[1][-2:] == [None] * 2
    assert any(f"The paper reports no results for {DDL} (" in note for note in table.notes)
    assert any(
        f"Settings of {BASE} that differ from the paper's (x.py): " in n for n in table.notes
    )
    lines = paper.make_lines(sizes)
    assert [line.published_loss for line in lines] == [2.85426, None]
    with plots.use_print_style():
        axes = plots.plot_paper_curves(lines, "tokens").axes
    stars = [line for axis in axes for line in axis.lines if line.get_marker() == "*"]
    points = [(star.get_xdata()[0], star.get_ydata()[0]) for star in stars]
    assert points == [(50 * STEPS, 2.85426)]


def make_result(task, shots, metric, value, standard_error) -> dict:
    """Return a result as eval.py stores it."""
    return tasks.Result(task, shots, metric, value, standard_error)._asdict()


def test_accuracies_are_means_over_seeds_beside_the_published(sweep):
    def with_accuracy(run, value):
        shown = [
            make_result("piqa", 1, "acc_norm", value, 1.5),
            make_result("sciq", 1, "acc_norm", value + 5, 2.5),
        ]
        record = {"settings": {"dtype": "float32", "limit": None}, "shown": shown}
        return replace(run, accuracy=[record], published=make_published(BASE))

    one, two, ddl, without = load(*sweep[BASE][:2], sweep[DDL][0], sweep[f"{DDL}-EC"][0])
    runs = [with_accuracy(one, 60.0), with_accuracy(two, 62.0), with_accuracy(ddl, 70.0), without]
    [table] = tables.make_accuracy_tables(compare.group_runs(runs))
    assert (table.name, table.title) == (
        "accuracy_1_shot_float32",
        "Accuracy in %, 1-shot, float32",
    )
    mean, half = by_hand([60.0, 62.0])
    assert table.rows == [
        [f"{BASE} (2)", f"{mean:.2f} ± {half:.2f}", f"{mean + 5:.2f} ± {half:.2f}"],
        ["published", "65.94", "80.60"],
        [f"{DDL} (1)", "70.00 ± 1.50", "75.00 ± 2.50"],
        ["published", "65.94", "80.60"],
        [f"{DDL}-EC (1)", "not evaluated", None],
    ]


def test_the_average_over_tasks_is_one_of_averages_of_runs(sweep):
    """A seed changes all tasks together, so that the average varies as much as each of them."""

    def with_accuracy(run, value):
        shown = [make_result(task, 0, "acc", value, 1.5) for task in tasks.PAPER_METRICS]
        record = {"settings": {"dtype": "float32", "limit": None}, "shown": shown}
        return replace(run, accuracy=[record])

    runs = [with_accuracy(run, value) for run, value in zip(load(*sweep[BASE][:2]), (40.0, 42.0))]
    [table] = tables.make_accuracy_tables(compare.group_runs(runs))
    mean, half = by_hand([40.0, 42.0])
    assert table.rows[0][1:] == [f"{mean:.2f} ± {half:.2f}"] * 9


ACCURACY = {BASE: [0.50, 0.53, 0.51], DDL: [0.70, 0.74, 0.69]}  # by seed


def test_an_unfinished_run_has_no_published_loss_in_the_figure(sweep):
    one, other = load(sweep[BASE][0], sweep[DDL][0])
    one = replace(one, published=make_published(BASE))
    longer = {**other.settings, "max_steps": 2 * STEPS}
    other = replace(other, published=make_published(DDL), settings=longer)
    [size] = paper.make_sizes([one, other], [], None)
    lines = {line.name: line for line in paper.make_lines([size])}
    assert lines[BASE].published_loss == pytest.approx(2.85426)
    assert lines[DDL].published_loss is None


def test_synthetic_tasks_are_compared_by_their_accuracy(tmp_path):
    for model_name, values in ACCURACY.items():
        for seed, value in enumerate(values):
            scores = {"val_accuracy": value, "val_exact_match": value / 2}
            write_run(tmp_path / f"{model_name}-{seed}", model_name, seed, scores=scores)
    [size] = paper.make_sizes(load(tmp_path), [], None)
    assert size.metric == "val_accuracy"
    gains = [own - base for own, base in zip(ACCURACY[DDL], ACCURACY[BASE])]
    mean, half = by_hand([100 * gain for gain in gains])
    [row] = tables.make_difference_table([size]).rows
    exact = f"{mean / 2:+.2f} ± {half / 2:.2f}"
    assert row[3:] == [f"{mean:+.2f} ± {half:.2f}", exact, "better", "3 pairs"]
    line = next(line for line in paper.make_lines([size]) if line.name == DDL)
    assert line.curves["difference"].mean == pytest.approx([mean, mean])
    out = tmp_path / "rows.json"
    result = call("research/report.py", "table", tmp_path, f"--against={BASE}", f"--json={out}")
    assert f"{mean:+.2f} ± {half:.2f}" in result.stdout.decode()
    stored = json.loads(out.read_text())
    group = next(group for group in stored["groups"] if group["model"] == DDL)
    assert group["difference"] == pytest.approx(mean)  # in percent, as val_accuracy beside it
    assert group["val_accuracy"] == pytest.approx(100 * np.mean(ACCURACY[DDL]))
    assert stored.keys() >= {"commit", "machine", "date", "torch", "rows"}


def test_losses_of_averaged_weights_have_a_column(tmp_path):
    losses = {BASE: [2.0, 2.1, 2.05], DDL: [1.8, 1.95, 1.9]}
    for model_name, values in losses.items():
        for seed, value in enumerate(values):
            scores = {"ema_val_loss": value}
            write_run(tmp_path / f"{model_name}-{seed}", model_name, seed, scores=scores)
    result = call("research/report.py", "runs", tmp_path, f"--out={tmp_path / 'runs.csv'}")
    assert result.returncode == 0, result.stderr.decode()
    for source in (tmp_path, tmp_path / "runs.csv"):
        out = tmp_path / "table.json"
        call("research/report.py", "table", source, f"--json={out}")
        rows = {group["model"]: group for group in json.loads(out.read_text())["groups"]}
        for model_name, values in losses.items():
            assert rows[model_name]["ema_val_loss"] == pytest.approx(by_hand(values)[0])


def test_every_size_has_its_baseline(tmp_path):
    shapes = (SMALL, {**SMALL, "num_hidden_layers": 3})
    for model_name in (BASE, DDL):
        for index, config in enumerate(shapes):
            write_long_run(tmp_path / f"{model_name}{index}", model_name, 0, config=config)
    sizes = paper.make_sizes(load(tmp_path), [], None)
    names = ["2 layers, width 12", "3 layers, width 12"]
    assert {size.name for size in sizes} == set(names)
    for size in sizes:
        groups = [group.name for group in size.groups]
        assert groups == [f"{model_name}, {size.name}" for model_name in (BASE, DDL)]
        assert [comparison.baseline for comparison in size.comparisons] == [size.baseline]
        folders = [tmp_path / f"{model_name}{names.index(size.name)}" for model_name in (DDL, BASE)]
        difference = size.differences["val_loss"][0].estimate.mean
        assert difference == pytest.approx(last_value(folders[0]) - last_value(folders[1]))
    looks = [line.style for line in paper.make_lines(sizes)]
    assert looks[:2] == looks[2:]
    assert looks[0]["color"] == "#000000"


# ---- curves ----


def test_curves_are_means_over_seeds_with_their_interval(sweep, report):
    validation = report.lines[BASE].curves["validation"]
    lines_by_run = [lines_with(folder, "val_loss") for folder in sweep[BASE]]
    for index, lines in enumerate(zip(*lines_by_run)):
        mean, half_width = by_hand([line["val_loss"] for line in lines])
        assert validation.steps[index] == lines[0]["step"]
        assert validation.mean[index] == pytest.approx(mean)
        assert validation.half_width[index] == pytest.approx(half_width, rel=1e-5)
        assert validation.x_values["seconds"][index] == pytest.approx(lines[0]["seconds"] - 7.5)

    difference = report.lines[DDL].curves["difference"]
    key = "val_bits_per_byte"
    ddl = [[line[key] for line in lines_with(folder, key)] for folder in sweep[DDL]]
    baseline = [[line[key] for line in lines_with(sweep[BASE][seed], key)] for seed in (2, 0)]
    for index, (ddl_2, ddl_0, base_2, base_0) in enumerate(zip(*ddl, *baseline)):
        mean, half_width = by_hand([ddl_2 - base_2, ddl_0 - base_0])
        assert difference.mean[index] == pytest.approx(mean)
        assert difference.half_width[index] == pytest.approx(half_width, rel=1e-5)

    steps, values = report.lines[DDL].residual_statistics["attn"]["beta"]
    betas = []
    for folder in sweep[DDL]:
        records = lines_with(folder, "residual")
        betas.append([record["residual"]["attn.beta_mean"] for record in records])
    assert steps.tolist() == [10, 20, 30, 40]
    assert values == pytest.approx(np.mean(betas, axis=0))
    assert report.lines[BASE].residual_statistics == {}


def test_training_is_smoothed_over_the_steps_that_all_have():
    steps = np.arange(1.0, 1001)
    losses = np.random.default_rng(0).standard_normal(1000)
    one = plots.Series(steps, {"tokens": 3 * steps}, losses)
    shorter = plots.Series(steps[99:], {"tokens": 3 * steps[99:]}, losses[99:])
    curve = plots.make_training_curve([one, shorter])
    assert (len(curve.steps), curve.steps[0], curve.steps[-1]) == (plots.MAX_POINTS, 100, 1000)
    step = int(curve.steps[150])
    expected = smoothed_by_hand(losses)[step - 1], smoothed_by_hand(losses[99:])[step - 100]
    assert curve.mean[150] == pytest.approx(np.mean(expected))
    assert curve.x_values["tokens"][150] == 3 * step
    later = plots.Series(steps + 2000, {"tokens": steps}, losses)
    assert plots.make_training_curve([one, later]) is None
    between_steps = plots.Series(steps + 0.5, {"tokens": steps}, losses)
    assert plots.make_validation_curve([one, between_steps]) is None
    assert np.isnan(plots.make_training_curve([one]).half_width).all()


def draw_lines(monkeypatch, *arguments):
    """Return the lines that report.py curves draws, the axis, the output file and the title."""
    drawings = []

    def record(lines, x_axis, x_label, y_label, out, title):
        drawings.append((lines, x_axis, out, title))

    for name in ("plot_losses", "write_page"):
        monkeypatch.setattr(plots, name, record)
    ended = call("research/report.py", "curves", *arguments)
    assert ended.returncode == 0, ended.stderr
    return drawings[0]


def test_curves_of_every_axis(tmp_path, monkeypatch):
    run = write_run(tmp_path / "a")
    nats = {"tokens": [10, 20, 30, 40], "flops": [1e6, 2e6, 3e6, 4e6], "seconds": [0, 0.5, 1, 1.5]}
    nats["steps"] = [1, 2, 3, 4]
    for x, at in nats.items():
        [line], axis, out, title = draw_lines(monkeypatch, run, f"--x={x}")
        training = line.curves["training"]
        validation = line.curves["validation"]
        assert training.x_values[axis].tolist() == at
        assert training.mean.tolist() == smoothed_by_hand([4.0, 3.0, 2.0, 1.0])
        assert (validation.x_values[axis].tolist(), validation.mean.tolist()) == (
            [at[1], at[3]],
            [2, 2],
        )
        assert (out, title) == (run / "curves.png", "a")
    [line], *_ = draw_lines(monkeypatch, run, "--y=bits_per_byte")
    bits = 1 / math.log(2) / 4  # four bytes a token
    expected = [value * bits for value in smoothed_by_hand([4.0, 3.0, 2.0, 1.0])]
    assert line.curves["training"].mean == pytest.approx(expected)
    assert line.curves["validation"].mean == pytest.approx([2 * bits] * 2)


def test_a_band_is_the_mean_of_seeds_as_far_as_all_of_them_are(tmp_path, monkeypatch):
    """Also where runs were not equally fast: both axes are means at a step."""
    for seed, steps in enumerate((4, 3, 4)):
        folder = write_run(tmp_path / f"seed={seed}", seed=seed, val=2.0 + seed, steps=steps)
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for line in lines:
            line["seconds"] = line["step"] * (1 + seed)
            line |= {"loss": line["loss"] * (1 + seed)} if "loss" in line else {}
        write_lines(folder, lines)
    [line], *_ = draw_lines(monkeypatch, tmp_path, "--band", "--x=seconds")
    curve = line.curves["training"]
    assert (line.num_runs, curve.steps.tolist(), curve.x_values["seconds"].tolist()) == (
        3,
        [1, 2, 3],
        [0, 2, 4],
    )
    for index in range(3):
        longer, shorter = (smoothed_by_hand(np.arange(4, 4 - n, -1.0)) for n in (4, 3))
        mean, half = by_hand([longer[index], 2 * shorter[index], 3 * longer[index]])
        assert (curve.mean[index], curve.half_width[index]) == pytest.approx((mean, half), rel=1e-6)
    assert line.curves["validation"].mean.tolist() == [3.0]


def test_a_model_has_one_look_in_curves_and_in_a_paper(tmp_path, monkeypatch):
    """Whatever the order of the runs: the baseline black, the others in the paper's order."""
    model_names = (DDL, "DDL-vdim1-gpt-mha-rope", BASE, f"{DDL}-EC")
    for index, model_name in enumerate(model_names):
        write_run(tmp_path / f"{index}", model_name)
    lines = paper.make_lines(paper.make_sizes(load(tmp_path), [], None))
    expected = {line.model_name: line.style for line in lines}
    assert expected[BASE]["color"] == "#000000"
    assert len({look["color"] for look in expected.values()}) == len(model_names)
    for words in ([], ["--band"]):
        lines, *_ = draw_lines(monkeypatch, tmp_path, *words)
        assert {line.model_name: line.style for line in lines} == expected
    looks = [tuple(plots.get_line_style(number).values()) for number in range(29)]
    assert len(set(looks)) == len(looks)
    assert plots.assign_style_numbers([BASE, BASE, "a"]) == [1, 2, 3]  # none is the baseline


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_curves_are_files_beside_the_runs_or_where_they_were_asked_for(tmp_path, suffix):
    folders = [write_run(tmp_path / name) for name in ("a", "b")]
    ended = call("research/report.py", "curves", *folders)
    assert ended.stdout.decode() == f"drew {tmp_path / 'curves.png'}\n"
    out = tmp_path / "figures" / f"loss.{suffix}"
    assert call("research/report.py", "curves", *folders, f"--out={out}").returncode == 0
    assert [path.name for path in out.parent.iterdir()] == [out.name]
    if suffix == "png":
        assert matplotlib.image.imread(out).std() > 0.05  # something is on the canvas


def test_the_interactive_page_has_the_curves_and_needs_no_network(tmp_path):
    for seed in (0, 1):
        write_run(tmp_path / f"<b>{seed}", seed=seed, val=2.5 + seed)
    out = tmp_path / "curves.html"
    ended = call("research/report.py", "curves", tmp_path, "--band", f"--out={out}")
    assert ended.returncode == 0
    page = out.read_text(encoding="utf-8")
    traces = json.JSONDecoder().raw_decode(page, page.index("[", page.rindex("Plotly.newPlot(")))
    training, validation = traces[0]
    assert (training["mode"], validation["mode"]) == ("lines", "markers")
    assert (training["x"], validation["y"]) == ([1, 2, 3, 4], [3.0, 3.0])
    assert validation["error_y"]["array"] == pytest.approx([12.7062 * 0.5] * 2, rel=1e-4)
    assert not re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=", page)
    assert "<b>" not in json.dumps(traces[0])


# ---- figures ----


def make_line(number, name, size="small", model_name=None, points=8, published_loss=None):
    """Return a line of two runs whose loss falls; lines of different numbers do not touch."""
    steps = np.linspace(100, 800, points)
    x = {"steps": steps, "tokens": 2048 * steps, "flops": 1e10 * steps, "seconds": 0.2 * steps}
    curve = plots.Curve(steps, x, 3 + 200 / steps - 0.05 * number, np.full(points, 0.02))
    curves = {"training": curve, "validation": curve}
    if number:
        curves["difference"] = curve
    values = np.stack([np.linspace(0, 1, points), np.linspace(1, 0, points)], axis=1)
    statistics = {}
    if number:
        statistics = {site: {"beta": (steps, values)} for site in ("attn", "mlp")}
    return plots.Line(
        name=name,
        model_name=model_name or name,
        style_number=number,
        num_runs=2,
        size=size,
        curves=curves,
        published_loss=published_loss,
        residual_statistics=statistics,
    )


def figures_of(lines):
    rows = [(e, compare.Estimate(-0.1, 0.03, 1, 2), "undecided") for e in lines if e.style_number]
    members_by_name = plots.group_lines_by_statistics(lines)
    # none is left out
    num_lines = sum(bool(line.residual_statistics) for line in lines)
    assert sum(map(len, members_by_name.values())) == num_lines
    with plots.use_print_style():
        return {
            "curves": plots.plot_paper_curves(lines, "tokens"),
            "costs": plots.plot_costs(lines),
            "differences": plots.plot_differences(lines, BASE, "bits per byte"),
            "final": plots.plot_final(rows, BASE, "bits per byte"),
            **{name: plots.plot_residual(members) for name, members in members_by_name.items()},
        }


def many(count):
    return [make_line(n, f"{BASE} learning_rate={0.001 * n:.3f} beta2=0.95") for n in range(count)]


def three_sizes():
    """The last with a run that was not evaluated."""
    names = ("12 layers, width 768", "24 layers, width 1024", "100 layers, width 10240")
    lines = [make_line(n, f"{DDL}-{n}, {s}", s, f"{DDL}-{n}") for s in names for n in range(2)][:-1]
    del lines[-1].curves["validation"]
    return lines


@pytest.mark.parametrize("lines", [many(2), many(20), three_sizes()], ids=["2", "20", "sizes"])
def test_nothing_in_a_figure_covers_anything(lines):
    for name, figure in figures_of(lines).items():
        with plots.use_print_style():
            renderer = FigureCanvasAgg(figure).get_renderer()
            figure.draw(renderer)
        legends = [legend.get_window_extent(renderer) for legend in figure.legends]
        boxes = [axis.get_tightbbox(renderer) for axis in figure.axes if axis.get_visible()]
        inside = figure.bbox.padded(1)
        assert len(legends) == (name in ("curves", "costs", "differences")), name
        for index, box in enumerate([*boxes, *legends]):
            assert inside.x0 <= box.x0 <= box.x1 <= inside.x1, name
            assert inside.y0 <= box.y0 <= box.y1 <= inside.y1, name
            others = [*boxes, *legends][:index]
            assert not any(box.padded(-1).overlaps(other) for other in others), name
        for axis in figure.axes:
            labels = [
                label.get_window_extent() for label in axis.get_xticklabels() if label.get_text()
            ]
            low, high = axis.get_xlim()
            visible_labels = [
                label for label, tick in zip(labels, axis.get_xticks()) if low <= tick <= high
            ]
            assert not any(one.overlaps(two) for one, two in pairwise(visible_labels)), name
        texts = [text for text in figure.findobj(matplotlib.text.Text) if text.get_text()]
        assert min(text.get_fontsize() for text in texts) >= 8


def test_a_legend_of_many_runs_hides_no_curve(tmp_path, monkeypatch):
    folders = [write_run(tmp_path / f"{i}", name="n" * 40 + str(i)) for i in range(12)]
    figures = []
    monkeypatch.setattr(plots, "save", lambda figure, out: figures.append(figure))
    assert call("research/report.py", "curves", *folders).returncode == 0
    renderer = FigureCanvasAgg(figures[0]).get_renderer()
    figures[0].draw(renderer)
    [legend] = figures[0].legends
    [axis] = figures[0].axes
    assert legend.get_window_extent().y1 < axis.xaxis.label.get_window_extent().y0
    assert axis.get_window_extent().height > 0.4 * figures[0].bbox.height
    looks = {
        (line.get_color(), line.get_linestyle()) for line in axis.lines if line.get_alpha() is None
    }
    assert len(looks) >= 12


def test_the_papers_six_panels():
    model_names = (BASE, "DDL-vdim1-gpt-mha-rope", DDL)
    sizes = ("small", "medium")
    lines = [
        make_line(n, f"{s}, {size}", size, s) for size in sizes for n, s in enumerate(model_names)
    ]
    variants = [f"{DDL}-{suffix}" for suffix in ("EC", "CC")]
    lines += [
        make_line(n, f"{model_name}, small", "small", model_name)
        for n, model_name in enumerate(variants, 3)
    ]
    with plots.use_print_style():
        top, bottom = np.reshape(plots.plot_paper_curves(lines, "tokens").axes, (2, 3))
    assert [axis.get_title() for axis in top] == ["small", "medium", "small,\nDDL variants"]
    assert {axis.get_xlabel() for axis in bottom} == {"tokens"}
    colors = {line.name: line.style["color"] for line in lines}
    members = [[f"{s}, small" for s in model_names], [f"{s}, medium" for s in model_names]]
    members.append([f"{model_name}, small" for model_name in (BASE, DDL, *variants)])
    for axes in (top, bottom):
        drawn = [[line.get_color() for line in axis.lines] for axis in axes]
        assert drawn == [[colors[name] for name in names] for names in members]
    curve = lines[0].curves["validation"]
    assert bottom[0].lines[0].get_ydata().tolist() == curve.mean.tolist()
    assert bottom[0].lines[0].get_xdata().tolist() == curve.x_values["tokens"].tolist()
    band = bottom[0].collections[0].get_paths()[0].get_extents()
    low = min(curve.mean - curve.half_width)
    high = max(curve.mean + curve.half_width)
    assert (band.y0, band.y1) == pytest.approx((low, high))


def test_an_interval_is_drawn_as_it_is():
    rows = [(make_line(1, "a"), compare.estimate_mean([1.0, 2.0]), "undecided")]
    rows.append((make_line(2, "b"), compare.estimate_mean([3.0]), "x"))
    with plots.use_print_style():
        axis = plots.plot_final(rows, BASE, "loss").axes[0]
    (bars,) = axis.containers[0][2]
    ends = sorted(bars.get_segments()[0][:, 0])
    assert ends == pytest.approx([1.5 - 6.3531, 1.5 + 6.3531], rel=1e-4)
    words = ["+1.5000 ± 6.3531 (2)  undecided", "+3.0000 (1)  x"]
    assert [text.get_text() for text in axis.texts] == words


def test_numbers_on_axes_are_short():
    for value, text in ((0, "0"), (1500, "1.5K"), (4.9e10, "49B"), (0.5, "0.5"), (3e21, "3e+09T")):
        assert plots.format_short_number(value, "KMBT") == text


def test_latex_is_whole():
    header = ["model & co", "a_b"]
    rows = [["x % y", "1 ± 2"], ["{z}", None], ["published", "#~^\\"]]
    text = texts.format_latex(header, rows, continuations=("published",))
    plain = re.sub(r"\\[&%$#_{}]", "", text)
    assert plain.count("{") == plain.count("}")
    lines = [line for line in plain.splitlines() if line.endswith("\\\\")]
    assert [line.count("&") for line in lines] == [1] * 4
    assert not set("#%_^~") & set(plain)
    assert [plain.count(r) for r in (r"\toprule", r"\midrule", r"\bottomrule")] == [1, 2, 1]
    assert r"x \% y & 1 $\pm$ 2 \\" in text
    assert r"\{z\} & - \\" in text


# ---- the folder ----


def test_the_folder_and_what_is_missing_in_it(tmp_path):
    """Whole runs, one that did not finish, another vocabulary, a damaged run, one without state."""
    write_long_run(tmp_path / "runs/a", BASE, 0)
    write_long_run(tmp_path / "runs/b", DDL, 0, steps=25)
    other = {**CORPUS, "tokenizer": "bytes", "val": {"bytes": 800, "tokens": 800}}
    write_long_run(tmp_path / "runs/c", f"{DDL}-EC", 0, corpus=other)
    early = write_long_run(tmp_path / "runs/d", f"{DDL}-CC", 0, steps=5)
    text = (early / "metrics.jsonl").read_text() + '{"step": 6, "loss": NaN}\n{"step"'
    (early / "metrics.jsonl").write_text(text)
    write_lines(tmp_path / "runs/e", [])
    alone = write_long_run(tmp_path / "runs/f_&_g", BASE, 1)
    (alone / "checkpoints").rename(alone / "gone")
    out = tmp_path / "a report"
    ended = call("research/report.py", "paper", tmp_path / "runs", f"--out={out}")
    assert ended.stdout.decode() == f"wrote {out / 'report.md'}\n"
    drawn = {p.name for p in (out / "figures").iterdir()}
    names = ("curves", "costs", "final", "residual_beta")
    assert drawn == {f"{name}.{kind}" for name in names for kind in ("png", "svg")}
    files = {path.name for path in out.iterdir() if path.is_file()}
    assert files == {"report.md", "report.json", "tables.tex", "curves.csv"} | {
        f"{name}.csv" for name in ("validation", "differences", "costs", "runs")
    }
    text = (out / "report.md").read_text()
    cells = [[c.strip() for c in row.split("|")[1:-1]] for row in text.splitlines() if "|" in row]
    rows = {row[0]: row for row in reversed(cells)}
    assert rows[DDL][3] == f"20 of {STEPS}"
    assert rows[f"{DDL}-CC"][3:5] == [f"6 of {STEPS}", "not evaluated"]
    assert rows["f_&_g"][2:4] == ["1", str(STEPS)]
    assert "different texts or tokens (gpt2, bytes" in text
    omitted = json.loads((out / "report.json").read_text())["left_out"]
    assert [line.partition(":")[0] for line in omitted] == ["e", "d", "d", "f_&_g"]
    assert all(f"- {line}" in text for line in omitted)
    assert all(f"note: {line}" in ended.stderr.decode() for line in omitted)
    assert all((out / name).is_file() for name in re.findall(r"\]\((.*?)\)", text))
    latex = (out / "tables.tex").read_text()
    assert latex.count("\\begin{tabular}") == latex.count("\\end{tabular}") == 4


def test_one_run_is_a_report(sweep, tmp_path):
    out = tmp_path / "out"
    ended = call("research/report.py", "paper", sweep[DDL][0], f"--out={out}", "--x=steps")
    assert ended.returncode == 0
    stored = json.loads((out / "report.json").read_text())
    assert list(stored["tables"]) == ["validation", "costs", "runs"]
    assert "No comparison" in stored["tables"]["validation"]["notes"][-1]


def test_an_interrupted_report_leaves_the_earlier_one(sweep, tmp_path, monkeypatch):
    loaded = load(sweep[BASE][0])
    out = tmp_path / "out"

    def write():
        paper.write(loaded, omitted=[], keys=[], against=None, x_axis="tokens", out=out)

    def read_files():
        return {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}

    def interrupt(*_):
        raise KeyboardInterrupt

    write()
    first_report = read_files()
    for name in ("store_figures", "format_curves_csv"):
        with monkeypatch.context() as patch:
            patch.setattr(paper, name, interrupt)
            with pytest.raises(KeyboardInterrupt):
                write()
        assert read_files() == first_report
        assert [path.name for path in tmp_path.iterdir()] == ["out"]
    (out / "figures/mine.png").write_text("mine")
    error = one_line_error(call("research/report.py", "paper", sweep[BASE][0], f"--out={out}"))
    assert "figures/mine.png" in error
    assert (out / "figures/mine.png").read_text() == "mine"


def test_mistakes_end_in_one_line(tmp_path):
    run = write_run(tmp_path / "a")
    out = tmp_path / "new"
    empty = write_lines(tmp_path / "empty", [])
    early = write_run(tmp_path / "early", steps=1)
    unknown = write_run(tmp_path / "unknown", corpus={})
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "notes.txt").write_text("mine")
    for message, *words in (
        ("holds no metrics.jsonl", "curves", mine),
        ("nothing does not exist", "table", tmp_path / "nothing"),
        ("has no step yet", "curves", empty),
        ("ends with .png", "curves", run, f"--out={out}"),
        ("early has no evaluation yet", "table", early),
        ("text size is unknown", "curves", unknown, "--y=bits_per_byte"),
        ("no run has a key 'sead', did you mean", "curves", run, "--where=sead=1"),
        (
            "--where=model=x: no run matches; its values are gpt-mha-rope",
            "table",
            run,
            "--where=model=x",
        ),
        ("give key=value", "table", run, "--where=seed"),
        ("none of the rows", "table", run, "--against=nobody"),
        ("it exists and is not a report", "paper", run, f"--out={mine}"),
        ("none of the rows", "paper", run, f"--out={out}", "--against=nobody"),
        ("sead", "paper", run, f"--out={out}", "--by=sead"),
    ):
        ended = call("research/report.py", *words)
        assert ended.returncode == 2, words
        assert message in ended.stderr.decode().strip().splitlines()[-1], words
    assert not out.exists()
    assert [path.name for path in mine.iterdir()] == ["notes.txt"]
