"""Means over seeds, intervals and verdicts agree with scipy and simulation; groups and pairs of runs."""

import json
import math

import numpy as np
import pytest
from helpers import SMALL, one_line_error
from in_process import call
from report_helpers import BASE, CORPUS, by_hand, edit_state, load, write_run
from scipy import stats

from research import compare, tables
from research.compare import (
    correct_p_values,
    estimate_mean,
    estimate_paired_difference,
    estimate_unpaired_difference,
    judge_differences,
)

A = [1.30, 1.35, 1.28, 1.41, 1.33]
B = [1.36, 1.37, 1.33, 1.44, 1.41]


def test_intervals_and_p_values_are_those_of_scipys_tests():
    mean = estimate_mean(A)
    for estimate, expected in (
        (estimate_paired_difference(A, B), stats.ttest_rel(A, B)),
        (estimate_unpaired_difference(A, B[:4]), stats.ttest_ind(A, B[:4], equal_var=False)),
        (mean, stats.ttest_1samp(A, 0)),
    ):
        assert estimate.p_value == pytest.approx(expected.pvalue, rel=1e-9)
        interval = expected.confidence_interval(0.95)
        ends = (estimate.mean - estimate.half_width, estimate.mean + estimate.half_width)
        assert ends == pytest.approx((interval.low, interval.high), rel=1e-9)
    assert estimate_paired_difference(A, B).format() == "-0.048 ± 0.030 (5)"


def test_a_single_seed_decides_nothing():
    for estimate in (
        estimate_mean([2.0]),
        estimate_paired_difference([2.0], [1.0]),
        estimate_unpaired_difference([2.0], B),
        estimate_unpaired_difference(A, [1.0]),
    ):
        assert estimate.half_width is None
        assert estimate.p_value == 1
        assert judge_differences([estimate]) == ["undecided"]
    assert estimate_mean([2.0]).format() == "2.000 (1)"


def test_equal_values_have_an_interval_without_a_width():
    assert estimate_mean([2.0, 2.0]) == compare.Estimate(2.0, 0.0, 0.0, 2)
    assert judge_differences([estimate_mean([0.0, 0.0]), estimate_mean([2.0, 2.0])]) == [
        "undecided",
        "worse",
    ]


def test_verdicts():
    estimates = [estimate_mean([mean - 0.05, mean, mean + 0.05]) for mean in (-0.3, 0.3, 0.05)]
    assert judge_differences(estimates) == ["better", "worse", "undecided"]
    assert judge_differences(estimates, lower_is_better=False) == ["worse", "better", "undecided"]


def test_verdicts_are_corrected_for_their_number():
    # Holm by hand: 0.01 x 4, 0.02 x 3, 0.025 x 2 (not below the one before), 0.8 x 1.
    assert correct_p_values([0.025, 0.8, 0.01, 0.02]) == pytest.approx([0.06, 0.8, 0.04, 0.06])
    clear_and_unclear = [estimate_mean([-1.0, -1.1, -0.9]), estimate_mean([1.0, -1.0, 0.0])]
    assert judge_differences(clear_and_unclear) == ["better", "undecided"]


# ---- groups and pairs ----


def compare_to_base(folder, metric=None):
    """Compare the groups in a folder with that of the runs `base*`, by the name of the first run."""
    groups = compare.group_runs(load(folder))
    baseline = next(group for group in groups if group.runs["name"][0].startswith("base"))
    comparisons = compare.compare_groups(groups, baseline, metric)
    return {comparison.group.runs["name"][0]: comparison for comparison in comparisons}


def test_pairs_are_runs_of_the_same_seed_and_the_same_order_of_data(tmp_path):
    losses = {"base": [2.0, 2.5, 2.1], "same": [1.0, 1.4, 1.3], "batch": [1.1, 1.4, 1.0]}
    settings = {"base": {}, "same": {"learning_rate": 1.0}, "batch": {"global_batch_size": 8}}
    for name, values in losses.items():
        for seed, value in enumerate(values):
            write_run(tmp_path / f"{name}{seed}", val=value, seed=seed, **settings[name])
    other_corpus = {**CORPUS, "sha256": "x"}
    write_run(tmp_path / "shards0", val=1.0, seed=0, warmup_steps=1, corpus=other_corpus)
    comparisons = compare_to_base(tmp_path, "val_loss")
    assert comparisons.keys() == {"same0", "batch0", "shards0"}
    assert {name for name, comparison in comparisons.items() if comparison.paired} == {"same0"}
    mean, half_width = by_hand(np.subtract(losses["same"], losses["base"]).tolist())
    estimate = comparisons["same0"].estimate
    assert (estimate.mean, estimate.half_width) == pytest.approx((mean, half_width), rel=1e-6)
    welch = stats.ttest_ind(losses["batch"], losses["base"], equal_var=False)
    assert comparisons["batch0"].estimate.p_value == pytest.approx(welch.pvalue)
    assert comparisons["batch0"].reason == "the data came in another order"


def test_losses_of_other_tokens_or_texts_are_not_compared(tmp_path):
    """Bits per byte may be compared across vocabularies, of the same text."""
    write_run(tmp_path / "base")
    val = {"bytes": 800, "tokens": 150}
    corpus_changes = {
        "tokens": {"tokenizer": "bpe", "val": val},
        "text": {"val": {**val, "bytes": 700}},
        "source": {"source": "elsewhere"},
    }
    for name, changes in corpus_changes.items():
        write_run(tmp_path / name, dataset=name, corpus={**CORPUS, **changes})
    by_loss = compare_to_base(tmp_path, "val_loss")
    by_bits = compare_to_base(tmp_path, "val_bits_per_byte")
    assert {comparison.reason for comparison in by_loss.values()} == {
        "another vocabulary or validation text"
    }
    assert {name for name, comparison in by_bits.items() if comparison.estimate} == {"tokens"}
    assert by_bits["text"].reason == by_bits["source"].reason == "another validation text"
    printed = call(
        "research/report.py", "table", tmp_path, f"--against={BASE} dataset=fineweb_edu"
    ).stderr.decode()
    assert "Losses cannot be compared" in printed
    assert "another validation text" in printed
    assert (
        "losses per token cannot be compared"
        in call("research/report.py", "curves", tmp_path).stderr.decode()
    )


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, "the data came in another order"),
        ({"eval_full": False}, "another validation text"),
        ({"eval_part": "first"}, "another validation text"),
    ],
)
def test_all_of_a_text_is_the_same_text_for_every_block_size(tmp_path, settings, reason):
    for name, block_size in (("base", 8), ("other", 16)):
        write_run(
            tmp_path / name,
            scores={"val_bits_per_byte": 1.0, "val_sequences": 48},
            config={**SMALL, "block_size": block_size},
            **settings,
        )
    [by_bits] = compare_to_base(tmp_path, "val_bits_per_byte").values()
    assert by_bits.reason == reason


def test_unfinished_runs_are_no_comparison(tmp_path):
    write_run(tmp_path / "base")
    write_run(tmp_path / "longer", max_steps=8)
    [comparison] = compare_to_base(tmp_path).values()
    assert comparison.estimate is None
    assert "a run is not finished" in comparison.reason


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
    write_run(tmp_path / "copy/r0")
    [group] = compare.group_runs(load(tmp_path / "copy", write_run(tmp_path / "copied")), ["model"])
    assert group.cautions == ["seed 0 occurs more than once: such runs are not independent"]
    assert any(group.cautions[0] in line for line in tables.list_cautions([group]))
    out = f"--out={tmp_path / 'x.png'}"
    ended = call("research/report.py", "curves", tmp_path / "runs", "--band", out)
    assert commits in ended.stderr.decode()


def test_groups_by_any_key(tmp_path):
    for rate in (0.001, 0.01):
        for seed in (0, 1):
            write_run(tmp_path / f"{rate}-{seed}", seed=seed, learning_rate=rate, beta1=0.9)
    loaded = load(tmp_path)

    def groups_by(*by):
        groups = compare.group_runs(loaded, by)
        return [(group.name, group.runs["name"].to_list(), group.mixed_keys) for group in groups]

    rates = [(f"learning_rate={r}", [f"{r}-0", f"{r}-1"], []) for r in (0.001, 0.01)]
    assert groups_by() == [(f"{BASE} {name}", *rest) for name, *rest in rates]
    assert groups_by("learning_rate") == rates
    mixed = ["learning_rate"]
    seeds = [(f"seed={s}", [f"0.001-{s}", f"0.01-{s}"], mixed) for s in (0, 1)]
    assert groups_by("seed") == seeds
    everyone = loaded["name"].to_list()
    assert groups_by("model", "beta1") == [(f"{BASE} beta1=0.9", everyone, mixed)]
    error = one_line_error(call("research/report.py", "table", tmp_path, "--by=learning_rat"))
    assert "no run has a key 'learning_rat', did you mean learning_rate, " in error


def test_groups_that_repeat_a_seed_have_different_names(tmp_path):
    for name in ("first", "second"):
        write_run(tmp_path / name, seed=0)
    names = [group.name for group in compare.group_runs(load(tmp_path))]
    assert len(set(names)) == 2
    assert names[0].endswith(", first")
    assert names[1].endswith(", second")


@pytest.mark.parametrize(
    ("first_seed", "reason", "suffix"),
    [(2, "one seed in common", "unpaired"), (1, "", "(2 pairs)")],
)
def test_a_difference_says_from_how_many_pairs_it_is(tmp_path, first_seed, reason, suffix):
    for seed in (0, 1, 2):
        write_run(tmp_path / f"a{seed}", seed=seed, learning_rate=1e-3, val=2 + 0.1 * seed)
    for seed in range(first_seed, first_seed + 3):
        write_run(tmp_path / f"b{seed}", seed=seed, learning_rate=2e-3, val=3 + 0.2 * seed)
    first, second = compare.group_runs(load(tmp_path))
    [comparison] = compare.compare_groups([first, second], first, "val_loss")
    assert comparison.reason == reason
    assert tables.format_difference(comparison).endswith(suffix)


def test_differences_of_single_runs_do_not_weaken_the_verdict_on_others():
    several = estimate_paired_difference(A, B)
    single = estimate_paired_difference([1.0], [2.0])
    assert several.p_value > 0.05 / 5
    assert judge_differences([several, *[single] * 4])[0] == "better"


def test_the_column_of_steps_has_the_step_of_the_loss_beside_it(tmp_path):
    path = write_run(tmp_path / "run") / "metrics.jsonl"
    *lines, last = path.read_text().splitlines()
    record = json.loads(last)
    path.write_text("\n".join([*lines, json.dumps({**record, "val_loss": math.nan})]) + "\n")
    [group] = compare.group_runs(load(tmp_path))
    assert tables.format_steps(group) == "2 of 4"


def test_runs_of_before_and_after_a_key_was_added_are_one_group(tmp_path):
    for seed in (0, 1):
        write_run(tmp_path / str(seed), seed=seed)
    [state_file] = (tmp_path / "0").glob("checkpoints/*/state.json")
    run_config = json.loads(state_file.read_text())["run_config"]
    old_config = {key: value for key, value in run_config.items() if key != "muon_dtype"}
    edit_state(tmp_path / "0", run_config={**old_config, "max_epochs": None})
    edit_state(tmp_path / "1", run_config={**run_config, "seed": 1, "muon_dtype": None})
    [group] = compare.group_runs(load(tmp_path))
    assert group.seeds == [0, 1]
