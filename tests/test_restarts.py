"""The ranks of a job that torchrun restarts meet each other, and none that is dead."""

import os
import socket
import subprocess
import sys

import pytest
from helpers import ROOT


def start_torchrun(port: int, num_nodes: int, folder, **environment) -> subprocess.Popen:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        f"--nnodes={num_nodes}",
        f"--nproc_per_node={2 // num_nodes}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=localhost:{port}",
        "--rdzv-id=test",
        "--max-restarts=3",
        ROOT / "tests" / "restarted_rank.py",
        folder,
    ]
    return subprocess.Popen(
        command,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )


@pytest.mark.slow
@pytest.mark.parametrize("num_nodes", [1, 2])
def test_ranks_meet_again_after_torchrun_restarts_them(tmp_path, num_nodes):
    """On two nodes, only the one whose rank died counts the restart."""
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    environment = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if num_nodes == 2 else {}
    agents = [start_torchrun(port, num_nodes, tmp_path, **environment) for _ in range(num_nodes)]
    assert [agent.wait(timeout=120) for agent in agents] == [0] * num_nodes
    for rank in range(2):
        assert (tmp_path / f"rank_{rank}").read_text() == "[0, 0]\n[1, 1]\n"
