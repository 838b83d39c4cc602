"""Muon (Jordan et al., 2024), whose Newton-Schulz iterations are divided over the ranks.

Orthogonalizing a matrix needs all of it, and costs far more than the rest of a step of the
optimizer. Each matrix therefore has one rank, its owner, that orthogonalizes it for all.

- With DDP, every rank has the gradients of all matrices. The owners compute the updates, and one
  all-gather distributes them.
- With FSDP2, each rank has some rows of each matrix. One all-to-all brings the rows to the owners,
  and a second takes the rows of the updates back.

Both send numbers in the dtype of the iteration, which is also that of its result. Nothing is rounded
on the way, so that any number of ranks computes the same bits as one process.
"""

import collections
import math
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

# Matrices of one shape are exchanged together, in messages of about this many bytes.
MESSAGE_BYTES = 2**26
# So many messages are under way at once, while other matrices are orthogonalized.
MAX_MESSAGES = 3


class Muon(torch.optim.Muon):
    """torch.optim.Muon for sharded and replicated matrices, with a choice of the dtype.

    torch always orthogonalizes in bfloat16, which a CPU without bfloat16 instructions multiplies ten
    times slower than float32. Updates are scaled to the RMS of AdamW's updates, so that both
    optimizers can share a learning rate.

    Args:
        groups: parameter groups of matrices, either all sharded by FSDP2 or all replicated
        lr: learning rate of groups that have none
        dtype: in which the updates are orthogonalized

    Raises:
        ValueError: some matrices are sharded and others replicated
    """

    def __init__(self, groups: list[dict], lr: float, dtype: torch.dtype):
        super().__init__(groups, lr=lr, adjust_lr_fn="match_rms_adamw")
        self.dtype = dtype
        first_weight = self.param_groups[0]["params"][0]
        self.is_sharded = isinstance(first_weight, DTensor)
        for group in self.param_groups:
            if isinstance(group["params"][0], DTensor) != self.is_sharded:
                raise ValueError(
                    "engine=fsdp shards some of the matrices that Muon trains and replicates "
                    "others; set rounded=True in the rules of all of them (model/parameters.py)"
                )
        # With HSDP, the ranks of one copy of the model divide its matrices among themselves, and
        # every copy repeats the work. Otherwise rows would be sent between machines.
        self.process_group = None
        if self.is_sharded:
            self.process_group = first_weight.device_mesh.get_group(mesh_dim=-1)
        self.rank = 0
        self.num_ranks = 1
        if dist.is_initialized():
            self.rank = dist.get_rank(self.process_group)
            self.num_ranks = dist.get_world_size(self.process_group)

    @torch.no_grad()
    def step(self) -> None:
        if self.num_ranks > 1:
            run_overlapped(self.chunk_updates())
            return
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    direction = self.advance_momentum(group, weight).to(self.dtype)
                    self.apply(group, weight, self.orthogonalize(group, direction))

    def chunk_updates(self) -> Iterator[Iterator[None]]:
        """Yield, for each chunk of matrices of one shape, a generator that updates them.

        The generator yields while it waits for other ranks. The order is the same on all ranks.
        """
        # Owners go round over all shapes, so that the remainders of the divisions are not all
        # those of rank 0.
        num_assigned = 0
        for group in self.param_groups:
            stacks = collections.defaultdict(list)
            for weight in group["params"]:
                if weight.grad is not None:
                    stacks[weight.shape].append(weight)
            for shape, weights in stacks.items():
                matrix_bytes = shape.numel() * self.dtype.itemsize
                matrices_per_rank = max(MESSAGE_BYTES // matrix_bytes // self.num_ranks, 1)
                chunk_size = matrices_per_rank * self.num_ranks
                for first in range(0, len(weights), chunk_size):
                    chunk = weights[first : first + chunk_size]
                    owners = [
                        (num_assigned + index) % self.num_ranks for index in range(len(chunk))
                    ]
                    num_assigned += len(chunk)
                    if self.is_sharded:
                        yield self.update_sharded(group, chunk, owners)
                    else:
                        yield self.update_replicated(group, chunk, owners)

    # ---- the two ways to update a chunk ----

    def update_replicated(
        self, group: dict, weights: list[torch.Tensor], owners: list[int]
    ) -> Iterator[None]:
        """Update matrices of which every rank has a copy, and the same gradient."""
        shape = weights[0].shape
        matrices_per_rank = max(owners.count(rank) for rank in range(self.num_ranks))
        # The results of this rank. Ranks with fewer matrices send some zeros.
        own_updates = torch.zeros(
            (matrices_per_rank, *shape), dtype=self.dtype, device=weights[0].device
        )
        slot = 0
        for weight, owner in zip(weights, owners):
            direction = self.advance_momentum(group, weight)
            if owner == self.rank:
                own_updates[slot] = self.orthogonalize(group, direction.to(self.dtype))
                slot += 1
        updates = own_updates.new_empty((self.num_ranks * matrices_per_rank, *shape))
        work = dist.all_gather_into_tensor(
            updates, own_updates, group=self.process_group, async_op=True
        )
        yield
        work.wait()
        updates_of_rank = updates.view(self.num_ranks, matrices_per_rank, *shape)
        next_slot = [0] * self.num_ranks
        for weight, owner in zip(weights, owners):
            self.apply(group, weight, updates_of_rank[owner, next_slot[owner]])
            next_slot[owner] += 1

    def update_sharded(
        self, group: dict, weights: list[torch.Tensor], owners: list[int]
    ) -> Iterator[None]:
        """Update matrices (DTensors) of which every rank has some rows."""
        num_rows, num_columns = weights[0].shape
        rows_of_rank = count_rows(num_rows, self.num_ranks)
        own_rows = rows_of_rank[self.rank]
        matrices_of_rank = [owners.count(rank) for rank in range(self.num_ranks)]
        num_owned = matrices_of_rank[self.rank]
        # all_to_all_single sends the tensor in pieces, one for each rank in turn
        by_owner = [
            weight
            for rank in range(self.num_ranks)
            for weight, owner in zip(weights, owners)
            if owner == rank
        ]
        sizes_by_owner = [count * own_rows * num_columns for count in matrices_of_rank]
        sizes_by_shard = [num_owned * rows * num_columns for rows in rows_of_rank]

        # this rank's rows of all matrices go to the owners
        directions = [
            self.advance_momentum(group, weight).to(self.dtype).flatten() for weight in by_owner
        ]
        sent = torch.cat(directions)
        received = sent.new_empty(sum(sizes_by_shard))
        work = dist.all_to_all_single(
            received,
            sent,
            output_split_sizes=sizes_by_shard,
            input_split_sizes=sizes_by_owner,
            group=self.process_group,
            async_op=True,
        )
        yield
        work.wait()

        # complete matrices, (num_owned, num_rows, num_columns)
        row_blocks = [
            block.view(num_owned, rows, num_columns)
            for block, rows in zip(received.split(sizes_by_shard), rows_of_rank)
        ]
        matrices = torch.cat(row_blocks, dim=1)
        updates = torch.empty_like(matrices)
        for index in range(num_owned):
            updates[index] = self.orthogonalize(group, matrices[index])

        # the rows of the updates go back
        sent = torch.cat([block.flatten() for block in updates.split(rows_of_rank, dim=1)])
        received = sent.new_empty(sum(sizes_by_owner))
        work = dist.all_to_all_single(
            received,
            sent,
            output_split_sizes=sizes_by_owner,
            input_split_sizes=sizes_by_shard,
            group=self.process_group,
            async_op=True,
        )
        yield
        work.wait()
        own_updates = received.view(len(weights), own_rows, num_columns)
        for weight, update in zip(by_owner, own_updates):
            self.apply(group, weight, update)

    # ---- one matrix, or the rows of it that this rank has ----

    def advance_momentum(self, group: dict, weight: torch.Tensor) -> torch.Tensor:
        """Add the gradient to the momentum, and return the direction of Nesterov's step."""
        state = self.state[weight]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(weight.grad)
        gradient = local_tensor(weight.grad)
        momentum = local_tensor(state["momentum_buffer"])
        momentum.lerp_(gradient, 1 - group["momentum"])
        # (1 - momentum) * gradient + momentum * average
        return gradient.lerp(momentum, group["momentum"])

    def orthogonalize(self, group: dict, matrix: torch.Tensor) -> torch.Tensor:
        return orthogonalize(
            matrix,
            coefficients=group["ns_coefficients"],
            num_steps=group["ns_steps"],
            eps=group["eps"],
        )

    def apply(self, group: dict, weight: torch.Tensor, update: torch.Tensor) -> None:
        """Decay the weight and add the update to it."""
        rms_scale = 0.2 * math.sqrt(max(weight.shape))
        local_weight = local_tensor(weight)
        local_weight.mul_(1 - group["lr"] * group["weight_decay"])
        local_weight.add_(update, alpha=-group["lr"] * rms_scale)


def orthogonalize(
    matrix: torch.Tensor, coefficients: tuple[float, float, float], num_steps: int, eps: float
) -> torch.Tensor:
    """Move all singular values of a matrix (m, n) near 1 by Newton-Schulz iteration.

    Each step computes a X + b (X X^T) X + c (X X^T)^2 X (Jordan et al., Muon, 2024).
    """
    a, b, c = coefficients
    is_tall = matrix.shape[0] > matrix.shape[1]
    # X X^T is the smaller of the two Gram matrices if X is wide
    x = matrix.T if is_tall else matrix
    # the iteration converges for singular values of at most 1, which the norm bounds
    x = x / x.norm().clamp(min=eps)
    for _ in range(num_steps):
        gram = x @ x.T
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, polynomial, x, beta=a)
    return x.T if is_tall else x


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the rows that this rank has of a sharded tensor; a replicated one as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def count_rows(num_rows: int, num_ranks: int) -> list[int]:
    """Return how many rows of a matrix FSDP2 gives to each rank; the last ones may have fewer."""
    rows_per_rank = math.ceil(num_rows / num_ranks)
    return [
        max(min(rows_per_rank, num_rows - rank * rows_per_rank), 0) for rank in range(num_ranks)
    ]


def get_own_rows(parameter: DTensor) -> slice:
    """Return which rows of a parameter this rank has; FSDP2 cuts the first dimension."""
    # the last dimension of a mesh is the one that shards; HSDP's first one has the copies
    mesh = parameter.device_mesh
    num_rows = count_rows(parameter.shape[0], mesh.size(-1))
    own_index = mesh.get_local_rank(-1)
    first_row = sum(num_rows[:own_index])
    return slice(first_row, first_row + num_rows[own_index])


def run_overlapped(tasks: Iterator[Iterator[None]]) -> None:
    """Run generators to their ends, MAX_MESSAGES at a time, each up to its next yield in turn."""
    running: collections.deque[Iterator[None]] = collections.deque()
    for task in tasks:
        running.append(task)
        while len(running) >= MAX_MESSAGES:
            advance(running)
    while running:
        advance(running)


def advance(running: collections.deque[Iterator[None]]) -> None:
    """Run the first task up to its next yield, and put it last, unless it has ended."""
    task = running.popleft()
    is_waiting = next(task, "ended") != "ended"
    if is_waiting:
        running.append(task)
