"""The Makefile's names of run folders, and what the README's commands leave in a clone."""

import re
import subprocess

import pytest
from helpers import ROOT

LONG = " ".join(
    f"--{key}={value}" for key in ("learning_rate", "weight_decay", "min_lr") for value in range(40)
)


def folder(args: str, *more: str) -> str:
    """Return the run folder of `make train ARGS=args`."""
    command = ["make", "--dry-run", "train", f"ARGS={args}", *more]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    (run_folder,) = re.findall(r'training.plot "(.*)"', printed)
    assert printed.count(f'--out_dir="{run_folder}" --resume=auto {args}'.rstrip()) == 1
    return run_folder


def test_a_run_without_arguments_is_named_after_its_config():
    assert folder("") == "runs/demo_cpu"
    assert folder("--seed=1") != folder("--seed=1", "CONFIG=config/gpt_small.py")


def test_a_run_folder_names_the_first_arguments():
    name = folder("--model=gated-gpt-mha-rope --gate_init=0.5 --max_steps=940")
    assert re.fullmatch(
        r"runs/demo_cpu-model=gated-gpt-mha-rope,gate_init=0.5,max_steps=940-[0-9a-f]{8}", name
    )


def test_run_folders_are_short_and_tell_arguments_apart():
    arguments = [
        "--dataset=a/b",
        "--dataset=a_b",
        LONG,
        f"{LONG} --seed=1",
        "--wandb_run_name='two words'",
        f"--wandb_run_name={'x' * 300}",
    ]
    names = [folder(args) for args in arguments]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"runs/[A-Za-z0-9_=,.-]{1,90}", name) for name in names)


def test_a_run_folder_does_not_depend_on_the_interpreter():
    assert folder("--seed=1") == folder("--seed=1", "BIN=elsewhere")


def test_out_dir_in_the_arguments_is_taken_as_it_is():
    assert folder("--seed=1 --out_dir=runs/mine") == "runs/mine"


def list_commands(target: str) -> str:
    """Return what `make target` would run in a clone that has no .venv yet."""
    command = ["make", "--dry-run", "--always-make", target]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_training_installs_nothing_that_only_tests_need():
    commands = list_commands("train")
    assert "-r requirements.txt" in commands
    assert "requirements-dev.txt" not in commands


@pytest.mark.parametrize("target", ["test", "test-research", "soak", "golden", "lint", "format"])
def test_checks_install_both_files(target):
    commands = list_commands(target)
    assert commands.index("-r requirements.txt") < commands.index("-r requirements-dev.txt")


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a clone")
def test_what_scripts_write_is_no_change_of_the_clone():
    paths = [
        "runs/curves.png",
        "runs/mup.png",
        "runs/bench_quick_cpu.json",
        "exported/demo/gpt.py",
        "loss.png",
        "sweeps/demo_cpu/table.md",
        "wandb/run",
        "data/copy_task/meta.json",
        "data/text/text_train_000001.bin",
    ]
    result = subprocess.run(
        ["git", "check-ignore", *paths], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.stdout.split() == paths
