"""The tokens of a source as one stream that can be taken up at any token, made by several threads."""

import re
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import tiktoken

from data.sources import Batch
from data.tokenizer import bytes_by_token

# tiktoken's regular expressions fail on a run of about a million blanks: longer texts are cut at half of that.
LONGEST_BLANK = 500_000
START = {"cursor": None, "skip": 0}


class TokenReader:
    """The tokens of a source from a position on: a cursor, and how many tokens after it are taken already."""

    def __init__(self, source, encoding: tiktoken.Encoding, workers: int, position: dict, progress=None):
        self.source, self.encoding, self.progress = source, encoding, progress
        self.cursor, self.used = position["cursor"], position["skip"]
        self.batches = tokenised(source, self.cursor, encoding, workers)
        self.lengths = bytes_by_token(encoding)
        self.tokens = None

    @property
    def position(self) -> dict:
        """Where the next token is."""
        return {"cursor": self.cursor, "skip": self.used}

    def take(self, count: int) -> tuple[np.ndarray, dict]:
        """The next `count` tokens, uint16, fewer where the source ends; how many documents begin there, and bytes."""
        result, filled = np.empty(count, dtype=np.uint16), 0
        documents = size = 0
        while filled < count:
            if self.tokens is None or self.used >= len(self.tokens):
                batch, tokens = next(self.batches, (None, None))
                if batch is None:
                    break
                # At a resumed position the first batch, or more of them if they are smaller now, is taken already.
                self.used -= 0 if self.tokens is None else len(self.tokens)
                self.cursor, self.tokens = batch.cursor, tokens
                continue
            part = self.tokens[self.used : self.used + count - filled]
            result[filled : filled + len(part)] = part
            filled, self.used = filled + len(part), self.used + len(part)
            documents += int((part == self.encoding.eot_token).sum())
            size += int(self.lengths[part].sum())
            if self.progress:
                self.progress.advance(len(part))
        return result[:filled], {"documents": documents, "bytes": size}


def tokenised(source, cursor, encoding: tiktoken.Encoding, workers: int) -> Iterator[tuple[Batch, np.ndarray]]:
    """Every batch with its tokens, in order; a bounded number of them is in work."""
    pool, pending = ThreadPoolExecutor(workers), deque()
    try:
        for batch in source.read(cursor):
            pending.append((batch, pool.submit(encode, encoding, batch)))
            if len(pending) > 2 * workers:
                batch, future = pending.popleft()
                yield batch, future.result()
        while pending:
            batch, future = pending.popleft()
            yield batch, future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def encode(encoding: tiktoken.Encoding, batch: Batch) -> np.ndarray:
    """Tokens of a batch's texts, uint16, each document after end-of-text. What looks like a special token is text."""
    parts = [np.zeros(0, dtype=np.uint32)]
    eot = np.array([encoding.eot_token], dtype=np.uint32)
    for text, start in zip(batch.texts, batch.starts or [True] * len(batch.texts)):
        if start:
            parts.append(eot)
        for piece in [text] if len(text) < LONGEST_BLANK else without_long_blanks(text):
            parts.append(encoding.encode_to_numpy(piece, disallowed_special=()))
    return np.concatenate(parts).astype(np.uint16)


def without_long_blanks(text: str) -> list[str]:
    """The text in pieces, cut within runs of blanks that are too long."""
    cuts = [0]
    for run in re.finditer(rf"(?<!\s)\s{{{LONGEST_BLANK},}}", text):  # tried once a run, not at each of its blanks
        cuts += range(run.start(), run.end() + 1, LONGEST_BLANK)
    return [text[start:end] for start, end in zip(cuts, [*cuts[1:], len(text)])]


def first_bytes(source, count: int) -> Iterator[str]:
    """Texts of a source up to about `count` bytes."""
    for batch in source.read():
        for text in batch.texts:
            if count <= 0:
                return
            yield text
            count -= len(text.encode())
