"""Texts that nearly repeat each other, and their similarity by Python's sets."""

import random

NUM_WORDS_OF_SHINGLE = 5
VOCABULARY = [f"name_{number}" for number in range(400)] + ["größe", "=", "(", ")"]


def list_shingles(text: str) -> set[tuple[str, ...]]:
    """Return every run of five words; a shorter text is one run."""
    words = text.split()
    num_shingles = max(len(words) - NUM_WORDS_OF_SHINGLE + 1, 1)
    return {tuple(words[first : first + NUM_WORDS_OF_SHINGLE]) for first in range(num_shingles)}


def jaccard_similarity(text: str, other: str) -> float:
    shingles = list_shingles(text)
    others = list_shingles(other)
    return len(shingles & others) / len(shingles | others)


def write_words(rng: random.Random, num_words: int = 300) -> list[str]:
    return rng.choices(VOCABULARY, k=num_words)


def change_words(rng: random.Random, words: list[str], num_changes: int) -> list[str]:
    """Return the words with `num_changes` of them replaced by words that occur nowhere else."""
    changed_words = list(words)
    for place in rng.sample(range(len(words)), num_changes):
        changed_words[place] = f"other_{rng.randrange(10**6)}"
    return changed_words
