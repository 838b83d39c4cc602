"""Batches against plain slices of the concatenated stream.

Tokens are distinct there, so a window shows its start.
"""

import threading
from itertools import islice, pairwise

import numpy as np
import pytest
import torch

from data.loader import JoinedShards, TrainBatches, ValidationBatches, keyed_permutation, prefetched
from data.shards import DamagedShard, read_shard, write_shard
from training.config import TrainConfig
from training.distributed import World
from training.setup import micro_batches


def cut(stream, sizes):
    """The stream as uint16 shards of the given sizes, the last one taking what is left."""
    return [part.astype("<u2") for part in np.split(stream, np.cumsum(sizes))]


def distinct(count):
    return np.random.default_rng(count).permutation(np.arange(1, 2**16))[:count]


@pytest.mark.parametrize("sizes", [(), (1, 1, 1), (3, 0, 1, 9), (0, 0, 2), (30,)])
def test_stream_reads_what_the_concatenation_holds(sizes):
    whole = distinct(30)
    stream = JoinedShards(cut(whole, sizes))
    assert len(stream) == 30
    places = np.random.default_rng(0).permutation(31)
    for count in range(33):
        tokens = stream.read(places, count)
        here = [whole[start : start + count].tolist() for start in places]
        assert tokens.tolist() == [part + [0] * (count - len(part)) for part in here]


def test_a_token_beyond_the_vocabulary_is_named(tmp_path):
    for name, tokens in (("a_train_0.bin", [1, 2, 3]), ("a_train_1.bin", [4, 300, 5])):
        write_shard(tmp_path / name, np.array(tokens))
    stream = JoinedShards([read_shard(path) for path in sorted(tmp_path.iterdir())], 300)
    assert stream.read(np.array([0]), 4).tolist() == [[1, 2, 3, 4]]
    message = r"a_train_1\.bin holds token id 300 at 1, but the vocabulary has 300 ids"
    with pytest.raises(DamagedShard, match=message):
        stream.read(np.array([0, 2]), 3)


def test_permutation_is_a_bijection_that_looks_random():
    for size in [*range(1, 71), 1000, 65_536, 65_537]:
        image = keyed_permutation(np.arange(size), size, 2**64 - 1)
        assert (np.sort(image) == np.arange(size)).all(), size
    image = keyed_permutation(np.arange(1000), 1000, 5)
    assert [keyed_permutation(np.array([i]), 1000, 5)[0] for i in range(40)] == image[:40].tolist()
    assert abs(np.corrcoef(np.arange(1000), image)[0, 1]) < 0.1  # standard deviation 0.03
    assert len(np.unique(np.diff(image) % 1000)) > 500  # 63% in a random order, 1 for a rotation
    keys = [keyed_permutation(np.arange(20), 20, key).tolist() for key in range(200)]
    assert len({tuple(order) for order in keys}) == 200
    # A first element that is uniform over 20 misses no value in 200 draws, and none holds a fifth.
    counts = np.bincount([order[0] for order in keys], minlength=20)
    assert 0 < counts.min() <= counts.max() < 40


SEQ_LEN = 4
# One window, one more token, whole windows, one token past, and one short of another window.
LENGTHS = [5, 6, 8, 9, 12, 13, 40, 41, 43]


def epochs_of(tokens, number, seed=1, batch=3):
    """Starts by epoch, found by first tokens; every window's ids and targets are checked. An epoch
    has one window fewer than fit, or the only one.
    """
    windows, stream = max((tokens - 1) // SEQ_LEN - 1, 1), distinct(tokens)
    place = {token: index for index, token in enumerate(stream.tolist())}
    shards = cut(stream, (7, 1, 2, 11) if tokens > 25 else (1, 2))
    batches, starts = TrainBatches(shards, SEQ_LEN, batch, seed), []
    for step in range(-(-number * windows // batch)):
        ids, targets = batches.get(step, 0, batch)
        assert ids.dtype == targets.dtype == torch.int64
        for row, target in zip(ids.tolist(), targets.tolist()):
            first = place[row[0]]
            assert [*row, target[-1]] == stream[first : first + SEQ_LEN + 1].tolist()
            assert target[:-1] == row[1:]
            starts.append(first)
    return batches, np.reshape(starts[: number * windows], (number, windows))


@pytest.mark.parametrize("tokens", LENGTHS)
def test_every_epoch_serves_every_window_once_at_any_offset_that_fits(tokens):
    batches, epochs = epochs_of(tokens, 80)
    for epoch in epochs:
        offset = epoch.min()
        assert sorted(epoch) == list(range(offset, offset + SEQ_LEN * len(epoch), SEQ_LEN))
    last = tokens - 1 - SEQ_LEN * epochs.shape[1]
    assert set(epochs.min(axis=1)) == set(range(last + 1))
    touched = {token for start in epochs[0] for token in range(start, start + SEQ_LEN + 1)}
    assert batches.num_dropped_tokens == tokens - len(touched)


def test_order_and_offset_change_with_epoch_and_with_seed():
    runs = [epochs_of(103, 30, seed)[1] for seed in (1, 2)]
    orders = [tuple((epoch - epoch.min()) // SEQ_LEN) for run in runs for epoch in run]
    assert len(set(orders)) == 60
    offsets = [run.min(axis=1).tolist() for run in runs]
    assert all(len(set(values)) > 3 for values in offsets)
    assert offsets[0] != offsets[1]


def test_a_split_without_a_window_or_a_target_is_refused():
    for tokens in (0, SEQ_LEN):
        message = (
            f"training split has {tokens} tokens, but block_size={SEQ_LEN} needs {SEQ_LEN + 1}"
        )
        with pytest.raises(ValueError, match=message):
            TrainBatches([distinct(tokens).astype("<u2")], SEQ_LEN, 2, 0)
    with pytest.raises(ValueError, match="validation split has 1 tokens, but needs 2"):
        ValidationBatches([distinct(1).astype("<u2")], SEQ_LEN)


@pytest.mark.parametrize("tokens", [2, 4, 5, 6, 41, 45])
@pytest.mark.parametrize("rows", [1, 4])
def test_validation_predicts_every_token_but_the_first_once(tokens, rows):
    stream = distinct(tokens)
    batches = ValidationBatches(cut(stream, (1, 2) if tokens > 3 else ()), SEQ_LEN)
    windows, predicted = list(range(batches.num_sequences)), []
    for first in range(0, len(windows), rows):
        chunk = windows[first : first + rows]
        ids, targets = batches.get(chunk, rows)
        assert ids.shape == targets.shape == (rows, SEQ_LEN)
        for row in range(rows):
            begin = chunk[row] * SEQ_LEN if row < len(chunk) else tokens
            here = list(zip(stream[begin:-1].tolist(), stream[begin + 1 :].tolist()))[:SEQ_LEN]
            expected = here + [(0, -1)] * (SEQ_LEN - len(here))
            assert list(zip(ids[row].tolist(), targets[row].tolist())) == expected
            predicted += [target for _, target in here]
    assert predicted == stream[1:].tolist()


@pytest.mark.parametrize("windows", [1, 2, 10, 37])
def test_spread_is_even_and_holds_both_ends(windows):
    batches = ValidationBatches([distinct(1 + windows * SEQ_LEN).astype("<u2")], SEQ_LEN)
    for count in range(2, 45):
        chosen = batches.spread(count)
        assert len(chosen) == min(count, windows)
        assert (chosen[0], chosen[-1]) == (0, windows - 1)
        assert all(before < after for before, after in pairwise(chosen))
        gap = (windows - 1) / max(len(chosen) - 1, 1)
        assert all(abs(window - i * gap) <= 0.5 + 1e-9 for i, window in enumerate(chosen))
    assert len(batches.spread(1)) == 1
    if windows > 1:
        first, second = (batches.spread(part=part) for part in ("first", "second"))
        assert first == list(range(windows // 2))
        assert first + second == batches.spread() == list(range(windows))
        assert batches.spread(2, "second") == sorted({windows // 2, windows - 1})


def served(monkeypatch, world_size, micro, first_step=1, batch=24, tokens=2003, steps=20):
    """Batch by step, as all processes of a run serve it: rows of ids with their last target."""
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    config = TrainConfig(global_batch_size=batch, micro_batch_size=micro, max_steps=steps)
    parts = []
    for rank in range(world_size):
        batches = TrainBatches(cut(distinct(tokens), (1, 700, 3, 0, 999)), SEQ_LEN, batch, seed=5)
        world = World(rank, world_size, torch.device("cpu"))
        made = micro_batches(config, batches, first_step, world)
        parts.append([torch.cat([batch.ids, batch.targets[:, -1:]], 1) for batch in made])
    per_step = batch // world_size // min(micro, batch // world_size)
    assert {len(part) for part in parts} == {per_step * (steps + 1 - first_step)}
    # Micro-batch m of rank r holds the rows (m * world_size + r) * rows of the global batch.
    rounds = [torch.cat([part[i] for part in parts]) for i in range(len(parts[0]))]
    return [torch.cat(rounds[i : i + per_step]) for i in range(0, len(rounds), per_step)]


def test_global_batches_are_the_same_for_any_world_and_after_resuming(monkeypatch):
    whole = served(monkeypatch, 1, 24)
    for world_size, micro in ((1, 4), (2, 12), (3, 2), (8, 20)):
        for first in (1, 18):
            again = served(monkeypatch, world_size, micro, first)
            assert all(torch.equal(a, b) for a, b in zip(whole[first - 1 :], again, strict=True))


def test_prefetching_keeps_the_order_and_works_ahead():
    made, cpu = [], torch.device("cpu")

    def make(request):
        made.append((request, threading.current_thread() is threading.main_thread()))
        if request == 9:
            raise DamagedShard("shard 7")
        return torch.tensor(request), torch.tensor(-request)

    results = prefetched(make, range(1, 10), cpu, ahead=3)
    assert [[a.item(), b.item()] for a, b in islice(results, 8)] == [[i, -i] for i in range(1, 9)]
    with pytest.raises(DamagedShard, match="shard 7"):  # where it was due
        next(results)
    assert made == [(i, False) for i in range(1, 10)]
    assert list(prefetched(make, [], cpu)) == []
    made.clear()
    endless = prefetched(make, iter(int, 1), cpu, ahead=3)
    list(islice(endless, 5))
    endless.close()
    assert 5 <= len(made) <= 8
