"""The tokens of documents as one stream: texts are encoded by several threads, in order."""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from tqdm import tqdm

from data import shards
from data.documents import Batch, Documents
from data.tokenizer import Tokenizer


class TokenReader:
    """Reads the tokens of documents as one stream.

    Args:
        state: of the dataset, from which reading goes on; None is the beginning
        num_used: how many tokens after it have been read before
    """

    def __init__(
        self,
        documents: Documents,
        encoding: Tokenizer,
        workers: int,
        state: dict | None = None,
        num_used: int = 0,
    ):
        self.documents = documents
        self.state = state
        self.num_used = num_used
        self.batches = tokenize(documents, state, encoding, workers)
        # of the batch at the state
        self.tokens = np.zeros(0, dtype=shards.choose_format(encoding.n_vocab).dtype)

    def take(self, count: int, progress_bar: tqdm | None = None) -> np.ndarray:
        """Return the next `count` tokens, uint16 or uint32; fewer if the documents end."""
        result = np.empty(count, dtype=self.tokens.dtype)
        filled = 0
        while filled < count:
            if self.num_used >= len(self.tokens):
                state, future = next(self.batches, (None, None))
                if future is None:
                    break
                self.num_used -= len(self.tokens)
                self.state = state
                self.tokens = future.result()
                continue
            part = self.tokens[self.num_used : self.num_used + count - filled]
            result[filled : filled + len(part)] = part
            filled += len(part)
            self.num_used += len(part)
            if progress_bar is not None:
                progress_bar.update(len(part))
        return result[:filled]


def tokenize(
    documents: Documents, state: dict | None, encoding: Tokenizer, workers: int
) -> Iterator[tuple[dict | None, Future]]:
    """Yield the state and the future tokens of each batch, in order, from a state on."""
    # two batches per thread keep all threads busy; more would only take memory
    with ThreadPoolExecutor(workers) as pool:
        pending = deque()
        for batch in documents.read(state):
            pending.append((batch.state, pool.submit(encode_batch, encoding, batch)))
            if len(pending) > 2 * workers:
                yield pending.popleft()
        yield from pending


def encode_batch(encoding: Tokenizer, batch: Batch) -> np.ndarray:
    """Return the tokens of a batch, in which encoding.bos_token precedes each document.

    Returns:
        uint16 or uint32 (num_tokens,)
    """
    begin_of_text = np.array([encoding.bos_token], dtype=np.uint32)
    parts = [np.zeros(0, dtype=np.uint32)]
    for tokens, starts_document in zip(encoding.encode_batch(batch.texts), batch.starts):
        if starts_document:
            parts.append(begin_of_text)
        parts.append(tokens)
    return np.concatenate(parts).astype(shards.choose_format(encoding.n_vocab).dtype)
