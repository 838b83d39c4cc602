"""Documents that nearly repeat an earlier one, found by MinHash in bands and decided by exact Jaccard similarity.

A document is the set of its shingles, runs of WORDS words. The least of a hash over a set is the same for two sets with
the probability of their similarity (Broder, "On the resemblance and containment of documents", 1997); a pair whose ROWS
least hashes agree in one of BANDS bands is compared shingle by shingle (Leskovec, Rajaraman, Ullman, "Mining of Massive
Datasets", section 3.4). No pair below the threshold is called one; a pair of similarity s is missed with probability
(1 - s^ROWS)^BANDS: 0.0004 at 0.8.
"""

from collections import defaultdict
from zlib import crc32

import numpy as np

WORDS = 5
BANDS, ROWS = 20, 5
THRESHOLD = 0.8
CHUNK = 4096  # shingles hashed at once, which fit a cache with all their hashes
_rng = np.random.default_rng(0)
FACTORS = _rng.integers(0, 2**63, (BANDS * ROWS, 1), dtype=np.uint64) * np.uint64(2) + np.uint64(1)
TERMS = _rng.integers(0, 2**63, (BANDS * ROWS, 1), dtype=np.uint64)


def shingles(text: str) -> np.ndarray:
    """The document as a set: hashes of its runs of WORDS words, sorted, each once, uint64; one for a shorter text."""
    words = np.fromiter(map(crc32, text.encode().split()), dtype=np.uint64)
    words = np.pad(words, (0, max(WORDS - len(words), 0)))
    return np.unique(
        mixed([words[first : len(words) - WORDS + 1 + first] for first in range(WORDS)])
    )


def mixed(parts) -> np.ndarray:
    """A hash of several uint64 arrays, position by position. The arithmetic wraps by design."""
    state = np.zeros_like(parts[0])
    for part in parts:
        state = (state ^ part) * np.uint64(0x9E3779B97F4A7C15)
        state ^= state >> np.uint64(29)
    return state


def band_keys(document: np.ndarray) -> list[int]:
    """A hash of each band of the document's MinHash signature."""
    signature = np.full(BANDS * ROWS, 2**64 - 1, dtype=np.uint64)
    for first in range(0, len(document), CHUNK):
        hashes = FACTORS * document[first : first + CHUNK] + TERMS  # (BANDS * ROWS, CHUNK)
        signature = np.minimum(signature, hashes.min(axis=1))
    return mixed(signature.reshape(BANDS, ROWS).T).tolist()


def similarity(one: np.ndarray, other: np.ndarray) -> float:
    """Jaccard similarity of two sets: what they share over what they have together."""
    shared = len(np.intersect1d(one, other, assume_unique=True))
    return shared / (len(one) + len(other) - shared)


class NearDuplicates:
    """The documents kept so far. What nearly repeats one of them is not kept, so an earlier document always wins."""

    def __init__(self, threshold: float = THRESHOLD):
        self.threshold, self.kept = threshold, []
        self.bands = [defaultdict(list) for _ in range(BANDS)]

    def repeats(self, text: str) -> bool:
        """Whether the similarity to a document that was kept is the threshold or more; otherwise this one is kept."""
        document = shingles(text)
        keys = band_keys(document)
        candidates = {number for band, key in zip(self.bands, keys) for number in band.get(key, ())}
        if any(self.alike(document, self.kept[number]) for number in candidates):
            return True
        for band, key in zip(self.bands, keys):
            band[key].append(len(self.kept))
        self.kept.append(document)
        return False

    def alike(self, one: np.ndarray, other: np.ndarray) -> bool:
        smaller, larger = sorted((len(one), len(other)))
        return smaller >= self.threshold * larger and similarity(one, other) >= self.threshold
