"""Test `--profile_steps`: the trace that a run writes, and that the run computes the same."""

import gzip
import json
from pathlib import Path

from helpers import small_run
from in_process import train_in_processes
from training_runs import read_records, run_train

# The trace begins after the first five steps. Each step has two micro-batches.
KEYS = {
    "max_steps": 10,
    "eval_interval": 10,
    "checkpoint_interval": 10,
    "micro_batch_size": 1,
}


def read_trace(run: Path) -> list[str]:
    """Return the names of the spans in the only trace of a run."""
    [path] = (run / "profile").iterdir()
    assert path.name == "step_00000006.json.gz"
    with gzip.open(path, "rt") as file:
        trace = json.load(file)
    return [event["name"] for event in trace["traceEvents"] if event["ph"] == "X"]


def test_the_first_of_two_ranks_writes_a_trace_and_computes_the_same(corpus, tmp_path):
    printed = {}
    for profile_steps in (0, 3):
        run = tmp_path / str(profile_steps)
        arguments = small_run(corpus, run, **KEYS, profile_steps=profile_steps)
        printed[profile_steps] = train_in_processes(2, arguments, tmp_path / "log")
    assert printed[3].count("open it at https://ui.perfetto.dev\n") == 1
    names = read_trace(tmp_path / "3")
    # the profiler counts steps from 0
    for step in (5, 6, 7):
        assert names.count(f"ProfilerStep#{step}") == 1
    assert names.count("Optimizer.step#AdamW.step") == 3
    # of two blocks
    assert names.count("aten::scaled_dot_product_attention") == 2 * 2 * 3
    assert read_records(tmp_path / "3") == read_records(tmp_path / "0")
    assert not (tmp_path / "0" / "profile").exists()


def test_a_run_that_ends_early_writes_the_steps_that_it_has_recorded(corpus, tmp_path):
    run_train(*small_run(corpus, tmp_path, **{**KEYS, "max_steps": 7}, profile_steps=3))
    assert read_trace(tmp_path).count("Optimizer.step#AdamW.step") == 2
