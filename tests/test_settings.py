"""What train.py answers before it trains: help, dry runs, and mistakes on the command line."""

import re
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from helpers import configure, small_run
from training_runs import run_train

from model import MODEL_NAMES
from model.gpt import GPTConfig
from training import setup
from training.config import TrainConfig
from utils import machine

# ---- --help ----


def test_help_has_the_keys_of_the_run_and_of_ddl_and_names_the_other_models():
    text = run_train("--help")
    for key in ("--learning_rate=0.001", "--hidden_size=768", "--ddl_beta_init=1.0"):
        assert f"\n  {key}\n" in text
    assert "--hc_streams" not in text
    lines = text.partition("\nModels ")[2].splitlines()
    assert {line.split()[0] for line in lines if re.match("  [^ ]", line)} == set(MODEL_NAMES)
    assert max(map(len, text.splitlines())) <= 100


def test_help_has_the_keys_of_a_model_and_the_values_of_the_file_and_the_command_line():
    text = run_train("config/demo_cpu.py", "--model=mHC-gpt-mha-rope", "--seed=7", "--help")
    for key in ("--dataset=python_stdlib", "--global_batch_size=8", "--seed=7", "--hc_streams=4"):
        assert f"\n  {key}\n" in text
    assert "\n  --ddl_beta_init" not in text


# ---- config files ----


def test_config_files_are_run_in_order_in_one_namespace(tmp_path):
    """A function that a file defines for itself is no setting."""
    (tmp_path / "long.py").write_text(
        "from __future__ import annotations\nimport math\ndef double(x):\n    return 2 * x\n"
        "max_steps = double(9)\nseed = 3\n"
    )
    (tmp_path / "short.py").write_text("max_steps = max_steps // 2\n")
    files = [str(tmp_path / "long.py"), str(tmp_path / "short.py")]
    config, _ = configure([*files, "--seed=4"])
    assert (config.max_steps, config.seed) == (9, 4)
    assert config.out_dir == "runs/long-short"


# ---- precedence ----


def test_the_command_line_overrides_the_file_and_the_file_the_defaults(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("seed = 3\nmax_steps = 50\nhidden_size = 24\nblock_size = 8\n")
    config, model_config = configure([str(file), "--seed=7", "--hidden_size=36"])
    assert (config.seed, config.max_steps, config.eval_batches) == (7, 50, 8)
    assert (model_config.hidden_size, model_config.block_size) == (36, 8)
    assert model_config.num_hidden_layers == GPTConfig().num_hidden_layers


# ---- --dry_run ----


class FinishedRun(NamedTuple):
    folder: Path
    arguments: list[str]


@pytest.fixture(scope="module")
def finished_run(corpus, tmp_path_factory) -> FinishedRun:
    """Train a run of one step."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    arguments = small_run(corpus, folder, max_steps=1)
    run_train(*arguments)
    return FinishedRun(folder, arguments)


def test_a_dry_run_needs_no_data():
    arguments = ["config/ddl_dv4_small.py", "--dataset=fineweb_edu", "--num_hidden_layers=1"]
    assert "python data/fineweb_edu/prepare.py" in run_train(*arguments, "--dry_run")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "is not empty: to train, resume that run"),
        (["--resume=auto"], "nothing to train"),
        (["--resume=auto", "--max_steps=2"], "this run would resume from"),
        (
            ["--num_attention_heads=3"],
            "note: attention has 3 heads of head_dim=8, whose product is",
        ),
    ],
)
def test_a_dry_run_beside_a_run_says_what_to_do_and_changes_nothing(finished_run, arguments, line):
    run, start = finished_run
    times = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    assert line in run_train(*start, "--dry_run", *arguments)
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == times


# ---- the run folder ----


def test_a_relative_dataset_is_remembered_as_an_absolute_path(corpus, tmp_path, monkeypatch):
    (tmp_path / "mine").symlink_to(corpus)
    monkeypatch.chdir(tmp_path)
    for given, remembered in (("mine", str(tmp_path / "mine")), ("fineweb_edu", "fineweb_edu")):
        config, _ = configure([f"--dataset={given}"])
        assert config.dataset == remembered


@pytest.mark.parametrize(
    ("keys", "device", "num_processes", "reason"),
    [
        ({}, "cuda", 1, None),
        ({"cuda_graphs": "on"}, "cuda", 1, None),
        ({}, "cpu", 1, "CUDA graphs need a CUDA device and compile=True"),
        ({"compile": False}, "cuda", 1, "CUDA graphs need a CUDA device and compile=True"),
        ({}, "cuda", 2, "on several GPUs, cuda_graphs=step alone"),
        ({"cuda_graphs": "on"}, "cuda", 2, "on several GPUs, cuda_graphs=step alone"),
        ({"cuda_graphs": "step"}, "cuda", 2, None),
        ({"cuda_graphs": "step", "engine": "fsdp"}, "cuda", 2, "CUDA graphs do not contain"),
        ({"cuda_graphs": "step", "dtype": "float16"}, "cuda", 1, "the graph of a step cannot"),
        ({"dtype": "float16"}, "cuda", 1, "CUDA graphs were not tried in float16; cuda_graphs=on"),
        ({"dtype": "float16", "cuda_graphs": "on"}, "cuda", 1, None),
    ],
)
def test_when_cuda_graphs_are_used(monkeypatch, keys, device, num_processes, reason):
    monkeypatch.setenv("WORLD_SIZE", str(num_processes))
    actual_reason = setup.reason_without_cuda_graphs(TrainConfig(**keys), torch.device(device))
    if reason is None:
        assert actual_reason is None
    else:
        assert actual_reason.startswith(reason)


@pytest.mark.parametrize(
    ("given", "num_running", "spin_count"),
    [
        ({}, [1, 1, 1, 1, 1], "10000"),
        ({}, [4, 2, 2, 1, 2], "10000"),  # processes that end
        ({}, [2, 2, 3, 2, 2], "0"),
        ({"GOMP_SPINCOUNT": "1000"}, [2, 2, 2, 2, 2], "1000"),
        ({"OMP_WAIT_POLICY": "active"}, [2, 2, 2, 2, 2], None),
    ],
)
def test_threads_sleep_at_once_on_busy_cores_unless_the_user_says_otherwise(
    monkeypatch, given, num_running, spin_count
):
    environment = dict(given)
    readings = [f"0.10 0.20 0.30 {running}/456 7890" for running in num_running]
    monkeypatch.setattr(machine.os, "environ", environment)
    monkeypatch.setattr(machine.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(machine, "count_cores", lambda: 2)
    monkeypatch.setattr(machine.Path, "read_text", lambda path: readings.pop(0))
    machine.limit_spinning()
    assert environment.get("GOMP_SPINCOUNT") == spin_count
