"""report.py: the series behind a figure, the figure itself, and tables."""

import json
import math

import pytest
from conftest import SMALL, one_line_error, sign
from in_process import call

import report


def write_run(folder, losses, val=2.0, **run_config):
    """A run folder with two bytes per training token and a validation every second step."""
    folder.mkdir(parents=True)
    records = []
    for step, loss in enumerate(losses, 1):
        common = {"step": step, "tokens": 10 * step, "flops": 1e6 * step, "seconds": 0.5 * step}
        records.append({**common, "loss": loss})
        if step % 2 == 0:
            records.append({**common, "val_loss": val, "val_bits_per_byte": val / math.log(2) / 4})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    checkpoint = folder / "checkpoints" / "step_00000004"
    checkpoint.mkdir(parents=True)
    state = {
        "step": 4,
        "seconds": 2.0,
        "run_config": run_config,
        "model": "gpt-mha-rope",
        "model_config": SMALL,
        "corpus": {"train": {"bytes": 20, "tokens": 10}},
    }
    (checkpoint / "state.json").write_text(json.dumps(state))
    sign(checkpoint)
    return folder


def test_series(tmp_path):
    records = report.read_run(str(write_run(tmp_path / "a", [4.0, 3.0, 2.0, 1.0])))
    assert report.series(records, "tokens", "loss", None) == (
        ([10, 20, 30, 40], [4.0, 3.0, 2.0, 1.0]),
        ([20, 40], [2.0, 2.0]),
    )
    (x, y), (val_x, val_y) = report.series(records, "seconds", "bits_per_byte", 2.0)
    assert x == [0.5, 1.0, 1.5, 2.0]
    assert y == pytest.approx([2 / math.log(2), 1.5 / math.log(2), 1 / math.log(2), 0.5 / math.log(2)])
    assert val_x == [1.0, 2.0]
    assert val_y == pytest.approx([0.5 / math.log(2)] * 2)


def test_smooth_is_a_centred_mean():
    values = [1.0, 2.0, 6.0, 4.0, 8.0]
    assert report.smooth(values, 2) == pytest.approx([1.5, 3.0, 4.0, 6.0, 6.0])
    assert report.smooth(values, 1) == values
    assert report.smooth([], 2) == []


def test_curves_draw_every_run(tmp_path, monkeypatch):
    runs = [str(write_run(tmp_path / name, losses)) for name, losses in (("a", [4, 3, 2, 1]), ("b", [5, 4, 4, 3]))]
    drawn = []
    plt = report.pyplot()
    original = plt.Axes.plot

    def plot(axes, *args, **kwargs):
        drawn.append((list(args[0]), kwargs.get("label")))
        return original(axes, *args, **kwargs)

    monkeypatch.setattr(plt.Axes, "plot", plot)
    out = tmp_path / "figures" / "loss.png"
    report.curves(runs, "flops", "loss", out)
    labels = [label for _, label in drawn if label]
    assert labels == ["a training", "a validation (2.000)", "b training", "b validation (2.000)"]
    assert drawn[0][0] == [1e6, 2e6, 3e6, 4e6]
    assert out.read_bytes().startswith(b"\x89PNG")
    assert plt.imread(out).std() > 0.05  # something is on the canvas


def test_labels_are_short_and_name_what_differs(tmp_path):
    def labels(**runs):
        folders = [tmp_path / key for key in runs]
        for folder, settings in zip(folders, runs.values()):
            write_run(folder, [1.0], **settings)
        return report.labels_of([str(folder) for folder in folders])

    same = {"out_dir": "x", "warmup_steps": 5}
    one, two = {"model": "a", "seed": 1, "max_steps": 9}, {"model": "b", "seed": 1, "max_steps": 10}
    assert labels(a=same | one, b=same | two | {"out_dir": "y"}) == ["a, max_steps=9", "b, max_steps=10"]
    assert labels(c=one | {"own": 1}, d=one | {"seed": 2}) == ["seed=1", "seed=2"]
    assert labels(e=one, f=one) == ["e", "f"]  # nothing differs
    long = {"name": "n" * 80}
    assert labels(g=one | long, h=two | {"name": "m"}) == ["a, max_steps=9", "b, max_steps=10"]
    assert labels(**{"i" * 90: one, "j": one}) == ["i" * 30 + "..." + "i" * 30, "j"]
    (tmp_path / "e/checkpoints").rename(tmp_path / "e/gone")  # a run before its first checkpoint
    assert report.labels_of([str(tmp_path / "e"), str(tmp_path / "d")]) == ["e", "d"]


def test_a_curve_goes_into_the_run_or_beside_the_runs(tmp_path):
    runs = [write_run(tmp_path / name, [4, 3, 2, 1]) for name in ("a", "b")]
    assert call("report.py", "curves", runs[0]).stdout.decode() == f"drew {runs[0] / 'loss.png'}\n"
    assert call("report.py", "curves", *runs).stdout.decode() == f"drew {tmp_path / 'loss.png'}\n"
    assert (runs[0] / "loss.png").is_file()
    assert (tmp_path / "loss.png").is_file()


def test_table(tmp_path):
    run = write_run(tmp_path / "a", [4.0, 3.0, 2.0, 1.0], val=3.25)
    rows = report.table_rows([str(run)])
    assert rows[0]["run"] == "a"
    cells = report.markdown(report.groups_of(rows, [{}])).splitlines()[-1].split("|")[1:-1]
    assert [cell.strip() for cell in cells] == ["`gpt-mha-rope`", "7,052", "4", "2", "3.250", "1.172"]
    out = tmp_path / "rows.json"
    assert call("report.py", "table", run, f"--json={out}").returncode == 0
    stored = json.loads(out.read_text())
    assert stored["rows"] == rows
    assert stored["command"] == f"python report.py table {run} --json={out}"
    assert stored.keys() >= {"commit", "machine", "date", "torch"}


def test_runs_that_differ_in_their_seed_are_one_row(tmp_path):
    """Beside a baseline with the same seeds and one more, a run of other settings, and two runs of the same seed."""
    losses = {"gpt-mha-rope": [3.0, 3.4, 3.1, 9.0], "DDL-vdim1-gpt-mha-rope": [2.0, 2.5, 2.2]}
    runs = []
    for stem, values in losses.items():
        for seed, val in sorted(enumerate(values), reverse=stem.startswith("DDL")):  # not the order of the baseline's
            folder = tmp_path / f"{stem}-{seed}"
            settings = {"seed": seed, "model": stem, "max_steps": 4, "learning_rate": 0.5, "out_dir": folder.name}
            runs.append(write_run(folder, [4, 3, 2, 1], val=val, **settings))
            path = folder / "checkpoints" / "step_00000004" / "state.json"
            path.write_text(json.dumps({**json.loads(path.read_text()), "model": stem}))
            sign(path.parent)
    runs.append(write_run(tmp_path / "other", [4, 3, 2, 1], val=5.0, seed=1, learning_rate=1.0))
    runs += [write_run(tmp_path / name, [4, 3, 2, 1], val=6.0, seed=7, warmup_steps=1) for name in ("same", "again")]
    out = tmp_path / "rows.json"
    printed = call("report.py", "table", *runs, f"--json={out}", f"--against={runs[0]}")
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in printed.stdout.decode().strip().splitlines()]
    assert table[0][-2:] == ["bits per byte less that of `gpt-mha-rope learning_rate=0.5`", "that is"]
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
    assert [row[0] for row in table[2:]] == [f"`{name}`" for name in [*names, "gpt-mha-rope", "gpt-mha-rope"]]
    assert table[2][3:] == [text(base, 3.1824463), text([x / nats for x in base], 3.1824463), "-", "-"]
    assert table[3][3:] == [text(own, 4.3026527), text([x / nats for x in own], 4.3026527), difference, "better"]
    assert table[4][3:] == ["5.000", f"{5 / nats:.3f}", f"{1.6 / nats:+.3f} (1)", "undecided"]
    assert [row[3:] for row in table[5:]] == [["6.000", f"{6 / nats:.3f}", "-", "-"]] * 2  # no seed in common
    stored = json.loads(out.read_text())
    assert [row["run"] for row in stored["rows"]] == [run.name for run in runs]
    assert stored["groups"][0]["seeds"] == [0, 1, 2, 3]
    assert report.markdown(stored["groups"]) == printed.stdout.decode().rstrip("\n")
    assert "4 of the rows" in one_line_error(call("report.py", "table", *runs, "--against=gpt-mha-rope"))
    assert call("report.py", "table", *runs, f"--against={names[0]}").stdout == printed.stdout
    assert "none of the rows" in one_line_error(call("report.py", "table", *runs, "--against=gpt"))


def test_mistakes_end_in_one_line(tmp_path):
    assert "holds no metrics.jsonl" in one_line_error(call("report.py", "curves", tmp_path))
    assert "nothing is not there" in one_line_error(call("report.py", "table", tmp_path / "nothing"))
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match="has no step yet"):
        report.read_run(str(tmp_path))
    run = write_run(tmp_path / "a", [1.0])
    with pytest.raises(ValueError, match="has no evaluation yet"):
        report.table_rows([str(run)])
    path = run / "checkpoints" / "step_00000004" / "state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "corpus": {}}))
    sign(path.parent)
    with pytest.raises(ValueError, match="text size is unknown"):
        report.curves([str(run)], "steps", "bits_per_byte", tmp_path / "x.png")
