"""What a rank says of another one that does not answer, and the settings of NCCL."""

import os
import socket
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from training import distributed, timeouts
from training.timeouts import Activity

TIMED_OUT = RuntimeError("[unbound_buffer.cc:129] Timed out waiting 2000ms for send operation")
SHORT = timedelta(seconds=5)


@pytest.fixture(autouse=True)
def activity(monkeypatch):
    """Let each test begin with a fresh record, in a job of two processes."""
    monkeypatch.setattr(timeouts, "_activity", Activity())
    monkeypatch.setattr(timeouts, "_groups", [])
    monkeypatch.setenv("RANK", "3")


@pytest.fixture
def group(monkeypatch):
    """Return a process group of one rank, whose time-out follows the phase."""
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    dist.init_process_group("gloo", init_method=f"tcp://localhost:{port}", rank=0, world_size=1)
    timeouts.follow_phases(dist.group.WORLD)
    yield dist.group.WORLD
    dist.destroy_process_group()


def read_timeout(group: dist.ProcessGroup) -> timedelta:
    return group._get_backend(torch.device("cpu")).options._timeout


def test_a_group_follows_the_phase(group):
    assert read_timeout(group) == timeouts.PATIENT_TIMEOUT
    timeouts.enter("forward and backward pass", step=2, timeout=SHORT)
    assert read_timeout(group) == SHORT
    timeouts.enter("gradient sync")
    assert read_timeout(group) == SHORT
    later_group = dist.new_group()
    timeouts.follow_phases(later_group)
    assert read_timeout(later_group) == SHORT
    timeouts.enter("save", timeout=timeouts.PATIENT_TIMEOUT)
    assert read_timeout(group) == timeouts.PATIENT_TIMEOUT


def test_ranks_meet_before_their_time_out_becomes_shorter(group, monkeypatch):
    barriers = []
    monkeypatch.setattr(dist, "barrier", lambda: barriers.append(read_timeout(group)))
    timeouts.enter("save", step=4, timeout=timeouts.PATIENT_TIMEOUT)
    timeouts.enter("forward and backward pass", step=5, timeout=SHORT)
    timeouts.enter("forward and backward pass", step=6, timeout=SHORT)
    timeouts.enter("evaluation", timeout=timeouts.PATIENT_TIMEOUT)
    assert barriers == [timeouts.PATIENT_TIMEOUT]


def test_the_group_of_one_rank_alone_keeps_its_time_out(group):
    patient_group = distributed.patient_group()
    timeouts.enter("forward and backward pass", step=2, timeout=SHORT)
    assert read_timeout(patient_group) == distributed.ONE_RANK_TIMEOUT


def test_a_time_out_names_rank_phase_step_and_durations(group):
    timeouts.enter("forward and backward pass", step=7, timeout=SHORT)
    timeouts.enter("gradient clipping")
    assert timeouts.describe_lost_rank(TIMED_OUT) == (
        "rank 3 waited 0 s for the other ranks in the gradient clipping of step 7 (time-out 5 s): "
        f"one of them hangs, or cannot be reached; {timeouts.RESUME_ADVICE}"
    )


def test_a_lost_connection_names_the_phase(group):
    message = timeouts.describe_lost_rank(RuntimeError("Connection closed by peer [10.0.0.2]"))
    assert message.startswith("rank 3 lost the connection to another rank after 0 s in the start:")


@pytest.mark.parametrize("error", [RuntimeError("shapes differ"), ValueError("timed out waiting")])
def test_other_errors_are_not_those_of_a_lost_rank(group, error):
    assert timeouts.describe_lost_rank(error) is None


def test_a_single_process_has_no_lost_rank():
    assert timeouts.describe_lost_rank(TIMED_OUT) is None


def test_a_phase_that_takes_too_long_is_reported(capsys, monkeypatch):
    """The thread that runs with NCCL."""
    monkeypatch.setattr(timeouts, "POLL_INTERVAL", 0.01)
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", "runs/a/nccl_trace_rank_")
    timeouts.enter("step statistics", step=9, timeout=timedelta(seconds=0.05))
    timeouts.report_timeout()
    [line] = capsys.readouterr().err.splitlines()
    assert "rank 3 waited 0 s for the other ranks in the step statistics of step 9" in line
    assert line.endswith("written to runs/a/nccl_trace_rank_<rank>")


@pytest.fixture
def without_recorder(monkeypatch):
    """Remove the settings of the flight recorder, and let no thread watch the phases."""
    for name in (*RECORDER, *OLD_NAMES):
        # set first, so that what the test sets is removed afterwards
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr("threading.Thread.start", lambda thread: None)


RECORDER = ("TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DUMP_ON_TIMEOUT")
OLD_NAMES = ("TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")


def test_the_flight_recorder_writes_into_the_run_folder(without_recorder, tmp_path):
    timeouts.prepare_nccl(tmp_path)
    expected = ("2000", f"{tmp_path}/nccl_trace_rank_", "1")
    assert tuple(os.environ[name] for name in RECORDER) == expected


def test_settings_of_the_user_stay(without_recorder, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_NCCL_TRACE_BUFFER_SIZE", "7")
    monkeypatch.setenv("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "/scratch/trace_")
    monkeypatch.setenv("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
    timeouts.prepare_nccl(tmp_path)
    assert os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "0"
    assert "TORCH_FR_BUFFER_SIZE" not in os.environ
    assert "TORCH_FR_DUMP_TEMP_FILE" not in os.environ
    assert timeouts.describe_flight_recorder().endswith("/scratch/trace_<rank>")
