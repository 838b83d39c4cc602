"""report.py paper: its numbers against plain Python on the lines of metrics.jsonl, and what it does without some."""

import csv
import io
import json
import math
import statistics as plain
from dataclasses import replace

import numpy as np
import pytest
from helpers import SMALL
from in_process import call
from paper_helpers import BASE, CORPUS, DDL, STEPS, loaded, write_run

from evaluation import published
from research.reporting import bands, drawing, figures, groups, paper, results, sizes

STUDENT = {2: 12.706205, 3: 4.302653}  # 97.5% quantile with n - 1 degrees, from a table


def lines_of(folder, key):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if key in line]


def interval(values):
    """(mean, half the 95% interval), by the textbook."""
    n = len(values)
    mean = sum(values) / n
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / (n - 1))
    return mean, STUDENT[n] * deviation / math.sqrt(n)


def table_of(report, name):
    return next(table for table in report.tables if table.name == name)


def rows_of(table):
    """What the CSV says, by model."""
    return {row["model"]: row for row in csv.DictReader(io.StringIO(table.comma_separated()))}


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """Three seeds of the baseline, of which DDL has two, beside a DDL variant's single run."""
    folder = tmp_path_factory.mktemp("sweep")
    made = {BASE: [write_run(folder / f"a{seed}", BASE, seed) for seed in range(3)]}
    made[DDL] = [write_run(folder / f"b{seed}", DDL, seed, better=0.5) for seed in (2, 0)]
    made[f"{DDL}-EC"] = [write_run(folder / "c", f"{DDL}-EC", 1)]
    return made


@pytest.fixture(scope="module")
def report(sweep):
    return paper.make(loaded(*sweep[DDL], *sweep[f"{DDL}-EC"], *sweep[BASE]), [], [], None, "tokens")


def test_validation_is_that_of_the_last_lines(sweep, report):
    table = table_of(report, "validation")
    stored = rows_of(table)
    assert list(stored) == [BASE, DDL, f"{DDL}-EC"]  # the paper's order, the baseline first
    for stem, folders in sweep.items():
        for key in ("val_loss", "val_perplexity", "val_bits_per_byte"):
            values = [lines_of(folder, key)[-1][key] for folder in folders]
            mean, half = interval(values) if len(values) > 1 else (values[0], None)
            assert float(stored[stem][key]) == pytest.approx(mean)
            assert (
                stored[stem][f"{key}_ci95"] == ""
                if half is None
                else half == pytest.approx(float(stored[stem][f"{key}_ci95"]), rel=1e-5)
            )
            said = f"{mean:.4f}" + (f" ± {half:.4f}" if half else "") + f" ({len(values)})"
            assert key != "val_loss" or said in next(row for row in table.rows if row[0] == stem)


def test_differences_are_those_of_the_same_seeds(sweep, report):
    def last(folder):
        return lines_of(folder, "val_loss")[-1]["val_loss"]

    base = {seed: last(folder) for seed, folder in enumerate(sweep[BASE])}
    mean, half = interval([last(sweep[DDL][0]) - base[2], last(sweep[DDL][1]) - base[0]])
    own = rows_of(table_of(report, "differences"))[DDL]
    assert (own["baseline"], own["n"], own["paired"]) == (BASE, "2", "True")
    assert float(own["val_loss"]) == pytest.approx(mean)
    assert float(own["val_loss_ci95"]) == pytest.approx(half, rel=1e-5)
    assert float(own["val_bits_per_byte"]) == pytest.approx(mean / math.log(2) / 4)
    assert own["verdict"] == ("better" if mean + half < 0 else "undecided")  # of two comparisons one has no interval
    cells = table_of(report, "differences").rows
    assert cells[0][2:] == [f"{mean:+.4f} ± {half:.4f}", cells[0][3], own["verdict"], "2 pairs"]
    assert cells[1][-1] == "1 pair"
    assert "±" not in cells[1][2]


def test_curves_are_means_over_seeds_with_their_interval(sweep, report):
    curve = next(group for group in report.groups if group.name == BASE).curves["validation"]
    by_run = [lines_of(folder, "val_loss") for folder in sweep[BASE]]
    for index, lines in enumerate(zip(*by_run)):
        mean, half = interval([line["val_loss"] for line in lines])
        assert (curve.steps[index], curve.mean[index]) == pytest.approx((lines[0]["step"], mean))
        assert curve.half[index] == pytest.approx(half, rel=1e-5)
        assert curve.x["seconds"][index] == pytest.approx(lines[0]["seconds"] - 7.5)  # less the first step's
    difference = next(group for group in report.groups if group.name == DDL).curves["difference"]
    of = [{line["step"]: line["val_bits_per_byte"] for line in lines_of(f, "val_loss")} for f in sweep[DDL]]
    base = [{line["step"]: line["val_bits_per_byte"] for line in lines_of(sweep[BASE][s], "val_loss")} for s in (2, 0)]
    for index, step in enumerate((10, 20, 30, 40)):
        mean, half = interval([own[step] - other[step] for own, other in zip(of, base)])
        assert difference.mean[index] == pytest.approx(mean)
        assert difference.half[index] == pytest.approx(half, rel=1e-5)


def test_training_is_smoothed_and_thinned():
    rng = np.random.default_rng(0)
    steps, losses = np.arange(1.0, 1001), rng.standard_normal(1000)
    one = bands.Series(steps, {"tokens": 3 * steps}, losses)
    shorter = bands.Series(steps[99:], {"tokens": 3 * steps[99:]}, losses[99:])
    curve = bands.training_curve([one, shorter])
    assert len(curve.steps) == bands.POINTS
    assert (curve.steps[0], curve.steps[-1], curve.runs) == (100, 1000, 2)
    index = 150
    step = int(curve.steps[index])
    around = losses[step - 1 - 10 : step - 1 + 11].mean()  # 10 of 1,000 on either side
    nine = losses[step - 1 - 9 : step - 1 + 10].mean()  # of 901 points
    assert curve.mean[index] == pytest.approx((around + nine) / 2)
    assert curve.x["tokens"][index] == 3 * step
    assert bands.training_curve([one, bands.Series(steps + 2000, {"tokens": steps}, losses)]) is None
    assert bands.validation_curve([one, bands.Series(steps + 0.5, {"tokens": steps}, losses)]) is None
    assert np.isnan(bands.training_curve([one]).half).all()


def test_costs_are_measured_ones_beside_the_baselines(sweep, report):
    stored = rows_of(table_of(report, "costs"))
    found = {}
    for stem, folders in sweep.items():
        lines = [lines_of(folder, "loss") for folder in folders]
        found[stem] = plain.mean(plain.median(line["tokens_per_second"] for line in each) for each in lines)
        assert float(stored[stem]["tokens_per_second"]) == pytest.approx(found[stem])
        assert float(stored[stem]["memory"]) == max(line["memory"] for line in lines[0])
        assert float(stored[stem]["device_seconds"]) == pytest.approx(0.5 * (STEPS - 1))  # the first took 7.5 seconds
        assert float(stored[stem]["flops_per_token"]) == pytest.approx(3e3)
    assert float(stored[DDL]["tokens_per_second_factor"]) == pytest.approx(found[DDL] / found[BASE])
    more = int(float(stored[DDL]["parameters"])) / int(float(stored[BASE]["parameters"]))
    assert f"({more:.2f}\N{MULTIPLICATION SIGN})" in table_of(report, "costs").rows[1][1]


def test_costs_of_different_machines_have_no_factors(sweep):
    one, other = loaded(sweep[BASE][0], sweep[DDL][0])
    one = replace(one, machine={"chip": "A"}, processes=2)
    made = sizes.sizes_of([one, replace(other, machine={"chip": "B"})], [], None)
    table = results.costs(made)
    assert (
        "different machines (2 \N{MULTIPLICATION SIGN} A: gpt-mha-rope; 1 \N{MULTIPLICATION SIGN} B" in table.notes[-1]
    )
    assert table.figures[1].keys() & {"tokens_per_second_factor", "memory_factor", "device_seconds_factor"} == set()
    assert "parameters_factor" in table.figures[1]
    assert table.figures[0]["device_seconds"] == pytest.approx(2 * 0.5 * (STEPS - 1))


def test_published_figures_stand_beside_comparable_runs_alone(sweep):
    one, other = loaded(sweep[BASE][0], sweep[DDL][0])
    one = replace(one, published=published.Published(BASE, "small", published.CODE, (), ()))
    [group, second] = groups.groups_of([one, other])
    table = results.validation([group, second])
    loss = lines_of(sweep[BASE][0], "val_loss")[-1]["val_loss"]
    assert table.rows[0][-3:] == ["2.8543", "17.3616", f"{loss - 2.85426:+.4f}"]
    assert table.rows[1][-3:] == [None] * 3
    assert any(f"No published row beside {DDL}: " in note for note in table.notes)
    assert any(f"Published row beside {BASE}: 64 validation tokens" in note for note in table.notes)
    found = drawing.drawn(sizes.sizes_of([one, other], [], None))
    assert [each.published for each in found] == [2.85426, None]
    with figures.printed():
        axes = figures.curves(found).axes
    stars = [line for axis in axes for line in axis.lines if line.get_marker() == "*"]
    assert [(star.get_xdata()[0], star.get_ydata()[0]) for star in stars] == [(50 * STEPS, 2.85426)]


def test_accuracies_are_means_over_seeds_beside_the_published(sweep):
    from research.reporting.accuracy import accuracy

    def evaluated(run, value):
        settings = {"dtype": "float32", "add_bos_token": False, "limit": None}
        shown = {"piqa": ["acc_norm", value, 1.5], "sciq": ["acc_norm", value + 5, 2.5]}
        entry = {"task": "piqa", "shots": 1, "settings": settings, "shown": shown}
        paper_row = published.Published(BASE, "small", published.CODE, (), ())
        return replace(run, accuracy=[entry], published=paper_row)

    one, two, ddl, without = loaded(*sweep[BASE][:2], sweep[DDL][0], sweep[f"{DDL}-EC"][0])
    found = groups.groups_of([evaluated(one, 60.0), evaluated(two, 62.0), evaluated(ddl, 70.0), without])
    [table] = accuracy(found)
    assert table.title == "Accuracy in %, 1-shot, float32"
    mean, half = interval([60.0, 62.0])
    assert table.rows[0] == [f"{BASE} (2)", f"{mean:.2f} ± {half:.2f}", f"{mean + 5:.2f} ± {half:.2f}"]
    assert table.rows[1] == ["published", "65.94", "80.60"]
    assert table.rows[2][:2] == ["difference", f"{mean - 65.94:+.2f} ± {half:.2f}"]
    assert table.rows[3] == [f"{DDL} (1)", "70.00 ± 1.50", "75.00 ± 2.50"]
    assert table.rows[-1][:2] == [f"{DDL}-EC (1)", "not evaluated"]
    assert table.name == "accuracy_1_shot_float32"


def test_every_size_has_its_baseline(tmp_path):
    large = SMALL | {"num_hidden_layers": 3}
    folders = [
        write_run(tmp_path / f"{s}{i}", s, 0, size=size) for s in (BASE, DDL) for i, size in enumerate((SMALL, large))
    ]
    found = sizes.sizes_of(loaded(*folders), [], None)
    assert [size.name for size in found] == ["2 layers, width 12", "3 layers, width 12"]
    assert [group.name for size in found for group in size.groups] == [
        f"{stem}, {size.name}" for size in found for stem in (BASE, DDL)
    ]
    for size, folder in zip(found, folders[2:]):
        base = folders[folders.index(folder) - 2]
        assert [each.baseline for each in size.comparisons] == [size.baseline]
        own, other = (lines_of(each, "val_loss")[-1]["val_loss"] for each in (folder, base))
        assert size.differences["val_loss"][0].estimate.mean == pytest.approx(own - other)
    looks = [group.look for group in drawing.drawn(found)]
    assert looks[:2] == looks[2:]


def test_what_is_missing_leaves_marked_gaps(tmp_path):
    write_run(tmp_path / "runs/a", BASE, 0)
    write_run(tmp_path / "runs/b", DDL, 0, steps=25)
    other = {**CORPUS, "tokenizer": "bytes", "val": {"bytes": 800, "tokens": 800}}
    write_run(tmp_path / "runs/c", f"{DDL}-EC", 0, corpus=other)
    early = write_run(tmp_path / "runs/d", f"{DDL}-CC", 0, steps=5)
    (early / "metrics.jsonl").write_text((early / "metrics.jsonl").read_text() + '{"step": 6, "loss": NaN}\n{"step"')
    (tmp_path / "runs/e").mkdir()
    (tmp_path / "runs/e/metrics.jsonl").write_text("")
    alone = write_run(tmp_path / "runs/f_&_g", BASE, 1)
    (alone / "checkpoints").rename(alone / "gone")
    out = tmp_path / "a report"
    ended = call("research/report.py", "paper", tmp_path / "runs", f"--out={out}")
    assert ended.returncode == 0
    text = (out / "report.md").read_text()
    rows = {row[0]: row for row in (line.split(" | ") for line in text.split("## Differences")[0].splitlines())}
    rows = {name.strip("| "): [cell.strip(" |") for cell in row] for name, row in rows.items()}
    assert rows[DDL][3] == f"did not finish: step 25 of {STEPS}"
    assert rows[f"{DDL}-CC"][3] == f"did not finish: step 6 of {STEPS}"
    assert rows["f_&_g"][1:3] == ["1", str(STEPS)]
    assert "The tokens are not the same" in text
    assert f"| {DDL}-EC" in text.split("## Differences")[1]
    left = json.loads((out / "report.json").read_text())["left_out"]
    assert [line.partition(":")[0] for line in left] == ["e", "d", "d", "f_&_g"]
    assert all(f"- {line}" in text for line in left)
    assert all(f"note: {line}" in ended.stderr.decode() for line in left)


def test_one_run_is_a_report(tmp_path):
    [run] = loaded(write_run(tmp_path / "a", DDL, 0))
    made = paper.make([run], [], [], None, "steps")
    assert [table.name for table in made.tables] == ["validation", "costs", "runs"]
    assert "No comparison" in made.tables[0].notes[-1]
    assert [figure["name"] for figure in made.figures] == ["curves", "costs", "residual_beta"]
    paper.write(made, tmp_path / "out")
    assert (tmp_path / "out/report.md").is_file()


def test_residual_statistics_are_means_over_runs(sweep, report):
    ours = next(group for group in report.groups if group.name == DDL)
    steps, values = ours.residual["attn"]["beta"]
    own = [[line["residual"]["attn.beta_mean"] for line in lines_of(folder, "residual")] for folder in sweep[DDL]]
    assert steps.tolist() == [10, 20, 30, 40]
    assert values == pytest.approx(np.mean(own, axis=0))
    assert next(group for group in report.groups if group.name == BASE).residual == {}


ACCURACY = {BASE: [0.50, 0.53, 0.51], DDL: [0.70, 0.74, 0.69]}  # by seed


def write_task(folder, stem, seed, **scores):
    """A run of a synthetic task, which has no bits per byte; `scores` are those of its evaluations."""
    metrics = write_run(folder, stem, seed, corpus={"tokenizer": "symbols", "vocab_size": 20}) / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    for line in lines:
        if line.pop("val_bits_per_byte", None):
            line |= scores
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    for stem, values in ACCURACY.items():
        for seed, value in enumerate(values):
            scores = {"val_accuracy": value, "val_exact_match": value / 2}
            write_task(folder / f"{stem}-{seed}", stem, seed, **scores)
    return folder


def percent(values, sign=""):
    mean, half = interval([100 * value for value in values])
    return f"{mean:{sign}.2f} ± {half:.2f}"


GAINS = [own - base for own, base in zip(ACCURACY[DDL], ACCURACY[BASE])]


def test_a_report_of_synthetic_tasks_compares_their_accuracy(tasks):
    made = paper.make(loaded(tasks), [], [], None, "tokens")
    table, differences = (table_of(made, name) for name in ("validation", "differences"))
    assert table.header[3:] == ["validation loss", "perplexity", "accuracy (%)", "exact match (%)"]
    for row, values in zip(table.rows, ACCURACY.values()):
        assert row[-2:] == [f"{percent(values)} (3)", f"{percent([v / 2 for v in values])} (3)"]
    assert float(rows_of(table)[DDL]["val_accuracy"]) == pytest.approx(sum(ACCURACY[DDL]) / 3)
    assert differences.header[2:] == ["validation loss", "accuracy (%)", "exact match (%)", "that is", "rests on"]
    [row] = differences.rows
    assert row[3:] == [percent(GAINS, "+"), percent([gain / 2 for gain in GAINS], "+"), "better", "3 pairs"]
    assert float(rows_of(differences)[DDL]["val_exact_match"]) == pytest.approx(sum(GAINS) / 6)
    assert made.difference == f"accuracy (%) less that of {BASE}"
    curve = next(group for group in made.groups if group.name == DDL).curves["difference"]
    assert curve.mean == pytest.approx(np.full(4, 100 * sum(GAINS) / 3))
    assert any(f"{sum(GAINS) / 3 * 100:+.4f}".encode() in figure["svg"] for figure in made.figures)


def test_a_table_of_synthetic_tasks_compares_their_accuracy(tasks, tmp_path):
    out = tmp_path / "rows.json"
    lines = (
        call("research/report.py", "table", tasks, f"--against={BASE}", f"--json={out}").stdout.decode().splitlines()
    )
    head, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert head[3:6] == ["validation loss", "accuracy (%)", "exact match (%)"]
    assert head[6:] == [f"accuracy (%) less that of `{BASE}`", "that is"]
    by_name = {row[0].strip("`"): row for row in rows}
    exact = [value / 2 for value in ACCURACY[BASE]]
    assert by_name[BASE][4:] == [f"{percent(ACCURACY[BASE])} (3)", f"{percent(exact)} (3)", "-", "-"]
    assert by_name[DDL][6:] == [f"{percent(GAINS, '+')} (3)", "better"]
    against = next(row["against"] for row in json.loads(out.read_text())["groups"] if row["name"] == DDL)
    assert against["mean"] == pytest.approx(sum(GAINS) / 3)  # stored as it was measured, a share


def test_accuracy_is_compared_where_all_have_it_and_none_has_bits(tasks, sweep, tmp_path):
    alone = write_task(tmp_path / "alone", BASE, 9)
    both = write_task(tmp_path / "both", DDL, 9, val_accuracy=0.5, val_bits_per_byte=1.0)
    folders = tasks / f"{BASE}-0", tasks / f"{DDL}-0", alone, both, sweep[BASE][0]
    one, two, without, bits, text = loaded(*folders)
    assert groups.metric_of([groups.group_of("a", [one]), groups.group_of("b", [two])]) == "val_accuracy"
    for other in (without, bits, text):
        assert groups.metric_of([groups.group_of("a", [one]), groups.group_of("b", [other])]) == "val_loss"
    table = results.validation([groups.group_of("a", [without]), groups.group_of("b", [one])])
    assert table.rows[0][-2:] == [None, None]
    assert results.validation([groups.group_of("a", [without])]).header[3:] == ["validation loss", "perplexity"]
