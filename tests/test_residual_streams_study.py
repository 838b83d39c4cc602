"""The study of residual streams: its grid of runs, and the words that its rules give to made-up results."""

import math
import re

import pytest
from conftest import ROOT

import train
from studies.residual_streams import arms, findings, grid, run
from studies.residual_streams.findings import Finding, Hypothesis
from training import statistics

PLAN = (ROOT / "studies" / "residual_streams" / "PLAN.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("arm", arms.ARMS)
def test_every_arm_is_another_model(arm):
    """An arm's keys are its model's, and no two arms are the same."""
    options = [f"--{key}={value}" for key, value in arms.ARMS[arm].items()]
    _, config = train.configure(["studies/residual_streams/cpu.py", *options], note=lambda line: None)
    for key, value in arms.ARMS[arm].items():
        assert key == "model" or str(getattr(config, key)) == value
    assert [other for other, keys in arms.ARMS.items() if keys == arms.ARMS[arm]] == [arm]


def test_the_plan_names_every_arm_and_comparison():
    table = PLAN[PLAN.index("## Arms") : PLAN.index("## Problems")]
    named = {name.strip() for row in re.findall(r"^\| ([^|]+) \|", table, flags=re.M) for name in row.split(";")}
    whole = {part for name in named for part in (name, *name.split(", "))}
    assert set(arms.ARMS) - whole == set()
    rows = re.findall(r"^\| (L\d+|T\d) ([^|]*)\| (\w+) \|", PLAN, flags=re.M)
    planned = {name: equal for name, _, equal in rows}
    assert planned == {each.name: each.at for each in (*findings.OF_LANGUAGE, *findings.OF_TASKS)}
    for hypothesis in (*findings.OF_LANGUAGE, *findings.OF_TASKS):
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


def test_arms_take_turns(monkeypatch):
    cells = {("a", "x"): list("123"), ("a", "y"): list("456"), ("b", "x"): list("789")}
    monkeypatch.setattr(run, "replace", lambda cell, index: (cell, index))
    assert run.in_turns(cells) == [(cell, index) for index, cell in enumerate("142536789")]


def finding(word, hypothesis):
    return Finding("language", hypothesis, "a", "b", None, word)


@pytest.mark.parametrize(
    ("words", "each", "differs", "said"),
    [
        (["better"], True, False, "supported"),
        (["worse"], True, False, "refuted"),
        (["level"], True, False, "refuted"),
        (["undecided"], True, False, "undecided"),
        (["worse"], True, True, "supported"),
        (["better", "better"], False, False, "supported"),
        (["better", "undecided"], False, False, "undecided"),
        (["better", "worse"], False, False, "refuted"),
        (["better", "worse"], True, False, "a: supported; a: refuted"),
        (["better", "pending"], True, False, "pending"),
    ],
)
def test_what_words_make_of_a_hypothesis(words, each, differs, said):
    hypothesis = Hypothesis("H", "", (("a", "b"),) * len(words), each=each, differs=differs)
    assert findings.outcome([finding(word, hypothesis) for word in words]) == said


def test_comparisons_are_paired_by_seed_and_corrected_together():
    """Ten comparisons of the same differences: alone each would be "better" (p = 0.031), together none is."""
    hypothesis = Hypothesis("H", "", (("a", "b"),) * 10)
    noise = [0.3, -0.2, 0.1, 0.4, -0.6]  # what a seed does to both
    own = {seed: 3.0 + noise[seed] for seed in range(5)}
    differences = (-0.05, -0.01, -0.04, -0.02, -0.08)
    values = {"tokens": {"a": {seed: own[seed] + differences[seed] for seed in range(5)}, "b": own}}
    [one, *_] = findings.compare("language", (Hypothesis("H", "", (("a", "b"),)),), values, range(5), True)
    assert one.estimate.mean == pytest.approx(-0.04)
    assert one.word == "better"
    assert {each.word for each in findings.compare("language", (hypothesis,), values, range(5), True)} == {"undecided"}
    del values["tokens"]["a"][4]
    assert findings.compare("language", (hypothesis,), values, range(5), True)[0].word == "pending"


def test_more_right_answers_are_better_on_a_task():
    values = {"tokens": {"a": {seed: 0.9 + 0.01 * seed for seed in range(5)}, "b": dict.fromkeys(range(5), 0.5)}}
    [found] = findings.compare("recall", (Hypothesis("H", "", (("a", "b"),)),), values, range(5), lower=False)
    assert found.word == "better"


def test_level_is_an_interval_within_the_smallest_difference():
    within, beyond = (statistics.interval([x + shift for x in (-0.002, 0.002, 0.001)]) for shift in (0.0, 0.008))
    assert findings.with_level("undecided", within) == "level"
    assert findings.with_level("undecided", beyond) == "undecided"
    assert findings.with_level("better", within) == "better"
