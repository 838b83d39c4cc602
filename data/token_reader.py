"""The tokens of a source as one stream: documents are encoded by several threads, in order."""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from tqdm import tqdm

from data import shards
from data.sources import Batch, Source
from data.tokenizer_base import Tokenizer


class TokenReader:
    """Reads the tokens of a source as one stream.

    Attributes:
        cursor: of the batch that the next token is in; set both to begin elsewhere
        num_used: number of tokens of that batch that precede it
    """

    def __init__(
        self,
        source: Source,
        encoding: Tokenizer,
        workers: int,
        progress_bar: tqdm | None = None,
    ):
        self.source = source
        self.encoding = encoding
        self.workers = workers
        self.progress_bar = progress_bar
        self.cursor: dict | None = None
        self.num_used = 0
        self.batches: Iterator[tuple[dict, Future]] | None = None
        # of the batch at the cursor
        self.tokens = np.zeros(0, dtype=shards.choose_format(encoding.n_vocab).dtype)

    def take(self, count: int) -> np.ndarray:
        """Return the next `count` tokens, uint16 or uint32; fewer if the source ends."""
        if self.batches is None:
            self.batches = tokenize(self.source, self.cursor, self.encoding, self.workers)
        result = np.empty(count, dtype=self.tokens.dtype)
        filled = 0
        while filled < count:
            if self.num_used >= len(self.tokens):
                cursor, future = next(self.batches, (None, None))
                if future is None:
                    break
                # The start may lie beyond the first batch, if batches are smaller than those of the
                # run that recorded it.
                self.num_used -= len(self.tokens)
                self.cursor = cursor
                self.tokens = future.result()
                continue
            part = self.tokens[self.num_used : self.num_used + count - filled]
            result[filled : filled + len(part)] = part
            filled += len(part)
            self.num_used += len(part)
            if self.progress_bar is not None:
                self.progress_bar.update(len(part))
        return result[:filled]


def tokenize(
    source: Source, cursor: dict | None, encoding: Tokenizer, workers: int
) -> Iterator[tuple[dict, Future]]:
    """Yield the cursor and the future tokens of each batch, in order, from a cursor on."""
    # Two batches per thread keep all threads busy; more would only take memory.
    with ThreadPoolExecutor(workers) as pool:
        pending = deque()
        for batch in source.read(cursor):
            pending.append((batch.cursor, pool.submit(encode_batch, encoding, batch)))
            if len(pending) > 2 * workers:
                yield pending.popleft()
        yield from pending


def encode_batch(encoding: Tokenizer, batch: Batch) -> np.ndarray:
    """Return the tokens of a batch, in which encoding.bos_token precedes each document.

    Returns:
        uint16 or uint32 (num_tokens,)
    """
    begin_of_text = np.array([encoding.bos_token], dtype=np.uint32)
    starts = batch.starts or [True] * len(batch.texts)
    parts = [np.zeros(0, dtype=np.uint32)]
    for tokens, starts_document in zip(encoding.encode_batch(batch.texts), starts):
        if starts_document:
            parts.append(begin_of_text)
        parts.append(tokens)
    return np.concatenate(parts).astype(shards.choose_format(encoding.n_vocab).dtype)
