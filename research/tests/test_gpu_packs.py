"""The packs of research/gpu.py, as far as a CPU can show them."""

import gzip
import json
import re
import shlex
import sys
import time
from collections import Counter
from itertools import pairwise

import pytest
import torch
from helpers import ROOT, configure

from research import gpu

RUN = "# train.py config/demo_cpu.py --device=cpu"


def list_all_tasks(device: str) -> list[gpu.Task]:
    speeds = [task for group in gpu.list_speeds(device) for task in group]
    learning = [gpu.prepare_packages(device), *gpu.list_learning(device)]
    return [*gpu.list_tests(device), *speeds, gpu.profile(device), *learning]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_train_understands_its_commands(device):
    scripts = "\n".join(task.script for task in list_all_tasks(device))
    commands = re.findall(r"train\.py (.*)", scripts)
    for command in commands:
        # device=cuda is refused without a GPU, a folder of an earlier rehearsal is not empty, and
        # the packages are not prepared
        refused = ("--device", "--out_dir", f"--dataset={gpu.CORPUS}")
        configure([word for word in shlex.split(command) if not word.startswith(refused)])
    assert len(commands) > 8
    assert all((ROOT / name).exists() for name in re.findall(r"\$PYTHON ([\w/]+\.py)", scripts))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_no_two_tasks_have_the_same_figure_or_run_folder(device):
    tasks = list_all_tasks(device)
    names = [task.name for task in tasks]
    assert len(set(names)) == len(names)
    folders = [task.run for task in tasks if task.run is not None]
    assert len(set(folders)) == len(folders)


def test_both_states_are_timed_with_and_without_the_graph_of_a_step_in_the_texts_form():
    forms = [gpu.describe_form(task.script) for group in gpu.list_speeds("cuda") for task in group]
    states = [(form["state_dtype"], form["cuda_graphs"]) for form in forms]
    counts = {(s, g): 5 for s in ("float32", "bfloat16") for g in ("auto", "step")}
    counts["bfloat16", "auto"] += 2  # with all kernels
    assert Counter(states) == counts
    assert {form.get("ddl_cc_read", "folded") for form in forms} == {"folded"}
    assert not any(form.get("ddl_v_bias") for form in forms)
    assert sum(form["kernels"] == "on" for form in forms) == 2


def test_a_task_that_fails_or_hangs_is_recorded(tmp_path):
    session = gpu.Session(tmp_path)
    session.run(gpu.Task("fails", "exit 3\ntouch never"), time.monotonic() + 60)
    session.run(gpu.Task("hangs", "sleep 600"), time.monotonic() + 0.5)
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["fails"]["exit_code"] == 3
    assert figures["hangs"]["exit_code"] == "stopped"
    assert "+ exit 3" in (tmp_path / "log.txt").read_text()


def test_a_run_is_ended_after_its_steps_and_its_speed_is_a_median(tmp_path):
    speeds = [1.0] * gpu.FIRST_STEPS + [300.0, 500.0, 400.0]
    records = [{"step": 5, "val_loss": 3.0}]
    records += [{"loss": 2.0, "tokens_per_second": speed} for speed in speeds]
    lines = [json.dumps(record) for record in records]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + '\n{"loss": 9')
    started = time.monotonic()
    session = gpu.Session(tmp_path)
    task = gpu.Task("run", f"sleep 600 {RUN}", tmp_path, num_steps=len(speeds))
    session.run(task, started + 600)
    assert time.monotonic() - started < 60
    figures = session.figures["run"]
    assert figures["exit_code"] == "stopped"
    assert figures["steps"] == len(speeds)
    assert figures["tokens_per_second"] == 400.0
    assert figures["val_losses"] == [(5, 3.0)]


def test_runs_take_turns_and_are_held_meanwhile(tmp_path):
    """Each program writes the time as its loss in an endless loop, 50 times a second; one fails."""
    tasks = [gpu.Task("failed", f"exit 4 {RUN}", tmp_path / "failed")]
    for name in ("first", "second"):
        folder = tmp_path / name
        folder.mkdir()
        step = '{\\"loss\\": $(date +%s.%N), \\"tokens_per_second\\": 7}'
        loop = f'while true; do echo "{step}" >> {folder}/metrics.jsonl; sleep 0.02; done {RUN}'
        tasks.append(gpu.Task(name, loop, folder))
    session = gpu.Session(tmp_path)
    session.run_in_turns(tasks, time.monotonic() + 60)
    assert session.figures["failed"]["exit_code"] == 4
    assert "turns" not in session.figures["failed"]
    for name in ("first", "second"):
        figures = session.figures[name]
        assert figures["turns"] == [7] * gpu.NUM_TURNS
        steps = gpu.read_steps(tmp_path / name)
        assert len(steps) == figures["steps"]  # it has been ended
        times = [step["loss"] for step in steps]
        pauses = [later - earlier for earlier, later in pairwise(times)]
        # during a turn of the other, which takes 0.6 seconds at least
        assert max(pauses) > 0.4


def test_kernels_of_a_profile_are_summed_by_name(tmp_path):
    events = [
        {"cat": "kernel", "name": "short", "dur": 3.0},
        *({"cat": "kernel", "name": "long", "dur": duration} for duration in (10.0, 20.0, 30.0)),
        {"cat": "cpu_op", "name": "aten::mm", "dur": 1000.0},
        {"name": "a mark without a category"},
    ]
    trace = tmp_path / "step.json.gz"
    trace.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    assert gpu.list_kernels(trace) == [("long", 1.0, 20.0), ("short", 1 / 3, 1.0)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sped"], "no pack sped, did you mean speed?"),
        (["speed"], "has the figures of an earlier call; give another --out"),
    ],
)
def test_mistakes_are_refused(words, message, tmp_path, monkeypatch):
    (tmp_path / "figures.json").write_text("{}")
    monkeypatch.setattr(sys, "argv", ["gpu.py", *words, f"--out={tmp_path}"])
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        gpu.main()
    assert (tmp_path / "figures.json").read_text() == "{}"


def test_a_missing_gpu_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "speed", f"--out={tmp_path / 'figures'}"])
    with pytest.raises(ValueError, match="torch finds no GPU; give --device=cpu"):
        gpu.main()
    assert not list(tmp_path.iterdir())
