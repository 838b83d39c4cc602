"""The shard format, byte by byte from its description, and the folders that hold shards."""

import errno
import json
import os
import struct

import numpy as np
import pytest
from helpers import MAGIC, VERSION, shard_bytes

from data import shards

SHARDS = [[], [7], [0, 1, 255, 256, 50256, 65535], list(range(0, 60_000, 7))]


@pytest.mark.parametrize("tokens", SHARDS)
def test_write_and_read_follow_the_format(tmp_path, tokens):
    written = tmp_path / "written_train.bin"
    shards.write_shard(written, np.array(tokens, dtype=np.int64))
    assert written.read_bytes() == shard_bytes(tokens)
    assert list(tmp_path.iterdir()) == [written]  # no .tmp left

    foreign = tmp_path / "foreign_train.bin"
    foreign.write_bytes(shard_bytes(tokens))
    read = shards.read_shard(foreign)
    assert read.dtype == np.uint16
    assert read.tolist() == tokens


def test_a_failed_write_leaves_the_old_shard_whole(tmp_path, monkeypatch):
    def full(_descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "a_train.bin"
    path.write_bytes(shard_bytes([1, 2, 3]))
    for tokens in ([1, 65536], [-1, 5], [70_000], [2**32]):
        with pytest.raises(ValueError, match=r"a_train\.bin: token ids must lie in 0\.\.65535"):
            shards.write_shard(path, np.array(tokens))
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        shards.write_shard(path, np.arange(9))
    assert path.read_bytes() == shard_bytes([1, 2, 3])
    assert list(tmp_path.iterdir()) == [path]


WHOLE = shard_bytes([3, 1, 4, 1, 5])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a token shard"),
        (WHOLE[:1023], "not a token shard"),
        (b"#!/usr/bin/python3\n" * 99, "not a token shard"),
        (shard_bytes([1, 2], magic=MAGIC + 1), "not a token shard"),
        (struct.pack(">256i", MAGIC, VERSION, *[0] * 254), "not a token shard"),
        (shard_bytes([1, 2], version=2), "shard version 2, this code reads 1"),
        (shard_bytes([1, 2], version=0), "shard version 0"),
        (WHOLE[:-1], "damaged: 5 tokens need 1034 bytes, it has 1033"),
        (WHOLE[:-2], "damaged"),
        (WHOLE[:1024], "damaged"),
        (WHOLE + b"\0", "damaged"),
        (WHOLE + b"\0\0", "damaged: 5 tokens need 1034 bytes, it has 1036"),
        (shard_bytes([1, 2], count=-1), "damaged"),
    ],
)
def test_what_is_no_whole_shard_is_refused_by_name(tmp_path, content, message):
    path = tmp_path / "bad_train_000000.bin"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"bad_train_000000\.bin .*{message}"):
        shards.read_shard(path)


def fill(folder, **splits):
    """A folder of shards `x_<split>_<number>.bin`, written last to first."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, parts in splits.items():
        for number, tokens in reversed(list(enumerate(parts))):
            (folder / f"x_{split}_{number:06d}.bin").write_bytes(shard_bytes(tokens))
    return folder


@pytest.fixture
def data_folder(tmp_path, monkeypatch):
    """An empty repository's data/ with two preparable corpora, as the module sees it."""
    folder = tmp_path / "data"
    for name in ("alpha", "beta"):
        (folder / name).mkdir(parents=True)
        (folder / name / "prepare.py").touch()
    monkeypatch.setattr(shards, "__file__", str(folder / "shards.py"))
    return folder


PARTS = {"train": [[1, 2], [3], [4, 5]], "val": [[6], [7, 8]]}


def assert_corpus(corpus, folder):
    assert corpus.path == folder
    found = {"train": corpus.train, "val": corpus.val}
    assert {split: [part.tolist() for part in found[split]] for split in found} == PARTS


def refused(folder, message):
    with pytest.raises(ValueError, match=message):
        shards.open_corpus(str(folder))


META = {"tokenizer": "bytes", "vocab_size": 257, "eot_token": 256}


def write_meta(folder, sums="abcde", **more):
    """meta.json with the folder's shards and these in place of their SHA-256 sums."""
    files = [(split, file) for split in PARTS for file in shards.shard_files(folder, split)]
    sizes = [{"file": f.name, "split": s, "tokens": len(shards.read_shard(f))} for s, f in files]
    listed = [{**record, "sha256": digest} for record, digest in zip(sizes, sums)]
    (folder / "meta.json").write_text(json.dumps({**META, "shards": listed, **more}))


def test_open_by_path_and_by_name_in_name_order(data_folder, tmp_path):
    elsewhere = fill(tmp_path / "elsewhere", **PARTS)
    assert_corpus(shards.open_corpus(str(elsewhere)), elsewhere)
    fill(data_folder / "alpha", **PARTS)
    assert_corpus(shards.open_corpus("alpha"), data_folder / "alpha")


@pytest.mark.parametrize("present", [{}, {"train": [[1]]}, {"val": [[1]]}])
def test_missing_shards_name_the_command_that_makes_them_or_known_names(data_folder, present):
    fill(data_folder / "beta", **present)
    refused("beta", r"dataset=beta .*python data/beta/prepare\.py")
    for unknown in ("gamma", str(fill(data_folder / "half", **present))):
        refused(unknown, f"dataset={unknown}: .*one of alpha, beta")


def test_meta_comes_from_the_folder_or_is_gpt2(tmp_path):
    fill(tmp_path, **PARTS)
    corpus = shards.open_corpus(str(tmp_path))
    assert corpus.meta == {"tokenizer": "gpt2", "vocab_size": 50257, "eot_token": 50256}
    assert corpus.bytes_per_token("train") is None

    meta = META | {"train": {"tokens": 8, "bytes": 20}, "val": {"tokens": 3, "bytes": 12}}
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    corpus = shards.open_corpus(str(tmp_path))
    assert corpus.meta == meta
    assert corpus.bytes_per_token("train") == 2.5
    assert corpus.bytes_per_token("val") == 4.0

    (tmp_path / "meta.json").write_text(json.dumps({**meta, "train": {"tokens": 8}}))
    assert shards.open_corpus(str(tmp_path)).bytes_per_token("train") is None


def test_shards_that_meta_lists_must_be_there_and_whole(tmp_path):
    fill(tmp_path, **PARTS)
    write_meta(tmp_path)
    assert_corpus(shards.open_corpus(str(tmp_path)), tmp_path)
    (tmp_path / "y_train_000009.bin").write_bytes(shard_bytes([1]))
    refused(tmp_path, r"y_train_000009\.bin is no shard that .*meta\.json lists")
    (tmp_path / "y_train_000009.bin").unlink()
    shard = tmp_path / "x_train_000000.bin"
    shard.write_bytes(shard_bytes([1, 2, 3, 4, 5, 6, 7]))
    refused(tmp_path, f"{shard.name} is not the shard of 2 tokens that meta.json lists")
    shard.write_bytes(WHOLE[:-2])
    refused(tmp_path, f"{shard.name} is damaged")
    shard.unlink()
    refused(tmp_path, f"{shard.name} is not the shard of 2 tokens")


def test_a_preparation_that_has_not_ended_is_no_corpus(tmp_path):
    fill(tmp_path, **PARTS)
    begun = {"shards": [{"tokens": 5}, {"tokens": 7}]}
    (tmp_path / "preparation.json").write_text(json.dumps(begun))
    refused(tmp_path, r"not prepared to its end: .* with --max_tokens=12")


def test_identity_changes_with_any_shard_and_holds_no_list(tmp_path):
    fill(tmp_path, **PARTS)

    def identity(sums):
        write_meta(tmp_path, sums)
        return shards.open_corpus(str(tmp_path)).identity

    one = identity("abcde")
    assert identity("abcdf") != one == identity("abcde")
    assert "shards" not in one
    (tmp_path / "meta.json").unlink()
    plain = shards.open_corpus(str(tmp_path)).identity
    assert plain["train"]["tokens"] == sum(map(len, PARTS["train"]))
    assert "sha256" not in plain
