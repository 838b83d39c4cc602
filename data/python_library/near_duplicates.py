"""Documents that nearly repeat an earlier one, found by MinHash and decided by exact Jaccard similarity.

A document is the set of its shingles, which are runs of WORDS words. The smallest hash over a set is
the same for two sets with the probability of their similarity (Broder, "On the resemblance and
containment of documents", 1997). A signature has BANDS bands of ROWS such hashes. Two documents with
an equal band are compared shingle by shingle (Leskovec, Rajaraman, Ullman, "Mining of Massive
Datasets", section 3.4). No pair below the threshold is called a near duplicate. A pair of similarity
s is missed with probability (1 - s^ROWS)^BANDS, which is 0.0004 at 0.8.
"""

from collections import defaultdict
from zlib import crc32

import numpy as np

WORDS = 5
BANDS = 20
ROWS = 5
THRESHOLD = 0.8
CHUNK = 4096  # shingles that are hashed at once; with all their hashes they fit in a cache
_rng = np.random.default_rng(0)
FACTORS = _rng.integers(0, 2**63, (BANDS * ROWS, 1), dtype=np.uint64) * np.uint64(2) + np.uint64(1)
TERMS = _rng.integers(0, 2**63, (BANDS * ROWS, 1), dtype=np.uint64)


def hash_shingles(text: str) -> np.ndarray:
    """Return the hashes of a document's shingles, sorted and each once: (number of shingles,), uint64.

    A text of fewer than WORDS words is one shingle.
    """
    words = np.fromiter(map(crc32, text.encode().split()), dtype=np.uint64)
    words = np.pad(words, (0, max(WORDS - len(words), 0)))
    num_shingles = len(words) - WORDS + 1
    return np.unique(mix([words[first : first + num_shingles] for first in range(WORDS)]))


def mix(arrays: list[np.ndarray] | np.ndarray) -> np.ndarray:
    """Return a hash of several uint64 arrays, position by position. Its products wrap by design."""
    state = np.zeros_like(arrays[0])
    for array in arrays:
        state = (state ^ array) * np.uint64(0x9E3779B97F4A7C15)
        state ^= state >> np.uint64(29)
    return state


def hash_bands(shingles: np.ndarray) -> list[int]:
    """Return a hash of each band of the MinHash signature of a document: BANDS integers."""
    signature = np.full(BANDS * ROWS, 2**64 - 1, dtype=np.uint64)
    for first in range(0, len(shingles), CHUNK):
        hashes = FACTORS * shingles[first : first + CHUNK] + TERMS  # (BANDS * ROWS, CHUNK)
        signature = np.minimum(signature, hashes.min(axis=1))
    return mix(signature.reshape(BANDS, ROWS).T).tolist()


def measure_similarity(shingles: np.ndarray, others: np.ndarray) -> float:
    """Return the Jaccard similarity of two sets: the size of their intersection over their union's."""
    num_shared = len(np.intersect1d(shingles, others, assume_unique=True))
    return num_shared / (len(shingles) + len(others) - num_shared)


class NearDuplicates:
    """The documents that nearly repeat none before them, in the order in which they are given."""

    def __init__(self, threshold: float = THRESHOLD):
        self.threshold = threshold
        self.documents: list[np.ndarray] = []  # the shingles of each
        # by band and its hash, the indices of the documents that have it
        self.indices: list[dict[int, list[int]]] = [defaultdict(list) for _ in range(BANDS)]

    def repeats(self, text: str) -> bool:
        """Return whether a text nearly repeats an earlier one. If it does not, it is added to them."""
        shingles = hash_shingles(text)
        keys = hash_bands(shingles)
        candidates = set()
        for indices, key in zip(self.indices, keys, strict=True):
            candidates.update(indices.get(key, ()))
        if any(self.are_similar(shingles, self.documents[index]) for index in candidates):
            return True
        for indices, key in zip(self.indices, keys, strict=True):
            indices[key].append(len(self.documents))
        self.documents.append(shingles)
        return False

    def are_similar(self, shingles: np.ndarray, others: np.ndarray) -> bool:
        smaller = min(len(shingles), len(others))
        larger = max(len(shingles), len(others))
        if smaller < self.threshold * larger:  # then they cannot be, and the comparison is slow
            return False
        return measure_similarity(shingles, others) >= self.threshold
