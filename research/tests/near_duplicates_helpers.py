"""What tests of near duplicates and others share."""


def runs(text) -> set[tuple]:
    """Every run of five words; a shorter text is one run."""
    words = text.split()
    return {tuple(words[i : i + 5]) for i in range(max(len(words) - 4, 1))}


def jaccard(one: str, other: str) -> float:
    return len(runs(one) & runs(other)) / len(runs(one) | runs(other))


def written(rng, words=300) -> list[str]:
    return rng.choices([f"name_{i}" for i in range(400)] + ["größe", "=", "(", ")"], k=words)


def changed(rng, words, changes) -> list[str]:
    words = list(words)
    for place in rng.sample(range(len(words)), changes):
        words[place] = f"other_{rng.randrange(10**6)}"
    return words
