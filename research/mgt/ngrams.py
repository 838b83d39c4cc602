"""Losses of n-gram models on the validation characters that the MGT study scores.

The probability of a character after a context is (count + p) / (count of the context + 1), where p
is that of the next lower order; below the unigram it is uniform. Counts are those of the training
split.
"""

from pathlib import Path

import numpy as np

from data.loader import ValidationBatches
from data.shards import open_corpus

SEQ_LEN = 32
NUM_SEQUENCES = 512  # eval_batches x global_batch_size of small.py
NAMES = ("unigram", "bigram", "trigram")


def encode_contexts(tokens: np.ndarray, order: int, vocab_size: int) -> np.ndarray:
    """Return the order tokens that end at each position as one number; position 0 is order - 1."""
    codes = np.zeros(len(tokens) - order + 1, dtype=np.int64)
    for offset in range(order):
        codes = codes * vocab_size + tokens[offset : len(tokens) - order + 1 + offset]
    return codes


def score_ngrams(
    train: np.ndarray, validation: np.ndarray, vocab_size: int, max_order: int = 3
) -> np.ndarray:
    """Return -log p of every validation token from position max_order - 1 on, by order.

    Args:
        train, validation: token ids, int64 (tokens,)

    Returns:
        float64 (max_order, validation tokens - max_order + 1), in nats
    """
    num_scored = len(validation) - max_order + 1
    probability = np.full(num_scored, 1 / vocab_size)
    losses = np.empty((max_order, num_scored))
    for order in range(1, max_order + 1):
        pair_counts = np.bincount(encode_contexts(train, order, vocab_size))
        codes = encode_contexts(validation, order, vocab_size)[-num_scored:]
        counts = lookup(pair_counts, codes)
        if order == 1:
            context_counts = np.full(num_scored, len(train))
        else:
            context_table = np.bincount(encode_contexts(train[:-1], order - 1, vocab_size))
            context_counts = lookup(context_table, codes // vocab_size)
        probability = (counts + probability) / (context_counts + 1)
        losses[order - 1] = -np.log(probability)
    return losses


def lookup(table: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Return the entries of a table, 0 past its end."""
    inside = codes < len(table)
    return np.where(inside, table[np.where(inside, codes, 0)], 0)


def compute_references(dataset: str | Path) -> dict[str, dict[str, float]]:
    """Return {"all", "first" or "second": {"unigram": mean loss, ...}}.

    all: the whole validation split. first: the sequences that tune the study. second: those on
    which its results are scored.
    """
    corpus = open_corpus(str(dataset))
    vocab_size = corpus.meta["vocab_size"]
    train = np.concatenate([np.asarray(shard) for shard in corpus.train]).astype(np.int64)
    validation = np.concatenate([np.asarray(shard) for shard in corpus.val]).astype(np.int64)
    losses = score_ngrams(train, validation, vocab_size)
    first_scored = len(validation) - losses.shape[1]

    batches = ValidationBatches(corpus.val, SEQ_LEN, vocab_size)
    parts = {"all": losses}
    for half in ("first", "second"):
        sequences = np.array(batches.spread(NUM_SEQUENCES, half))
        # targets of sequence i are the tokens i * SEQ_LEN + 1, ..., (i + 1) * SEQ_LEN
        targets = (sequences[:, None] * SEQ_LEN + 1 + np.arange(SEQ_LEN)).ravel()
        # the first token that has a trigram is first_scored
        inside = (targets >= first_scored) & (targets < len(validation))
        parts[half] = losses[:, targets[inside] - first_scored]
    return {
        part: dict(zip(NAMES, scored.mean(1).tolist(), strict=True))
        for part, scored in parts.items()
    }
