"""Windows of documents of one length: which targets they have, and which count and are scored."""

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from data.loader import TrainBatches, ValidationBatches
from data.sequences import SequenceLayout
from model.loss import MAX_LOGITS
from training.distributed import World
from training.validation import evaluate

# five tokens and their labels, 0 for none
LABELLED = np.random.default_rng(0).integers(0, 4, (9, 10))


def expected(document) -> tuple[list, list]:
    ids, labels = document[:5].tolist(), document[5:].tolist()
    return ids, [label if label else -1 for label in labels]


@pytest.mark.parametrize("trained", [[[0, 5]], [[2, 4]], [[0, 1], [4, 5]], None])
def test_labels_are_the_second_half_and_only_trained_positions_have_targets(trained):
    kept = [any(first <= i < end for first, end in trained or [[0, 5]]) for i in range(5)]
    layout, plain = (
        SequenceLayout(10, labels=True, trained=trained),
        SequenceLayout(6, trained=trained),
    )
    assert layout.seq_len == plain.seq_len == 5
    for document in LABELLED:
        found = layout.ids_and_targets(document[None].astype(np.uint16))
        assert {part.dtype for part in found} == {torch.int64}
        ids, labels = expected(document)
        targets = [label if keep else -1 for label, keep in zip(labels, kept)]
        assert [part[0].tolist() for part in found] == [ids, targets]
        targets = [token if keep else -1 for token, keep in zip(document[1:6].tolist(), kept)]
        found = plain.ids_and_targets(document[None, :6])
        assert [part[0].tolist() for part in found] == [ids, targets]


@pytest.mark.parametrize("labels", [True, False])
def test_batches_hold_whole_documents(labels):
    cuts = [part.astype(np.uint16) for part in np.split(LABELLED.ravel(), [37])]
    layout, length = SequenceLayout(10, labels), 5 if labels else 9
    wanted = [expected(document) for document in LABELLED]
    if not labels:
        wanted = [(row[:-1], row[1:]) for row in LABELLED.tolist()]
    train = TrainBatches(cuts, length, 3, 0, layout=layout)
    val = ValidationBatches(cuts, length, layout=layout)
    assert (train.num_sequences, train.num_dropped_tokens, val.num_sequences) == (9, 0, 9)
    epoch = [train.get(step, 0, 3) for step in range(3)]
    rows = [(ids.tolist(), targets.tolist()) for batch in epoch for ids, targets in zip(*batch)]
    assert sorted(rows) == sorted(wanted)
    rows = [(i.tolist(), t.tolist()) for i, t in zip(*val.get([8, 2], 3))]
    assert rows == [wanted[8], wanted[2], ([0] * length, [-1] * length)]
    message = rf"block_size=6, but .* 10 tokens each, .* give --block_size={length}"
    with pytest.raises(ValueError, match=message):
        TrainBatches(cuts, 6, 3, 0, layout=layout)
    with pytest.raises(ValueError, match="validation split has 4 tokens"):
        ValidationBatches([cuts[0][:4]], length, layout=layout)


@pytest.mark.parametrize("rows", [1, 3, 6])
def test_a_micro_batch_counts_by_its_targets(rows):
    documents = LABELLED.astype(np.uint16)
    documents[[1, 4], 5:] = 0
    batches = TrainBatches([documents.ravel()], 5, 6, 0, layout=SequenceLayout(10, labels=True))
    for step in range(4):
        counts = np.array([(batches.get(step, i, rows)[1] != -1).sum() for i in range(0, 6, rows)])
        weights = batches.loss_weights(step, rows)
        if (counts == counts[0]).all() and counts[0]:
            assert weights is None
        else:
            np.testing.assert_allclose(weights, counts / counts.mean(), rtol=1e-6)
            assert weights.dtype == torch.float32


def test_where_all_count_the_same_there_is_no_share():
    tokens = LABELLED.astype(np.uint16).ravel()  # 0 is a target where it is no label
    for layout in (SequenceLayout(10), SequenceLayout(10, trained=[[2, 4]]), None):
        assert TrainBatches([tokens], 9, 4, 0, 2**16, layout).loss_weights(0, 2) is None
    full = [np.maximum(tokens, 1)]
    assert (
        TrainBatches(full, 5, 4, 0, layout=SequenceLayout(10, labels=True)).loss_weights(0, 2)
        is None
    )
    none = TrainBatches([np.zeros(90, np.uint16)], 5, 4, 0, layout=SequenceLayout(10, labels=True))
    assert none.loss_weights(0, 2).tolist() == [0, 0]


class Alone(World):
    """One of several processes whose sums are its own."""

    def sum(self, *values):
        return list(values)


class Fixed(torch.nn.Module):
    """Logits that depend on the token alone."""

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


@pytest.mark.parametrize("rows", [1, 4, 9])
@pytest.mark.parametrize("at_once", [1, 2**27])
@pytest.mark.parametrize("scored", [None, ((1, 2), (3, 5))])
def test_losses_are_of_trained_positions_and_answers_of_scored(monkeypatch, rows, at_once, scored):
    """Of each window and of all, where two processes see every second one."""
    monkeypatch.setitem(MAX_LOGITS, "cpu", at_once)
    documents = LABELLED.copy()
    documents[3, 6:] = 0  # no label but at position 0
    layout = SequenceLayout(10, labels=True, trained=((1, 5),), scored=scored)
    batches = ValidationBatches([documents.ravel()], 5, layout=layout)
    model, cast, wanted, answers = Fixed(), contextlib.nullcontext(), [], []
    for document in documents:
        p = torch.log_softmax(model.table[document[:5]].double(), dim=1).numpy()
        labels = {i: label for i, label in enumerate(document[5:].tolist()) if label and i}
        wanted.append([-p[i, label] for i, label in labels.items()])
        answers.append([p[i].argmax() == label for i, label in labels.items() if i != 2])
    shown = list(range(9))
    alone = evaluate(model, batches, shown, rows, World(0, 1, torch.device("cpu")), cast)
    assert alone["loss"] == pytest.approx(np.mean(np.concatenate(wanted)), rel=1e-6)
    if scored:
        assert alone["accuracy"] == pytest.approx(np.mean(np.concatenate(answers)))
        assert alone["exact_match"] == pytest.approx(np.mean([bool(a) and all(a) for a in answers]))
    shown, total = [0, 2, 3, 5, 8], 0
    for rank in range(2):
        world = Alone(rank, 2, torch.device("cpu"))
        total = (
            total
            + evaluate(model, batches, shown, rows, world, cast, return_sequence_losses=True)[
                "losses"
            ]
        )
    means = [np.mean(wanted[i]) if wanted[i] else np.nan for i in shown]
    assert total.dtype == np.float32
    np.testing.assert_allclose(total, means, rtol=1e-6)
    assert np.isnan(total).tolist() == [False, False, True, False, False]


def test_what_meta_json_says():
    assert SequenceLayout.from_meta({"vocab_size": 9}) is None
    # as it was once
    assert SequenceLayout.from_meta({"window_tokens": 11, "scored_from": 5}) == SequenceLayout(
        11, scored=[[5, 10]]
    )
    meta = {"window_tokens": 10, "labels": True, "trained": [[1, 5]], "scored": [[2, 5]]}
    assert SequenceLayout.from_meta(meta) == SequenceLayout(10, True, [[1, 5]], [[2, 5]])


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
