"""Sequences of documents of one length: their targets, and which of them are trained and scored."""

import contextlib
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from data.loader import TrainBatches, ValidationBatches
from data.sequences import SequenceLayout
from training.validation import evaluate
from utils.processes import World

# documents of five tokens and their labels, of which 0 is none
LABELED = np.random.default_rng(0).integers(0, 4, (9, 10)).astype(np.uint16)

WITH_LABELS = SequenceLayout(10, labels=True)


def read_labels(document: np.ndarray) -> list[int]:
    """Return the labels of a document, -1 for none."""
    return [label if label else -1 for label in document[5:].tolist()]


# ---- layouts ----


# ranges of positions that are trained, and all of these positions
TRAINED = [
    ([[0, 5]], {0, 1, 2, 3, 4}),
    ([[2, 4]], {2, 3}),
    ([[0, 1], [4, 5]], {0, 4}),
    (None, {0, 1, 2, 3, 4}),
]


@pytest.mark.parametrize(("ranges", "trained_positions"), TRAINED)
def test_labels_are_the_targets_of_trained_positions(ranges, trained_positions):
    layout = SequenceLayout(10, labels=True, trained=ranges)
    assert layout.seq_len == 5
    ids, targets = layout.ids_and_targets(LABELED)
    assert ids.dtype == targets.dtype == torch.int64
    assert ids.tolist() == LABELED[:, :5].tolist()
    for document, document_targets in zip(LABELED, targets.tolist()):
        assert document_targets == [
            label if position in trained_positions else -1
            for position, label in enumerate(read_labels(document))
        ]


@pytest.mark.parametrize(("ranges", "trained_positions"), TRAINED)
def test_next_tokens_are_the_targets_of_trained_positions(ranges, trained_positions):
    layout = SequenceLayout(6, trained=ranges)
    assert layout.seq_len == 5
    ids, targets = layout.ids_and_targets(LABELED[:, :6])
    assert ids.tolist() == LABELED[:, :5].tolist()
    for document, document_targets in zip(LABELED, targets.tolist()):
        assert document_targets == [
            token if position in trained_positions else -1
            for position, token in enumerate(document[1:6].tolist())
        ]


def test_a_corpus_of_documents_of_any_length_has_no_layout():
    assert SequenceLayout.from_meta({"vocab_size": 9}) is None


def test_a_layout_is_read_from_meta_json():
    meta = {"window_tokens": 10, "labels": True, "trained": [[1, 5]], "scored": [[2, 5]]}
    expected = SequenceLayout(10, labels=True, trained=[[1, 5]], scored=[[2, 5]])
    assert SequenceLayout.from_meta(meta) == expected


CONTRADICTIONS = [
    (11, {"labels": True}, "window_tokens=11 is odd"),
    (10, {"scored": [[3, 10]]}, "\\[3, 10\\] is not a range of positions of a sequence of 9"),
    (10, {"scored": [[4, 4]]}, "\\[4, 4\\] is not a range"),
    (10, {"trained": [[4, 9]], "scored": [[3, 9]]}, r"scored=\[\[3, 9\]\] has positions that"),
]


@pytest.mark.parametrize(("tokens", "meta", "message"), CONTRADICTIONS)
def test_a_meta_json_that_contradicts_itself(tokens, meta, message):
    with pytest.raises(ValueError, match=message):
        SequenceLayout.from_meta({"window_tokens": tokens, **meta})


# ---- batches ----


@pytest.fixture
def shards() -> list[np.ndarray]:
    """Return the documents as two shards, of which the first ends within a document."""
    return np.split(LABELED.ravel(), [37])


def list_sequences(labels: bool) -> list[tuple[list[int], list[int]]]:
    """Return the ids and targets of every document."""
    if labels:
        return [(document[:5].tolist(), read_labels(document)) for document in LABELED]
    return [(document[:-1], document[1:]) for document in LABELED.tolist()]


def pair_rows(
    batch: tuple[torch.Tensor, torch.Tensor],
) -> list[tuple[list[int], list[int]]]:
    """Return the ids and targets of every sequence of a batch."""
    ids, targets = batch
    return list(zip(ids.tolist(), targets.tolist()))


@pytest.mark.parametrize(("labels", "seq_len"), [(True, 5), (False, 9)])
def test_an_epoch_of_training_has_every_document_once(labels, seq_len, shards):
    batches = TrainBatches(shards, seq_len, 3, 0, layout=SequenceLayout(10, labels))
    assert batches.num_sequences == 9
    assert batches.num_dropped_tokens == 0
    sequences = [sequence for step in range(3) for sequence in pair_rows(batches.get(step, 0, 3))]
    assert sorted(sequences) == sorted(list_sequences(labels))


@pytest.mark.parametrize(("labels", "seq_len"), [(True, 5), (False, 9)])
def test_a_validation_batch_holds_documents_and_padding(labels, seq_len, shards):
    batches = ValidationBatches(shards, seq_len, layout=SequenceLayout(10, labels))
    assert batches.num_sequences == 9
    sequences = list_sequences(labels)
    padding = ([0] * seq_len, [-1] * seq_len)
    assert pair_rows(batches.get([8, 2], 3)) == [sequences[8], sequences[2], padding]


@pytest.mark.parametrize(("labels", "seq_len"), [(True, 5), (False, 9)])
def test_a_block_size_other_than_the_documents_length_is_refused(labels, seq_len, shards):
    message = rf"block_size=6, but .* 10 tokens each, .* give --block_size={seq_len}"
    with pytest.raises(ValueError, match=message):
        TrainBatches(shards, 6, 3, 0, layout=SequenceLayout(10, labels))


def test_a_validation_split_without_a_document_is_refused(shards):
    with pytest.raises(ValueError, match="validation split has 4 tokens"):
        ValidationBatches([shards[0][:4]], 5, layout=WITH_LABELS)


# ---- weights of micro-batches ----


@pytest.mark.parametrize("micro_batch_size", [1, 3, 6])
def test_a_micro_batch_counts_by_its_targets(micro_batch_size):
    documents = LABELED.copy()
    documents[[1, 4], 5:] = 0
    batches = TrainBatches([documents.ravel()], 5, 6, 0, layout=WITH_LABELS)
    for step in range(4):
        counts = []
        for first in range(0, 6, micro_batch_size):
            _, targets = batches.get(step, first, micro_batch_size)
            counts.append(int((targets != -1).sum()))
        weights = batches.loss_weights(step, micro_batch_size)
        np.testing.assert_allclose(weights, counts / np.mean(counts), rtol=1e-6)
        assert weights.dtype == torch.float32


@pytest.mark.parametrize("layout", [SequenceLayout(10), SequenceLayout(10, trained=[[2, 4]]), None])
def test_next_tokens_need_no_weights(layout):
    # 0 is a target too, where it is not a label
    batches = TrainBatches([LABELED.ravel()], 9, 4, 0, 2**16, layout)
    assert batches.loss_weights(0, 2) is None


def test_micro_batches_with_as_many_labels_have_weight_1():
    """A weight in every step or in none, because the graph of a step has it or not."""
    batches = TrainBatches([np.maximum(LABELED.ravel(), 1)], 5, 4, 0, layout=WITH_LABELS)
    assert batches.loss_weights(0, 2).tolist() == [1, 1]


def test_documents_without_labels_have_weight_0():
    batches = TrainBatches([np.zeros(90, np.uint16)], 5, 4, 0, layout=WITH_LABELS)
    assert batches.loss_weights(0, 2).tolist() == [0, 0]


# ---- evaluation ----


class TableModel(torch.nn.Module):
    """A model whose logits are looked up by the current token."""

    def __init__(self):
        super().__init__()
        self.table = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
        self.config = SimpleNamespace(vocab_size=4)

    def forward(self, ids, targets=None, return_logits=False):
        logits = self.table[ids]
        if targets is None:
            return logits, None
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
        return logits if return_logits else None, loss


TRAINED_POSITIONS = (1, 2, 3, 4)
SCORED_POSITIONS = (1, 3, 4)
SCORED_RANGES = ((1, 2), (3, 5))


@pytest.fixture
def documents() -> np.ndarray:
    """Return documents, of which number 3 has no label at a trained position."""
    documents = LABELED.copy()
    documents[3, 6:] = 0
    return documents


def compute_losses(model: TableModel, document: np.ndarray) -> list[float]:
    """Return the loss at each trained position that has a label."""
    log_probabilities = torch.log_softmax(model.table[document[:5].tolist()].double(), dim=1)
    return [
        -log_probabilities[position, document[5 + position]].item()
        for position in TRAINED_POSITIONS
        if document[5 + position]
    ]


def score_answers(model: TableModel, document: np.ndarray) -> list[bool]:
    """Return whether the most likely label is right at each scored position that has one."""
    answers = model.table[document[:5].tolist()].argmax(dim=1)
    return [
        answers[position].item() == document[5 + position]
        for position in SCORED_POSITIONS
        if document[5 + position]
    ]


def make_validation_batches(
    documents: np.ndarray, scored: Sequence[Sequence[int]] | None
) -> ValidationBatches:
    layout = SequenceLayout(10, labels=True, trained=((1, 5),), scored=scored)
    return ValidationBatches([documents.ravel()], 5, layout=layout)


@pytest.mark.parametrize("batch_size", [1, 4, 9])
def test_the_loss_is_the_mean_over_trained_labels(documents, batch_size):
    model = TableModel()
    evaluation = evaluate(
        model,
        make_validation_batches(documents, SCORED_RANGES),
        list(range(9)),
        batch_size,
        World(0, 1, torch.device("cpu")),
        contextlib.nullcontext(),
    )
    losses = np.concatenate([compute_losses(model, document) for document in documents])
    assert evaluation["loss"] == pytest.approx(losses.mean(), rel=1e-6)


@pytest.mark.parametrize("batch_size", [1, 4, 9])
def test_answers_are_counted_at_scored_labels(documents, batch_size):
    model = TableModel()
    evaluation = evaluate(
        model,
        make_validation_batches(documents, SCORED_RANGES),
        list(range(9)),
        batch_size,
        World(0, 1, torch.device("cpu")),
        contextlib.nullcontext(),
    )
    answers = [score_answers(model, document) for document in documents]
    assert evaluation["accuracy"] == pytest.approx(np.mean(np.concatenate(answers)))
    exact_matches = [all(document) for document in answers if document]
    assert evaluation["exact_match"] == pytest.approx(np.mean(exact_matches))


@pytest.mark.parametrize("batch_size", [1, 4, 9])
def test_documents_without_answers_do_not_count_as_wrong(documents, batch_size):
    """All labels that exist are the model's answers, but in one document one is not; document 3 has none."""
    model = TableModel()
    model.table[:, 0] = -9  # label 0 stands for none
    answers = model.table[documents[:, :5].astype(int)].argmax(dim=2).numpy()
    documents[:, 5:] = np.where(documents[:, 5:] > 0, answers, 0)
    documents[0, 5:] = 1 + answers[0] % 3
    evaluation = evaluate(
        model,
        make_validation_batches(documents, SCORED_RANGES),
        list(range(9)),
        batch_size,
        World(0, 1, torch.device("cpu")),
        contextlib.nullcontext(),
    )
    assert evaluation["exact_match"] == 7 / 8
