"""The network between two machines is cut: both ends stop in time, and the run can be resumed.

The machines are two network namespaces of this one, joined by a pair of virtual interfaces. To make
them takes root on Linux.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT, small_run, wait_for
from in_process import train_in_processes
from interruptions_helpers import CONSTANT_RATE, completed_steps, read_final_tensors, read_records

SETTINGS = {
    **CONSTANT_RATE,
    "global_batch_size": 8,
    "micro_batch_size": 1,
    "checkpoint_interval": 20,
    "eval_interval": 20,
    "collective_timeout": 5,
}
PORT = 23456


def ip(command: str) -> bool:
    """Run `ip COMMAND`, and return whether it was successful."""
    return (
        subprocess.run(["ip", *command.split()], capture_output=True, check=False).returncode == 0
    )


class Machine:
    """A network namespace with one interface."""

    def __init__(self, number: int):
        self.name = f"ddl{os.getpid()}n{number}"
        self.interface = f"ddl{os.getpid() % 10_000}v{number}"
        self.address = f"10.77.0.{number + 1}"
        # torchrun cannot tell by the name of the machine, which is the same in both
        self.is_host = number == 0
        self.processes: list[subprocess.Popen] = []

    def start(self, arguments: list[str], log: Path) -> subprocess.Popen:
        """Start torchrun for one of two nodes, which meet at the first machine."""
        command = [
            *("ip", "netns", "exec", self.name),
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nnodes=2",
            "--nproc_per_node=1",
            "--max-restarts=0",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint=10.77.0.1:{PORT}",
            "--rdzv-id=cut",
            f"--rdzv-conf=is_host={self.is_host},join_timeout=60",
            f"--local-addr={self.address}",
            "train.py",
            *arguments,
        ]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": self.interface,
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "2",
        }
        with open(log, "w") as file:
            process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=file)
        self.processes.append(process)
        return process


@pytest.fixture
def machines():
    """Return two machines with a network between them."""
    pair = [Machine(0), Machine(1)]
    is_allowed = sys.platform == "linux" and shutil.which("ip") is not None
    is_allowed = is_allowed and all(ip(f"netns add {machine.name}") for machine in pair)
    try:
        first, second = pair
        is_allowed = is_allowed and ip(
            f"link add {first.interface} type veth peer name {second.interface}"
        )
        for machine in pair:
            is_allowed = (
                is_allowed
                and ip(f"link set {machine.interface} netns {machine.name}")
                and ip(f"-n {machine.name} addr add {machine.address}/24 dev {machine.interface}")
                and ip(f"-n {machine.name} link set {machine.interface} up")
                and ip(f"-n {machine.name} link set lo up")
            )
        if not is_allowed:
            pytest.skip("this machine does not allow network namespaces")
        yield pair
    finally:
        for machine in pair:
            for process in machine.processes:
                process.kill()
                process.wait()
            ip(f"netns del {machine.name}")


@pytest.mark.slow
def test_a_cut_network_ends_both_ends_and_the_run_resumes(corpus, tmp_path, machines):
    run = tmp_path / "run"
    logs = [tmp_path / "log_0", tmp_path / "log_1"]
    arguments = small_run(corpus, run, **SETTINGS, max_steps=100_000)
    jobs = [machine.start(arguments, log) for machine, log in zip(machines, logs)]
    wait_for(lambda: len(completed_steps(run)) >= 25, 120)
    ip(f"-n {machines[0].name} link set {machines[0].interface} down")
    assert jobs[0].wait(timeout=60) != 0
    wait_for(lambda: "rank 1 has lost another rank" in logs[1].read_text())
    # The torchrun of the second machine waits for the first one's store; srun ends it.
    jobs[1].kill()
    jobs[1].wait()
    last_step = completed_steps(run)[-1]
    assert last_step < 100_000
    for rank, log in enumerate(logs):
        assert f"rank {rank} has lost another rank" in log.read_text()

    ip(f"-n {machines[0].name} link set {machines[0].interface} up")
    arguments = small_run(corpus, run, **SETTINGS, max_steps=last_step + 3)
    jobs = [machine.start(arguments, log) for machine, log in zip(machines, logs)]
    for job in jobs:
        assert job.wait(timeout=120) == 0
    undisturbed = tmp_path / "undisturbed"
    arguments = small_run(corpus, undisturbed, **SETTINGS, max_steps=last_step + 3)
    train_in_processes(2, arguments, tmp_path / "log")
    assert read_final_tensors(run) == read_final_tensors(undisturbed)
    assert read_records(run) == read_records(undisturbed)
