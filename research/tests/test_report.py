"""report.py: the series behind a figure, the figure itself, and tables."""

import json
import math
import re
from dataclasses import replace

import pytest
from helpers import one_line_error, sign, small_run
from in_process import call
from matplotlib.backends.backend_agg import FigureCanvasAgg
from report_helpers import write_run

from research.reporting import bands, curves, drawing, groups, runs, sizes, style, table


def loaded(*folders):
    found, faults = runs.load([str(folder) for folder in folders])
    assert not faults
    return found


def series_of(run, x, y, **keys):
    """((x, y) of training, (x, y) of validation) as lists."""
    return [(each.x[x].tolist(), each.values.tolist()) for each in curves.series(run, x, y, **keys)]


def test_series(tmp_path):
    [run] = loaded(write_run(tmp_path / "a", [4.0, 3.0, 2.0, 1.0]))
    training, validation = series_of(run, "tokens", "loss")
    assert training == ([10, 20, 30, 40], [4.0, 3.0, 2.0, 1.0])
    assert validation == ([20, 40], [2.0, 2.0])
    (x, y), (val_x, val_y) = series_of(run, "seconds", "bits_per_byte")
    assert x == [0.5, 1.0, 1.5, 2.0]
    assert y == pytest.approx([2 / math.log(2), 1.5 / math.log(2), 1 / math.log(2), 0.5 / math.log(2)])
    assert val_x == [1.0, 2.0]
    assert val_y == pytest.approx([0.5 / math.log(2)] * 2)
    (x, _), (val_x, _) = series_of(run, "seconds", "loss", first_step=False)
    assert (x, val_x) == ([0.0, 0.5, 1.0, 1.5], [0.5, 1.5])
    (x, _), (val_x, _) = series_of(replace(run, processes=3), "seconds", "loss", first_step=False)
    assert (x, val_x) == ([0.0, 1.5, 3.0, 4.5], [1.5, 4.5])


def test_smooth_is_a_centred_mean():
    values = [1.0, 2.0, 6.0, 4.0, 8.0]
    assert bands.smooth(values, 2) == pytest.approx([1.5, 3.0, 4.0, 6.0, 6.0])
    assert bands.smooth(values, 1).tolist() == values
    assert bands.smooth([], 2).tolist() == []


def lines_of(monkeypatch):
    """(x, y, label) of every line that is drawn from now on."""
    drawn, plt = [], style.pyplot()
    original = plt.Axes.plot

    def plot(axes, *args, **kwargs):
        drawn.append((list(args[0]), list(args[1]), kwargs.get("label")))
        return original(axes, *args, **kwargs)

    monkeypatch.setattr(plt.Axes, "plot", plot)
    return drawn


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_curves_draw_every_run(tmp_path, monkeypatch, suffix):
    folders = [write_run(tmp_path / name, losses) for name, losses in (("a", [4, 3, 2, 1]), ("b", [5, 4, 4, 3]))]
    drawn, out = lines_of(monkeypatch), tmp_path / "figures" / f"loss.{suffix}"
    assert call("research/report.py", "curves", *folders, "--x=flops", f"--out={out}").returncode == 0
    assert [label for *_, label in drawn if label][:2] == ["a, validation 2.000", "b, validation 2.000"]
    assert drawn[0][:2] == ([1e6, 2e6, 3e6, 4e6], [4, 3, 2, 1])
    if suffix == "png":
        assert style.pyplot().imread(out).std() > 0.05  # something is on the canvas
    else:
        assert "</svg>" in out.read_text()
    assert [path.name for path in out.parent.iterdir()] == [out.name]
    assert "ends with .png, .svg" in one_line_error(call("research/report.py", "curves", *folders, f"--out={out}x"))


def test_a_band_is_the_mean_of_seeds_with_students_interval(tmp_path, monkeypatch):
    """Of runs that are not equally far, as far as all of them are."""
    losses = [[4.0, 3.0, 2.0, 1.0], [5.0, 3.5, 2.5], [4.5, 2.5, 3.0, 2.0]]
    for seed, values in enumerate(losses):
        write_run(tmp_path / f"seed={seed}", values, val=2.0 + seed, seed=seed, max_steps=4)
    drawn, filled = lines_of(monkeypatch), []
    monkeypatch.setattr(style.pyplot().Axes, "fill_between", lambda self, x, low, high, **_: filled.append((low, high)))
    monkeypatch.setattr(bands, "smooth", lambda values, window: values)
    assert call("research/report.py", "curves", tmp_path, "--band").returncode == 0
    x, mean, label = drawn[0]
    means = [sum(step) / 3 for step in zip(*losses)]
    assert (x, label) == ([1, 2, 3], "gpt-mha-rope, 3 runs, validation 3.000")
    assert mean == pytest.approx(means)
    low, high = filled[0]
    for step, values in enumerate(zip(*losses)):
        deviation = math.sqrt(sum((value - means[step]) ** 2 for value in values) / 2)
        half = 4.3026527 * deviation / math.sqrt(3)  # Student's t of 2 degrees
        assert (low[step], high[step]) == pytest.approx((means[step] - half, means[step] + half), rel=1e-6)


def test_a_band_over_seconds_is_of_the_same_steps(tmp_path, monkeypatch):
    """Runs of unequal speed: both axes are means at a step, and the last validation is the last one's."""
    values = {0: [4.0, 3.0, 2.0, 1.0], 1: [5.0, 4.0, 3.0, 2.0]}
    for seed, losses in values.items():
        folder = write_run(tmp_path / f"seed={seed}", losses, seed=seed, max_steps=4)
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for line in lines:
            line["seconds"] *= 1 + 3 * seed  # 0.5 a step, and 2.0
            if "val_loss" in line:
                line["val_loss"] = 9.0 - line["step"] - seed
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    drawn, points = lines_of(monkeypatch), []
    monkeypatch.setattr(bands, "smooth", lambda values, window: values)
    monkeypatch.setattr(style.pyplot().Axes, "errorbar", lambda self, x, y, **_: points.append((list(x), list(y))))
    assert call("research/report.py", "curves", tmp_path, "--band", "--x=seconds").returncode == 0
    assert drawn[0] == ([1.25, 2.5, 3.75, 5.0], [4.5, 3.5, 2.5, 1.5], "gpt-mha-rope, 2 runs, validation 4.500")
    assert points == [([2.5, 5.0], [6.5, 4.5])]


def test_a_model_has_one_look_in_curves_and_in_a_paper(tmp_path, monkeypatch):
    """Whatever the order of the runs: the baseline black, the others in the paper's order."""
    stems = "DDL-gpt-mha-rope", "DDL-vdim1-gpt-mha-rope", "gpt-mha-rope", "DDL-gpt-mha-rope-EC"
    for index, stem in enumerate(stems):
        path = write_run(tmp_path / f"{index}", [4, 3, 2, 1], max_steps=4, model=stem) / "checkpoints/step_00000004"
        state = json.loads((path / "state.json").read_text())
        (path / "state.json").write_text(json.dumps({**state, "model": stem}))
        sign(path)
    found = loaded(tmp_path)
    expected = {each.stem: each.look for each in drawing.drawn(sizes.sizes_of(found, [], None))}
    assert expected["gpt-mha-rope"]["color"] == "#000000"
    assert len({look["color"] for look in expected.values()}) == len(stems)
    looks = []
    monkeypatch.setattr(curves, "draw_one", lambda axes, line, x, look, trace: looks.append((line.stem, look)))
    for words in ([], ["--band"]):
        looks.clear()
        assert call("research/report.py", "curves", tmp_path, *words).returncode == 0
        assert dict(looks) == expected


def test_looks_are_distinct_and_one_baseline_is_black():
    looks = [tuple(style.line(number).values()) for number in range(style.DISTINCT + 1)]
    assert len(set(looks)) == len(looks)
    assert [look for look in looks if look[0] == "#000000"] == [("#000000", "-")]
    base = "gpt-mha-rope"
    assert style.numbers(["a", base, None]) == [1, 0, 2]
    assert style.numbers([base, base, "a"]) == [1, 2, 3]


def test_a_legend_hides_no_curve(tmp_path, monkeypatch):
    """It lies below the axes, whatever its length."""
    folders = [write_run(tmp_path / f"{i}", [4, 3, 2, 1], name="n" * 40 + str(i)) for i in range(12)]
    figures = []
    monkeypatch.setattr(curves, "save", lambda figure, out: figures.append(figure))
    assert call("research/report.py", "curves", *folders).returncode == 0
    [figure] = figures
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer = canvas.get_renderer()
    legend, axes = (box.get_window_extent(renderer) for box in (figure.legends[0], figure.axes[0]))
    assert legend.y1 < figure.axes[0].xaxis.label.get_window_extent(renderer).y0
    assert legend.x0 >= 0
    assert legend.x1 <= figure.bbox.x1
    assert axes.height > 0.4 * figure.bbox.height
    styles = [(line.get_color(), line.get_linestyle()) for line in figure.axes[0].lines if ":" not in line.get_label()]
    assert len({each for each in styles if each[1] != "None"}) >= 12


def test_labels_are_short_and_name_what_differs(tmp_path):
    def labels(**runs):
        folders = [tmp_path / key for key in runs]
        for folder, settings in zip(folders, runs.values()):
            write_run(folder, [1.0], **settings)
        return groups.labels_of(loaded(*folders))

    same = {"out_dir": "x", "warmup_steps": 5}
    one, two = {"model": "a", "seed": 1, "max_steps": 9}, {"model": "b", "seed": 1, "max_steps": 10}
    assert labels(a=same | one, b=same | two | {"out_dir": "y"}) == ["a, max_steps=9", "b, max_steps=10"]
    assert labels(c=one | {"own": 1}, d=one | {"seed": 2}) == ["seed=1", "seed=2"]
    assert labels(e=one, f=one) == ["e", "f"]  # nothing differs
    long = {"name": "n" * 80}
    assert labels(g=one | long, h=two | {"name": "m"}) == ["a, max_steps=9", "b, max_steps=10"]
    assert labels(**{"i" * 90: one, "j": one}) == ["i" * 30 + "..." + "i" * 30, "j"]
    (tmp_path / "e/checkpoints").rename(tmp_path / "e/gone")  # a run before its first checkpoint
    assert groups.labels_of(loaded(tmp_path / "e", tmp_path / "d")) == ["e", "d"]


def test_a_curve_goes_into_the_run_or_beside_the_runs(tmp_path):
    folders = [write_run(tmp_path / name, [4, 3, 2, 1]) for name in ("a", "b")]
    assert call("research/report.py", "curves", folders[0]).stdout.decode() == f"drew {folders[0] / 'loss.png'}\n"
    assert call("research/report.py", "curves", *folders).stdout.decode() == f"drew {tmp_path / 'loss.png'}\n"
    assert (folders[0] / "loss.png").is_file()
    assert (tmp_path / "loss.png").is_file()


def test_table(tmp_path):
    run = write_run(tmp_path / "a", [4.0, 3.0, 2.0, 1.0], val=3.25)
    found = loaded(run)
    rows = [table.row_of(each) for each in found]
    assert rows[0]["run"] == "a"
    cells = table.markdown(table.rows_of(groups.groups_of(found), [])).splitlines()[-1].split("|")[1:-1]
    assert [cell.strip() for cell in cells] == ["`gpt-mha-rope`", "7,052", "4", "2", "3.250", "1.172"]
    out = tmp_path / "rows.json"
    assert call("research/report.py", "table", run, f"--json={out}").returncode == 0
    stored = json.loads(out.read_text())
    assert stored["rows"] == rows
    assert stored["command"] == f"python research/report.py table {run} --json={out}"
    assert stored.keys() >= {"commit", "machine", "date", "torch"}


def test_runs_whose_rates_are_apart_are_told_apart(corpus, tmp_path):
    folders = [tmp_path / f"muon_{rate}" for rate in (0.01, 0.02)]
    for folder, rate in zip(folders, (0.01, 0.02)):
        keys = {"optimizer": "muon", "muon_learning_rate": rate, "max_steps": 3}
        assert call("train.py", *small_run(corpus, folder, **keys)).returncode == 0
    assert groups.labels_of(loaded(*folders)) == ["muon_learning_rate=0.01", "muon_learning_rate=0.02"]
    printed = call("research/report.py", "table", *folders).stdout.decode()
    assert "muon_learning_rate=0.01" in printed
    assert "muon_learning_rate=0.02" in printed
    assert call("research/report.py", "curves", *folders).returncode == 0


def test_runs_that_differ_in_their_seed_are_one_row(tmp_path):
    """Beside a baseline with the same seeds and one more, a run of other settings, and two runs of the same seed."""
    losses = {"gpt-mha-rope": [3.0, 3.4, 3.1, 9.0], "DDL-vdim1-gpt-mha-rope": [2.0, 2.5, 2.2]}
    folders = []
    for stem, values in losses.items():
        for seed, val in sorted(enumerate(values), reverse=stem.startswith("DDL")):  # not the order of the baseline's
            folder = tmp_path / f"{stem}-{seed}"
            settings = {"seed": seed, "model": stem, "max_steps": 4, "learning_rate": 0.5, "out_dir": folder.name}
            folders.append(write_run(folder, [4, 3, 2, 1], val=val, **settings))
            path = folder / "checkpoints" / "step_00000004" / "state.json"
            path.write_text(json.dumps({**json.loads(path.read_text()), "model": stem}))
            sign(path.parent)
    folders.append(write_run(tmp_path / "other", [4, 3, 2, 1], val=5.0, seed=1, learning_rate=1.0))
    folders += [write_run(tmp_path / name, [4, 3, 2, 1], val=6.0, seed=7, warmup_steps=1) for name in ("same", "again")]
    out = tmp_path / "rows.json"
    printed = call("research/report.py", "table", *folders, f"--json={out}", f"--against={folders[0]}")
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in printed.stdout.decode().strip().splitlines()]
    assert cells[0][-2:] == ["bits per byte less that of `gpt-mha-rope learning_rate=0.5`", "that is"]
    # By hand: values of two bytes a token; t of 2 degrees is 4.303, of 3 it is 3.182; s by the textbook's formula.
    nats = 4 * math.log(2)

    def text(values, t, form=".3f"):
        mean = sum(values) / len(values)
        s = math.sqrt(sum((x - mean) ** 2 for x in values) / (len(values) - 1))
        return f"{mean:{form}} ± {t * s / math.sqrt(len(values)):.3f} ({len(values)})"

    base, own = losses.values()
    difference = text([(x - y) / nats for x, y in zip(own, base)], 4.3026527, "+.3f")
    # A name says in what rows of one stem differ, where both have the key.
    names = ["gpt-mha-rope learning_rate=0.5", "DDL-vdim1-gpt-mha-rope", "gpt-mha-rope learning_rate=1.0"]
    assert [row[0] for row in cells[2:]] == [f"`{name}`" for name in [*names, "gpt-mha-rope", "gpt-mha-rope"]]
    assert cells[2][3:] == [text(base, 3.1824463), text([x / nats for x in base], 3.1824463), "-", "-"]
    assert cells[3][3:] == [text(own, 4.3026527), text([x / nats for x in own], 4.3026527), difference, "better"]
    assert cells[4][3:] == ["5.000", f"{5 / nats:.3f}", f"{1.6 / nats:+.3f} (1)", "undecided"]
    half = 3.1824463 * math.sqrt(sum((x - sum(base) / 4) ** 2 for x in base) / 3) / 2 / nats
    assert half > 0  # of the baseline; the other's is not known from one run
    unpaired = f"{(6 - sum(base) / 4) / nats:+.3f} (1) unpaired"
    assert [row[3:] for row in cells[5:]] == [["6.000", f"{6 / nats:.3f}", unpaired, "undecided"]] * 2
    stored = json.loads(out.read_text())
    assert [row["run"] for row in stored["rows"]] == [folder.name for folder in folders]
    assert stored["groups"][0]["seeds"] == [0, 1, 2, 3]
    assert table.markdown(stored["groups"]) == printed.stdout.decode().rstrip("\n")
    assert "4 of the rows" in one_line_error(call("research/report.py", "table", *folders, "--against=gpt-mha-rope"))
    assert call("research/report.py", "table", *folders, f"--against={names[0]}").stdout == printed.stdout
    assert "none of the rows" in one_line_error(call("research/report.py", "table", *folders, "--against=gpt"))


def test_mistakes_end_in_one_line(tmp_path):
    assert "holds no metrics.jsonl" in one_line_error(call("research/report.py", "curves", tmp_path))
    assert "nothing is not there" in one_line_error(call("research/report.py", "table", tmp_path / "nothing"))
    (tmp_path / "metrics.jsonl").write_text("")
    assert "has no step yet" in one_line_error(call("research/report.py", "curves", tmp_path))
    (tmp_path / "metrics.jsonl").unlink()
    run = write_run(tmp_path / "a", [1.0], seed=0)
    assert "give --x=seconds" in one_line_error(call("research/report.py", "curves", run, "--skip_first_step"))
    assert "a has no evaluation yet" in one_line_error(call("research/report.py", "table", run))
    path = run / "checkpoints" / "step_00000004" / "state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "corpus": {}}))
    sign(path.parent)
    assert "text size is unknown" in one_line_error(call("research/report.py", "curves", run, "--y=bits_per_byte"))
    assert "no run has a key 'sead', did you mean" in one_line_error(
        call("research/report.py", "curves", run, "--where=sead=1")
    )
    assert "--where=model=x: no run; they have gpt-mha-rope" in one_line_error(
        call("research/report.py", "curves", run, "--where=model=x")
    )
    assert "give key=value" in one_line_error(call("research/report.py", "table", run, "--where=seed"))


def test_the_interactive_page_has_the_curves_and_needs_no_network(tmp_path):
    """Its numbers are taken out of the page and compared with the runs' own lines."""
    for seed in (0, 1):
        write_run(tmp_path / f"<b>{seed}", [4.0, 3.0 + seed, 2.0], val=2.5 + seed, seed=seed)
    out = tmp_path / "curves.html"
    assert call("research/report.py", "curves", tmp_path, "--band", f"--out={out}").returncode == 0
    page = out.read_text(encoding="utf-8")
    traces = json.JSONDecoder().raw_decode(page, page.index("[", page.rindex("Plotly.newPlot(")))[0]
    training, validation = traces
    assert (training["mode"], validation["mode"]) == ("lines", "markers")
    assert len(training["x"]) == len(training["y"]) > 1
    assert validation["y"] == [3.0]
    assert validation["error_y"]["array"] == pytest.approx([12.7062 * 0.5], rel=1e-4)  # Student, one degree
    assert not re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=", page)
    assert "<b>" not in json.dumps(traces)
