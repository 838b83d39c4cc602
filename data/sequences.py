"""Sequences of one fixed length: the targets of each, and which of them are trained and scored.

In most corpora documents have any length, and a sequence begins anywhere. In those of synthetic
tasks all documents have one length, and a sequence is one document. Their meta.json says

    window_tokens   number of tokens of a document
    labels          if true, the second half of a document holds the targets of the first half, 0
                    for none; without it, targets are the next tokens
    trained         [[start, end], ...]: positions whose targets count in the loss (default: all)
    scored          the same for the positions whose answers are counted, all of which are trained
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch

NO_LABEL = 0  # in shards, whose ids are not negative
IGNORED_TARGET = -1  # in batches, as the loss expects it

# [[start, end], ...]
Ranges = Sequence[Sequence[int]]


@dataclass(frozen=True)
class SequenceLayout:
    """The layout of the sequences of a corpus whose documents all have one length."""

    # the fields are the keys of meta.json, above
    window_tokens: int
    labels: bool = False
    trained: Ranges | None = None
    scored: Ranges | None = None

    @classmethod
    def from_meta(cls, meta: dict) -> "SequenceLayout | None":
        """Return the layout that meta.json describes; None if documents have any length.

        Raises:
            ValueError: meta.json contradicts itself
        """
        if "window_tokens" not in meta:
            return None
        if "packing" in meta:
            raise ValueError("packed corpora are of an earlier version; prepare this one again")
        return cls(**{field.name: meta[field.name] for field in fields(cls) if field.name in meta})

    def __post_init__(self):
        if self.labels and self.window_tokens % 2:
            raise ValueError(
                f"window_tokens={self.window_tokens} is odd, but a document with labels has as "
                "many labels as ids; prepare the corpus again"
            )
        if self.scored is None:
            return
        if (self.mask(self.scored) & ~self.mask(self.trained)).any():
            raise ValueError(
                f"scored={self.scored} has positions that trained={self.trained} does not have; "
                "prepare the corpus again"
            )

    @property
    def same_num_targets(self) -> bool:
        """Return whether all sequences have the same number of targets."""
        return not self.labels

    @property
    def seq_len(self) -> int:
        """Return the number of positions of a sequence, which block_size must equal."""
        if self.labels:
            return self.window_tokens // 2
        return self.window_tokens - 1

    def mask(self, ranges: Ranges | None) -> torch.Tensor:
        """Return which positions are in one of the ranges, bool (seq_len,); None means all.

        Raises:
            ValueError: a range is empty, or not within a sequence
        """
        if ranges is None:
            return torch.ones(self.seq_len, dtype=torch.bool)
        mask = torch.zeros(self.seq_len, dtype=torch.bool)
        for start, end in ranges:
            if not 0 <= start < end <= self.seq_len:
                raise ValueError(
                    f"[{start}, {end}] is not a range of positions of a sequence of "
                    f"{self.seq_len}; prepare the corpus again"
                )
            mask[start:end] = True
        return mask

    def ids_and_targets(self, documents: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the ids and targets of documents.

        Args:
            documents: token ids (batch, window_tokens)

        Returns:
            int64 (batch, seq_len) each; a target of -1 does not count in the loss
        """
        tokens = torch.from_numpy(documents.astype(np.int64))
        if self.labels:
            ids = tokens[:, : self.seq_len].clone()
            targets = tokens[:, self.seq_len :].clone()
            targets.masked_fill_(targets == NO_LABEL, IGNORED_TARGET)
        else:
            ids = tokens[:, :-1].clone()
            targets = tokens[:, 1:].clone()
        return ids, targets.masked_fill_(~self.mask(self.trained), IGNORED_TARGET)
