"""Means over seeds, intervals and words: scipy's own tests, simulation; groups and pairs of runs."""

import math

import numpy as np
import pytest
from helpers import one_line_error
from in_process import call
from report_helpers import BASE, CORPUS, by_hand, edit_state, load, write_run
from scipy import stats

from research import compare, tables
from research.compare import (
    correct_p_values,
    estimate_mean,
    estimate_paired_difference,
    estimate_unpaired_difference,
    judge_difference,
    judge_hypothesis,
)

A, B = [1.30, 1.35, 1.28, 1.41, 1.33], [1.36, 1.37, 1.33, 1.44, 1.41]


def draws(repeats: int, n: int, scale: float = 1.0, seed: int = 0) -> list:
    return (scale * np.random.default_rng(seed).standard_normal((repeats, n))).tolist()


def share(hits) -> float:
    return float(np.mean(list(hits)))


def test_intervals_and_p_values_are_those_of_scipys_tests():
    mean, pairs, welch = (
        estimate_mean(A),
        estimate_paired_difference(A, B),
        estimate_unpaired_difference(A, B[:4]),
    )
    low, high = stats.t.interval(0.95, 4, np.mean(A), stats.sem(A))
    assert (mean.low, mean.high) == pytest.approx((low, high), rel=1e-9)
    for ours, theirs in (
        (pairs, stats.ttest_rel(A, B)),
        (welch, stats.ttest_ind(A, B[:4], equal_var=False)),
        (mean, stats.ttest_1samp(A, 0)),
    ):
        assert ours.compute_p_value() == pytest.approx(theirs.pvalue, rel=1e-9)
        bounds = theirs.confidence_interval(0.95)
        assert (ours.low, ours.high) == pytest.approx((bounds.low, bounds.high), rel=1e-9)
    assert estimate_paired_difference(A, B).format() == "-0.048 ± 0.030 (5)"


def test_a_single_seed_decides_nothing():
    for each in (
        estimate_mean([2.0]),
        estimate_paired_difference([2.0], [1.0]),
        estimate_unpaired_difference([2.0], B),
        estimate_unpaired_difference(A, [1.0]),
    ):
        words = judge_difference(each, 0.01), judge_hypothesis(each, 0)
        assert (each.half_width, each.compute_p_value(), *words) == (
            math.inf,
            1,
            "undecided",
            "undecided",
        )
    assert estimate_mean([2.0]).format() == "2.000 (1)"
    with pytest.raises(ValueError, match="no value"):
        estimate_mean([])
    with pytest.raises(ValueError, match="5 and 4 values are no pairs"):
        estimate_paired_difference(A, B[:4])


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_95_percent_intervals_hold_the_truth_in_95_percent_of_studies(scale):
    """Five seeds of either setting; the effect of the seed, common to both, is larger than the rest."""
    own, base, common = draws(4000, 5, seed=1), draws(4000, 5, scale, 2), draws(4000, 5, 5.0, 3)
    covered = share(
        each.low <= 0 <= each.high for each in map(estimate_unpaired_difference, own, base)
    )
    assert 0.93 < covered < 0.97
    seeds = [(np.add(a, c), np.add(b, c)) for a, b, c in zip(own, base, common)]
    covered = share(
        each.low <= 0 <= each.high for each in (estimate_paired_difference(*both) for both in seeds)
    )
    assert 0.93 < covered < 0.97
    assert (
        share(
            estimate_paired_difference(*both).half_width
            < estimate_unpaired_difference(*both).half_width
            for both in seeds[:200]
        )
        > 0.8
    )


def test_words_without_a_difference_are_wrong_in_at_most_5_percent_of_studies():
    """At three and five seeds, and at the edge of a smallest difference of interest."""
    for n, shift in ((3, 0.0), (5, 0.0), (5, 0.7)):
        studies = [estimate_mean(np.add(each, shift)) for each in draws(4000, n, seed=n)]
        wrong = share(judge_difference(each, shift) in ("better", "worse") for each in studies)
        # One in two hundred true 5% is above the first; nor are the intervals too wide.
        assert (0.04 if shift == 0 else 0.015) < wrong < 0.05 + 2.6 * math.sqrt(0.05 * 0.95 / 4000)


def test_words():
    def of(mean, half=0.1):
        return compare.Estimate(mean, half / stats.t.ppf(0.975, 4), 4, 5)

    assert [judge_difference(of(m)) for m in (-0.2, 0.2, 0.05)] == ["better", "worse", "undecided"]
    assert [judge_difference(of(m), lower_is_better=False) for m in (-0.2, 0.2)] == [
        "worse",
        "better",
    ]
    words = ["better", "undecided", "level", "undecided"]
    assert [judge_difference(of(m), 0.15) for m in (-0.26, -0.24, 0.04, 0.06)] == words
    words = ["supported", "undecided", "refuted"]
    assert [judge_hypothesis(of(m), -0.05) for m in (-0.2, -0.1, 0.1)] == words


def test_many_comparisons_are_wrong_together_in_at_most_5_percent_of_studies():
    # Holm by hand: 0.01 x 4, 0.02 x 3, 0.03 x 2 (not below the one before), 0.8 x 1.
    assert correct_p_values([0.03, 0.8, 0.01, 0.02]) == pytest.approx([0.06, 0.8, 0.04, 0.06])
    studies = [list(map(estimate_mean, draws(6, 5, seed=seed))) for seed in range(1000)]
    assert (
        0.025
        < share(set(compare.judge_differences(each)) != {"undecided"} for each in studies)
        < 0.07
    )
    assert (
        share(set(map(judge_difference, each)) != {"undecided"} for each in studies) > 0.2
    )  # uncorrected
    clear = [estimate_mean([-1.0, -1.1, -0.9]), estimate_mean([1.0, -1.0, 0.0])]
    assert compare.judge_differences(clear) == ["better", "undecided"]


# ---- groups and pairs ----


def compared(folder, metric=None):
    """{name: comparison} with the group of the runs `base*`."""
    groups = compare.group_runs(load(folder))
    baseline = next(group for group in groups if group.runs[0].name.startswith("base"))
    return {e.group.runs[0].name: e for e in compare.compare_groups(groups, baseline, metric)}


def test_pairs_are_runs_of_the_same_seed_and_the_same_order_of_data(tmp_path):
    values = {"base": [2.0, 2.5, 2.1], "same": [1.0, 1.4, 1.3], "batch": [1.1, 1.4, 1.0]}
    keys = {"base": {}, "same": {"learning_rate": 1.0}, "batch": {"global_batch_size": 8}}
    for name, each in values.items():
        for seed, val in enumerate(each):
            write_run(tmp_path / f"{name}{seed}", val=val, seed=seed, **keys[name])
    other = {**CORPUS, "sha256": "x"}
    write_run(tmp_path / "shards0", val=1.0, seed=0, warmup_steps=1, corpus=other)
    found = compared(tmp_path, "val_loss")
    assert {name for name, each in found.items() if each.paired} == {"same0"}
    assert found.keys() == {"same0", "batch0", "shards0"}
    mean, half = by_hand([own - base for own, base in zip(values["same"], values["base"])])
    estimate = found["same0"].estimate
    assert (estimate.mean, estimate.half_width) == pytest.approx((mean, half), rel=1e-6)
    welch = stats.ttest_ind(values["batch"], values["base"], equal_var=False)
    assert found["batch0"].estimate.compute_p_value() == pytest.approx(welch.pvalue)
    assert found["batch0"].reason == "the data came in another order"


def test_losses_of_other_tokens_or_texts_are_not_compared(tmp_path):
    """Bits per byte may be compared across vocabularies, of the same text."""
    write_run(tmp_path / "base")
    val = {"bytes": 800, "tokens": 150}
    corpora = {"tokens": {"tokenizer": "bpe", "val": val}, "text": {"val": {**val, "bytes": 700}}}
    corpora["source"] = {"source": "elsewhere"}
    for name, changes in corpora.items():
        write_run(tmp_path / name, dataset=name, corpus=CORPUS | changes)
    nats, bits = (compared(tmp_path, metric) for metric in ("val_loss", "val_bits_per_byte"))
    assert {each.reason for each in nats.values()} == {"another vocabulary or validation text"}
    assert {name for name, each in bits.items() if each.estimate} == {"tokens"}
    assert {each.reason for name, each in bits.items() if name != "tokens"} == {
        "another validation text"
    }
    printed = call("research/report.py", "table", tmp_path, "--against=base").stderr.decode()
    assert "their losses are no comparison" in printed
    assert "another validation text" in printed
    assert "of different tokens" in call("research/report.py", "curves", tmp_path).stderr.decode()
    assert not call("research/report.py", "curves", tmp_path, "--where=tokenizer=bpe").stderr


def test_unfinished_runs_are_no_comparison(tmp_path):
    write_run(tmp_path / "base")
    write_run(tmp_path / "longer", max_steps=8)
    [each] = compared(tmp_path).values()
    assert each.estimate is None
    assert "a run is not finished" in each.reason


def test_runs_that_are_no_repetitions_are_told_apart_or_named(tmp_path):
    """Another corpus is another row; other code, and a seed that comes twice, are said."""
    for seed, (commit, digit) in enumerate(
        [("abc", "1"), ("abc", "1"), ("def", "1"), ("abc", "2")]
    ):
        folder = write_run(tmp_path / f"runs/r{seed}", seed=seed)
        edit_state(folder, commit=commit, corpus={**CORPUS, "sha256": digit * 64})
    groups = compare.group_runs(load(tmp_path / "runs"))
    names = [f"{BASE} corpus=11111111", f"{BASE} corpus=22222222"]
    assert [(group.name, group.seeds) for group in groups] == list(zip(names, ([0, 1, 2], [3])))
    commits = "its runs were trained at several commits: abc, def"
    assert [group.cautions for group in groups] == [[commits], []]
    printed = call("research/report.py", "table", tmp_path / "runs", "--by=model").stderr.decode()
    assert f"note: {BASE}: {commits}" in printed
    assert f"{BASE}: its runs had several corpora: 11111111, 22222222" in printed
    write_run(tmp_path / "copy/r0")
    [group] = compare.group_runs(load(tmp_path / "copy", write_run(tmp_path / "copied")), ["model"])
    assert group.cautions == ["seed 0 comes more than once: such runs are not independent"]
    assert any(group.cautions[0] in line for line in tables.list_cautions([group]))
    out = f"--out={tmp_path / 'x.png'}"
    ended = call("research/report.py", "curves", tmp_path / "runs", "--band", out)
    assert commits in ended.stderr.decode()


def test_groups_by_any_key_and_filters(tmp_path):
    for rate in (0.001, 0.01):
        for seed in (0, 1):
            write_run(tmp_path / f"{rate}-{seed}", seed=seed, learning_rate=rate, beta1=0.9)
    found = load(tmp_path)

    def groups_by(*by):
        groups = compare.group_runs(found, by)
        return [
            (group.name, [run.name for run in group.runs], group.mixed_keys) for group in groups
        ]

    rates = [(f"learning_rate={r}", [f"{r}-0", f"{r}-1"], ()) for r in (0.001, 0.01)]
    assert groups_by() == [(f"{BASE} {name}", *rest) for name, *rest in rates]
    assert groups_by("learning_rate") == rates
    mixed = ("learning_rate",)
    seeds = [(f"seed={s}", [f"0.001-{s}", f"0.01-{s}"], mixed) for s in (0, 1)]
    assert groups_by("seed") == seeds
    everyone = [run.name for run in found]
    assert groups_by("model", "beta1") == [(f"{BASE} beta1=0.9", everyone, mixed)]
    for conditions, names in (
        (["learning_rate=1e-3"], ["0.001-0", "0.001-1"]),
        (["learning_rate=1e-3,0.01", "seed=1"], ["0.001-1", "0.01-1"]),
        (["run=0.01-0"], ["0.01-0"]),
        (["model=gpt-mha-rope", "seed=0"], ["0.001-0", "0.01-0"]),
    ):
        assert [run.name for run in compare.select_runs(found, conditions)] == names
    error = one_line_error(call("research/report.py", "table", tmp_path, "--by=learning_rat"))
    assert "no run has a key 'learning_rat', did you mean learning_rate?" in error


def test_labels_are_short_and_name_what_differs(tmp_path):
    def labels(**runs):
        folders = [write_run(tmp_path / name, **keys) for name, keys in runs.items()]
        return compare.make_labels(load(*folders))

    one = {"warmup_steps": 9}
    two = {"model_name": "DDL-gpt-mha-rope", "warmup_steps": 10}
    assert labels(a=one, b=two) == [f"{BASE}, warmup_steps=9", "DDL-gpt-mha-rope, warmup_steps=10"]
    assert labels(c={"out_dir": "x"}, d={"seed": 2, "out_dir": "y"}) == ["seed=0", "seed=2"]
    assert labels(e={}, f={}) == ["e", "f"]  # nothing differs
    assert labels(**{"i" * 90: {}, "j": {}}) == ["i" * 30 + "..." + "i" * 30, "j"]
    (tmp_path / "e/checkpoints").rename(tmp_path / "e/gone")  # a run before its first checkpoint
    assert compare.make_labels(load(tmp_path / "e", tmp_path / "d")) == ["e", "d"]


def test_pairs_over_validation_sequences_are_of_the_same_sequences(tmp_path):
    losses, generator = {}, np.random.default_rng(0)
    for name, stem in (("a", BASE), ("b", "DDL-gpt-mha-rope"), ("c", "conv-gpt-mha-rope")):
        write_run(tmp_path / name, stem)
        windows = generator.permutation(50)[: 49 if name == "c" else 50]
        losses[name] = dict(zip(windows.tolist(), generator.standard_normal(len(windows))))
        pairs = {"window": windows, "loss": np.array(list(losses[name].values())), "step": 4}
        np.savez(tmp_path / name / "losses.npz", **pairs)
    a, b, c = load(tmp_path)
    found = compare.compare_by_sequence(b, a)
    values = [[losses[name][window] for window in range(50)] for name in "ba"]
    assert found.compute_p_value() == pytest.approx(stats.ttest_rel(*values).pvalue, rel=1e-9)
    with pytest.raises(ValueError, match="other sequences"):
        compare.compare_by_sequence(c, a)
    options = (f"--against={BASE}", "--by_sequence")
    printed = call("research/report.py", "table", tmp_path / "a", tmp_path / "b", *options)
    assert found.format("+.4f") in printed.stdout.decode()
