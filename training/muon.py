"""Muon (Jordan et al., 2024) on any number of ranks, with the bits of one process.

Orthogonalizing a matrix needs all of it and costs far more than the rest of the optimizer's step.
Each rank therefore orthogonalizes a share of the matrices, and an all-gather distributes the results,
as in modded-nanogpt and nanochat. With FSDP2 the matrices are gathered first.
"""

import math
from collections import defaultdict

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor


class Muon(torch.optim.Muon):
    """torch.optim.Muon for replicated and sharded matrices, with a choice of the dtype.

    torch always orthogonalizes in bfloat16, which a CPU without bfloat16 instructions multiplies ten
    times slower than float32. Updates are scaled to the RMS of AdamW's updates, so that both
    optimizers can share a learning rate.

    Args:
        groups: parameter groups of matrices
        lr: learning rate of groups that have none
        dtype: in which the updates are orthogonalized, and sent to other ranks
    """

    # () float, 1 if the next step is to change nothing and 0 if not, as in torch's fused optimizers
    found_inf: torch.Tensor | None = None

    def __init__(self, groups: list[dict], lr: float, dtype: torch.dtype):
        super().__init__(groups, lr=lr, adjust_lr_fn="match_rms_adamw")
        self.dtype = dtype

    @torch.no_grad()
    def step(self) -> None:
        num_ranks = dist.get_world_size() if dist.is_initialized() else 1
        for group in self.param_groups:
            by_shape = defaultdict(list)
            for weight in group["params"]:
                if weight.grad is not None:
                    by_shape[weight.shape].append(weight)
            # one matrix per rank at a time, all of one shape
            for weights in by_shape.values():
                for first in range(0, len(weights), num_ranks):
                    self.update(group, weights[first : first + num_ranks], num_ranks)

    def update(self, group: dict, weights: list[torch.Tensor], num_ranks: int) -> None:
        """Update matrices of one shape, of which rank i orthogonalizes the i-th."""
        directions = [self.advance_momentum(group, weight).to(self.dtype) for weight in weights]
        if isinstance(weights[0], DTensor):
            directions = [direction.full_tensor() for direction in directions]
        if num_ranks == 1:
            updates = [self.orthogonalize(group, direction) for direction in directions]
        else:
            own_update = torch.zeros_like(directions[0])
            if dist.get_rank() < len(weights):
                own_update = self.orthogonalize(group, directions[dist.get_rank()]).contiguous()
            updates = [torch.empty_like(own_update) for _ in range(num_ranks)]
            dist.all_gather(updates, own_update)
        for weight, update in zip(weights, updates):
            self.apply(group, weight, update)

    def advance_momentum(self, group: dict, weight: torch.Tensor) -> torch.Tensor:
        """Add the gradient to the momentum, and return the direction of Nesterov's step."""
        state = self.state[weight]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(weight.grad)
        momentum = state["momentum_buffer"]
        new_momentum = momentum.lerp(weight.grad, 1 - group["momentum"])
        self.overwrite(momentum, new_momentum)
        # (1 - momentum) * gradient + momentum * average
        return weight.grad.lerp(new_momentum, group["momentum"])

    def orthogonalize(self, group: dict, matrix: torch.Tensor) -> torch.Tensor:
        return orthogonalize(
            matrix,
            coefficients=group["ns_coefficients"],
            num_steps=group["ns_steps"],
            eps=group["eps"],
        )

    def apply(self, group: dict, weight: torch.Tensor, update: torch.Tensor) -> None:
        """Decay the weight and add the update (m, n) to it, or its own rows of the update."""
        rms_scale = 0.2 * math.sqrt(max(weight.shape))
        if isinstance(weight, DTensor):
            # every rank has the update, so that none need send it
            mesh = weight.device_mesh
            update = distribute_tensor(update, mesh, weight.placements, src_data_rank=None)
            update = update.to_local()
            weight = weight.to_local()
        new_weight = weight * (1 - group["lr"] * group["weight_decay"])
        new_weight.add_(update, alpha=-group["lr"] * rms_scale)
        self.overwrite(weight, new_weight)

    def overwrite(self, tensor: torch.Tensor, new_value: torch.Tensor) -> None:
        """Overwrite a tensor, unless `found_inf` says that the step is to change nothing."""
        if self.found_inf is not None:
            if isinstance(tensor, DTensor):
                tensor = tensor.to_local()
                new_value = new_value.to_local()
            new_value = torch.where(self.found_inf == 0, new_value, tensor)
        tensor.copy_(new_value)


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
