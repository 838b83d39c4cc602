"""Documents of one length, one a window: the targets, and which are trained and scored.

A synthetic task's meta.json says it:

    window_tokens   tokens of a document; a window of training or evaluation is one document
    labels          true: the second half of a document holds the targets of the first, 0 for none;
                    without it targets are the next tokens
    trained         [[first, end], ...]: positions whose targets count in the loss; without it all
    scored          the same, of the positions whose answers are counted; all of them are trained on
"""

from dataclasses import dataclass

import numpy as np
import torch

NO_TARGET = 0  # among labels


@dataclass(frozen=True)
class Windows:
    """The windows of one corpus. ValueError: meta.json contradicts itself."""

    tokens: int
    labels: bool = False
    trained: tuple | None = None
    scored: tuple | None = None

    @classmethod
    def of(cls, meta: dict) -> "Windows | None":
        """Those that a meta.json describes; None where documents have any length."""
        if "window_tokens" not in meta:
            return None
        scored, tokens = meta.get("scored"), meta["window_tokens"]
        if "scored_from" in meta:  # as corpora of the copy task had it first
            scored = [[meta["scored_from"], tokens - 1]]
        return cls(tokens, meta.get("labels", False), meta.get("trained"), scored)

    def __post_init__(self):
        if self.labels and self.tokens % 2:
            odd = f"window_tokens={self.tokens} of a corpus with labels is odd"
            raise ValueError(f"{odd}: prepare it again")
        if self.scored is not None and (self.mask(self.scored) & ~self.mask(self.trained)).any():
            lacks = f"scored={self.scored} has positions that trained={self.trained} lacks"
            raise ValueError(f"{lacks}: prepare it again")

    @property
    def length(self) -> int:
        """Positions of a window, the block_size that it needs."""
        return self.tokens // 2 if self.labels else self.tokens - 1

    def mask(self, ranges) -> torch.Tensor:
        """Which positions the ranges hold, bool (length,); None: all. ValueError: beyond."""
        chosen = torch.zeros(self.length, dtype=torch.bool)
        for first, end in [[0, self.length]] if ranges is None else ranges:
            if not 0 <= first < end <= self.length:
                beyond = f"positions {first} to {end} are not of a window of {self.length}"
                raise ValueError(f"{beyond}: prepare it again")
            chosen[first:end] = True
        return chosen

    def ids_and_targets(self, documents: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 (rows, length) each, of documents (rows, tokens); a target of -1 does not count."""
        documents = torch.from_numpy(documents.astype(np.int64))
        if self.labels:
            ids, targets = documents[:, : self.length].clone(), documents[:, self.length :].clone()
            # -1 is what the loss leaves out, but a shard's ids are not negative.
            targets.masked_fill_(targets == NO_TARGET, -1)
        else:
            ids, targets = documents[:, :-1].clone(), documents[:, 1:].clone()
        return ids, targets.masked_fill_(~self.mask(self.trained), -1)
