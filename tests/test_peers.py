"""The ranks of an attempt agree on its name, whatever earlier attempts left in the store."""

import json
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist
from helpers import ROOT

from training.peers import StorePeers, agree_on_attempt

TIMEOUT = timedelta(seconds=20)


@pytest.fixture
def server() -> dist.TCPStore:
    return dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


def connect(server: dist.TCPStore) -> dist.TCPStore:
    return dist.TCPStore("localhost", server.port, is_master=False, wait_for_workers=False)


def run_attempt(server: dist.TCPStore, delays: list[float]) -> list[str]:
    """Let each rank come after its delay in seconds, and return the name that each has."""

    def run_rank(rank: int) -> str:
        time.sleep(delays[rank])
        return agree_on_attempt(connect(server), rank, len(delays), TIMEOUT)

    with ThreadPoolExecutor(len(delays)) as pool:
        return list(pool.map(run_rank, range(len(delays))))


@pytest.mark.parametrize("delays", [[0.0, 0.0, 0.0], [0.3, 0.0, 0.1], [0.0, 0.3, 0.1]], ids=str)
def test_every_attempt_has_one_name_of_its_own(server, delays):
    names = [run_attempt(server, delays) for _ in range(3)]
    assert all(len(set(names_of_ranks)) == 1 for names_of_ranks in names)
    assert len({names_of_ranks[0] for names_of_ranks in names}) == 3


def test_a_rank_that_is_restarted_while_the_others_wait_is_waited_for(server):
    """Rank 1 comes, and dies before rank 2 has come. Its successor has another id."""
    store = connect(server)
    store.set("id/1", "dead")
    store.set("id/2", "dead, too")
    stale_proposal = {"attempt": "old", "ids": ["dead, as well", "dead", "dead, too"]}
    store.set("proposal", json.dumps(stale_proposal))
    for rank in range(3):
        store.set(f"old/accepted_{rank}", "")
    store.set("old/confirmed", "")
    names = run_attempt(server, [0.0, 0.4, 0.2])
    assert len(set(names)) == 1
    assert names[0] != "old"


def test_values_of_an_earlier_attempt_are_not_gathered(server):
    gathered = []
    for attempt in range(2):
        names = run_attempt(server, [0.0, 0.0])
        peers = [
            StorePeers(dist.PrefixStore(name, connect(server)), rank, 2)
            for rank, name in enumerate(names)
        ]
        values = {}

        def gather(rank: int, attempt: int = attempt, peers: list = peers, values: dict = values):
            values[rank] = peers[rank].all_gather([attempt, rank])

        threads = [threading.Thread(target=gather, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        gathered.append(values)
    for attempt, values in enumerate(gathered):
        assert values == {rank: [[attempt, 0], [attempt, 1]] for rank in range(2)}


def test_a_rank_that_does_not_come_is_an_error(server):
    with pytest.raises(TimeoutError, match="rank 0 has waited 0 s for the other 1 ranks"):
        agree_on_attempt(connect(server), 0, 2, timedelta(seconds=0.2))


@pytest.mark.slow
def test_ranks_of_two_nodes_meet_again_after_torchrun_restarts_them(tmp_path):
    """Only the node whose rank died counts the restart in TORCHELASTIC_RESTART_COUNT."""
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes=2",
        "--nproc_per_node=1",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=localhost:{port}",
        "--rdzv-id=test",
        "--max-restarts=3",
        ROOT / "tests" / "restarted_rank.py",
        tmp_path,
    ]
    agents = [subprocess.Popen(command, stderr=subprocess.DEVNULL) for _ in range(2)]
    assert [agent.wait(timeout=120) for agent in agents] == [0, 0]
    for rank in range(2):
        assert (tmp_path / f"rank_{rank}").read_text() == "[0, 0]\n[1, 1]\n"
