"""Test `--profile_steps`: the trace that a run writes, and that the run computes the same."""

import gzip
import json
from pathlib import Path
from typing import NamedTuple

import pytest
from helpers import small_run
from in_process import call, train_in_processes

from training import metrics, stopping
from training.config import PROFILE_WARMUP_STEPS
from utils.machine import can_compile

NUM_STEPS = 3
MAX_STEPS = PROFILE_WARMUP_STEPS + NUM_STEPS + 2
TRACE_NAME = "step_00000006.json.gz"


class ProfiledRun(NamedTuple):
    folder: Path
    output: str

    @property
    def trace_path(self) -> Path:
        return self.folder / "profile" / TRACE_NAME


def make_arguments(corpus: Path, folder: Path, **changes) -> list[str]:
    """Return arguments of train.py for a run that evaluates and saves after its last step only."""
    changes = {"eval_interval": MAX_STEPS, "checkpoint_interval": MAX_STEPS, **changes}
    return small_run(corpus, folder, **{"max_steps": MAX_STEPS, **changes})


def train(corpus: Path, folder: Path, **changes) -> str:
    """Run train.py in this process, expect success, and return what it printed."""
    result = call("train.py", *make_arguments(corpus, folder, **changes))
    assert result.returncode == 0, result.stderr.decode()
    return result.stdout.decode()


def read_event_names(path: Path) -> list[str]:
    """Return the names of the spans in a Chrome trace."""
    with gzip.open(path, "rt") as file:
        trace = json.load(file)
    return [event["name"] for event in trace["traceEvents"] if event["ph"] == "X"]


def find_recorded_steps(path: Path) -> list[str]:
    """Return the names of the spans of steps; the profiler counts from 0 in each process."""
    return sorted(name for name in read_event_names(path) if name.startswith("ProfilerStep#"))


def read_losses(folder: Path) -> list[tuple]:
    records = metrics.read(folder / "metrics.jsonl")
    return [(r["step"], r.get("loss"), r.get("grad_norm"), r.get("val_loss")) for r in records]


@pytest.fixture(scope="module")
def profiled_run(corpus, tmp_path_factory) -> ProfiledRun:
    folder = tmp_path_factory.mktemp("runs") / "profiled"
    return ProfiledRun(folder, train(corpus, folder, profile_steps=NUM_STEPS))


def test_the_trace_has_as_many_steps_as_asked(profiled_run):
    expected = ["ProfilerStep#5", "ProfilerStep#6", "ProfilerStep#7"]
    assert find_recorded_steps(profiled_run.trace_path) == expected


@pytest.mark.parametrize(
    ("operator", "calls_per_micro_batch"),
    [
        ("aten::scaled_dot_product_attention", 2),  # one a block
        ("aten::nll_loss_forward", 1),
        ("NllLossBackward0", 1),
        ("aten::embedding_dense_backward", 1),
    ],
)
def test_the_trace_has_the_operators_of_both_passes(profiled_run, operator, calls_per_micro_batch):
    names = read_event_names(profiled_run.trace_path)
    num_micro_batches = 2 * NUM_STEPS
    assert names.count(operator) == calls_per_micro_batch * num_micro_batches


def test_the_trace_has_the_optimizers_steps(profiled_run):
    assert read_event_names(profiled_run.trace_path).count("Optimizer.step#AdamW.step") == NUM_STEPS


def test_the_output_says_where_the_trace_is_and_how_to_open_it(profiled_run):
    assert (
        f"profile written to {profiled_run.trace_path}; open it at https://ui.perfetto.dev\n"
    ) in profiled_run.output


def test_a_profiled_run_has_the_losses_of_one_that_is_not(corpus, profiled_run, tmp_path):
    train(corpus, tmp_path / "plain")
    assert read_losses(profiled_run.folder) == read_losses(tmp_path / "plain")
    assert not (tmp_path / "plain" / "profile").exists()


@pytest.mark.slow
@pytest.mark.skipif(not can_compile(), reason="no C++ compiler")
def test_a_compiled_run_is_profiled_and_has_the_same_losses(corpus, tmp_path):
    train(corpus, tmp_path / "plain", compile=True)
    train(corpus, tmp_path / "profiled", compile=True, profile_steps=NUM_STEPS)
    assert read_losses(tmp_path / "profiled") == read_losses(tmp_path / "plain")
    names = read_event_names(tmp_path / "profiled" / "profile" / TRACE_NAME)
    forward_calls = [name for name in names if name.startswith("Torch-Compiled Region")]
    assert len(forward_calls) == 2 * NUM_STEPS
    assert names.count("CompiledFunctionBackward") == 2 * NUM_STEPS


def test_the_first_of_several_ranks_writes_the_trace(corpus, tmp_path):
    folder = tmp_path / "run"
    arguments = make_arguments(corpus, folder, profile_steps=NUM_STEPS)
    output = train_in_processes(2, arguments, tmp_path / "log")
    assert output.count("open it at https://ui.perfetto.dev") == 1
    assert len(find_recorded_steps(folder / "profile" / TRACE_NAME)) == NUM_STEPS
    assert [path.name for path in (folder / "profile").iterdir()] == [TRACE_NAME]


def test_a_run_that_stops_early_writes_the_steps_that_it_has_recorded(
    corpus, tmp_path, monkeypatch
):
    step_seconds = []
    monkeypatch.setattr(
        stopping.Stop, "record_step_seconds", lambda self, seconds: step_seconds.append(seconds)
    )
    monkeypatch.setattr(
        stopping.Stop, "reason", lambda self: "test" if len(step_seconds) >= 6 else None
    )
    folder = tmp_path / "run"
    arguments = make_arguments(corpus, folder, profile_steps=NUM_STEPS)
    result = call("train.py", *arguments)
    assert result.returncode == stopping.EXIT_CODE
    names = read_event_names(folder / "profile" / TRACE_NAME)
    assert names.count("Optimizer.step#AdamW.step") == 2
