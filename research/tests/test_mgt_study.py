"""research/mgt: the runs of an experiment, its verdicts on rows made by hand, and its report."""

import csv
import json
import math
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import SMALL, one_line_error
from in_process import call

from data.shards import open_corpus
from model import build, model_class
from model.gpt import GPT
from research.mgt import experiments, findings, measures
from research.mgt.findings import Findings
from training import metrics, model_folder
from training.memory import count_parameters

RUN = "research/mgt/run.py"
VERDICTS = {"supported", "refuted", "undecided"}


def find_verdict(verdicts: list[dict], text: str) -> dict:
    """Return the first verdict on a hypothesis that contains a text."""
    return next(verdict for verdict in verdicts if text in verdict["hypothesis"])


# ---- 1: effective rank ----


def make_rank_row(arm: str, seed: int, ranks: list[float], slope: float) -> dict:
    """Return a row whose ranks are those after 0, 1, ... blocks."""
    return {
        "arm": arm,
        "layers": len(ranks) - 1,
        "seed": seed,
        "rank": ranks,
        "slope": slope,
        "preservation": ranks[-1] / ranks[0],
    }


def make_standard_rows() -> list[dict]:
    """Return rows of a standard arm whose rank decays, at 2 and at 4 blocks."""
    rows = []
    for seed in range(3):
        rows.append(make_rank_row("standard", seed, [0.9, 0.5, 0.2 + 0.01 * seed], -0.7))
        ranks = [0.9, 0.4, 0.2, 0.1, 0.04 + 0.01 * seed]
        rows.append(make_rank_row("standard", seed, ranks, -0.8 - 0.01 * seed))
    return rows


@pytest.mark.parametrize("part", ["H1a:", "H1b:", "H1c:", "H1d:", "H1:"])
def test_every_part_of_h1_is_supported_by_a_rank_that_decays(part):
    verdicts = findings.judge_ranks(make_standard_rows())
    assert find_verdict(verdicts, part)["verdict"] == "supported"


def test_h1d_compares_the_deepest_with_the_shallowest_models_seed_by_seed():
    verdicts = findings.judge_ranks(make_standard_rows())
    assert find_verdict(verdicts, "H1d:")["values"] == pytest.approx([-0.16, -0.16, -0.16])


def test_rises_are_compared_with_falls():
    row = make_rank_row("standard", 0, [0.9, 0.2, 0.5, 0.1, 0.04], -0.8)
    assert findings.compute_rises_over_falls(row) == pytest.approx(0.3 / (0.7 + 0.4 + 0.06))


def test_h1_is_refuted_by_a_rank_that_rises_in_between():
    rows = make_standard_rows()
    for row in rows:
        if row["layers"] == 4:
            row["rank"] = [0.9, 0.2, 0.5, 0.1, row["rank"][-1]]
    verdicts = findings.judge_ranks(rows)
    assert find_verdict(verdicts, "H1a:")["verdict"] == "supported"
    assert find_verdict(verdicts, "H1b:")["verdict"] == "refuted"
    assert find_verdict(verdicts, "H1:")["verdict"] == "refuted"


def test_h2_distinguishes_the_last_rank_from_the_lowest():
    rows = [
        make_rank_row("full", seed, [0.9, 0.4, 0.5, 0.6, 0.7 + 0.01 * seed], -0.1)
        for seed in range(3)
    ]
    last, lowest = findings.judge_ranks(rows)
    assert last["verdict"] == "supported"
    assert "every depth" in lowest["hypothesis"]
    assert lowest["mean"] == pytest.approx(0.4)
    assert lowest["verdict"] == "refuted"


def test_seeds_that_disagree_decide_nothing():
    rows = [make_rank_row("additive", seed, [0.9, 0.5 + 0.2 * seed], -0.1) for seed in (-1, 1)]
    assert findings.judge_ranks(rows)[0]["verdict"] == "undecided"


def test_a_single_seed_decides_nothing():
    verdicts = findings.judge_ranks([make_rank_row("standard", 0, [0.9, 0.5, 0.01], -2.0)])
    assert {verdict["verdict"] for verdict in verdicts} == {"undecided"}


# ---- 2: ablation ----


def make_loss_rows(layers: int = 2, **losses: list[float]) -> list[dict]:
    """Return a row for each loss; the losses of an arm are those of seeds 0, 1, ..."""
    return [
        {
            "arm": arm,
            "seed": seed,
            "layers": layers,
            "val_loss": loss,
            "val_perplexity": 1.0,
            "parameters": 10,
        }
        for arm, arm_losses in losses.items()
        for seed, loss in enumerate(arm_losses)
    ]


def test_synergy_is_the_gain_of_both_beyond_the_sum_of_gains():
    rows = make_loss_rows(standard=[5.0, 5.5], mhc=[4.5, 5.4], ddl=[4.0, 5.0], full=[3.0, 4.8])
    assert findings.compute_synergy(rows) == pytest.approx([2.0 - 0.5 - 1.0, 0.7 - 0.1 - 0.5])


def test_synergies_that_differ_between_seeds_decide_nothing():
    # 0.5 and 0.1
    rows = make_loss_rows(standard=[5.0, 5.5], mhc=[4.5, 5.4], ddl=[4.0, 5.0], full=[3.0, 4.8])
    assert findings.find_ablation_results(rows).verdicts[0]["verdict"] == "undecided"


@pytest.fixture
def ablation_results() -> Findings:
    """Return the findings of arms whose gains do not add up: their synergy is about -0.2."""
    rows = make_loss_rows(
        standard=[5.0, 5.1, 5.2],
        mhc=[4.9, 5.0, 5.1],
        ddl=[4.8, 4.9, 5.0],
        full=[4.9, 5.01, 5.1],
    )
    return findings.find_ablation_results(rows)


def test_a_negative_synergy_is_refuted(ablation_results):
    assert ablation_results.verdicts[0]["verdict"] == "refuted"


def test_each_arm_is_compared_with_the_standard_arm(ablation_results):
    assert [(row[0], row[-1]) for row in ablation_results.table] == [
        ("`standard`", None),
        ("`mhc`", "better"),
        ("`ddl`", "better"),
        ("`full`", "better"),
    ]


# ---- 3: the gate beta ----


def make_beta_row(
    seed: int, training_fraction: float, mean: list[float], negative: list[float]
) -> dict:
    return {
        "seed": seed,
        "training_fraction": training_fraction,
        "mean": mean,
        "negative": negative,
        "variance": [0.1] * len(mean),
        "sign_changes": measures.find_sign_changes(mean),
    }


def test_sign_changes_are_the_blocks_after_them():
    assert measures.find_sign_changes([0.5, -0.1, -0.2, 0.3]) == [1, 3]


def judge_beta_rows(rows: list[dict]) -> dict[str, dict]:
    """Return the three verdicts on gates by the first word of the hypothesis."""
    verdicts = findings.find_beta_results(rows).verdicts
    return {verdict["hypothesis"].split()[0]: verdict for verdict in verdicts}


def test_positive_gates_refute_deep_negative_ones_and_their_sharpening():
    rows = []
    for seed in range(3):
        rows.append(make_beta_row(seed, 0.25, [0.7] * 4, [0.0] * 4))
        negative = [0.0, 0.0, 0.0, 0.05 + 0.001 * seed]
        rows.append(make_beta_row(seed, 1.0, [0.7, 0.7, 0.7, 0.6], negative))
    verdicts = judge_beta_rows(rows)
    assert verdicts["early"]["verdict"] == "supported"
    assert verdicts["deep"]["verdict"] == "refuted"
    assert verdicts["the"]["verdict"] == "refuted"


def make_sharpening_rows() -> list[dict]:
    """Return rows of three seeds whose gates change sign in the middle, by more at the end."""
    rows = []
    for seed in range(3):
        rows.append(make_beta_row(seed, 0.25, [0.7, 0.1, -0.1, -0.2], [0, 0, 0.6, 0.6]))
        mean = [0.7, 0.5, -0.5 - 0.01 * seed, -0.6]
        rows.append(make_beta_row(seed, 1.0, mean, [0, 0, 0.9, 0.9]))
    return rows


def test_gates_that_sharpen_support_all_hypotheses():
    verdicts = judge_beta_rows(make_sharpening_rows())
    assert {verdict["verdict"] for verdict in verdicts.values()} == {"supported"}


def test_sharpening_is_the_growth_of_the_step_at_the_sign_change():
    assert judge_beta_rows(make_sharpening_rows())["the"]["values"] == pytest.approx(
        [0.8, 0.81, 0.82]
    )


def test_sharpening_is_undecided_if_one_run_keeps_its_sign():
    rows = make_sharpening_rows()
    rows[-1] = make_beta_row(2, 1.0, [0.7, 0.6, 0.5, 0.4], [0, 0, 0.9, 0.9])
    assert judge_beta_rows(rows)["the"]["verdict"] == "undecided"


def test_gates_are_those_of_the_sites(corpus):
    """measure_gates equals tanh(X W + b) at the states of blocks that are run by hand."""
    torch.manual_seed(1)
    model = build("MGT-gpt-mha", **SMALL, mgt_beta_bias_init=0.1)
    measured = measures.measure_gates(model, str(corpus))
    ids = select_validation_ids(corpus)
    states = model.transformer.wte(ids)
    positions = model.positions(ids)
    for layer, block in enumerate(model.transformer.h):
        betas = []
        for site, norm, write in (
            (block.attn, block.ln_1, block.write_attn),
            (block.mlp, block.ln_2, block.write_mlp),
        ):
            betas.append((states @ write.beta.weight.T + write.beta.bias).tanh())
            states = write(states, site(norm(states), positions), states, None)
        beta = torch.stack(betas).detach().double()
        negative = (beta < 0).double().mean().item()
        assert measured["mean"][layer] == pytest.approx(beta.mean().item(), rel=1e-4)
        assert measured["mean_mlp"][layer] == pytest.approx(beta[1].mean().item(), rel=1e-4)
        assert measured["variance"][layer] == pytest.approx(
            beta.var(unbiased=False).item(), rel=1e-4
        )
        assert measured["negative"][layer] == pytest.approx(negative, abs=1e-6)


def select_validation_ids(corpus: Path) -> torch.Tensor:
    """Return 16 of the 149 full validation sequences of 16 tokens, evenly spread: (16, 16)."""
    tokens = torch.from_numpy(open_corpus(str(corpus)).val[0].astype("int64"))
    starts = [16 * round(i * 148 / 15) for i in range(16)]
    return torch.stack([tokens[start : start + 16] for start in starts])


# ---- 4: depth at one size ----


@pytest.fixture
def depth_results() -> Findings:
    """Return the findings of two depths, at the larger of which the full arm gains more."""
    rows = []
    for layers, gain in ((4, 0.1), (8, 0.3)):
        rows.extend(
            make_loss_rows(
                layers=layers,
                standard=[5.0, 5.1, 5.2],
                full=[5.0 - gain, 5.1 - gain, 5.21 - gain],
            )
        )
    for row in rows:
        row["width"] = 8
        row["epochs_to_target"] = 1.0
    return findings.find_depth_results(rows)


def test_a_gain_that_grows_with_depth_supports_all_hypotheses(depth_results):
    assert [verdict["verdict"] for verdict in depth_results.verdicts] == ["supported"] * 4


def test_the_table_of_depths_has_means_with_intervals(depth_results):
    losses = [row[4] for row in depth_results.table]
    assert losses[:2] == ["5.100 ± 0.248 (3)", "5.003 ± 0.261 (3)"]


def test_widths_of_experiment_4_come_nearest_to_the_size(tmp_path):
    options = {
        "num_hidden_layers": "3,9",
        "parameters": "300000",
        "dataset": "python_stdlib",
        "block_size": "64",
    }
    commands = experiments.make_commands("depth", "paper", options, tmp_path)
    assert len(commands) == 4
    for command in commands:
        cell = experiments.make_cells(command)[0]
        distances = []
        for width_change in (-8, 0, 8):
            hidden_size = cell.settings["hidden_size"] + width_change
            model = build(
                "MGT-gpt-mha",
                vocab_size=4096,
                block_size=64,
                num_attention_heads=4,
                mgt_arm=cell.settings["mgt_arm"],
                num_hidden_layers=cell.settings["num_hidden_layers"],
                hidden_size=hidden_size,
                head_dim=hidden_size // 4,
            )
            distances.append(abs(model.num_parameters() - 300_000))
        assert min(distances) == distances[1], cell.title


# ---- 5: language modeling ----


def test_counted_overhead_of_experiment_5():
    """research/docs/mgt.md states these numbers for the paper's model with GPT-2's vocabulary."""

    def count(arm: str) -> int:
        config = model_class("MGT-gpt-mha").Config(
            vocab_size=50304,
            num_hidden_layers=24,
            hidden_size=512,
            num_attention_heads=8,
            head_dim=64,
            mgt_arm=arm,
        )
        return count_parameters("MGT-gpt-mha", config)

    standard = count("standard")
    full = count("full")
    d = 512
    embedding = 50304 * d
    block = 4 * d * d + 2 * 64 + 3 * d * (8 * d // 3) + 2 * 2 * d
    write = 2 * d * d + d + 2 * d + 1  # W_gate, W_beta, b_beta, the norm in the gate, alpha
    assert standard == embedding + 24 * block == 101_293_056
    assert full == standard + 24 * 2 * write + 2 * d == 126_533_680
    assert f"{(full - standard) / standard:.1%}" == "24.9%"
    assert f"{(full - standard) / (standard - embedding):.1%}" == "33.4%"


# ---- the paper's sizes ----


# the number of runs at the paper's size, and their epochs
PAPER_RUNS = {
    "rank": (36, 50),
    "ablation": (15, 50),
    "beta": (3, 100),
    "depth": (24, 50),
    "language": (6, 100),
    "copy": (15, 5),
}


@pytest.mark.parametrize("experiment", experiments.EXPERIMENTS)
def test_the_papers_sizes_are_ready(experiment, corpus, tmp_path):
    options = {"dataset": str(corpus)}
    if experiment == "depth":
        # as many depths as in the paper, but smaller: finding widths for 200 blocks takes a minute
        options["parameters"] = "60000"
        options["num_hidden_layers"] = "1,2,3,4"
    if experiment == "copy":
        options["block_size"] = "256"
    num_runs, epochs = PAPER_RUNS[experiment]
    commands = experiments.make_commands(experiment, "paper", options, tmp_path)
    cells = [cell for command in commands for cell in experiments.make_cells(command)]
    assert len(cells) == num_runs
    for cell in cells:
        assert cell.settings["learning_rate"] == 1e-3
        assert cell.settings["global_batch_size"] == 64
        assert cell.settings["max_steps"] == math.ceil(epochs * 32_111 / (64 * 256))


def test_checkpoints_of_experiment_3_cover_every_quarter_of_training(corpus, tmp_path):
    [command] = experiments.make_commands("beta", "paper", {"dataset": str(corpus)}, tmp_path)
    settings = experiments.make_cells(command)[0].settings
    assert settings["checkpoint_interval"] * 4 >= settings["max_steps"]
    assert settings["keep_last"] == 4


# ---- reports of runs ----

TINY_RUN = {
    **SMALL,
    "max_steps": 4,
    "warmup_steps": 1,
    "global_batch_size": 2,
    "micro_batch_size": 2,
    "eval_batches": 2,
    "device": "cpu",
    "dtype": "float32",
    "compile": False,
    "preset": "paper",
}


def make_options(corpus: Path, tmp_path: Path, **changes) -> list[str]:
    """Return options of run.py for tiny runs of two seeds."""
    settings = {
        "dataset": corpus,
        **TINY_RUN,
        "seed": "0..1",
        "runs": tmp_path / "runs",
        "results": tmp_path,
        **changes,
    }
    return [f"--{key}={value}" for key, value in settings.items()]


def train_cells(experiment: str, corpus: Path, tmp_path: Path, **changes) -> None:
    """Train, in this process, the runs of the sweeps that `--mode=show` prints."""
    options = make_options(corpus, tmp_path, mode="show", **changes)
    result = call(RUN, experiment, *options)
    assert result.returncode == 0, result.stderr.decode()
    for line in result.stdout.decode().splitlines():
        python, script, *command = shlex.split(line)
        assert (python, script) == ("python", "research/sweep.py")
        for cell in experiments.make_cells(command):
            assert call("train.py", *cell.arguments).returncode == 0


TINY_EXPERIMENTS = {
    "rank": {"num_hidden_layers": "2,3"},
    "ablation": {},
    "beta": {},
    "depth": {"num_hidden_layers": "1,2", "parameters": 9000, "eval_interval": 2},
    "language": {"eval_interval": 2},
}


@pytest.mark.parametrize("experiment", TINY_EXPERIMENTS)
def test_every_experiment_is_reported_from_its_runs(experiment, corpus, tmp_path):
    changes = TINY_EXPERIMENTS[experiment]
    train_cells(experiment, corpus, tmp_path, **changes)
    options = make_options(corpus, tmp_path, mode="report", **changes)
    result = call(RUN, experiment, *options)
    assert result.returncode == 0, result.stderr.decode()
    stored = json.loads((tmp_path / f"{experiment}_paper.json").read_text())
    page = (tmp_path / f"{experiment}_paper.md").read_text()
    assert stored["unfinished"] == []
    assert {verdict["verdict"] for verdict in stored["verdicts"]} <= VERDICTS
    assert all(verdict["hypothesis"] in page for verdict in stored["verdicts"])
    assert (tmp_path / f"{experiment}_paper.png").read_bytes().startswith(b"\x89PNG")
    if experiment in CHECKS:
        CHECKS[experiment](stored, tmp_path)

    with open(tmp_path / "runs.csv", encoding="utf-8", newline="") as file:
        names = [row["name"] for row in csv.DictReader(file)]
    assert len(set(names)) == len(stored["rows"]) or experiment == "beta"
    assert len(names) == len(list((tmp_path / "runs").rglob("metrics.jsonl")))

    # a second report measures nothing
    output = call(RUN, experiment, *options).stdout.decode()
    assert "of 12:" not in output
    assert "gates at step" not in output
    assert page in output


def check_rank(stored: dict, tmp_path: Path) -> None:
    """Check that every run has its ranks, and one untrained rank by numpy."""
    initial_ranks = {}
    for row in stored["rows"]:
        assert len(row["rank"]) == len(row["initial_rank"]) == row["layers"] + 1
        initial_ranks[row["arm"], row["layers"], row["seed"]] = row["initial_rank"]
    assert len(initial_ranks) == len(stored["rows"]) == 12
    torch.manual_seed(1)
    model = build("MGT-gpt-mha", **SMALL, mgt_arm="full")
    expected = compute_embedding_rank(model, Path(stored["settings"]["dataset"]))
    assert initial_ranks["full", 2, 1][0] == pytest.approx(expected, rel=1e-5)


def compute_embedding_rank(model: GPT, corpus: Path) -> float:
    """Return the mean effective rank of the embeddings of 16 validation sequences, by numpy."""
    ranks = []
    for ids in select_validation_ids(corpus):
        embeddings = model.transformer.wte(ids).detach().double().numpy()
        singular_values = np.linalg.svd(embeddings, full_matrices=False)[1]
        singular_values = singular_values[singular_values > 1e-12]
        p = singular_values / singular_values.sum()
        ranks.append(math.exp(-(p * np.log(p)).sum()) / 12)
    return float(np.mean(ranks))


def check_beta(stored: dict, tmp_path: Path) -> None:
    """Check that the gates are those of the start and of each quarter of the training."""
    rows = stored["rows"]
    assert [row["step"] for row in rows] == [0, 1, 2, 4, 0, 1, 2, 4]
    # before the first step the bias alone sets the mean
    assert rows[0]["mean"] == pytest.approx([math.tanh(1)] * 2, abs=0.02)
    assert len({tuple(row["mean"]) for row in rows}) == 8


def check_depth(stored: dict, tmp_path: Path) -> None:
    """Check the target loss of each depth, and the first evaluation that reached it."""
    for row in stored["rows"]:
        losses = [other["val_loss"] for other in stored["rows"] if other["layers"] == row["layers"]]
        assert row["target"] == max(losses)
        step, epochs, _ = next(
            evaluation for evaluation in row["evaluations"] if evaluation[2] <= row["target"]
        )
        assert row["epochs_to_target"] == epochs
        assert epochs == pytest.approx(step * 2 * 16 / 32_111)


def check_ablation(stored: dict, tmp_path: Path) -> None:
    """Check the loss and the size of one run against its folder."""
    folder = next((tmp_path / "runs" / "ablation_paper").glob("mgt_arm=ddl,*seed=1"))
    row = next(row for row in stored["rows"] if (row["arm"], row["seed"]) == ("ddl", 1))
    evaluation = metrics.find_last_evaluation(folder / "metrics.jsonl")
    assert row["val_loss"] == evaluation["val_loss"]
    model, _, _ = model_folder.load_model(folder, "cpu")
    assert row["parameters"] == model.num_parameters()


CHECKS = {
    "rank": check_rank,
    "ablation": check_ablation,
    "beta": check_beta,
    "depth": check_depth,
}


def test_the_copy_task_is_reported(tmp_path):
    data = tmp_path / "data"
    result = call(
        "data/copy_task/prepare.py",
        f"--out={data}",
        "--half=4",
        "--symbols=2",
        "--sequences=50",
        "--val_sequences=20",
    )
    assert result.returncode == 0
    settings = {
        "block_size": 8,
        "mgt_arm": "standard,full",
        "eval_interval": 2,
        "preset": "cpu",
    }
    train_cells("copy", data, tmp_path, **settings)
    options = make_options(data, tmp_path, mode="report", **settings)
    assert call(RUN, "copy", *options).returncode == 0
    stored = json.loads((tmp_path / "copy_cpu.json").read_text())
    assert {verdict["verdict"] for verdict in stored["verdicts"]} <= VERDICTS
    assert [row["solved_at"] for row in stored["rows"]] == [None] * 4
    for row in stored["rows"]:
        assert [step for step, _, _ in row["evaluations"]] == [2, 4]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ranks"], "ranks: give one of rank, ablation"),
        ([], "no experiment: give one of"),
        (["rank", "--preset=gpu"], "--preset=gpu: give cpu or paper"),
        (["rank", "--preset=cpu"], "--preset=cpu is a size of the copy task only"),
        (
            ["copy", "--preset=cpu", "--mgt_arms=full"],
            "unknown key --mgt_arms, did you mean mgt_arm",
        ),
        (["rank", "--parameters=5"], "--parameters=5 is the size of experiment depth's models"),
        (
            ["depth", "--parameters=many", "--dataset=python_stdlib"],
            "--parameters=many: give a whole number",
        ),
        (
            ["rank", "--mode=report", "--runs=nowhere", "--dataset=python_stdlib"],
            "no run of rank is finished",
        ),
        (
            ["ablation", "--learning_rate=1e-3,1e-1"],
            "a report compares only seed, mgt_arm, num_hidden_layers",
        ),
        (["beta", "--mgt_arm=standard"], "--mgt_arm=standard: give full or ddl"),
        (["beta", "--mgt_arm=full,ddl"], "--mgt_arm=full,ddl: give full or ddl; beta measures one"),
        (
            ["ablation", "--num_hidden_layers=24,48"],
            "--num_hidden_layers=24,48: give one value; only rank and depth compare depths",
        ),
        (["rank", "--mgt_arm=full,full_post"], "a report cannot show full_post; give some of"),
        (
            ["copy", "--dataset=python_stdlib"],
            "--dataset=python_stdlib: it has no answers to score",
        ),
        (
            ["depth", "--parameters=0", "--dataset=python_stdlib"],
            "give a whole number, 1 or more",
        ),
    ],
)
def test_mistakes_are_one_line(arguments, message, tmp_path):
    assert message in one_line_error(call(RUN, *arguments, f"--results={tmp_path}"))


@pytest.mark.slow
def test_the_command_trains_reports_and_trains_nothing_twice(corpus, tmp_path):
    options = make_options(corpus, tmp_path, mgt_arm="standard,full")
    for _ in range(2):
        result = call(RUN, "language", *options)
        assert result.returncode == 0, result.stderr.decode()
    logs = [path.read_text() for path in (tmp_path / "runs").rglob("*.log")]
    assert len(logs) == 4
    assert all(log.count("$ ") == 1 for log in logs)
