"""CUDA graphs of whole steps, recorded on a CPU."""

import functools

import pytest
from helpers import small_run
from in_process import train_in_processes
from training_runs import read_final_tensors, read_records

from utils import processes


@pytest.mark.parametrize(
    ("model", "num_processes"), [("gpt-mha-rope", 1), ("DDL-gpt-mha-rope-CC-EC", 2)]
)
def test_a_captured_step_changes_no_bits(
    corpus, tmp_path, monkeypatch, recordings, model, num_processes
):
    """With two micro-batches a step, whose gradients DDP averages after the last one."""
    stop = processes.stop

    def stop_after_the_graph(world, num_recordings):
        assert len(recordings) == num_recordings
        # destroying the process group would wait for them
        assert all(recording() is None for recording in recordings)
        stop(world)

    for setting, num_recordings in (("step", 1), ("off", 0)):
        check_and_stop = functools.partial(stop_after_the_graph, num_recordings=num_recordings)
        monkeypatch.setattr(processes, "stop", check_and_stop)
        arguments = small_run(
            corpus,
            tmp_path / setting,
            model=model,
            cuda_graphs=setting,
            global_batch_size=4 * num_processes,
            micro_batch_size=2,
            grad_clip=0.1,
            max_steps=4,
        )
        train_in_processes(num_processes, arguments, tmp_path / f"log_{setting}")
    captured, plain = (tmp_path / setting for setting in ("step", "off"))
    assert read_final_tensors(captured) == read_final_tensors(plain)
    assert read_records(captured)[1:] == read_records(plain)[1:]
