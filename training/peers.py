"""Processes that divide a task on the host and exchange its results.

Unlike the collectives of the training loop, these exchanges need no device, may run in a thread
beside training, and may come before the process group exists.
"""

import json
import time
import uuid
from datetime import timedelta

import torch.distributed as dist


class Peers:
    """A group of processes that share a task; `rank` is the index of this one.

    This base class is a group of one process.
    """

    rank = 0
    size = 1

    def all_gather(self, value: object) -> list:
        """Return the values of all processes, ordered by rank. All of them must call it.

        value: anything that JSON can express
        """
        return [value]


class GroupPeers(Peers):
    """Some ranks of the job, with a process group of their own."""

    def __init__(self, ranks: list[int], timeout: timedelta):
        """Form the group. Every rank of the job must call it, also those outside the group."""
        # a group of its own, so that a thread can use it while the training loop uses the others
        self.group = dist.new_group(ranks, backend="gloo", timeout=timeout)
        # -1 outside the group
        self.rank = dist.get_rank(self.group)
        self.size = len(ranks)

    def all_gather(self, value: object) -> list:
        values: list = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values


class StorePeers(Peers):
    """All ranks of the job, which meet at its key-value store."""

    def __init__(self, store: dist.Store, rank: int, size: int):
        self.store = store
        self.rank = rank
        self.size = size
        self.num_calls = 0

    def all_gather(self, value: object) -> list:
        self.num_calls += 1
        prefix = f"all_gather_{self.num_calls}"
        self.store.set(f"{prefix}/value_{self.rank}", json.dumps(value))
        # `get` waits until the other rank has set its value
        values = [json.loads(self.store.get(f"{prefix}/value_{rank}")) for rank in range(self.size)]
        # Without torchrun the store lives in rank 0, which must not exit while others still read.
        self.store.set(f"{prefix}/done_{self.rank}", "")
        if self.rank == 0:
            self.store.wait([f"{prefix}/done_{rank}" for rank in range(self.size)])
        return values


# how often a rank looks whether the others have come, in seconds
POLLING_INTERVAL = 0.1


def agree_on_attempt(store: dist.Store, rank: int, size: int, timeout: timedelta) -> str:
    """Return a name that all ranks of this attempt share, and that no earlier attempt had.

    The store may still have what the ranks of earlier attempts wrote. Each rank therefore writes an
    id of its own, rank 0 proposes a name together with all ids that it finds, and a rank accepts the
    proposal only if its own id is among them. Rank 0 proposes anew when an id has changed, and
    confirms a proposal that all ranks have accepted.

    Raises:
        TimeoutError: a rank has not come in time
    """
    deadline = time.monotonic() + timeout.total_seconds()
    own_id = uuid.uuid4().hex
    store.set(f"id/{rank}", own_id)
    proposed_ids: list[str] = []
    accepted = None
    while time.monotonic() < deadline:
        if rank == 0 and store.check([f"id/{other}" for other in range(size)]):
            ids = [store.get(f"id/{other}").decode() for other in range(size)]
            if ids != proposed_ids:
                proposed_ids = ids
                proposal = {"attempt": uuid.uuid4().hex, "ids": ids}
                store.set("proposal", json.dumps(proposal))
        if store.check(["proposal"]):
            proposal = json.loads(store.get("proposal"))
            # an earlier attempt may have had another number of ranks
            is_of_this_attempt = len(proposal["ids"]) == size and proposal["ids"][rank] == own_id
            if is_of_this_attempt and proposal["attempt"] != accepted:
                accepted = proposal["attempt"]
                store.set(f"{accepted}/accepted_{rank}", "")
        if accepted is not None:
            all_accepted = [f"{accepted}/accepted_{other}" for other in range(size)]
            if rank == 0 and store.check(all_accepted):
                store.set(f"{accepted}/confirmed", "")
            if store.check([f"{accepted}/confirmed"]):
                return accepted
        time.sleep(POLLING_INTERVAL)
    absent_ranks = [str(other) for other in range(size) if not store.check([f"id/{other}"])]
    raise TimeoutError(
        f"rank {rank} has waited {timeout.total_seconds():.0f} s for the other {size - 1} ranks "
        f"(never seen: {', '.join(absent_ranks) or 'none'}); see the output of their machines"
    )
