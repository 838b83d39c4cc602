"""Batches are compared with plain slices of the concatenated shards.

Their tokens are distinct, so that the first token of a sequence tells where it starts.
"""

import itertools
import math
import threading
from itertools import islice

import numpy as np
import pytest
import torch

from data.loader import JoinedShards, TrainBatches, ValidationBatches, keyed_permutation, prefetched
from data.shards import DamagedShard, read_shard, write_shard
from training.batches import micro_batches
from training.config import TrainConfig
from utils.processes import World


def split_into_shards(tokens: np.ndarray, sizes: tuple[int, ...]) -> list[np.ndarray]:
    """Return uint16 shards of the given sizes and one with the remaining tokens."""
    return [part.astype("<u2") for part in np.split(tokens, np.cumsum(sizes))]


def make_distinct_tokens(count: int) -> np.ndarray:
    return np.random.default_rng(count).permutation(np.arange(1, 2**16))[:count]


@pytest.mark.parametrize("sizes", [(), (1, 1, 1), (3, 0, 1, 9), (0, 0, 2), (30,)])
def test_joined_shards_read_as_their_concatenation(sizes):
    tokens = make_distinct_tokens(30)
    stream = JoinedShards(split_into_shards(tokens, sizes))
    assert len(stream) == 30
    starts = np.random.default_rng(0).permutation(31)
    for count in range(33):
        # the end is padded with zeros
        slices = [tokens[start : start + count].tolist() for start in starts]
        expected = [part + [0] * (count - len(part)) for part in slices]
        assert stream.read(starts, count).tolist() == expected


def test_a_token_outside_the_vocabulary_is_named(tmp_path):
    write_shard(tmp_path / "a_train_0.bin", np.array([1, 2, 3]))
    write_shard(tmp_path / "a_train_1.bin", np.array([4, 300, 5]))
    stream = JoinedShards([read_shard(path) for path in sorted(tmp_path.iterdir())], 300)
    assert stream.read(np.array([0]), 4).tolist() == [[1, 2, 3, 4]]
    message = r"a_train_1\.bin holds token id 300 at 1, but the vocabulary has 300 ids"
    with pytest.raises(DamagedShard, match=message):
        stream.read(np.array([0, 2]), 3)


# ---- permutation ----


@pytest.mark.parametrize("size", [*range(1, 71), 1000, 65_536, 65_537])
def test_permutation_is_a_bijection(size):
    image = keyed_permutation(np.arange(size), size, 2**64 - 1)
    assert (np.sort(image) == np.arange(size)).all()


def test_permutation_of_one_index_is_that_of_all():
    image = keyed_permutation(np.arange(1000), 1000, 5)
    alone = [keyed_permutation(np.array([index]), 1000, 5)[0] for index in range(40)]
    assert alone == image[:40].tolist()


def test_permutation_looks_random():
    image = keyed_permutation(np.arange(1000), 1000, 5)
    assert abs(np.corrcoef(np.arange(1000), image)[0, 1]) < 0.1  # standard deviation 0.03
    # 63% of the differences are distinct in a random order, and one alone in a rotation
    assert len(np.unique(np.diff(image) % 1000)) > 500


def test_each_key_permutes_in_another_way():
    orders = [keyed_permutation(np.arange(20), 20, key).tolist() for key in range(200)]
    assert len({tuple(order) for order in orders}) == 200
    # a first element that is uniform over 20 values has none of them 0 or 40 times in 200 draws
    counts = np.bincount([order[0] for order in orders], minlength=20)
    assert counts.min() > 0
    assert counts.max() < 40


# ---- training sequences ----

SEQ_LEN = 4
# one sequence, one more token, several sequences and a target, one token more, and one token less
# than another sequence needs
LENGTHS = [5, 6, 8, 9, 12, 13, 40, 41, 43]


def make_train_batches(num_tokens: int, seed: int = 1) -> TrainBatches:
    """Return batches of 3 sequences of distinct tokens in several shards."""
    sizes = (7, 1, 2, 11) if num_tokens > 25 else (1, 2)
    shards = split_into_shards(make_distinct_tokens(num_tokens), sizes)
    return TrainBatches(shards, SEQ_LEN, 3, seed)


def find_starts(batches: TrainBatches, num_tokens: int, num_epochs: int) -> np.ndarray:
    """Return where the sequences of each epoch start: (epochs, sequences).

    An epoch has one sequence fewer than would fit, or the only one. All ids and targets are checked.
    """
    tokens = make_distinct_tokens(num_tokens).tolist()
    position = {token: index for index, token in enumerate(tokens)}
    num_sequences = max((num_tokens - 1) // SEQ_LEN - 1, 1)
    starts = []
    for step in range(math.ceil(num_epochs * num_sequences / 3)):
        ids, targets = batches.get(step, 0, 3)
        assert ids.dtype == targets.dtype == torch.int64
        for sequence_ids, sequence_targets in zip(ids.tolist(), targets.tolist()):
            start = position[sequence_ids[0]]
            assert sequence_ids == tokens[start : start + SEQ_LEN]
            assert sequence_targets == tokens[start + 1 : start + SEQ_LEN + 1]
            starts.append(start)
    return np.reshape(starts[: num_epochs * num_sequences], (num_epochs, num_sequences))


@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_every_epoch_serves_every_sequence_once_from_any_offset(num_tokens):
    batches = make_train_batches(num_tokens)
    starts = find_starts(batches, num_tokens, 80)
    for epoch in starts:
        offset = epoch.min()
        assert sorted(epoch) == list(range(offset, offset + SEQ_LEN * len(epoch), SEQ_LEN))
    num_sequences = starts.shape[1]
    last_offset = num_tokens - 1 - SEQ_LEN * num_sequences
    assert set(starts.min(axis=1)) == set(range(last_offset + 1))
    used = {position for start in starts[0] for position in range(start, start + SEQ_LEN + 1)}
    assert batches.num_dropped_tokens == num_tokens - len(used)


def test_order_and_offset_change_with_epoch_and_with_seed():
    starts = [find_starts(make_train_batches(103, seed), 103, 30) for seed in (1, 2)]
    orders = {tuple((epoch - epoch.min()) // SEQ_LEN) for run in starts for epoch in run}
    assert len(orders) == 60
    offsets = [run.min(axis=1).tolist() for run in starts]
    assert len(set(offsets[0])) > 3
    assert len(set(offsets[1])) > 3
    assert offsets[0] != offsets[1]


def test_a_split_without_a_sequence_is_refused():
    [one] = split_into_shards(make_distinct_tokens(1), ())
    with pytest.raises(ValueError, match="training split has 4 tokens, but block_size=4 needs 5"):
        TrainBatches([one] * SEQ_LEN, SEQ_LEN, 2, 0)
    with pytest.raises(ValueError, match="validation split has 1 tokens, but needs 2"):
        ValidationBatches([one], SEQ_LEN)


# ---- validation sequences ----


@pytest.mark.parametrize("num_tokens", [2, 4, 5, 6, 41, 45])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_validation_predicts_every_token_but_the_first_once(num_tokens, batch_size):
    tokens = make_distinct_tokens(num_tokens)
    sizes = (1, 2) if num_tokens > 3 else ()
    batches = ValidationBatches(split_into_shards(tokens, sizes), SEQ_LEN)
    predicted = []
    for first in range(0, batches.num_sequences, batch_size):
        sequences = list(range(first, min(first + batch_size, batches.num_sequences)))
        ids, targets = batches.get(sequences, batch_size)
        assert ids.shape == targets.shape == (batch_size, SEQ_LEN)
        # the last sequence is padded, and the last batch has padding alone after it
        for row in range(batch_size):
            start = (first + row) * SEQ_LEN
            pairs = list(zip(tokens[start:-1].tolist(), tokens[start + 1 :].tolist()))[:SEQ_LEN]
            padding = [(0, -1)] * (SEQ_LEN - len(pairs))
            assert list(zip(ids[row].tolist(), targets[row].tolist())) == pairs + padding
            predicted += [target for _, target in pairs]
    assert predicted == tokens[1:].tolist()


def make_validation_batches(num_sequences: int) -> ValidationBatches:
    tokens = make_distinct_tokens(1 + num_sequences * SEQ_LEN)
    return ValidationBatches(split_into_shards(tokens, ()), SEQ_LEN)


@pytest.mark.parametrize("num_sequences", [1, 2, 10, 37])
def test_spread_is_even_and_holds_both_ends(num_sequences):
    batches = make_validation_batches(num_sequences)
    assert len(batches.spread(1)) == 1
    for count in range(2, 45):
        selected = batches.spread(count)
        assert len(selected) == min(count, num_sequences)
        assert selected[0] == 0
        assert selected[-1] == num_sequences - 1
        spacing = (num_sequences - 1) / max(len(selected) - 1, 1)
        for index, sequence in enumerate(selected):
            assert abs(sequence - index * spacing) <= 0.5 + 1e-9


@pytest.mark.parametrize("num_sequences", [2, 10, 37])
def test_both_halves_of_the_sequences_are_all(num_sequences):
    batches = make_validation_batches(num_sequences)
    half = num_sequences // 2
    first = batches.spread(part="first")
    assert first == list(range(half))
    assert first + batches.spread(part="second") == batches.spread() == list(range(num_sequences))
    assert batches.spread(2, "second") == sorted({half, num_sequences - 1})


# ---- several processes ----


def list_global_batches(
    world_size: int, micro_batch_size: int, first_step: int = 1
) -> list[torch.Tensor]:
    """Return the batch of each step that all processes of a run use together.

    A row holds the ids of a sequence and its last target.
    """
    config = TrainConfig(global_batch_size=24, micro_batch_size=micro_batch_size, max_steps=20)
    shards = split_into_shards(make_distinct_tokens(2003), (1, 700, 3, 0, 999))
    batches_by_rank = []
    for rank in range(world_size):
        batches = TrainBatches(shards, SEQ_LEN, 24, seed=5)
        world = World(rank, world_size, torch.device("cpu"))
        batches_by_rank.append(
            [
                torch.cat([batch.ids, batch.targets[:, -1:]], 1)
                for batch in micro_batches(config, batches, first_step, world)
            ]
        )
    local_batch_size = 24 // world_size
    grad_accum_steps = local_batch_size // min(micro_batch_size, local_batch_size)
    num_micro_batches = grad_accum_steps * (21 - first_step)
    assert {len(batches) for batches in batches_by_rank} == {num_micro_batches}
    # the micro-batches of all ranks, rank by rank, are a contiguous part of the global batch
    rounds = [torch.cat(parts) for parts in zip(*batches_by_rank)]
    return [
        torch.cat(rounds[index : index + grad_accum_steps])
        for index in range(0, num_micro_batches, grad_accum_steps)
    ]


@pytest.mark.parametrize("first_step", [1, 18])
@pytest.mark.parametrize(("world_size", "micro_batch_size"), [(1, 4), (2, 12), (3, 2), (8, 20)])
def test_global_batches_are_the_same_for_any_world_and_after_resuming(
    world_size, micro_batch_size, first_step, monkeypatch
):
    expected = list_global_batches(1, 24)[first_step - 1 :]
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    batches = list_global_batches(world_size, micro_batch_size, first_step)
    assert all(torch.equal(a, b) for a, b in zip(batches, expected, strict=True))


# ---- prefetching ----


def make_pair(request: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(request), torch.tensor(-request)


def test_prefetching_keeps_the_order_in_another_thread_a_few_results_ahead():
    threads = []

    def make_pair_and_record(request: int) -> tuple[torch.Tensor, torch.Tensor]:
        threads.append(threading.current_thread())
        return make_pair(request)

    results = prefetched(make_pair_and_record, itertools.count(), torch.device("cpu"), ahead=3)
    assert [(a.item(), b.item()) for a, b in islice(results, 5)] == [(i, -i) for i in range(5)]
    results.close()
    assert 5 <= len(threads) <= 8
    assert threading.main_thread() not in threads


def test_an_error_of_prefetching_is_raised_where_its_result_is_due():
    def fail_at_3(request: int) -> tuple[torch.Tensor, torch.Tensor]:
        if request == 3:
            raise DamagedShard("shard 7")
        return make_pair(request)

    assert len(list(prefetched(fail_at_3, range(3), torch.device("cpu"), ahead=3))) == 3
    results = prefetched(fail_at_3, range(1, 4), torch.device("cpu"), ahead=3)
    assert len(list(islice(results, 2))) == 2
    with pytest.raises(DamagedShard, match="shard 7"):
        next(results)
