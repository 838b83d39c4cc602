"""What the tests of analyses share."""

import numpy as np
import torch
from helpers import SMALL

from data import shards
from data.loader import ValidationBatches
from model import build
from model.causality import move_parameters
from model.gpt import GPT
from research.analysis.common import LoadedRun, select_sequences


def build_moved(model_name: str, **keys) -> GPT:
    """Return a small model in float64 whose parameters are all off their initial values."""
    model = build(model_name, **{**SMALL, "block_size": 10, **keys}).double()
    return move_parameters(model).eval()


def open_run(model: GPT, corpus, num_sequences: int) -> LoadedRun:
    """Return a model and sequences of the corpus, as the commands measure them."""
    batches = ValidationBatches(shards.open_corpus(str(corpus)).val, model.config.block_size)
    return LoadedRun("", model, None, batches, select_sequences(batches, num_sequences))


class LabeledDocuments:
    """Validation sequences with targets at some positions alone.

    Args:
        documents: as many ids as labels, of which 0 is none, (count, 2 * seq_len)
    """

    def __init__(self, documents: np.ndarray):
        ids, labels = torch.from_numpy(documents.astype(np.int64)).chunk(2, dim=1)
        self.ids = ids
        self.targets = labels.masked_fill(labels == 0, -1)

    def get(self, sequences: list[int], batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        assert batch_size == len(sequences)
        return self.ids[sequences], self.targets[sequences]
