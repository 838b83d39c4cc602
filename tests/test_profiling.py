"""Test `--profile_steps`: the trace that a run writes, and that the run computes the same."""

import gzip
import json
from pathlib import Path

import pytest
from helpers import small_run
from in_process import train_in_processes
from training_runs import read_records, run_train

from training import stopping
from training.config import PROFILE_WARMUP_STEPS

NUM_STEPS = 3
MAX_STEPS = PROFILE_WARMUP_STEPS + NUM_STEPS + 2
TRACE_NAME = "step_00000006.json.gz"


def make_arguments(corpus: Path, folder: Path, **changes) -> list[str]:
    """Return arguments of train.py for a run that evaluates and saves after its last step only."""
    changes = {"eval_interval": MAX_STEPS, "checkpoint_interval": MAX_STEPS, **changes}
    return small_run(corpus, folder, **{"max_steps": MAX_STEPS, **changes})


def read_event_names(path: Path) -> list[str]:
    """Return the names of the spans in a Chrome trace."""
    with gzip.open(path, "rt") as file:
        trace = json.load(file)
    return [event["name"] for event in trace["traceEvents"] if event["ph"] == "X"]


def find_recorded_steps(path: Path) -> list[str]:
    """Return the names of the spans of steps; the profiler counts from 0 in each process."""
    return sorted(name for name in read_event_names(path) if name.startswith("ProfilerStep#"))


@pytest.fixture(scope="module")
def profiled_run(corpus, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "profiled"
    printed = run_train(*make_arguments(corpus, folder, profile_steps=NUM_STEPS))
    path = folder / "profile" / TRACE_NAME
    assert f"profile written to {path}; open it at https://ui.perfetto.dev\n" in printed
    return folder


def test_the_trace_has_all_operators_of_as_many_steps_as_asked(profiled_run):
    path = profiled_run / "profile" / TRACE_NAME
    assert find_recorded_steps(path) == ["ProfilerStep#5", "ProfilerStep#6", "ProfilerStep#7"]
    names = read_event_names(path)
    num_micro_batches = 2 * NUM_STEPS
    # one a block
    assert names.count("aten::scaled_dot_product_attention") == 2 * num_micro_batches
    assert names.count("aten::nll_loss_forward") == num_micro_batches
    assert names.count("aten::embedding_dense_backward") == num_micro_batches
    assert names.count("Optimizer.step#AdamW.step") == NUM_STEPS


def test_a_profiled_run_has_the_losses_of_one_that_is_not(corpus, profiled_run, tmp_path):
    run_train(*make_arguments(corpus, tmp_path / "plain"))
    assert read_records(profiled_run) == read_records(tmp_path / "plain")
    assert not (tmp_path / "plain" / "profile").exists()


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
    run_train(*arguments, exit_code=stopping.EXIT_CODE)
    names = read_event_names(folder / "profile" / TRACE_NAME)
    assert names.count("Optimizer.step#AdamW.step") == 2
