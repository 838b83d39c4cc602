"""reporting: runs as data, whatever has happened to their files; groups and comparisons."""

import hashlib
import json
import math
import re
import shutil
import statistics

import pytest
from helpers import one_line_error, sign
from in_process import call
from report_helpers import write_run
from runs_helpers import lines_of_a_run, naive_curve, only, write

from research.reporting import groups, records, results, runs
from training import checkpoint


@pytest.mark.parametrize("points", [7, 100, 2000])
@pytest.mark.parametrize("damaged", [False, True])  # by polars, or line by line
def test_a_curve_is_the_means_of_naive_python(tmp_path, points, damaged):
    lines = lines_of_a_run(903)
    folder = write(tmp_path / "run", [*lines[:400], *["}{"] * damaged, *lines[400:]])
    metrics = records.read(folder / "metrics.jsonl", points)
    expected = naive_curve(lines, min(points, 903 - 53))
    assert metrics.training.height == len(expected) == min(points, 850)
    for row, by_hand in zip(metrics.training.to_dicts(), expected):
        assert row == pytest.approx(by_hand, rel=1e-12)
    evaluations = [{k: v for k, v in line.items() if k != "best_val_loss"} for line in lines if "val_loss" in line]
    found = [{k: v for k, v in row.items() if v is not None} for row in metrics.evaluations.to_dicts()]
    assert found == evaluations
    assert metrics.residual == [
        {"step": line["step"], "residual": line["residual"]} for line in lines if "residual" in line
    ]
    trained = [line for line in lines if "loss" in line]
    assert metrics.totals == {key: trained[-1][key] for key in ("tokens", "flops", "seconds")} | {
        "tokens_per_second": statistics.median(line["tokens_per_second"] for line in trained),
        "memory": max(line["memory"] for line in trained),
    }  # of all steps, whatever the number of points
    rates = {line["step"]: line["lr"] for line in lines if "lr" in line}
    assert metrics.rates == rates
    assert (metrics.step, metrics.first_seconds) == (903, 7.5)
    assert metrics.notes == (["no JSON: line 401 of metrics.jsonl"] if damaged else [])


GOOD = [{"step": n, "tokens": n, "flops": n, "seconds": float(n), "loss": 4.0 - n} for n in (1, 2, 3)]
DAMAGE = {  # a line in the middle: (what a note says, the losses that are left)
    '{"step": 9, "lo': ("no JSON: line 3 of", [3, 2, 1]),
    "\udcff\udcfe\x00": ("no JSON: line 3 of", [3, 2, 1]),
    "[1, 2]": ("no JSON object: line 3 of", [3, 2, 1]),
    "null": ("no JSON object: line 3 of", [3, 2, 1]),
    '{"loss": 5.0}': ("step is no whole number: line 3 of", [3, 2, 1]),
    '{"step": 2.5, "loss": 5.0}': ("step is no whole number: line 3 of", [3, 2, 1]),
    '{"step": true, "loss": 5.0}': ("step is no whole number: line 3 of", [3, 2, 1]),
    '{"step": "3", "loss": 5.0}': ("step is no whole number: line 3 of", [3, 2, 1]),
    '{"step": 2, "skipped": true, "loss": NaN}': ("loss is NaN: line 3 of", [3, 2, 1]),
    '{"step": 2, "loss": -Infinity}': ("loss is infinite: line 3 of", [3, 2, 1]),
    '{"step": 2, "loss": 1e999}': ("loss is infinite: line 3 of", [3, 2, 1]),
    f'{{"step": 2, "loss": 1{"0" * 400}}}': ("loss is no number: line 3 of", [3, 2, 1]),
    '{"step": 2, "loss": "low"}': ("loss is no number: line 3 of", [3, 2, 1]),
    '{"step": 2, "loss": true}': ("loss is no number: line 3 of", [3, 2, 1]),
    '{"step": 2, "loss": null, "val_loss": NaN}': ("val_loss is NaN: step 2", [3, 2, 1]),
    '{"step": 2, "val_loss": 1.0, "val_perplexity": Infinity}': ("val_perplexity is infinite: step 2", [3, 2, 1]),
    '{"step": 2, "residual": {"a": [1.0, NaN]}}': (
        "statistics of the stream that are not finite numbers: step 2",
        [3, 2, 1],
    ),
    '{"step": 2, "residual": 7}': ("statistics of the stream that are not finite numbers: step 2", [3, 2, 1]),
    '{"step": 2, "residual": {"attn.x_mean": 3.0}}': ("statistics of the stream that are", [3, 2, 1]),
    '{"step": 2, "loss": 5.0}': ("steps that come again later", [3, 5, 1]),
    '{"step": 9, "loss": 5.0}': ("steps that come again later", [3, 2, 1]),
    '{"step": 1, "loss": 5.0}': ("steps that come again later", [5, 1]),
    "": (None, [3, 2, 1]),
}


@pytest.mark.parametrize("line", DAMAGE)
def test_damage_is_named_and_the_rest_is_read(tmp_path, line):
    said, losses = DAMAGE[line]
    folder = tmp_path / "run"
    folder.mkdir()
    text = "\n".join([json.dumps(GOOD[0]), json.dumps(GOOD[1]), line, json.dumps(GOOD[2])]) + "\n"
    (folder / "metrics.jsonl").write_bytes(text.encode("utf-8", "surrogateescape"))
    run = only(folder)
    assert run.training["loss"].to_list() == losses
    *notes, last = run.notes
    assert [said in note for note in notes] == [True] * bool(said)
    assert "its settings are not known" in last
    assert (run.settings, run.stem, run.parameters, run.finished) == ({}, None, None, None)
    printed = call("research/report.py", "curves", folder)
    assert printed.returncode == 0
    assert len(printed.stderr.decode().splitlines()) == len(run.notes)


def test_a_null_is_not_a_number_and_not_a_fault(tmp_path):
    """What a later line lacks is a gap in that column alone."""
    run = only(write(tmp_path / "run", [*GOOD, {"step": 4, "loss": 1.0, "grad_norm": None}]))
    assert run.training["loss"].to_list() == [3, 2, 1, 1]
    assert run.training["tokens"].to_list() == [1, 2, 3, None]
    assert call("research/report.py", "curves", tmp_path / "run", "--x=tokens").returncode == 0


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_a_last_line_that_is_cut_short_is_left_out(tmp_path, cut):
    folder = write(tmp_path / "run", GOOD)
    whole = (folder / "metrics.jsonl").read_bytes()
    (folder / "metrics.jsonl").write_bytes(whole[:-1])
    assert only(folder).training.height == 3  # only its newline is missing
    (folder / "metrics.jsonl").write_bytes(whole[: -1 - cut])
    run = only(folder)
    assert run.training["loss"].to_list() == [3, 2]
    assert run.notes[0] == "the last line of metrics.jsonl, 3, is cut short"


def test_a_run_that_went_on_from_an_earlier_step_without_dropping_what_was_past_it(tmp_path):
    lines = lines_of_a_run(100)
    again = [{**line, **({"loss": 0.5} if "loss" in line else {})} for line in lines_of_a_run(80) if line["step"] > 60]
    run = only(write(tmp_path / "run", [*lines, *again]))
    expected = [line["loss"] for line in lines if "loss" in line and line["step"] <= 60]
    expected += [0.5] * sum("loss" in line for line in again)
    assert run.training["loss"].to_list() == expected
    assert run.evaluations["step"].to_list() == [20, 40, 60, 80]
    assert [record["step"] for record in run.residual] == [50]
    assert "steps 61, 62, 63 and" in run.notes[0]
    assert run.step == 80


def test_what_cannot_be_read_is_named_and_the_rest_is_reported(tmp_path):
    sweep = tmp_path / "sweep"
    good = write_run(sweep / "good", [4, 3, 2, 1], seed=0)
    write(sweep / "empty", [])
    (sweep / "no_metrics/checkpoints").mkdir(parents=True)
    write(sweep / "garbage", ["}{"] * 5)
    (sweep / "table.md").write_text("")
    (sweep / "elsewhere").mkdir()
    (sweep / "directory/metrics.jsonl").mkdir(parents=True)
    missing, other = tmp_path / "missing", tmp_path / "notes.txt"
    other.write_text("hello\n")
    found, faults = runs.load([str(path) for path in (sweep, missing, other)])
    assert [run.name for run in found] == ["good"]
    expected = {
        "empty: metrics.jsonl has no step yet",
        "no_metrics: metrics.jsonl is missing",
        "garbage: metrics.jsonl has no step yet; no JSON: lines 1, 2, 3 and 2 more",
        "directory: metrics.jsonl is missing or unreadable",
        f"{missing} is not there",
        f"notes.txt: {other} is no file of report.py runs",
    }
    assert len(faults) == len(expected)
    assert all(any(fault.startswith(start) for fault in faults) for start in expected)
    for command in (["curves", f"--out={tmp_path / 'x.png'}"], ["table"], ["runs", f"--out={tmp_path / 'x.csv'}"]):
        printed = call("research/report.py", command[0], sweep, missing, *command[1:])
        assert printed.returncode == 0
        assert len(printed.stderr.decode().splitlines()) == 5
    one_line_error(call("research/report.py", "table", *(path for path in sorted(sweep.iterdir()) if path != good)))


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_counts(tmp_path):
    run = write_run(tmp_path / "run", [4, 3, 2, 1], seed=3)
    newer = run / "checkpoints" / "step_00000006"
    newer.mkdir()
    (newer / "state.json").write_text('{"step": 6')
    found = only(run)
    assert (found.seed, found.stem, found.parameters) == (3, "gpt-mha-rope", 7052)
    assert [bool(re.match(rf"{newer}.*is damaged", note)) for note in found.notes] == [True]
    state = json.loads((run / "checkpoints/step_00000004/state.json").read_text())
    for change, said in (
        ({"model": "other-stem"}, "its model cannot be made: model='other-stem' is not a variant"),
        ({"model_config": {"layers": 1}}, "its model cannot be made: unknown key layers"),
    ):
        (newer / "state.json").write_text(json.dumps({**state, **change, "step": 6}))
        found = only(run)
        assert found.parameters is None
        assert found.published is None
        assert [said in note for note in found.notes] == [True]
        assert found.training.height == 4


def test_stored_accuracy_is_that_of_the_runs_own_weights(tmp_path):
    folder = write_run(tmp_path / "run", [4, 3, 2, 1])
    sums = folder / "checkpoints/step_00000004" / checkpoint.SUMS
    weights = hashlib.sha256(sums.read_bytes()).hexdigest()
    entry = {"weights": weights, "task": "piqa", "shots": 0, "folder": "x"}
    entry |= {"shown": {"piqa": ["acc", 61.5, 1.1]}}
    entry |= {"settings": {"dtype": "float32", "add_bos_token": False, "limit": None}}
    (folder / "eval").mkdir()
    (folder / "eval/results.json").write_text(
        json.dumps({"entries": [entry, {**entry, "weights": "other"}, {"weights": weights, "task": "x"}]})
    )
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval/results.json").write_text('{"entries": [3')
    run = only(folder)
    assert run.accuracy == [{key: entry[key] for key in ("task", "shots", "shown", "settings", "weights")}]
    assert "1 entries are damaged" in run.notes[0]
    assert "results.json" in run.notes[1]


# ---- groups and comparisons ----


def make(tmp_path, name, val=2.0, corpus=None, config=None, **settings):
    folder = write_run(tmp_path / name, [4, 3, 2, 1], val=val, **{"max_steps": 4, **settings})
    path = folder / "checkpoints/step_00000004"
    state = json.loads((path / "state.json").read_text())
    state["corpus"] = {"tokenizer": "bpe", "val": {"bytes": 100, "tokens": 30}, **(corpus or {})}
    state["model_config"] |= config or {}
    (path / "state.json").write_text(json.dumps(state))
    sign(path)
    return folder


def compared(tmp_path, metric=None):
    """{name: comparison} against the group of the runs `base*`."""
    found = runs.load([str(tmp_path)])[0]
    made = groups.groups_of(found)
    baseline = next(group for group in made if group.runs[0].name.startswith("base"))
    return {each.group.runs[0].name: each for each in groups.compare(made, baseline, metric)}


def test_pairs_are_runs_of_the_same_seed_and_the_same_order_of_data(tmp_path):
    values = {"base": [2.0, 2.5, 2.1], "same": [1.0, 1.4, 1.3], "batch": [1.1, 1.4, 1.0], "length": [1.0, 1.9, 1.1]}
    keys = {"base": {}, "same": {"learning_rate": 1.0}, "batch": {"global_batch_size": 8}}
    keys["length"] = {"config": {"block_size": 8}}
    for name, each in values.items():
        for seed, val in enumerate(each):
            make(tmp_path, f"{name}{seed}", val=val, seed=seed, **{"global_batch_size": 4, **keys[name]})
    make(tmp_path, "shards0", val=1.0, seed=0, global_batch_size=4, warmup_steps=1, corpus={"sha256": "x"})
    found = compared(tmp_path, "val_loss")
    assert {name: each.paired for name, each in found.items()} == {
        "same0": True, "batch0": False, "length0": False, "shards0": False
    }  # fmt: skip
    differences = [own - base for own, base in zip(values["same"], values["base"])]
    mean = sum(differences) / 3
    deviation = math.sqrt(sum((x - mean) ** 2 for x in differences) / 2)
    assert found["same0"].estimate.mean == pytest.approx(mean)
    assert found["same0"].estimate.half == pytest.approx(4.3026527 * deviation / math.sqrt(3), rel=1e-6)
    means = {name: sum(each) / 3 for name, each in values.items()}
    squares = {name: sum((x - means[name]) ** 2 for x in each) / 2 / 3 for name, each in values.items()}
    estimate = found["batch0"].estimate  # Welch's, by the textbook
    assert estimate.mean == pytest.approx(means["batch"] - means["base"])
    assert estimate.standard_error == pytest.approx(math.sqrt(squares["batch"] + squares["base"]))
    assert found["batch0"].reason == "the data came in another order"


def test_losses_of_other_tokens_or_texts_are_not_compared(tmp_path):
    make(tmp_path, "base", seed=0)
    make(tmp_path, "tokens", seed=0, dataset="b", corpus={"tokenizer": "gpt2", "val": {"bytes": 100, "tokens": 25}})
    make(tmp_path, "text", seed=0, dataset="c", corpus={"val": {"bytes": 99, "tokens": 30}})
    make(tmp_path, "source", seed=0, dataset="d", corpus={"source": "elsewhere"})
    nats, bits = (compared(tmp_path, metric) for metric in ("val_loss", "val_bits_per_byte"))
    assert {name: each.reason for name, each in nats.items()} == dict.fromkeys(
        ("tokens", "text", "source"), "another vocabulary or validation text"
    )
    assert {name: bool(each.estimate) for name, each in bits.items()} == {
        "tokens": True, "text": False, "source": False
    }  # fmt: skip
    printed = call("research/report.py", "table", tmp_path, "--against=base").stderr.decode()
    assert "their losses are no comparison" in printed
    assert "another validation text" in printed
    assert "of different tokens" in call("research/report.py", "curves", tmp_path).stderr.decode()
    assert not call("research/report.py", "curves", tmp_path, "--where=tokenizer=bpe").stderr


def test_unfinished_runs_are_no_comparison(tmp_path):
    make(tmp_path, "base", seed=0)
    make(tmp_path, "longer", seed=0, max_steps=8)
    [each] = compared(tmp_path).values()
    assert each.estimate is None
    assert "a run is not finished" in each.reason


def test_runs_that_are_no_repetitions_are_told_apart_or_said(tmp_path):
    """Another corpus of the same settings is another row; other code, and a seed that comes twice, are said."""
    for seed, (commit, digit) in enumerate([("abc", "1"), ("abc", "1"), ("def", "1"), ("abc", "2")]):
        folder = make(tmp_path / "runs", f"r{seed}", seed=seed, corpus={"sha256": digit * 64})
        path = folder / "checkpoints/step_00000004"
        state = json.loads((path / "state.json").read_text())
        (path / "state.json").write_text(json.dumps({**state, "commit": commit}))
        sign(path)
    found, _ = runs.load([str(tmp_path / "runs")])
    made = groups.groups_of(found)
    assert [(group.name, group.seeds) for group in made] == [
        ("gpt-mha-rope corpus=11111111", [0, 1, 2]),
        ("gpt-mha-rope corpus=22222222", [3]),
    ]
    assert [group.cautions for group in made] == [["its runs were trained at several commits: abc, def"], []]
    commits = "its runs were trained at several commits: abc, def"
    printed = call("research/report.py", "table", tmp_path / "runs", "--by=model").stderr.decode()
    assert f"note: gpt-mha-rope: {commits}" in printed
    assert "gpt-mha-rope: its runs had several corpora: 11111111, 22222222" in printed
    shutil.copytree(tmp_path / "runs/r0", tmp_path / "copy/r0")
    [group] = groups.groups_of(runs.load([str(tmp_path / "runs/r0"), str(tmp_path / "copy/r0")])[0], ["model"])
    assert group.cautions == ["seed 0 comes more than once: such runs are not independent"]
    assert any(group.cautions[0] in line for line in results.warnings([group]))
    out = f"--out={tmp_path / 'x.png'}"
    assert commits in call("research/report.py", "curves", tmp_path / "runs", "--band", out).stderr.decode()


def test_groups_by_any_key_and_filters(tmp_path):
    for rate in (0.001, 0.01):
        for seed in (0, 1):
            make(tmp_path, f"{rate}-{seed}", val=2 + 100 * rate + seed, seed=seed, learning_rate=rate, beta1=0.9)
    found = runs.load([str(tmp_path)])[0]

    def groups_by(*by):
        return [(group.name, [run.name for run in group.runs], group.mixed) for group in groups.groups_of(found, by)]

    by_rate = [(f"gpt-mha-rope learning_rate={rate}", [f"{rate}-0", f"{rate}-1"], ()) for rate in (0.001, 0.01)]
    assert groups_by() == by_rate
    assert groups_by("learning_rate") == [(name.split()[1], *rest) for name, *rest in by_rate]
    both = [
        ("seed=0", ["0.001-0", "0.01-0"], ("learning_rate",)),
        ("seed=1", ["0.001-1", "0.01-1"], ("learning_rate",)),
    ]
    assert groups_by("seed") == both
    assert groups_by("model", "beta1") == [("gpt-mha-rope beta1=0.9", [run.name for run in found], ("learning_rate",))]
    for conditions, names in (
        (["learning_rate=1e-3"], ["0.001-0", "0.001-1"]),
        (["learning_rate=1e-3,0.01", "seed=1"], ["0.001-1", "0.01-1"]),
        (["run=0.01-0"], ["0.01-0"]),
        (["model=gpt-mha-rope", "seed=0"], ["0.001-0", "0.01-0"]),
    ):
        assert [run.name for run in groups.where(found, conditions)] == names
    printed = call("research/report.py", "table", tmp_path, "--by=seed")
    assert b"its runs differ in learning_rate as well" in printed.stderr
    assert [line.split("|")[1].strip() for line in printed.stdout.decode().splitlines()[2:]] == ["`seed=0`", "`seed=1`"]
    assert "no run has a key 'learning_rat', did you mean learning_rate?" in one_line_error(
        call("research/report.py", "table", tmp_path, "--by=learning_rat")
    )
