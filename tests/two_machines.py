"""Two machines for training: network namespaces of this one, joined by a pair of virtual interfaces.

To make them takes root on Linux.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from helpers import ROOT

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

    def start(self, program: Sequence[str], log: Path) -> subprocess.Popen:
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
            *program,
        ]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "GLOO_SOCKET_IFNAME": self.interface,
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "2",
        }
        with open(log, "w") as file:
            process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=file)
        self.processes.append(process)
        return process

    def cut_network(self) -> None:
        """Take down the interface to the other machine."""
        assert ip(f"-n {self.name} link set {self.interface} down")


def connect(first: Machine, second: Machine) -> bool:
    """Create both namespaces and the network between them; return whether this machine allows it."""
    if sys.platform != "linux" or shutil.which("ip") is None:
        return False
    if not ip(f"netns add {first.name}") or not ip(f"netns add {second.name}"):
        return False
    if not ip(f"link add {first.interface} type veth peer name {second.interface}"):
        return False
    return all(
        ip(f"link set {machine.interface} netns {machine.name}")
        and ip(f"-n {machine.name} addr add {machine.address}/24 dev {machine.interface}")
        and ip(f"-n {machine.name} link set {machine.interface} up")
        and ip(f"-n {machine.name} link set lo up")
        for machine in (first, second)
    )


@contextmanager
def two_machines() -> Iterator[tuple[Machine, Machine]]:
    """Yield two machines with a network between them, or skip the test."""
    pair = (Machine(0), Machine(1))
    try:
        if not connect(*pair):
            pytest.skip("this machine does not allow network namespaces")
        yield pair
    finally:
        for machine in pair:
            for process in machine.processes:
                process.kill()
                process.wait()
            ip(f"netns del {machine.name}")
