"""The data of a run: its corpus, its batches, and the micro-batches that a rank trains on."""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from data import tokenizer
from data.loader import (
    TrainBatches,
    ValidationBatches,
    open_train_batches,
    open_validation_batches,
    prefetched,
)
from data.shards import Corpus, open_corpus
from data.tokenizer import Tokenizer
from model.gpt import GPTConfig
from training.config import TrainConfig
from utils.processes import World


class Data(NamedTuple):
    """The corpus of a run, its tokenizer and its batches."""

    corpus: Corpus
    tokenizer: Tokenizer
    train: TrainBatches
    val: ValidationBatches


def open_data(config: TrainConfig, model_config: GPTConfig) -> Data:
    """Open the corpus and return it with its training and validation batches.

    Raises:
        ValueError: the corpus is missing, damaged or too short, or has more tokens than the model
    """
    corpus = open_corpus(config.dataset)
    # the model may have more tokens than the corpus, for example a multiple of 64, but not fewer
    vocab_size = corpus.meta["vocab_size"]
    if vocab_size > model_config.vocab_size:
        raise ValueError(
            f"vocab_size={model_config.vocab_size}, but {corpus.path} has {vocab_size} tokens"
        )
    # a corpus that others have made may name the wrong tokenizer
    encoding = tokenizer.read(corpus.path)
    if vocab_size != encoding.n_vocab:
        raise ValueError(
            f"{corpus.path}: vocab_size is {vocab_size} in meta.json, but its tokenizer has "
            f"{encoding.n_vocab} tokens; rerun prepare.py"
        )

    seq_len = model_config.block_size
    train_batches = open_train_batches(corpus, seq_len, config.global_batch_size, config.seed)
    val_batches = open_validation_batches(corpus, seq_len)
    if config.eval_part != "all" and val_batches.num_sequences < 2:
        raise ValueError(
            f"eval_part={config.eval_part}: the validation split of {corpus.path} has fewer than "
            f"two sequences of block_size={seq_len}; give a smaller block_size, or eval_part=all"
        )
    return Data(corpus, encoding, train_batches, val_batches)


class MicroBatch(NamedTuple):
    """The input of one forward pass, on the device."""

    ids: torch.Tensor  # int64 (B, T)
    targets: torch.Tensor  # int64 (B, T), -1 where there is none


def micro_batches(
    config: TrainConfig, batches: TrainBatches, first_step: int, world: World
) -> Iterator[MicroBatch]:
    """Yield the micro-batches of this rank from a step, counted from 1, to the end of the run.

    A thread prepares them in advance. Micro-batch m of rank r holds the sequences from
    (m * world_size + r) * size on, so that a step's batch does not depend on the number of ranks.
    """
    size = config.local_micro_batch_size
    first_sequences = range(world.rank * size, config.global_batch_size, world.world_size * size)
    requests = (
        (step_index, first_sequence)
        for step_index in range(first_step - 1, config.max_steps)
        for first_sequence in first_sequences
    )

    def read(request: tuple[int, int]) -> tuple[torch.Tensor, ...]:
        step_index, first_sequence = request
        return batches.get(step_index, first_sequence, size)

    for tensors in prefetched(read, requests, world.device):
        yield MicroBatch(*tensors)
