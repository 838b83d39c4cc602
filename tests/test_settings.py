"""What train.py answers before it trains: help, dry runs, and mistakes on the command line."""

import re

import pytest
import torch
from helpers import configure, small_run
from training_runs import run_train

from model import MODEL_NAMES, build
from model.gpt import GPTConfig
from training import setup
from training.config import TrainConfig
from utils import machine

# ---- --help ----


@pytest.mark.parametrize("arguments", [[], ["--model=mHC-gpt-mha-rope"]])
def test_help_fits_into_100_columns(arguments):
    assert max(map(len, run_train(*arguments, "--help").splitlines())) <= 100


def test_help_has_the_keys_of_the_run_and_of_ddl_and_names_the_other_models():
    text = run_train("--help")
    for key in ("--learning_rate=0.001", "--hidden_size=768", "--ddl_beta_init=1.0"):
        assert f"\n  {key}\n" in text
    assert "--hc_streams" not in text
    lines = text.partition("\nModels ")[2].splitlines()
    assert {line.split()[0] for line in lines if re.match("  [^ ]", line)} == set(MODEL_NAMES)


def test_help_of_a_model_has_its_keys():
    text = run_train("--model=mHC-gpt-mha-rope", "--help")
    assert "\n  --hc_streams=4\n" in text
    assert "\n  --ddl_beta_init" not in text


def test_help_shows_the_values_of_the_config_file_and_of_the_command_line():
    text = run_train("config/demo_cpu.py", "--seed=7", "--help")
    assert "\n  --dataset=python_stdlib\n" in text
    assert "\n  --global_batch_size=8\n" in text
    assert "\n  --seed=7\n" in text


# ---- config files ----


def test_what_a_config_file_defines_for_itself_is_no_setting(tmp_path):
    path = tmp_path / "c.py"
    path.write_text(
        "from __future__ import annotations\nimport math\ndef double(x):\n    return 2 * x\n"
        "max_steps = double(int(math.sqrt(9)))\n"
    )
    assert configure([str(path)])[0].max_steps == 6


def test_config_files_are_run_in_order_in_one_namespace(tmp_path):
    (tmp_path / "long.py").write_text("max_steps = 9\nseed = 3\n")
    (tmp_path / "short.py").write_text("max_steps = max_steps // 2\n")
    files = [str(tmp_path / "long.py"), str(tmp_path / "short.py")]
    config, _ = configure([*files, "--seed=4"])
    assert (config.max_steps, config.seed) == (4, 4)
    assert config.out_dir == "runs/long-short"
    with pytest.raises(ValueError, match=r"short\.py, line 1: NameError: name 'max_steps' is not"):
        configure(files[::-1])


# ---- precedence ----


def test_the_command_line_overrides_the_file_and_the_file_the_defaults(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("seed = 3\nmax_steps = 50\nhidden_size = 24\nblock_size = 8\n")
    config, model_config = configure([str(file), "--seed=7", "--hidden_size=36"])
    assert (config.seed, config.max_steps, config.eval_batches) == (7, 50, 8)
    assert (model_config.hidden_size, model_config.block_size) == (36, 8)
    assert model_config.num_hidden_layers == GPTConfig().num_hidden_layers


# ---- --dry_run ----


def test_a_dry_run_needs_no_data():
    arguments = ["config/ddl_dv4_small.py", "--dataset=fineweb_edu", "--num_hidden_layers=1"]
    text = run_train(*arguments, "--dry_run")
    with torch.device("meta"):
        model = build("DDL-gpt-mha-rope", **vars(configure(arguments)[1]))
    assert f"{model.num_parameters():,} parameters" in text
    assert "python data/fineweb_edu/prepare.py" in text


def test_a_dry_run_beside_a_run_says_what_to_do_and_changes_nothing(corpus, tmp_path):
    arguments = small_run(corpus, tmp_path / "run", max_steps=1)
    run_train(*arguments)
    times = sorted(path.stat().st_mtime_ns for path in tmp_path.rglob("*"))
    assert "is not empty: to train, resume that run" in run_train(*arguments, "--dry_run")
    assert sorted(path.stat().st_mtime_ns for path in tmp_path.rglob("*")) == times


def test_a_width_of_the_heads_that_is_not_the_hidden_size_is_noted(corpus, tmp_path):
    arguments = small_run(corpus, tmp_path / "run", num_attention_heads=3, dry_run=True)
    expected = "note: attention has 3 heads of head_dim=8, whose product is not hidden_size=12"
    assert expected in run_train(*arguments)


# ---- the run folder ----


def test_a_relative_dataset_is_remembered_as_an_absolute_path(corpus, tmp_path, monkeypatch):
    (tmp_path / "mine").symlink_to(corpus)
    monkeypatch.chdir(tmp_path)
    assert configure(["--dataset=mine"])[0].dataset == str(tmp_path / "mine")


def test_the_name_of_a_dataset_is_kept():
    assert configure(["--dataset=fineweb_edu"])[0].dataset == "fineweb_edu"


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
        ({"OMP_NUM_THREADS": "1"}, [2, 2, 2, 2, 2], "10000"),
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
