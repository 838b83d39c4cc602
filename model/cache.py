"""The cache of a model: what it stores of the tokens so far."""

from collections.abc import Callable
from typing import NamedTuple

import torch

# Padding to the left of the shorter sequences of a batch.
NO_TOKEN = -1


def pad_left(
    sequences: list[list[int]] | list[tuple[int, ...]], device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Return token ids as int64 (B, T), with NO_TOKEN to the left of shorter sequences.

    Raises:
        ValueError: a sequence is empty
    """
    if not all(sequences):
        raise ValueError(
            "a sequence is empty; give each sequence at least one token, such as the end-of-text "
            "token, with which documents begin in training"
        )
    length = max(map(len, sequences))
    rows = [[NO_TOKEN] * (length - len(ids)) + list(ids) for ids in sequences]
    return torch.tensor(rows, device=device)


class Folded(NamedTuple):
    """A tensor in a cache that is computed from parameters alone, whatever the tokens are."""

    tensor: torch.Tensor


class Cache:
    """What a model stores of the tokens so far: keys, values and the inputs of token convolutions.

    Sequences of unequal length end at the same position: the shorter ones have NO_TOKEN to their
    left in the first call. The parameters of the model must not change while a cache is in use.

    Attributes:
        length: number of tokens that it can hold
        num_tokens: number of tokens so far
        position: num_tokens on the device, int64 (1,)
        start: number of NO_TOKEN to the left of each sequence, int64 (B, 1); None before the first
            call
        padded: whether any sequence has NO_TOKEN to its left
        blocks: a dict of tensors for each block, and a last one for the expander and the readout.
            The first call creates the tensors, for its batch size and dtypes; later calls write into
            them, except for those in `Folded`.
    """

    def __init__(self, num_blocks: int, length: int, device: torch.device):
        self.length = length
        self.num_tokens = 0
        self.padded = False
        self.position = torch.zeros(1, dtype=torch.int64, device=device)
        self.start: torch.Tensor | None = None
        self.blocks: list[dict[str, torch.Tensor | Folded]] = [{} for _ in range(num_blocks + 1)]

    def reserve(self, ids: torch.Tensor) -> int:
        """Reserve places for ids (B, T), which the next call adds; return the number of all tokens.

        Raises:
            ValueError: they do not fit, or the batch size is not that of the first call
        """
        batch_size, new_tokens = ids.shape
        if self.num_tokens + new_tokens > self.length:
            raise ValueError(
                f"{self.num_tokens + new_tokens} tokens do not fit a cache of length={self.length}: "
                "give fewer"
            )
        if self.start is None:
            self.start = self.position.new_zeros(batch_size, 1)
        if batch_size != len(self.start):
            raise ValueError(
                f"batch_size={batch_size}: this cache is for {len(self.start)} sequences; create "
                "another one"
            )
        if self.num_tokens == 0:
            self.start.copy_((ids == NO_TOKEN).sum(1, keepdim=True))
            self.padded = bool((self.start > 0).any())
        self.num_tokens += new_tokens
        return self.num_tokens

    def select(self, rows: torch.Tensor) -> "Cache":
        """Return a new cache of these rows (N,), int64: for beams, or to continue one prefix."""
        selected = Cache(len(self.blocks) - 1, self.length, self.position.device)
        selected.num_tokens = self.num_tokens
        selected.padded = self.padded
        selected.position = self.position.clone()
        if self.start is not None:
            selected.start = self.start[rows]
        for block, selected_block in zip(self.blocks, selected.blocks):
            for slot, content in block.items():
                is_folded = isinstance(content, Folded)
                selected_block[slot] = content if is_folded else content[rows]
        return selected


def get_or_create_buffer(
    cache: dict[str, torch.Tensor | Folded],
    slot: str,
    shape: tuple[int, ...],
    like: torch.Tensor,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return the tensor in a slot of a block's cache, to be written in place; it starts at zero."""
    if slot not in cache:
        cache[slot] = like.new_zeros(shape, dtype=dtype)
    return cache[slot]


def get_or_fold(
    cache: dict[str, torch.Tensor | Folded], slot: str, fold: Callable[[], torch.Tensor]
) -> torch.Tensor:
    """Return fold(), which is computed once for a cache; it must depend on parameters alone."""
    if slot not in cache:
        cache[slot] = Folded(fold())
    return cache[slot].tensor
