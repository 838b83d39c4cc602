"""Blocks of one length that few documents cross: "fit or cut", as in a trainer of DDL's authors.

A document is a beginning-of-text token (BOS), its text and an end-of-text token (EOS). Documents
fill blocks of block_size tokens one after the other. A document that does not fit into the rest of
a block continues in the next blocks, as in a stream, unless it would end with few tokens in the last
of them, from 1 to cut_threshold - 1:

- These tokens are left out ("cut"), so that the next block begins with the next document.
- If the rest of the current block has fewer than cut_threshold tokens, it is padded instead. The
  document begins in the next block, where the same rule applies.

The shards hold sequences of one length (data/sequences.py). Each is a block, and the first token of
the next block, which is the target of the last position. Padding repeats EOS, which never follows
itself otherwise.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np
from tqdm import tqdm

from data.sources import Source
from data.token_reader import TokenReader, tokenize
from data.tokenizer_base import Tokenizer


@dataclass(frozen=True)
class FitOrCut:
    """The lengths of the packing, in tokens.

    Raises:
        ValueError: cut_threshold is larger than block_size
    """

    block_size: int
    cut_threshold: int

    def __post_init__(self):
        if self.cut_threshold > self.block_size:
            raise ValueError(
                f"cut_threshold={self.cut_threshold} is larger than block_size={self.block_size}; "
                f"give --cut_threshold={self.block_size} or less"
            )

    @property
    def window_tokens(self) -> int:
        """Return how many tokens the shards hold for each block."""
        return self.block_size + 1

    def round_down(self, num_tokens: int | None) -> int | None:
        """Return the number of tokens of as many blocks as num_tokens holds, at least of one."""
        if num_tokens is None:
            return None
        return max(num_tokens // self.window_tokens, 1) * self.window_tokens

    def open_reader(
        self, source: Source, encoding: Tokenizer, workers: int, progress_bar: tqdm | None = None
    ) -> "PackedReader":
        """Return a reader of the source's documents, packed."""
        return PackedReader(source, encoding, workers, progress_bar, self)

    def get_blocks(self, tokens: np.ndarray) -> np.ndarray:
        """Return the tokens of shards, 1-D, without the last target of each block."""
        return tokens.reshape(-1, self.window_tokens)[:, :-1].ravel()

    def count_kept(self, length: int, room: int) -> int:
        """Return how many tokens of a document are kept; 0 if it begins in the next block.

        Args:
            length: of the document, or of its rest at the beginning of a block
            room: number of tokens that are left in the current block
        """
        if length <= room:
            return length
        num_spilled = (length - room) % self.block_size
        if num_spilled == 0 or num_spilled >= self.cut_threshold:
            return length
        return length - num_spilled if room >= self.cut_threshold else 0


class PackedReader(TokenReader):
    """Reads the documents of a source, packed into sequences.

    `cursor` and `num_used` say where the next block begins in the tokens of the source. The reader
    resumes from them alone: if a document continues there, its rest ends in its last block after as
    many tokens as the whole document did, so the same rule applies to it.
    """

    def __init__(
        self,
        source: Source,
        encoding: Tokenizer,
        workers: int,
        progress_bar: tqdm | None,
        packing: FitOrCut,
    ):
        super().__init__(source, encoding, workers, progress_bar)
        self.packing = packing
        # positions of BOS in `tokens`
        self.starts = np.zeros(0, dtype=np.int64)
        # cursor, tokens and starts of batches that have been read after the one at the cursor
        self.lookahead: deque[tuple[dict, np.ndarray, np.ndarray]] = deque()
        # the current document with its EOS, or what is left of it; None before it is read
        self.document: np.ndarray | None = None

    def take(self, count: int) -> np.ndarray:
        """Return the next sequences, flattened; fewer if the source ends.

        count: number of tokens, a multiple of packing.window_tokens
        """
        self.packed = {"kept": 0, "cut": 0, "padding": 0}
        shape = (count // self.packing.window_tokens, self.packing.window_tokens)
        # padding repeats EOS
        windows = np.full(shape, self.encoding.eot_token, dtype=self.tokens.dtype)
        num_windows = 0
        while num_windows < len(windows) and self.read_document() is not None:
            self.fill(windows[num_windows])
            num_windows += 1
        if self.progress_bar is not None:
            self.progress_bar.update(num_windows * self.packing.window_tokens)
        return windows[:num_windows].ravel()

    def fill(self, window: np.ndarray) -> None:
        """Write the next block and its last target into a sequence (window_tokens,) of EOS."""
        num_filled = 0
        room = self.packing.block_size
        while room > 0 and (document := self.read_document()) is not None:
            num_kept = self.packing.count_kept(len(document), room)
            if num_kept == 0:
                break
            part = document[: min(num_kept, room)]
            window[num_filled : num_filled + len(part)] = part
            num_filled += len(part)
            room -= len(part)
            if len(part) < num_kept:
                self.document = document[len(part) :]
                self.num_used += len(part)
            else:
                self.document = None
                # the tokens of the source have no EOS
                self.num_used += len(document) - 1
                self.packed["cut"] += len(document) - num_kept
        self.packed["kept"] += num_filled
        self.packed["padding"] += room
        if room == 0 and self.move_to_token():
            window[-1] = self.tokens[self.num_used]

    def read_document(self) -> np.ndarray | None:
        """Return the current document from the cursor on, with EOS; None if the source has ended."""
        if self.document is not None or not self.move_to_token():
            return self.document
        tokens = self.tokens
        starts = self.starts
        first = self.num_used
        # the token at the cursor belongs to the document, whether it is BOS or not
        next_start = np.searchsorted(starts, first + 1)
        parts = []
        num_batches = 0
        while next_start == len(starts):
            # the document may continue in the next batch
            parts.append(tokens[first:])
            if num_batches == len(self.lookahead) and not self.read_batch():
                break
            _, tokens, starts = self.lookahead[num_batches]
            num_batches += 1
            first = 0
            next_start = 0
        else:
            parts.append(tokens[first : starts[next_start]])
        end = np.array([self.encoding.eot_token], dtype=self.tokens.dtype)
        self.document = np.concatenate([*parts, end])
        return self.document

    def move_to_token(self) -> bool:
        """Move the cursor to the batch of the next token; return whether there is one."""
        while self.num_used >= len(self.tokens):
            if not self.lookahead and not self.read_batch():
                return False
            self.num_used -= len(self.tokens)
            self.cursor, self.tokens, self.starts = self.lookahead.popleft()
        return True

    def read_batch(self) -> bool:
        """Add a batch to the lookahead; return whether the source has one."""
        if self.batches is None:
            self.batches = tokenize(self.source, self.cursor, self.encoding, self.workers)
        cursor, future = next(self.batches, (None, None))
        if future is None:
            return False
        tokens = future.result()
        starts = np.flatnonzero(tokens == self.encoding.bos_token)
        self.lookahead.append((cursor, tokens, starts))
        return True
