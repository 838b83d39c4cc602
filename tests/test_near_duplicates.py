"""Near duplicates, against the Jaccard similarity of Python's sets, over all pairs."""

import random
from collections.abc import Iterator
from itertools import combinations

import numpy as np
import pytest
from near_duplicates_helpers import change_words, jaccard_similarity, list_shingles, write_words

from data.python_library import near_duplicates
from data.python_library.near_duplicates import (
    BANDS,
    ROWS,
    NearDuplicates,
    hash_bands,
    hash_shingles,
    measure_similarity,
)


def make_pairs(count: int, seed: int = 0) -> Iterator[tuple[str, str]]:
    """Yield texts, each with a copy of it.

    In the copy up to sixty words are changed, and up to a fifth is added at the end.
    """
    rng = random.Random(seed)
    for index in range(count):
        words = write_words(rng, rng.randrange(6, 400))
        added_words = write_words(rng, len(words) * (index % 5) // 20)
        changed_words = change_words(rng, words, min(index % 61, len(words)))
        yield " ".join(words), "\n  ".join(changed_words + added_words)


def test_a_document_has_as_many_hashes_as_shingles():
    for text, _ in make_pairs(200):
        assert len(hash_shingles(text)) == len(list_shingles(text))


def test_the_similarity_is_that_of_jaccard():
    for text, other in make_pairs(200):
        similarity = measure_similarity(hash_shingles(text), hash_shingles(other))
        assert similarity == pytest.approx(jaccard_similarity(text, other), abs=1e-12)


@pytest.mark.parametrize(
    "text", ["a", "a b", "a b c d", "a b c d e", "größe\t\n= 尺寸", "x " * 500]
)
def test_short_texts_and_repetitions_are_sets_too(text):
    shingles = hash_shingles(text)
    assert len(shingles) == len(list_shingles(text))
    assert measure_similarity(shingles, hash_shingles(f"  {text}\n")) == 1
    assert measure_similarity(shingles, hash_shingles("else where or here now")) == 0


def test_bands_are_equal_as_often_as_sets_are_similar():
    """The hash of a band is that of ROWS smallest hashes: it is equal with probability s^ROWS."""
    observed = []
    expected = []
    for text, other in make_pairs(400, seed=1):
        bands = hash_bands(hash_shingles(text))
        other_bands = hash_bands(hash_shingles(other))
        observed.append(np.mean(np.equal(bands, other_bands)))
        expected.append(jaccard_similarity(text, other) ** ROWS)
    assert np.mean(observed) == pytest.approx(np.mean(expected), abs=0.02)
    assert np.corrcoef(observed, expected)[0, 1] > 0.93


def test_a_long_text_is_hashed_in_chunks(monkeypatch):
    shingles = hash_shingles(" ".join(write_words(random.Random(3), 3000)))
    bands = hash_bands(shingles)
    monkeypatch.setattr(near_duplicates, "CHUNK", 7)
    assert hash_bands(shingles) == bands
    assert len(bands) == BANDS


@pytest.mark.parametrize(("threshold", "max_missed"), [(0.5, 20), (0.8, 0), (0.95, 0)])
def test_the_threshold_decides_about_a_pair(threshold, max_missed):
    """The bands are made for 0.8; at 0.5, half of the pairs that should be found have no equal band."""
    num_missed = 0
    for text, other in make_pairs(300, seed=2):
        earlier_documents = NearDuplicates(threshold)
        assert not earlier_documents.repeats(text)
        is_found = earlier_documents.repeats(other)
        is_similar = jaccard_similarity(text, other) >= threshold
        assert is_similar or not is_found  # none below the threshold is ever found
        num_missed += is_similar and not is_found
    assert num_missed <= max_missed


def test_a_text_is_compared_with_those_before_it_that_repeated_none():
    """Take families of similar texts, in any order."""
    rng = random.Random(5)
    texts = []
    for _ in range(12):
        words = write_words(rng, 120)
        texts += [" ".join(change_words(rng, words, rng.randrange(8))) for _ in range(8)]
    rng.shuffle(texts)
    earlier_documents = NearDuplicates()
    expected_documents = []
    for text in texts:
        is_similar = any(jaccard_similarity(text, other) >= 0.8 for other in expected_documents)
        assert earlier_documents.repeats(text) == is_similar
        if not is_similar:
            expected_documents.append(text)
    assert 12 <= len(expected_documents) < len(texts)
    assert all(jaccard_similarity(*pair) < 0.8 for pair in combinations(expected_documents, 2))
