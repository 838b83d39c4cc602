"""research/mgt: what an experiment trains, what its hypotheses come to on rows made by hand, and its report of runs."""

import json
import math
import shlex

import numpy as np
import pytest
import torch
from helpers import SMALL, one_line_error
from in_process import call

from model import build
from research.mgt import experiments, findings, measures
from training import checkpoint
from training.memory import count_parameters

RUN = "research/mgt/run.py"


def words(verdicts: list[dict]) -> dict[str, str]:
    """{first word of the hypothesis, without its colon: verdict}, the first of each."""
    found: dict[str, str] = {}
    for each in verdicts:
        found.setdefault(each["hypothesis"].split()[0].rstrip(":"), each["verdict"])
    return found


def rank_row(arm: str, layers: int, seed: int, ranks: list[float], slope: float) -> dict:
    own = {"arm": arm, "layers": layers, "seed": seed, "rank": ranks, "slope": slope}
    return own | {"preservation": ranks[-1] / ranks[0]}


def test_hypotheses_on_ranks():
    rows = [rank_row("standard", 2, seed, [0.9, 0.5, 0.2 + 0.01 * seed], -0.7) for seed in range(3)]
    rows += [
        rank_row("standard", 4, s, [0.9, 0.4, 0.2, 0.1, 0.04 + 0.01 * s], -0.8 - 0.01 * s)
        for s in range(3)
    ]
    rows += [
        rank_row("full", 4, seed, [0.9, 0.4, 0.5, 0.6, 0.7 + 0.01 * seed], -0.1)
        for seed in range(3)
    ]
    rows += [
        rank_row("additive", 4, seed, [0.9, 0.8, 0.7, 0.6, 0.5 + 0.2 * seed], -0.1)
        for seed in (-1, 1)
    ]
    verdicts = findings.rank_verdicts(rows)
    assert words(verdicts) == {
        **{
            "H1a": "supported",
            "H1b": "supported",
            "H1c": "supported",
            "H1d": "supported",
            "H1": "supported",
        },
        **{"H2": "supported", "the": "undecided"},
    }
    everywhere = next(
        each
        for each in verdicts
        if each["hypothesis"].startswith("H2") and "every" in each["hypothesis"]
    )
    assert (everywhere["mean"], everywhere["verdict"]) == (pytest.approx(0.4), "refuted")
    fall = next(each for each in verdicts if each["hypothesis"].startswith("H1d"))
    assert fall["values"] == pytest.approx([-0.16, -0.16, -0.16])
    for row in rows[3:6]:  # it falls by 0.86 and rises by 0.3 in between
        row["rank"] = [0.9, 0.2, 0.5, 0.1, row["rank"][-1]]
    assert findings.rises_over_falls(rows[3]) == pytest.approx(0.3 / (0.7 + 0.4 + 0.06))
    assert {"H1a": "supported", "H1b": "refuted", "H1": "refuted"}.items() <= words(
        findings.rank_verdicts(rows)
    ).items()


def test_a_single_seed_decides_nothing():
    verdicts = findings.rank_verdicts([rank_row("standard", 2, 0, [0.9, 0.5, 0.01], -2.0)])
    assert set(words(verdicts).values()) == {"undecided"}


def losses(**arms: list[float]) -> list[dict]:
    each = [
        {"arm": arm, "seed": s, "val_loss": x, "val_perplexity": 1.0, "parameters": 10}
        for arm in arms
        for s, x in enumerate(arms[arm])
    ]
    return [row | {"layers": 2} for row in each]


def test_synergy_is_the_gain_of_both_beyond_the_sum_of_gains():
    rows = losses(standard=[5.0, 5.5], mhc=[4.5, 5.4], ddl=[4.0, 5.0], full=[3.0, 4.8])
    assert findings.synergy(rows) == pytest.approx([2.0 - 0.5 - 1.0, 0.7 - 0.1 - 0.5])
    assert findings.ablation_findings(rows).verdicts[0]["verdict"] == "undecided"  # 0.3 +- 2.5
    several = losses(
        standard=[5.0, 5.1, 5.2], mhc=[4.9, 5.0, 5.1], ddl=[4.8, 4.9, 5.0], full=[4.9, 5.01, 5.1]
    )
    found = findings.ablation_findings(several)
    assert found.verdicts[0]["verdict"] == "refuted"  # (0.1 - 0.1 - 0.2) and the like
    assert [row[0] for row in found.table] == ["`standard`", "`mhc`", "`ddl`", "`full`"]
    assert [row[-1] for row in found.table] == [None, "better", "better", "better"]


def beta_row(seed: int, share: float, mean: list[float], negative: list[float]) -> dict:
    row = {
        "seed": seed,
        "share": share,
        "mean": mean,
        "negative": negative,
        "variance": [0.1] * len(mean),
    }
    return row | {"sign_changes": measures.sign_changes(mean)}


def test_hypotheses_on_gates():
    assert measures.sign_changes([0.5, -0.1, -0.2, 0.3]) == [1, 3]
    rows = [
        beta_row(seed, 1.0, [0.7, 0.7, 0.7, 0.6], [0.0, 0.0, 0.0, 0.05 + 0.001 * seed])
        for seed in range(3)
    ]
    found = findings.beta_findings(
        rows + [beta_row(seed, 0.25, [0.7] * 4, [0.0] * 4) for seed in range(3)]
    )
    assert words(found.verdicts) == {"early": "supported", "deep": "refuted", "the": "refuted"}
    rows = [beta_row(seed, 0.25, [0.7, 0.1, -0.1, -0.2], [0, 0, 0.6, 0.6]) for seed in range(3)]
    rows += [
        beta_row(seed, 1.0, [0.7, 0.5, -0.5 - 0.01 * seed, -0.6], [0, 0, 0.9, 0.9])
        for seed in range(3)
    ]
    found = findings.beta_findings(rows)
    assert words(found.verdicts) == {"early": "supported", "deep": "supported", "the": "supported"}
    assert found.verdicts[-1]["values"] == pytest.approx([0.8, 0.81, 0.82])
    rows[-1] = beta_row(2, 1.0, [0.7, 0.6, 0.5, 0.4], [0, 0, 0.9, 0.9])  # one run's sign stays
    assert words(findings.beta_findings(rows).verdicts)["the"] == "undecided"


def test_hypotheses_on_depth():
    rows = []
    for layers, gain in ((4, 0.1), (8, 0.3)):
        each = losses(standard=[5.0, 5.1, 5.2], full=[5.0 - gain, 5.1 - gain, 5.21 - gain])
        rows += [row | {"layers": layers, "width": 8, "epochs_to_target": 1.0} for row in each]
    found = findings.depth_findings(rows)
    assert [each["verdict"] for each in found.verdicts] == (
        "supported supported supported supported"
    ).split()
    assert [row[4] for row in found.table][:2] == ["5.100 ± 0.248 (3)", "5.003 ± 0.261 (3)"]


def test_gates_are_those_of_the_sites(corpus):
    """Against tanh(X W + b) at the states of blocks run by hand."""
    torch.manual_seed(1)
    model = build("MGT-gpt-mha", **SMALL, mgt_beta_bias_init=0.1)
    found = measures.gates(model, str(corpus))
    val = torch.from_numpy(measures.open_corpus(str(corpus)).val[0].astype("int64"))
    windows = [round(i * 148 / 15) for i in range(16)]  # of the 149 whole ones, evenly
    ids = torch.stack([val[16 * window :][:16] for window in windows])
    states, positions = model.transformer.wte(ids), model.positions(ids)
    for layer, block in enumerate(model.transformer.h):
        betas = []
        for site, norm, write in (
            (block.attn, block.ln_1, block.write_attn),
            (block.mlp, block.ln_2, block.write_mlp),
        ):
            betas.append((states @ write.beta.weight.T + write.beta.bias).tanh())
            states = write(states, site(norm(states), positions), states, None)
        both = torch.stack(betas).detach().double()
        assert found["mean"][layer] == pytest.approx(both.mean().item(), rel=1e-4)
        assert found["mean_mlp"][layer] == pytest.approx(both[1].mean().item(), rel=1e-4)
        assert found["variance"][layer] == pytest.approx(both.var(unbiased=False).item(), rel=1e-4)
        assert found["negative"][layer] == pytest.approx(
            (both < 0).double().mean().item(), abs=1e-6
        )


def test_widths_of_experiment_4_come_nearest_to_the_size(tmp_path, monkeypatch):
    given = {"num_hidden_layers": "3,9", "parameters": "300000"}
    given |= {"dataset": "python_stdlib", "block_size": "64"}
    commands = experiments.commands("depth", "paper", given, tmp_path)
    assert len(commands) == 4
    for command in commands:
        cell = experiments.cells_of(command)[0]
        keys = {"vocab_size": 4096, "block_size": 64, "num_attention_heads": 4}
        sizes = []
        for width in (cell.settings["hidden_size"] + 8 * offset for offset in (-1, 0, 1)):
            own = {name: cell.settings[name] for name in ("mgt_arm", "num_hidden_layers")}
            model = build("MGT-gpt-mha", **keys, **own, hidden_size=width, head_dim=width // 4)
            sizes.append(abs(model.num_parameters() - 300_000))
        assert min(sizes) == sizes[1], cell.title


def test_counted_overhead_of_experiment_5():
    """Of the paper's model with GPT-2's vocabulary: research/docs/mgt.md states these."""
    keys = {
        "vocab_size": 50304,
        "num_hidden_layers": 24,
        "hidden_size": 512,
        "num_attention_heads": 8,
        "head_dim": 64,
    }
    config = measures.model_class("MGT-gpt-mha").Config
    standard, full = (
        count_parameters("MGT-gpt-mha", config(**keys, mgt_arm=arm)) for arm in ("standard", "full")
    )
    d, embedding = 512, 50304 * 512
    block = 4 * d * d + 2 * 64 + 3 * d * (8 * d // 3) + 2 * 2 * d
    write = 2 * d * d + d + 2 * d + 1  # W_gate, W_beta, b_beta, the norm in the gate, alpha
    assert standard == embedding + 24 * block == 101_293_056
    assert full == standard + 24 * 2 * write + 2 * d == 126_533_680
    assert f"{(full - standard) / standard:.1%}" == "24.9%"
    assert f"{(full - standard) / (standard - embedding):.1%}" == "33.4%"


@pytest.mark.parametrize("experiment", experiments.EXPERIMENTS)
def test_the_paper_s_sizes_are_ready(experiment, corpus, tmp_path):
    given = {"dataset": str(corpus)} | ({"parameters": "2000000"} if experiment == "depth" else {})
    given |= {"block_size": "256"} if experiment == "copy" else {}
    commands = experiments.commands(experiment, "paper", given, tmp_path)
    cells = [cell for command in commands for cell in experiments.cells_of(command)]
    runs = {"rank": 36, "ablation": 15, "beta": 3, "depth": 24, "language": 6, "copy": 15}
    assert len(cells) == runs[experiment]
    for cell in cells:
        a_step = 64 * 256
        epochs = {"beta": 100, "language": 100, "copy": 5}.get(experiment, 50)
        assert cell.settings["max_steps"] == -(-epochs * 32_111 // a_step)
        assert (cell.settings["learning_rate"], cell.settings["global_batch_size"]) == (1e-3, 64)
    if experiment == "beta":
        assert cells[0].settings["checkpoint_interval"] * 4 >= cells[0].settings["max_steps"]


TINY = {
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


def options(corpus, tmp_path, **changes) -> list[str]:
    keys = {
        "dataset": corpus,
        **TINY,
        "seed": "0..1",
        "runs": tmp_path / "runs",
        "results": tmp_path,
        **changes,
    }
    return [f"--{key}={value}" for key, value in keys.items()]


def train_cells(experiment: str, corpus, tmp_path, **changes) -> None:
    """What the sweeps of `--mode=show` would train, in this process."""
    shown = call(RUN, experiment, *options(corpus, tmp_path, mode="show", **changes))
    assert shown.returncode == 0, shown.stderr.decode()
    for line in shown.stdout.decode().splitlines():
        python, script, *command = shlex.split(line)
        assert (python, script) == ("python", "research/sweep.py")
        for cell in experiments.cells_of(command):
            assert call("train.py", *cell.arguments).returncode == 0


KEYS = {
    "rank": {"num_hidden_layers": "2,3"},
    "ablation": {},
    "beta": {},
    "depth": {"num_hidden_layers": "1,2", "parameters": 9000, "eval_interval": 2},
    "language": {"eval_interval": 2},
}


@pytest.mark.parametrize("experiment", KEYS)
def test_every_experiment_is_reported_from_its_runs(experiment, corpus, tmp_path):
    changes = KEYS[experiment]
    train_cells(experiment, corpus, tmp_path, **changes)
    result = call(RUN, experiment, *options(corpus, tmp_path, mode="report", **changes))
    assert result.returncode == 0, result.stderr.decode()
    stored = json.loads((tmp_path / f"{experiment}_paper.json").read_text())
    page = (tmp_path / f"{experiment}_paper.md").read_text()
    assert stored["unfinished"] == []
    assert {each["verdict"] for each in stored["verdicts"]} <= {"supported", "refuted", "undecided"}
    assert all(each["hypothesis"] in page for each in stored["verdicts"])
    assert (tmp_path / f"{experiment}_paper.png").read_bytes().startswith(b"\x89PNG")
    check = globals().get(f"check_{experiment}")
    if check:
        check(stored, tmp_path)
    again = call(
        RUN, experiment, *options(corpus, tmp_path, mode="report", **changes)
    ).stdout.decode()
    assert "of 12:" not in again  # ranks are not measured twice
    assert "gates at step" not in again
    assert page in again


def check_rank(stored: dict, tmp_path) -> None:
    found = {(row["arm"], row["layers"], row["seed"]) for row in stored["rows"]}
    assert len(found) == len(stored["rows"]) == 12
    assert all(
        len(row["rank"]) == len(row["initial_rank"]) == row["layers"] + 1 for row in stored["rows"]
    )
    same = {(row["arm"], row["layers"], row["seed"]): row["initial_rank"] for row in stored["rows"]}
    torch.manual_seed(1)
    model = build("MGT-gpt-mha", **SMALL, mgt_arm="full")
    assert same["full", 2, 1][0] == pytest.approx(embedding_rank(model, stored), rel=1e-5)


def embedding_rank(model, stored: dict) -> float:
    """Mean effective rank of 16 sequences' embeddings, by numpy."""
    val = measures.open_corpus(stored["settings"]["dataset"]).val[0].astype("int64")
    ranks = []
    for window in [round(i * 148 / 15) for i in range(16)]:
        share = np.linalg.svd(
            model.transformer.wte(torch.from_numpy(val[16 * window :][:16])).detach().double(),
            False,
        )[1]
        share = share[share > 1e-12] / share.sum()
        ranks.append(math.exp(-(share * np.log(share)).sum()) / 12)
    return float(np.mean(ranks))


def check_beta(stored: dict, tmp_path) -> None:
    assert [row["step"] for row in stored["rows"]] == [0, 1, 2, 4] * 2
    first = stored["rows"][0]["mean"]
    assert first == pytest.approx([math.tanh(1)] * 2, abs=0.02)  # the bias alone
    assert len({tuple(row["mean"]) for row in stored["rows"]}) == 8


def check_depth(stored: dict, tmp_path) -> None:
    for row in stored["rows"]:
        of_depth = [
            other["val_loss"] for other in stored["rows"] if other["layers"] == row["layers"]
        ]
        assert row["target"] == max(of_depth)
        reached = [point for point in row["evaluations"] if point[1] == row["epochs_to_target"]]
        assert reached[0][2] <= row["target"]
        assert reached[0][1] == pytest.approx(reached[0][0] * 2 * 16 / 32111)


def check_ablation(stored: dict, tmp_path) -> None:
    folder = next((tmp_path / "runs" / "ablation_paper").glob("mgt_arm=ddl,*seed=1"))
    last = measures.metrics.find_last_evaluation(folder / "metrics.jsonl")
    row = next(row for row in stored["rows"] if (row["arm"], row["seed"]) == ("ddl", 1))
    assert row["val_loss"] == last["val_loss"]
    saved = checkpoint.load_model(folder, "cpu")[0]
    assert row["parameters"] == saved.num_parameters()


def test_the_copy_task_is_reported(tmp_path):
    data = tmp_path / "data"
    arguments = (f"--out={data}", "--half=4", "--symbols=2", "--sequences=50", "--val_sequences=20")
    assert call("data/copy_task/prepare.py", *arguments).returncode == 0
    keys = {"block_size": 8, "mgt_arm": "standard,full", "eval_interval": 2, "preset": "cpu"}
    train_cells("copy", data, tmp_path, **keys)
    assert call(RUN, "copy", *options(data, tmp_path, mode="report", **keys)).returncode == 0
    stored = json.loads((tmp_path / "copy_cpu.json").read_text())
    assert {each["verdict"] for each in stored["verdicts"]} <= {"supported", "refuted", "undecided"}
    rows = stored["rows"]
    assert [row["solved_at"] for row in rows] == [None] * 4
    assert all([step for step, *_ in row["evaluations"]] == [2, 4] for row in rows)


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
            "a report compares seed, mgt_arm, num_hidden_layers alone",
        ),
        (["beta", "--mgt_arm=standard"], "standard has no beta; give full or ddl"),
        (
            ["copy", "--dataset=python_stdlib"],
            "--dataset=python_stdlib: it has no answers to score",
        ),
        (
            ["depth", "--parameters=0", "--dataset=python_stdlib"],
            "give a whole number from 1 on",
        ),
    ],
)
def test_mistakes_are_one_line(arguments, message, tmp_path):
    assert message in one_line_error(call(RUN, *arguments, f"--results={tmp_path}"))


@pytest.mark.slow
def test_the_command_trains_reports_and_trains_nothing_twice(corpus, tmp_path):
    arguments = options(corpus, tmp_path, mgt_arm="standard,full")
    first, second = (call(RUN, "language", *arguments) for _ in range(2))
    assert first.returncode == second.returncode == 0, first.stderr.decode()
    logs = [path.read_text() for path in sorted((tmp_path / "runs").rglob("*.log"))]
    assert len(logs) == 4
    assert all(log.count("$ ") == 1 for log in logs)
