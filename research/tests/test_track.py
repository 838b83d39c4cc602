"""Tests of the track: its plan, its frozen noise, and its table against scipy."""

import dataclasses
import math
import signal
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import ROOT, SMALL, change_default, run_script, wait_for
from scipy import stats

import model as models
from data.torch_source.prepare import read_sources, split_by_package
from research import track
from research.track_plan import CPU_1, Entry
from research.tuning import find_minimum
from utils import files


class LeakyModel(models.model_class(CPU_1.baseline)):
    """The additive stream, whose logits see the mean over all tokens."""

    def forward(self, *args, **kwargs):
        logits, loss = super().forward(*args, **kwargs)
        return logits + logits.mean(1, keepdim=True), loss


def bowl(run: track.Run) -> float:
    """Return a made-up loss, whose best rates are a quarter and twice those of the tier's start."""
    muon = math.log2(run.muon_learning_rate / 7e-3) + 2
    adamw = math.log2(run.learning_rate / 2e-2) - 1
    return 3 + 0.1 * muon**2 + 0.05 * adamw**2 + 0.001 * run.seed


def finish(entry: Entry, get_loss, batch_size: int) -> dict:
    """Return the losses of an entry whose missing runs finish in batches."""
    losses = {}
    while missing := track.make_plan(entry, losses).missing:
        losses |= {run: get_loss(run) for run in missing[:batch_size]}
    return losses


@pytest.fixture
def entry():
    return Entry(CPU_1, "wide-gpt-mha-rope", {})


def test_the_plan_has_the_tiers_numbers_of_tries_whatever_the_number_of_jobs(entry):
    losses = finish(entry, bowl, 1)
    assert finish(entry, bowl, 3) == losses
    parts = {
        part: [run for run in losses if run.part == part] for part in ("short", "long", "seed")
    }
    assert 5 <= len(parts["short"]) <= 8
    assert 3 <= len(parts["long"]) <= 5
    assert [run.seed for run in parts["seed"]] == [0, 1, 2, 3]
    # the search moves to the best rates, and longer runs start from half of them
    assert min(parts["short"], key=losses.get).muon_learning_rate == 0.00175
    assert parts["long"][0].muon_learning_rate == 0.000875
    rates = track.make_plan(entry, losses).rates
    # the start's rate times the first common factor is 0.0035
    assert rates["muon_learning_rate"] < 0.003
    assert rates["learning_rate"] > 0.02


def test_a_diverged_try_is_not_fitted():
    losses = {(-1.0,): 3.1, (0.0,): 3.0, (1.0,): math.inf}
    assert find_minimum(losses) == (0.0,)
    # 3 - 0.05 x + 0.05 x^2
    assert find_minimum({**losses, (-2.0,): 3.3}) == pytest.approx((0.5,))


def test_an_entry_that_always_diverges_is_refused(entry):
    with pytest.raises(ValueError, match="diverged"):
        finish(entry, lambda run: math.inf, 1)


def read_seed_losses(path: Path) -> list[float]:
    rows = files.read_json(path)["runs"]
    return [row["val_loss"] for row in rows if row["part"] == "seed"]


@pytest.fixture
def empty_tier(tmp_path):
    """Return the tier, of which only the baseline is stored."""
    tier = dataclasses.replace(CPU_1, root=tmp_path)
    tier.results.mkdir(parents=True)
    baseline = Entry(CPU_1, CPU_1.baseline, {}).path
    (tier.results / baseline.name).write_bytes(baseline.read_bytes())
    return tier


@pytest.fixture
def two_entries(empty_tier):
    """Return the tier with two made-up entries, one far from the baseline and one near it."""
    baseline = files.read_json(Entry(CPU_1, CPU_1.baseline, {}).path)
    mean = statistics.fmean(read_seed_losses(Entry(CPU_1, CPU_1.baseline, {}).path))
    for name, difference in (("wide-gpt-mha-rope", -0.03), ("conv-gpt-mha-rope", 0.02)):
        rows = [row for row in baseline["runs"] if row["part"] == "seed"][:4]
        rows = [{**row, "val_loss": mean + difference} for row in rows]
        stored = {**baseline, "model": name, "runs": rows}
        files.write_json(empty_tier.results / f"{name}.json", stored)
    return empty_tier


def test_the_figure_shows_the_differences_and_what_is_undecided(monkeypatch, tmp_path, two_entries):
    axis = track.plot_differences(two_entries).axes[0]
    intervals = [container[2][0].get_segments()[0][:, 0] for container in axis.containers]
    half_width = CPU_1.noise.get_half_width(4)
    for (low, high), difference in zip(intervals, (-0.03, 0.02), strict=True):
        assert (low, high) == pytest.approx((difference - half_width, difference + half_width))
    assert [label.get_text() for label in axis.get_yticklabels()] == [
        "wide-gpt-mha-rope",
        "conv-gpt-mha-rope",
    ]
    undecided = CPU_1.quantile * CPU_1.noise.get_standard_error(4)
    (band,) = axis.patches
    assert (band.get_x(), band.get_width()) == pytest.approx((-undecided, 2 * undecided))
    out = tmp_path / "figure.png"
    monkeypatch.setattr("sys.argv", ["track.py", "--mode=table", f"--out={out}"])
    assert track.main(two_entries) == 0
    assert out.read_bytes().startswith(b"\x89PNG")


def test_a_diverged_seed_has_no_place(two_entries):
    path = two_entries.results / "wide-gpt-mha-rope.json"
    stored = files.read_json(path)
    stored["runs"][2]["val_loss"] = None
    files.write_json(path, stored)
    assert "|  | wide-gpt-mha-rope |  |  |  | a seed diverged |" in track.format_table(two_entries)


@pytest.mark.parametrize(("part", "eval_part"), [("short", "first"), ("seed", "second")])
def test_rates_are_chosen_on_one_part_of_the_text_and_losses_reported_on_the_other(
    entry, part, eval_part
):
    run = track.make_plan(entry, {}).missing[0]._replace(part=part)
    cell = track.make_cell(entry, run, entry.folder)
    assert cell.settings["eval_part"] == eval_part


def test_a_run_that_diverges_in_its_first_step_is_stored(tmp_path):
    entry = Entry(dataclasses.replace(CPU_1, root=tmp_path), "wide-gpt-mha-rope", {})
    run = track.make_plan(entry, {}).missing[0]
    folder = track.make_cell(entry, run, entry.folder).folder
    (folder / "nonfinite").mkdir(parents=True)
    (folder / "metrics.jsonl").touch()
    runner = track.Runner(entry, {"runs": []}, jobs=1)
    row = runner.train(run)
    assert (row["val_loss"], row["seconds"]) == (math.inf, 0.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no-such-variant"], "no-such-variant"),
        (["gpt-mha-rope", "--hidden_size=64"], "hidden_size is fixed by the tier"),
        (["gpt-mha-rope", "--rope_base=500000"], "rope_base is fixed by the tier"),
        (["--jobs=4"], "--jobs needs a variant"),
        (["--mode=table", "--out=a.gif"], "a.gif must end in .png"),
    ],
)
def test_bad_command_lines_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        track.read_command(arguments, CPU_1)


def test_another_torch_is_refused(monkeypatch):
    tier = dataclasses.replace(CPU_1, torch_version="2.0.0")
    with pytest.raises(ValueError, match=r"the tier cpu-1 is of torch 2\.0\.0"):
        track.check_tier(tier)


def test_another_default_is_refused(monkeypatch):
    change_default(
        monkeypatch, models.model_class(CPU_1.baseline), "rope_base", float, default=500_000.0
    )
    with pytest.raises(ValueError, match=r"^the default of rope_base is no longer .*; restore it$"):
        track.check_tier(CPU_1)


def test_another_corpus_is_refused(tmp_path):
    (tmp_path / "meta.json").write_text("{}")
    for name in CPU_1.corpus_sha256:
        (tmp_path / name).write_bytes(b"other tokens")
    torch_version = torch.__version__.partition("+")[0]
    tier = dataclasses.replace(CPU_1, corpus=tmp_path, torch_version=torch_version)
    with pytest.raises(ValueError, match="is not the text of the tier cpu-1"):
        track.check_tier(tier)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (["own"], r"model/streams/wide-gpt-mha-rope\.py computes"),
        (["own", "baseline"], "the code of training computes"),
    ],
)
def test_code_with_other_losses_is_refused(monkeypatch, entry, changed, message):
    losses = {"wide-gpt-mha-rope": [7.0, 6.0], "gpt-mha-rope": [7.5, 6.5]}
    monkeypatch.setattr(track, "measure_first_losses", lambda entry, name, keys: losses[name])
    stored = {"runs": []}
    track.check_code(entry, stored)
    track.check_code(entry, stored)  # code with the same losses is accepted
    for name in changed:
        stored["code"]["first_losses"][name] = [7.0, 6.1]
    with pytest.raises(ValueError, match=message):
        track.check_code(entry, stored)


def test_a_leak_of_later_tokens_is_refused(monkeypatch):
    monkeypatch.setattr(track.models, "build", lambda name, config: LeakyModel(config))
    with pytest.raises(ValueError, match="has no place in the table, because later tokens leak"):
        track.check_causality(Entry(CPU_1, CPU_1.baseline, {}))


def test_the_corpus_has_each_text_once_and_no_generated_file(tmp_path):
    contents = {
        "a.py": "a",
        "jit/b.py": "b",
        "jit/copy_of_a.py": "a",
        "jit/generated/c.py": "c",
        "version.py": "d",
        "empty.py": "\n",
        "nested/e.py": "e",
    }
    for name, text in contents.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    texts = read_sources(tmp_path)
    assert texts == {"a.py": "a", "jit/b.py": "b", "nested/e.py": "e"}
    # tuning packages come before reporting packages
    assert split_by_package(texts) == {"val": ["e", "b"], "train": ["a"]}


def test_show_prints_the_plan_and_writes_nothing(monkeypatch, capsys, tmp_path, empty_tier):
    monkeypatch.setattr("sys.argv", ["track.py", "mHC-gpt-mha-rope", "--mode=show"])
    assert track.main(empty_tier) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.startswith("next: short, seed 1000, 800 steps") for line in lines[:-1]] == [
        True
    ] * 5
    # 5 short tries, 3 long ones and 4 seeds
    assert "0 runs are done, 26400 steps are left" in lines[-1]
    stored = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert stored == [Entry(empty_tier, "gpt-mha-rope", {}).path]


TINY_TIER = """
import sys
from pathlib import Path

sys.path.insert(0, {root!r})
from research import track
from research.track_statistics import Noise

track.SPEED_ROUNDS = 3
tier = track.Tier(
    name="tiny",
    corpus=Path({corpus!r}),
    root=Path({folder!r}),
    config=Path({folder!r}, "tiny.py"),
    settings_sha256="",
    defaults={{}},
    corpus_sha256={{}},
    torch_version=track.torch.__version__.partition("+")[0],
    short_steps=20,
    long_steps=40,
    max_short_tries=5,
    max_long_tries=3,
    num_seeds=1,
    num_baseline_seeds=2,
    noise=Noise(sigma=0.1, sigma_df=1, tau=0.1, tau_df=1, num_baseline_seeds=2),
    quantile=3.0,
)
settings = track.hash_settings(tier.read_settings())
sys.exit(track.main(track.dataclasses.replace(tier, settings_sha256=settings)))
"""


def test_an_entry_is_trained_stopped_and_resumed(corpus, tmp_path):
    settings = {
        **SMALL,
        "dataset": str(corpus),
        "device": "cpu",
        "dtype": "float32",
        "compile": False,
        "global_batch_size": 4,
        "micro_batch_size": 4,
        "optimizer": "muon",
        "muon_learning_rate": 7e-3,
        "learning_rate": 2e-2,
        "eval_interval": 100_000,
        "eval_full": True,
        "log_interval": 10,
    }
    config = tmp_path / "tiny.py"
    config.write_text("".join(f"{key} = {value!r}\n" for key, value in settings.items()))
    script = tmp_path / "track_tiny.py"
    script.write_text(TINY_TIER.format(root=str(ROOT), folder=str(tmp_path), corpus=str(corpus)))
    results = tmp_path / "results" / "track" / "tiny"
    path = results / "wide-gpt-mha-rope.json"
    command = [sys.executable, str(script), "wide-gpt-mha-rope", "--jobs=2"]

    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    wait_for(lambda: path.exists() and len(files.read_json(path)["runs"]) >= 2, seconds=200)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 128 + signal.SIGTERM
    assert "stopped by SIGTERM; to resume: python " in output
    first = files.read_json(path)
    assert 2 <= len(first["runs"]) < 9

    # a baseline with made-up losses, so that the table has something to compare with
    run = {"part": "seed", "steps": 40, "muon_learning_rate": 7e-3, "learning_rate": 2e-2}
    rows = [{**run, "seed": seed, "val_loss": 9.0, "seconds": 1.0} for seed in (0, 1)]
    files.write_json(
        results / "gpt-mha-rope.json", {**first, "model": "gpt-mha-rope", "runs": rows}
    )
    finished = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True
    )
    resumed = files.read_json(path)
    assert resumed["runs"][: len(first["runs"])] == first["runs"]
    parts = [row["part"] for row in resumed["runs"]]
    assert [parts.count(part) for part in ("short", "long", "seed")] == [5, 3, 1]
    assert len(track.read_losses(resumed)) == 9  # no run was trained twice
    assert resumed["speed"] == first["speed"]
    (seed_run,) = (row for row in resumed["runs"] if row["part"] == "seed")
    # one seed has no standard deviation
    difference = f"| {seed_run['val_loss']:.4f} |  | {seed_run['val_loss'] - 9:+.4f} ± "
    assert difference in finished.stdout
    assert "| better |" in finished.stdout

    # train.py alone reaches the same loss
    keys = ("seed", "muon_learning_rate", "learning_rate")
    train = run_script(
        "train.py",
        config,
        "--model=wide-gpt-mha-rope",
        *(f"--{key}={seed_run[key]}" for key in keys),
        "--max_steps=40",
        "--warmup_steps=4",
        "--eval_part=second",
        f"--out_dir={tmp_path / 'alone'}",
    )
    assert f"validation loss {seed_run['val_loss']:.4f}" in train.stdout.decode()


def test_the_page_is_what_scipy_computes_from_the_stored_rows():
    page = (ROOT / "research" / "track.md").read_text()
    rows = {
        line.split(" | ")[1]: line.strip("|").split(" | ")
        for line in page.splitlines()
        if line.startswith("| ")
    }
    folder = ROOT / "results" / "track" / "cpu-1"
    baseline = files.read_json(folder / "gpt-mha-rope.json")
    reference = read_seed_losses(folder / "gpt-mha-rope.json")
    searches = {row["seed"] for row in baseline["runs"] if row["part"] == "short"}
    assert (len(reference), len(searches)) == (12, 8)
    seed_variance = np.var(reference, ddof=1)
    rate_variance = CPU_1.noise.tau**2
    means = {}
    variances = []
    parts = seed_variance * (1 / 4 + 1 / 12), 2 * rate_variance
    degrees = sum(parts) ** 2 / (parts[0] ** 2 / 11 + parts[1] ** 2 / 7)
    error = math.sqrt(sum(parts))
    assert CPU_1.quantile == pytest.approx(stats.t.ppf(0.999, degrees), abs=1e-3)
    for path in sorted(folder.glob("*.json")):
        losses = read_seed_losses(path)
        label, is_released_form, _ = path.stem.partition("+ddl_")
        if is_released_form:
            label = f"{label} (released code's form)"
        cells = [cell.strip() for cell in rows[label]]
        if path.stem == "gpt-mha-rope" or len(losses) < 4:
            continue
        assert len(losses) == 4
        difference = np.mean(losses) - np.mean(reference)
        means[label] = np.mean(losses)
        variances.append(np.var(losses, ddof=1))
        half_width = stats.t.interval(0.95, degrees, scale=error)[1]
        p_value = 2 * stats.t.sf(abs(difference) / error, degrees)
        verdict = "better" if difference < 0 else "worse"
        own_error = math.sqrt(error**2 + (np.var(losses, ddof=1) - seed_variance) / 4)
        if p_value >= 0.002:
            verdict = "undecided"
        elif abs(difference) <= stats.t.ppf(0.999, degrees) * own_error:
            verdict = "undecided by its own spread"
        expected = [
            f"{np.mean(losses):.4f}",
            f"{np.std(losses, ddof=1):.4f}",
            f"{difference:+.4f} ± {half_width:.4f}",
            verdict,
        ]
        assert cells[2:6] == expected
    order = [name for name in rows if name in means]
    assert order == sorted(means, key=means.get)

    pooled = np.mean(variances)
    own_error = math.sqrt(pooled / 4 + seed_variance / 12 + 2 * rate_variance)
    text = " ".join(page.split())
    assert f"of {math.sqrt(pooled):.4f} nats ({3 * len(variances)} degrees of freedom)" in text
    p_value = 2 * stats.norm.sf(stats.t.ppf(0.999, degrees) * error / own_error)
    assert f"the rule decides on {p_value:.1%} of entries that equal additive" in text


def test_the_page_has_the_table_and_the_frozen_numbers():
    page = (ROOT / "research" / "track.md").read_text()
    null_test = files.read_json(ROOT / "results" / "track" / "null_test.json")
    error = CPU_1.noise.get_standard_error(CPU_1.num_seeds)
    assert track.format_table(CPU_1) in page
    assert f"sigma = {CPU_1.noise.sigma:.4f}" in page
    assert f"tau = {CPU_1.noise.tau:.4f}" in page
    assert f"s = {error:.4f}" in page
    assert f"> {CPU_1.quantile} s" in page
    assert f"decides is {CPU_1.quantile * error:.3f}" in page
    assert f"{null_test['false_decisions']:.2%} are decided" in page
    assert null_test["false_decisions"] <= 0.003
