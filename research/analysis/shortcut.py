"""What a write does to the state that it finds, its gates and directions as they are: a linear map for each token.

The table SHORTCUTS of parts.py has them; `analyze.py spectrum` multiplies them. Tensors have batch and tokens
first, or (1, 1) where the map is the same for every token. `axis` is the dimension of the state on which a map acts, m
its size there; along the others it acts alike.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch


@dataclass(frozen=True)
class LowRank:
    """x -> x + sum_r left_r (right_r . x) on the features: I + left^T right; left, right (B, T, r, d)."""

    axis: ClassVar[int] = -1
    left: torch.Tensor
    right: torch.Tensor

    def dense(self) -> torch.Tensor:
        """The matrix (B, T, d, d)."""
        identity = torch.eye(self.left.shape[-1], dtype=self.left.dtype, device=self.left.device)
        return identity + self.left.mT @ self.right


@dataclass(frozen=True)
class Diagonal:
    """x -> values * x on the features; values (B, T, d)."""

    axis: ClassVar[int] = -1
    values: torch.Tensor

    def dense(self) -> torch.Tensor:
        """The matrix (B, T, d, d)."""
        return self.values.diag_embed()


@dataclass(frozen=True)
class Mix:
    """H -> matrix H on the n streams of a state (B, T, n, d); matrix (B, T, n, n)."""

    axis: ClassVar[int] = 2
    matrix: torch.Tensor

    def dense(self) -> torch.Tensor:
        """The matrix (B, T, n, n)."""
        return self.matrix


def identity(state) -> Diagonal:
    """Of a write that adds alone to a state (B, T, ..., d)."""
    return Diagonal(state.new_ones(1, 1, state.shape[-1]))
