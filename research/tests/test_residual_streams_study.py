"""The study of residual streams: its runs, and the words its rules give to made-up results."""

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
from in_process import call
from scipy import stats

from research.compare import estimate_mean
from research.residual_streams import arms, report, run
from research.residual_streams.arms import Hypothesis
from research.residual_streams.report import Finding
from training.settings import configure

HERE = ROOT / "research" / "residual_streams"
PLAN = (HERE / "PLAN.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("arm", arms.ARMS)
def test_every_arm_is_another_model(arm):
    """An arm's keys are its model's, and no two arms are the same."""
    options = [f"--{key}={value}" for key, value in arms.ARMS[arm].items()]
    _, config = configure([f"{arms.HERE}/cpu.py", *options], note=lambda line: None)
    for key, value in arms.ARMS[arm].items():
        assert key == "model" or str(getattr(config, key)) == value
    assert [other for other, keys in arms.ARMS.items() if keys == arms.ARMS[arm]] == [arm]


def test_the_plan_names_every_arm_and_comparison():
    table = PLAN[PLAN.index("## Arms") : PLAN.index("## Problems")]
    cells = re.findall(r"^\| ([^|]+) \|", table, flags=re.M)
    named = {name.strip() for cell in cells for name in cell.split(";")}
    whole = {part for name in named for part in (name, *name.split(", "))}
    assert set(arms.ARMS) - whole == set()
    rows = re.findall(r"^\| ([LTX]\d+) ([^|]*)\| (\w+) \|", PLAN, flags=re.M)
    asked = (*arms.OF_LANGUAGE, *arms.EXPLORED, *arms.OF_TASKS)
    assert {name: at for name, _, at in rows} == {each.name: each.at for each in asked}
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
    assert run.next_rate(rates, losses) == beyond


def test_arms_take_turns():
    cells = {("a", "x"): list("123"), ("a", "y"): list("456"), ("b", "x"): list("789")}
    assert run.in_turns(cells) == list("142536789")


@pytest.mark.parametrize(
    ("words", "differs", "expected"),
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
def test_what_words_make_of_a_hypothesis(words, differs, expected):
    asked = Hypothesis("H", "", (("a", "b"),) * len(words), each=False, differs=differs)
    found = [Finding(asked, "a", "b", None, 1.0, word) for word in words]
    assert report.outcome(found) == expected


def findings(pairs, values, problem="language"):
    asked = (Hypothesis("H", "", tuple(pairs)),)
    return report.findings_of(arms.PRESETS["cpu"][problem], asked, {"tokens": values}, range(5))


def test_comparisons_are_paired_by_seed_and_corrected_together():
    """Ten of the same differences: alone each would be "better" (p = 0.031), together none is."""
    noise = [0.3, -0.2, 0.1, 0.4, -0.6]  # what a seed does to both
    base = {seed: 3.0 + noise[seed] for seed in range(5)}
    own = {s: base[s] + d for s, d in enumerate((-0.05, -0.01, -0.04, -0.02, -0.08))}
    values = {"a": own, "b": base}
    [one] = findings([("a", "b")], values)
    assert (one.estimate.mean, one.word) == (pytest.approx(-0.04), "better")
    assert {each.word for each in findings([("a", "b")] * 10, values)} == {"undecided"}
    to_come = [("a", "b"), *[("a", "e")] * 9]  # runs to come are counted
    assert findings(to_come, values)[0].word == "undecided"
    del own[4]
    assert findings([("a", "b")], values)[0].word == "pending"


def test_words_on_a_task():
    """More right answers are better; two arms at the same end of the scale were not compared."""
    values = {"a": {s: 0.9 + 0.01 * s for s in range(5)}, "b": dict.fromkeys(range(5), 0.5)}
    assert findings([("a", "b")], values, "recall")[0].word == "better"
    for a, b, word, so in (
        (1.0, 1.0, "ceiling", "ceiling"),
        (1.0, 0.9, "better", "supported"),
        (0.25, 0.255, "floor", "floor"),
        (0.25, 0.4, "worse", "refuted"),
    ):
        values = {"a": dict.fromkeys(range(5), a), "b": dict.fromkeys(range(5), b)}
        [found] = findings([("a", "b")], values, "recall")
        assert (found.word, report.outcome([found])) == (word, so)
    values = {arm: dict.fromkeys(range(5), 1.0) for arm in "ab"}  # nats
    assert findings([("a", "b")], values)[0].word == "level"


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
    estimate = estimate_mean([x + shift for x in (-0.002, 0.002, 0.001)])
    problem = arms.PRESETS["cpu"]["language"]
    assert report.word_of(estimate, p, problem, [3.0, 3.0]) == word


def test_a_loss_between_two_lengths():
    """Linear in the logarithm of the steps: 0.5 is half of the way from 1 to 0.25."""
    for shorter, share, target, expected in (
        (3.2, 0.25, 0.5, 3.1),
        (3.2, 0.25, 1.0, 3.0),
        (2.8, 4.0, 2.0, 2.9),  # an arm that is faster
        (3.2, 1.0, 1.0, 3.0),
    ):
        found = report.interpolated({0: 3.0, 1: 4.0}, {0: shorter}, share, target)
        assert found == {0: pytest.approx(expected)}
    assert report.interpolated({0: 3.0}, {0: 3.2}, 0.25, 0.2) == {}


TINY = {"max_steps": "4", "warmup_steps": "1", "hidden_size": "32", "head_dim": "16"}
TINY |= {"global_batch_size": "4", "micro_batch_size": "4", "eval_batches": "1"}


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A study of two arms and two seeds, whose problem takes a moment."""
    options = ["--positions=16", "--hops=2", "--sequences=200", "--val_sequences=40"]
    made = call("data/k_hop/prepare.py", *options, f"--out={tmp_path / 'data'}")
    assert made.returncode == 0
    keys = TINY | {"dataset": str(tmp_path / "data")}
    two = ("additive", "DDL")
    problem = arms.Problem("config/k_hop_cpu.py", keys, "val_loss", math.log(4), two, (1e-2,))
    for module in (arms, run, report):
        monkeypatch.setitem(module.PRESETS, "cpu", {"language": problem})
    for module in (arms, report):
        monkeypatch.setattr(module, "SEEDS", range(2))
    monkeypatch.setattr(run, "MOST_RATES", 1)
    monkeypatch.setattr(run, "TIMED_SEEDS", {"alone": range(1), "eager": range(1)})
    monkeypatch.setattr(run, "TIMED_SHARE", 1.0)
    return run.Study("cpu", tmp_path / "runs", tmp_path / "results")


def run_stage(name, tiny, monkeypatch, capfd) -> str:
    """What `run.py NAME` prints."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    words = [name, f"--runs={tiny.runs}", f"--results={tiny.results}"]
    monkeypatch.setattr(sys, "argv", ["run.py", *words])
    run.main()
    return capfd.readouterr().out


def test_the_study_from_rates_to_report(tiny, monkeypatch, capfd, tmp_path):
    def stage(name):
        return run_stage(name, tiny, monkeypatch, capfd)

    with pytest.raises(ValueError, match="no learning rate was chosen for additive"):
        run.cells_of(tiny, "tokens", "language", "additive")
    assert "rates: 2 runs in all, 2 to do" in stage("rates")
    assert tiny.rate("language", "DDL") == "0.01"
    with pytest.raises(ValueError, match="finish the stage alone first, which has no run of seeds"):
        run.cells_of(tiny, "seconds", "language", "DDL")
    assert "tokens: 4 runs in all, 4 to do" in stage("tokens")
    shutil.rmtree(tiny.runs)  # another machine has only what was stored
    assert stage("tokens").strip() == "tokens: 4 runs in all, 0 to do, 2 at a time"
    assert "again: 1 runs in all, 1 to do" in stage("again")
    assert "alone: 2 runs in all, 2 to do" in stage("alone")
    assert "seconds: 2 runs in all, 2 to do" in stage("seconds")
    fastest = {}
    for arm in ("DDL", "additive"):
        path = tiny.runs / "cpu/alone/language" / arm / "seed=0/metrics.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        speeds = sorted(line["tokens_per_second"] for line in lines if "loss" in line)
        place = 0.95 * (len(speeds) - 1)  # the quantile, straight between its neighbours
        low = int(place)
        fastest[arm] = speeds[low] + (place - low) * (speeds[min(low + 1, 3)] - speeds[low])
    share = fastest["DDL"] / fastest["additive"]
    as_long = {one.seed: one for one in tiny.stored("seconds", "language")}
    assert {one.settings["max_steps"] for one in as_long.values()} == {max(round(4 * share), 1)}

    page = tmp_path / "page.md"
    marked = "".join(f"<!-- {name} -->\nold\n<!-- end -->\n" for name in report.PARTS)
    page.write_text(f"before\n{marked}after")
    report.write(tiny, tmp_path, page)
    found = json.loads((tmp_path / "cpu_report.json").read_text())["problems"]["language"]
    runs = tiny.stored("tokens", "language")
    losses = {(run.arm_of(one), one.seed): one.final_evaluation["val_loss"] for one in runs}
    same = {"arm": "DDL", "seed": 0, "losses": [losses["DDL", 0]] * 2, "same": True}
    assert found["again"] == [same]
    less = [losses["DDL", seed] - losses["additive", seed] for seed in range(2)]
    by_name = {each["name"]: each["comparisons"][0] for each in found["hypotheses"]}
    assert by_name["L2"]["mean"] == pytest.approx(sum(less) / 2)
    assert f"{sum(less) / 2:+.3f}" in page.read_text()
    assert found["arms"]["DDL"]["speed"] == pytest.approx(share, rel=1e-4)  # stored, six digits
    less = [
        as_long[seed].final_evaluation["val_loss"] - losses["additive", seed] for seed in range(2)
    ]
    assert by_name["L10"]["mean"] == pytest.approx(sum(less) / 2)
    text = page.read_text()
    assert (text[:7], text[-5:], "old" in text) == ("before\n", "after", False)

    keys = tiny.problem("language").keys | {"beta2": "0.9"}
    changed = dataclasses.replace(tiny.problem("language"), keys=keys)
    monkeypatch.setitem(run.PRESETS["cpu"], "language", changed)
    cells = run.cells_of(tiny, "tokens", "language", "DDL")
    assert run.losses_of(tiny, "tokens", "language", "DDL", cells) == [None, None]


def test_mistakes_leave_the_page_as_it_is(tmp_path):
    with pytest.raises(ValueError, match="no end of verdicts: write <!-- end -->"):
        report.filled("<!-- verdicts -->\n", {"verdicts": "x"})
    page = tmp_path / "page.md"
    page.write_text("mine")
    options = (f"--results={tmp_path / 'none'}", f"--page={page}")
    ended = call("research/residual_streams/report.py", *options)
    assert "none: no such folder" in ended.stderr.decode()
    assert page.read_text() == "mine"


FAKE = """#!/usr/bin/env bash
[ -e "$1" ] || exit 2
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
    """Its Python only says what it was asked, and fails for a script that is not there."""
    fake = tmp_path / "python"
    fake.write_text(FAKE)
    fake.chmod(0o755)
    env = os.environ | {"PYTHON": str(fake), "FAILS": fails, "CODE": str(code)}
    keys = {"env": env, "capture_output": True, "text": True, "timeout": 60}
    result = subprocess.run([HERE / "gpu.sh", tmp_path / "out"], check=False, **keys)
    assert result.returncode == exits, result.stderr
    assert result.stdout.strip().splitlines()[-1].startswith(says)
    if fails == "nothing":
        stages = ["rates 4", "tokens 4", "again 4", "alone 1", "seconds 4", "eager 1"]
        found = re.findall(r"run\.py (\w+) .*--jobs=(\d)", result.stdout)
        assert [" ".join(each) for each in found] == stages


RESULTS = ROOT / "results" / "residual_streams"
STORED = json.loads((RESULTS / "cpu_report.json").read_text(encoding="utf-8"))["problems"]


def test_the_page_is_made_from_the_stored_runs(tmp_path):
    page = shutil.copy(HERE / "README.md", tmp_path)
    options = (f"--out={tmp_path}", f"--page={page}")
    assert call("research/residual_streams/report.py", *options).returncode == 0
    stored = (HERE / "README.md").read_text(encoding="utf-8")
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == stored, "make the report again"
    assert json.loads((tmp_path / "cpu_report.json").read_text())["problems"] == STORED
    assert (tmp_path / "cpu_report.md").read_bytes() == (RESULTS / "cpu_report.md").read_bytes()
    assert (tmp_path / "cpu_report.png").read_bytes().startswith(b"\x89PNG")


def last_values(stage, problem) -> dict[str, list[float]]:
    """By arm the metric after the last step, seed by seed; of arms with a run of every seed."""
    final: dict[str, dict] = {}
    with open(RESULTS / "cpu_runs.csv", encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["name"].startswith(f"{stage}/{problem}/"):
                value = float(row["val_loss" if problem == "language" else "val_accuracy"])
                final.setdefault(row["name"].split("/")[2], {})[int(row["seed"])] = value
    whole = {arm: values for arm, values in final.items() if len(values) == 5}
    return {arm: [values[seed] for seed in range(5)] for arm, values in whole.items()}


@pytest.mark.parametrize("problem", STORED)
def test_its_differences_are_those_of_a_paired_t_test(problem):
    """By scipy, from the stored rows; every arm of the plan has a row, finished or not."""
    assert list(STORED[problem]["arms"]) == list(arms.PRESETS["cpu"][problem].arms)
    by_stage = {stage: last_values(stage, problem) for stage in ("tokens", "seconds")}
    by_stage["seconds"]["additive"] = by_stage["tokens"]["additive"]  # its seconds are all of them
    asked = [(each, pair) for each in STORED[problem]["hypotheses"] for pair in each["comparisons"]]
    for each, pair in asked:
        values = by_stage[each["at"]]
        if not {pair["arm"], pair["than"]} <= values.keys():
            assert pair["word"] == "pending"
            continue
        found = stats.ttest_rel(values[pair["arm"]], values[pair["than"]])
        low, high = found.confidence_interval(0.95)
        assert pair["mean"] == pytest.approx((low + high) / 2, abs=1e-9)
        assert pair["ci95"] == pytest.approx((high - low) / 2)
        same = values[pair["arm"]] == values[pair["than"]]  # then scipy has no p-value
        assert pair["p"] == 1 if same else pair["p"] >= found.pvalue * 0.999999
