"""The packs of research/gpu.py, as far as a CPU can show them."""

import json
import re
import shlex
import sys
import time

import pytest
from helpers import ROOT, configure

from research import gpu


def list_all_tasks(device: str) -> list[gpu.Task]:
    return [
        task for pack in gpu.SECONDS for tasks in gpu.list_tasks(pack, device) for task in tasks
    ]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_train_understands_its_commands(device):
    scripts = "\n".join(task.script for task in list_all_tasks(device))
    commands = re.findall(r"train\.py (.*)", scripts)
    for command in commands:
        # device=cuda is refused without a GPU, and a folder of an earlier rehearsal is not empty
        words = shlex.split(command)
        configure([word for word in words if not word.startswith(("--device", "--out_dir"))])
    assert len(commands) > 8
    assert all((ROOT / name).exists() for name in re.findall(r"\$PYTHON (\w+\.py)", scripts))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_no_two_tasks_have_the_same_figure_or_run_folder(device):
    tasks = list_all_tasks(device)
    names = [task.name for task in tasks]
    assert len(set(names)) == len(names)
    folders = [task.run for task in tasks if task.run is not None]
    assert len(set(folders)) == len(folders)


def test_both_states_are_timed_with_and_without_the_graph_of_a_step_in_the_texts_form():
    _, timed = gpu.list_tasks("speed", "cuda")
    forms = [gpu.describe_form(task.script) for task in timed]
    states = {(form["state_dtype"], form["cuda_graphs"]) for form in forms}
    assert states == {(s, g) for s in ("float32", "bfloat16") for g in ("auto", "step")}
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
    speeds = [1.0] * (gpu.FIRST_TIMED_STEP - 1) + [300.0, 500.0, 400.0]
    records = [{"step": 0, "val_loss": 3.0}]
    records += [{"loss": 2.0, "tokens_per_second": speed} for speed in speeds]
    lines = [json.dumps(record) for record in records]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + '\n{"loss": 9')
    figures = gpu.summarize_steps(gpu.read_steps(tmp_path))
    assert figures["steps"] == len(speeds)
    assert figures["tokens_per_second"] == 400.0
    started = time.monotonic()
    script = "sleep 600 # train.py config/demo_cpu.py --device=cpu"
    session = gpu.Session(tmp_path)
    session.run(gpu.Task("run", script, tmp_path, num_steps=len(speeds)), started + 600)
    assert session.figures["run"]["exit_code"] == "stopped"
    assert time.monotonic() - started < 60


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
