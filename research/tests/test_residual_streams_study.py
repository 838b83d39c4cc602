"""The study of residual streams: its grid of runs, and the words that its rules give to made-up results."""

import csv
import dataclasses
import json
import math
import os
import re
import shutil
import subprocess
import sys

import pytest
from helpers import ROOT

import train
from research.compare import interval
from research.residual_streams import arms, equal, findings, grid, report, run
from research.residual_streams.findings import Finding, Hypothesis

PLAN = (ROOT / "research" / "residual_streams" / "PLAN.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("arm", arms.ARMS)
def test_every_arm_is_another_model(arm):
    """An arm's keys are its model's, and no two arms are the same."""
    options = [f"--{key}={value}" for key, value in arms.ARMS[arm].items()]
    _, config = train.configure(
        ["research/residual_streams/cpu.py", *options], note=lambda line: None
    )
    for key, value in arms.ARMS[arm].items():
        assert key == "model" or str(getattr(config, key)) == value
    assert [other for other, keys in arms.ARMS.items() if keys == arms.ARMS[arm]] == [arm]


def test_the_plan_names_every_arm_and_comparison():
    table = PLAN[PLAN.index("## Arms") : PLAN.index("## Problems")]
    named = {
        name.strip()
        for row in re.findall(r"^\| ([^|]+) \|", table, flags=re.M)
        for name in row.split(";")
    }
    whole = {part for name in named for part in (name, *name.split(", "))}
    assert set(arms.ARMS) - whole == set()
    rows = re.findall(r"^\| ([LTX]\d+) ([^|]*)\| (\w+) \|", PLAN, flags=re.M)
    planned = {name: equal for name, _, equal in rows}
    asked = (*findings.OF_LANGUAGE, *findings.EXPLORED, *findings.OF_TASKS)
    assert planned == {each.name: each.at for each in asked}
    for hypothesis in asked:
        assert {name for pair in hypothesis.pairs for name in pair} <= set(arms.ARMS)


@pytest.mark.parametrize(
    ("rates", "losses", "beyond"),
    [
        ([1.0, 2.0, 4.0], [3.0, 2.0, 3.0], None),  # the best has a worse one on either side
        ([1.0, 2.0, 4.0], [1.0, 2.0, 3.0], 0.5),
        ([1.0, 2.0, 4.0], [3.0, 2.0, 1.0], 8.0),
        ([1.0, 2.0, 4.0], [3.0, None, 1.0], None),  # not known yet
        ([1.0, 2.0, 4.0], [3.0, 1.0, math.inf], None),  # a divergence is the worst there is
        ([2.0**n for n in range(8)], [float(8 - n) for n in range(8)], None),  # enough was tried
    ],
)
def test_the_grid_goes_on_where_its_best_is_at_an_edge(rates, losses, beyond):
    assert grid.next_rate(rates, losses) == beyond


def test_arms_take_turns():
    cells = {("a", "x"): list("123"), ("a", "y"): list("456"), ("b", "x"): list("789")}
    assert run.in_turns(cells) == list("142536789")


def finding(word, hypothesis):
    return Finding("language", hypothesis, "a", "b", None, 1.0, word)


@pytest.mark.parametrize(
    ("words", "differs", "said"),
    [
        (["better"], False, "supported"),
        (["worse"], False, "refuted"),
        (["level"], False, "refuted"),
        (["undecided"], False, "undecided"),
        (["worse"], True, "supported"),
        (["better", "better"], False, "supported"),
        (["better", "undecided"], False, "undecided"),
        (["better", "worse"], False, "refuted"),
        (["better", "pending"], False, "pending"),
    ],
)
def test_what_words_make_of_a_hypothesis(words, differs, said):
    hypothesis = Hypothesis("H", "", (("a", "b"),) * len(words), each=False, differs=differs)
    assert findings.outcome([finding(word, hypothesis) for word in words]) == said


def compare(hypotheses, values, problem="language"):
    return findings.compare(problem, arms.PRESETS["cpu"][problem], hypotheses, values, range(5))


def test_comparisons_are_paired_by_seed_and_corrected_together():
    """Ten comparisons of the same differences: alone each would be "better" (p = 0.031), together none is."""
    hypothesis = Hypothesis("H", "", (("a", "b"),) * 10)
    noise = [0.3, -0.2, 0.1, 0.4, -0.6]  # what a seed does to both
    own = {seed: 3.0 + noise[seed] for seed in range(5)}
    differences = (-0.05, -0.01, -0.04, -0.02, -0.08)
    values = {"tokens": {"a": {seed: own[seed] + differences[seed] for seed in range(5)}, "b": own}}
    [one, *_] = compare((Hypothesis("H", "", (("a", "b"),)),), values)
    assert one.estimate.mean == pytest.approx(-0.04)
    assert one.word == "better"
    assert {each.word for each in compare((hypothesis,), values)} == {"undecided"}
    missing = Hypothesis("H", "", (("a", "b"), *[("a", "e")] * 9))  # runs to come are counted
    assert compare((missing,), values)[0].word == "undecided"
    del values["tokens"]["a"][4]
    assert compare((hypothesis,), values)[0].word == "pending"


def test_more_right_answers_are_better_on_a_task():
    values = {
        "tokens": {
            "a": {seed: 0.9 + 0.01 * seed for seed in range(5)},
            "b": dict.fromkeys(range(5), 0.5),
        }
    }
    [found] = compare((Hypothesis("H", "", (("a", "b"),)),), values, "recall")
    assert found.word == "better"


def test_two_arms_at_the_same_end_of_the_scale_were_not_compared():
    hypothesis = Hypothesis("H", "", (("a", "b"),))
    for a, b, word in (
        (1.0, 1.0, "ceiling"),
        (1.0, 0.9, "better"),
        (0.25, 0.255, "floor"),
        (0.25, 0.4, "worse"),
    ):
        values = {"tokens": {"a": dict.fromkeys(range(5), a), "b": dict.fromkeys(range(5), b)}}
        [found] = compare((hypothesis,), values, "recall")
        assert found.word == word
        assert findings.outcome([found]) == {"better": "supported", "worse": "refuted"}.get(
            word, word
        )
    values = {"tokens": {arm: dict.fromkeys(range(5), 1.0) for arm in "ab"}}  # nats
    assert compare((hypothesis,), values)[0].word == "level"


@pytest.mark.parametrize(
    ("shift", "p", "word"),
    [
        (0.0, 0.9, "level"),
        (0.008, 0.9, "undecided"),
        (0.008, 0.04, "worse"),
        (-0.008, 0.04, "better"),
    ],
)
def test_level_is_an_interval_within_the_smallest_difference(shift, p, word):
    estimate = interval([x + shift for x in (-0.002, 0.002, 0.001)])
    assert findings.word_of(estimate, p, lower=True) == word


def test_a_loss_between_two_lengths():
    """Linear in the logarithm of the steps: 0.5 is half of the way from 1 to 0.25."""
    assert equal.interpolated({0: 3.0, 1: 4.0}, {0: 3.2}, 0.25, 0.5) == {0: pytest.approx(3.1)}
    assert equal.interpolated({0: 3.0}, {0: 3.2}, 0.25, 1.0) == {0: 3.0}
    assert equal.interpolated({0: 3.0}, {0: 2.8}, 4.0, 2.0) == {
        0: pytest.approx(2.9)
    }  # an arm that is faster
    assert equal.interpolated({0: 3.0}, {0: 3.2}, 0.25, 0.2) == {}
    assert equal.interpolated({0: 3.0}, {0: 3.2}, 1.0, 1.0) == {0: 3.0}


TINY = {
    "dataset": "data/here",
    "max_steps": "4",
    "warmup_steps": "1",
    "hidden_size": "32",
    "head_dim": "16",
}
TINY |= {"global_batch_size": "4", "micro_batch_size": "4", "eval_batches": "1"}


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A study of two arms and two seeds, whose problem takes a moment; its Grid."""
    prepare = [
        sys.executable,
        "data/k_hop/prepare.py",
        "--positions=16",
        "--hops=2",
        f"--out={tmp_path / 'data'}",
    ]
    subprocess.run(
        [*prepare, "--sequences=200", "--val_sequences=40"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    keys = TINY | {"dataset": str(tmp_path / "data")}
    problem = arms.Problem(
        "config/k_hop_cpu.py", keys, "val_loss", math.log(4), ("additive", "DDL"), (1e-2,)
    )
    for module in (arms, grid, run, report):
        monkeypatch.setitem(module.PRESETS, "cpu", {"language": problem})
    for module in (grid, equal, report):
        monkeypatch.setattr(module, "SEEDS", range(2), raising=False)
    monkeypatch.setattr(grid, "MOST_RATES", 1)
    monkeypatch.setattr(grid, "ALONE", range(1))
    monkeypatch.setattr(grid, "TIMED", 1.0)
    return grid.Grid("cpu", tmp_path / "runs", tmp_path / "results")


def stage(name, tiny, monkeypatch, capfd) -> str:
    """What `run.py NAME` prints."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(
        sys, "argv", ["run.py", name, f"--runs={tiny.runs}", f"--results={tiny.results}"]
    )
    run.main()
    return capfd.readouterr().out


def fastest(metrics) -> float:
    """Tokens per second that one step of twenty reaches, linearly between two of them."""
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    found = sorted(line["tokens_per_second"] for line in lines if "loss" in line)
    below, part = divmod(0.95 * (len(found) - 1), 1)
    return found[int(below)] + part * (
        found[min(int(below) + 1, len(found) - 1)] - found[int(below)]
    )


def test_the_study_from_rates_to_report(tiny, monkeypatch, capfd, tmp_path):
    with pytest.raises(ValueError, match="no learning rate was chosen for additive"):
        tiny.cells("tokens", "language", "additive")
    assert "rates: 2 runs in all, 2 to do" in stage("rates", tiny, monkeypatch, capfd)
    assert tiny.chosen_rate("language", "DDL") == "0.01"
    with pytest.raises(ValueError, match="finish the stage alone first, which has no run of seeds"):
        tiny.cells("seconds", "language", "DDL")
    assert "tokens: 4 runs in all, 4 to do" in stage("tokens", tiny, monkeypatch, capfd)
    shutil.rmtree(tiny.runs)  # another machine has only what was kept
    again = stage("tokens", tiny, monkeypatch, capfd)
    assert again.strip() == "tokens: 4 runs in all, 0 to do, 2 at a time"
    assert "again: 1 runs in all, 1 to do" in stage("again", tiny, monkeypatch, capfd)

    assert "alone: 2 runs in all, 2 to do" in stage("alone", tiny, monkeypatch, capfd)
    assert "seconds: 2 runs in all, 2 to do" in stage("seconds", tiny, monkeypatch, capfd)
    alone = tiny.runs / "cpu/alone/language"
    speeds = {arm: fastest(alone / arm / "seed=0" / "metrics.jsonl") for arm in ("DDL", "additive")}
    share = speeds["DDL"] / speeds["additive"]
    as_long = {one.seed: one for one in tiny.kept("seconds", "language")}
    assert {one.settings["max_steps"] for one in as_long.values()} == {max(round(4 * share), 1)}

    page = tmp_path / "page.md"
    page.write_text(
        "before\n"
        + "".join(f"<!-- {name} -->\nold\n<!-- end -->\n" for name in report.PARTS)
        + "after"
    )
    report.write(tiny, tmp_path, page)
    found = json.loads((tmp_path / "cpu_report.json").read_text())["problems"]["language"]
    [pair] = found["hypotheses"][1]["comparisons"]
    losses = {
        (grid.arm_of(one), one.seed): one.final["val_loss"]
        for one in tiny.kept("tokens", "language")
    }
    assert found["again"] == [
        {"arm": "DDL", "seed": 0, "losses": [losses["DDL", 0]] * 2, "same": True}
    ]
    less = [losses["DDL", seed] - losses["additive", seed] for seed in range(2)]
    assert pair["mean"] == pytest.approx(sum(less) / 2)
    assert f"{sum(less) / 2:+.3f}" in page.read_text()
    assert found["arms"]["DDL"]["speed"] == pytest.approx(share, rel=1e-4)  # kept with six digits
    [pair] = [
        one
        for each in found["hypotheses"]
        if each["name"] == "L10"
        for one in each["comparisons"][:1]
    ]
    less = [as_long[seed].final["val_loss"] - losses["additive", seed] for seed in range(2)]
    assert (pair["arm"], pair["mean"]) == ("DDL", pytest.approx(sum(less) / 2))
    assert "old" not in page.read_text()
    assert page.read_text().startswith("before\n")
    assert page.read_text().endswith("after")

    changed = dataclasses.replace(
        tiny.problem("language"), keys=tiny.problem("language").keys | {"beta2": "0.9"}
    )
    monkeypatch.setitem(grid.PRESETS["cpu"], "language", changed)
    cells = tiny.cells("tokens", "language", "DDL")
    assert tiny.losses("tokens", "language", "DDL", cells) == [
        None,
        None,
    ]  # what is kept had other settings


def test_a_mark_without_an_end_is_refused():
    with pytest.raises(ValueError, match="no end of verdicts: write <!-- end -->"):
        report.filled("<!-- verdicts -->\n", {"verdicts": "x"})


def test_no_results_leave_the_page_as_it_is(tmp_path, monkeypatch, capfd):
    page = tmp_path / "page.md"
    page.write_text("kept")
    monkeypatch.setattr(
        sys, "argv", ["report.py", f"--results={tmp_path / 'none'}", f"--page={page}"]
    )
    with pytest.raises(SystemExit):
        report.main()
    assert "none: no such folder" in capfd.readouterr().err
    assert page.read_text() == "kept"


FAKE = """#!/usr/bin/env bash
echo "$*"
[[ "$*" != *"$FAILS"* ]] || exit "$CODE"
"""


@pytest.mark.parametrize(
    ("fails", "code", "exits", "says"),
    [
        ("nothing", 0, 0, "finished; now: "),
        ("run.py alone", 130, 0, "alone is not finished; the same command goes on"),
        ("run.py tokens", 1, 1, "research/residual_streams/run.py tokens --preset=gpu"),
    ],
)
def test_the_gpu_script_goes_from_stage_to_stage(tmp_path, fails, code, exits, says):
    """Its Python is one that says what it was asked and fails where it is told to; the rest is the script."""
    fake = tmp_path / "python"
    fake.write_text(FAKE)
    fake.chmod(0o755)
    env = os.environ | {"PYTHON": str(fake), "FAILS": fails, "CODE": str(code)}
    script = ROOT / "research" / "residual_streams" / "gpu.sh"
    result = subprocess.run(
        [script, tmp_path / "out"], env=env, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == exits, result.stderr
    assert result.stdout.strip().splitlines()[-1].startswith(says)
    if exits == 0 and code == 0:
        assert re.findall(r"run\.py (\w+) .*--jobs=(\d)", result.stdout) == [
            ("rates", "4"), ("tokens", "4"), ("again", "4"), ("alone", "1"), ("seconds", "4"), ("eager", "1")
        ]  # fmt: skip


RESULTS = ROOT / "results" / "residual_streams"
STORED = json.loads((RESULTS / "cpu_report.json").read_text(encoding="utf-8"))["problems"]


def test_the_page_is_made_from_the_runs_that_are_kept(tmp_path):
    page = shutil.copy(ROOT / "research" / "residual_streams" / "README.md", tmp_path)
    command = [
        sys.executable,
        "research/residual_streams/report.py",
        f"--out={tmp_path}",
        f"--page={page}",
    ]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    kept = (ROOT / "research" / "residual_streams" / "README.md").read_text(encoding="utf-8")
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == kept, "make the report again"
    assert json.loads((tmp_path / "cpu_report.json").read_text())["problems"] == STORED
    assert (tmp_path / "cpu_report.md").read_bytes() == (RESULTS / "cpu_report.md").read_bytes()
    assert (tmp_path / "cpu_report.png").read_bytes().startswith(b"\x89PNG")


def last_values(stage, problem) -> dict[str, list[float]]:
    """By arm the metric after the last step, seed by seed; of arms with a run of every seed."""
    final: dict[str, list] = {}
    with open(RESULTS / "cpu_runs.csv", encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["name"].startswith(f"{stage}/{problem}/"):
                value = float(row["val_loss" if problem == "language" else "val_accuracy"])
                final.setdefault(row["name"].split("/")[2], []).append((int(row["seed"]), value))
    return {
        arm: [value for _, value in sorted(pairs)]
        for arm, pairs in final.items()
        if len(pairs) == 5
    }


@pytest.mark.parametrize("problem", STORED)
def test_its_differences_are_those_of_a_paired_t_test(problem):
    """By scipy, from the lines of the kept runs; every arm of the plan has a row, finished or not."""
    stats = pytest.importorskip("scipy.stats")
    assert list(STORED[problem]["arms"]) == list(arms.PRESETS["cpu"][problem].arms)
    by_stage = {stage: last_values(stage, problem) for stage in ("tokens", "seconds")}
    by_stage["seconds"]["additive"] = by_stage["tokens"][
        "additive"
    ]  # its own seconds are all of them
    asked = [(each, pair) for each in STORED[problem]["hypotheses"] for pair in each["comparisons"]]
    for each, pair in asked:
        values = by_stage[each["at"]]
        if not {pair["arm"], pair["than"]} <= values.keys():
            assert pair["word"] == "pending"
            continue
        found = stats.ttest_rel(values[pair["arm"]], values[pair["than"]])
        interval = found.confidence_interval(0.95)
        assert pair["mean"] == pytest.approx((interval.low + interval.high) / 2, abs=1e-9)
        assert pair["ci95"] == pytest.approx((interval.high - interval.low) / 2)
        same = values[pair["arm"]] == values[pair["than"]]  # then scipy has no p-value
        assert pair["p"] == 1 if same else pair["p"] >= found.pvalue * 0.999999
    other_rate = {
        f"{arm}, other's rate": own for arm, own in last_values("swapped", problem).items()
    }
    for row in STORED[problem]["afterwards"]:
        values = by_stage[row["at"]] | other_rate
        interval = stats.ttest_rel(values[row["arm"]], values[row["than"]]).confidence_interval(
            0.95
        )
        assert (row["mean"] - row["ci95"], row["mean"] + row["ci95"]) == pytest.approx(
            tuple(interval)
        )
