"""The shard format, byte by byte from its description, and the folders that hold shards."""

import errno
import json
import os
import struct

import numpy as np
import pytest
from helpers import MAGIC, VERSION, encode_shard

from data import shards


@pytest.mark.parametrize("tokens", [[], [0, 1, 255, 256, 50256, 65535], list(range(0, 60_000, 7))])
def test_write_and_read_follow_the_format(tmp_path, tokens):
    path = tmp_path / "a_train.bin"
    shards.write_shard(path, np.array(tokens, dtype=np.int64))
    assert path.read_bytes() == encode_shard(tokens)
    assert list(tmp_path.iterdir()) == [path]  # no .tmp left
    assert shards.read_shard(path).dtype == np.uint16
    assert shards.read_shard(path).tolist() == tokens


def test_a_failed_write_leaves_the_old_shard_whole(tmp_path, monkeypatch):
    def full(_descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "a_train.bin"
    path.write_bytes(encode_shard([1, 2, 3]))
    for tokens in ([1, 65536], [-1, 5]):
        with pytest.raises(
            ValueError, match=r"a_train\.bin: token ids must be between 0 and 65535"
        ):
            shards.write_shard(path, np.array(tokens))
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        shards.write_shard(path, np.arange(9))
    assert path.read_bytes() == encode_shard([1, 2, 3])
    assert list(tmp_path.iterdir()) == [path]


WHOLE = encode_shard([3, 1, 4, 1, 5])
BROKEN = [
    (b"", "not a token shard"),
    (WHOLE[:1023], "not a token shard"),
    (encode_shard([1, 2], magic=MAGIC + 1), "not a token shard"),
    (struct.pack(">256i", MAGIC, VERSION, *[0] * 254), "not a token shard"),
    (encode_shard([1, 2], version=2), "shard version 2, but this code reads version 1"),
    (WHOLE[:-1], "damaged: 5 tokens need 1034 bytes, but the file has 1033"),
    (WHOLE + b"\0\0", "damaged: 5 tokens need 1034 bytes, but the file has 1036"),
    (encode_shard([1, 2], count=-1), "damaged"),
]


@pytest.mark.parametrize(("content", "message"), BROKEN)
def test_what_is_no_whole_shard_is_refused_by_name(tmp_path, content, message):
    path = tmp_path / "bad_train_000000.bin"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"bad_train_000000\.bin .*{message}"):
        shards.read_shard(path)


PARTS = {"train": [[1, 2], [3], [4, 5]], "val": [[6], [7, 8]]}


def fill(folder, splits=PARTS):
    """A folder of shards `x_<split>_<number>.bin`, written last to first."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, parts in splits.items():
        for number, tokens in reversed(list(enumerate(parts))):
            (folder / f"x_{split}_{number:06d}.bin").write_bytes(encode_shard(tokens))
    return folder


def assert_corpus(corpus, folder):
    assert corpus.path == folder
    parts = {"train": corpus.train, "val": corpus.val}
    assert {split: [part.tolist() for part in parts[split]] for split in parts} == PARTS


def refused(folder, message):
    with pytest.raises(ValueError, match=message):
        shards.open_corpus(str(folder))


META = {"tokenizer": "bytes", "vocab_size": 257, "eot_token": 256}


def write_meta(folder, sums="abcde", **more):
    """meta.json with the folder's shards and these in place of their SHA-256 sums."""
    files = [(split, file) for split in PARTS for file in shards.find_shards(folder, split)]
    sizes = [{"file": f.name, "split": s, "tokens": len(shards.read_shard(f))} for s, f in files]
    listed = [{**record, "sha256": digest} for record, digest in zip(sizes, sums)]
    (folder / "meta.json").write_text(json.dumps({**META, "shards": listed, **more}))


@pytest.mark.parametrize(
    ("file", "split"),
    [
        ("fineweb_train_000001.bin", "train"),
        ("fineweb_val_000000.bin", "val"),
        ("train.bin", "train"),
        ("val.bin", "val"),
        ("train_00_of_10.bin", "train"),
        ("medieval_train_000000.bin", "train"),
        ("pretrain_val_000000.bin", "val"),
        ("train_of_7b_val_000000.bin", "val"),
        ("training_000000.bin", None),
        ("model.bin", None),
    ],
)
def test_the_last_whole_word_of_a_name_is_its_split(tmp_path, file, split):
    (tmp_path / file).touch()
    for part in PARTS:
        names = [path.name for path in shards.find_shards(tmp_path, part)]
        assert names == ([file] if part == split else [])


def test_open_by_path_and_by_name_or_say_which_command_makes_it(tmp_path, monkeypatch):
    """In an empty repository's data/ with two corpora that can be prepared."""
    for name in ("alpha", "beta"):
        (tmp_path / "data" / name).mkdir(parents=True)
        (tmp_path / "data" / name / "prepare.py").touch()
    monkeypatch.setattr(shards, "__file__", str(tmp_path / "data" / "shards.py"))
    elsewhere = fill(tmp_path / "elsewhere")
    assert_corpus(shards.open_corpus(str(elsewhere)), elsewhere)
    alpha = fill(tmp_path / "data" / "alpha")
    assert_corpus(shards.open_corpus("alpha"), alpha)
    fill(tmp_path / "data" / "beta", {"val": [[1]]})
    refused("beta", r"dataset=beta .*python data/beta/prepare\.py")
    for unknown in ("gamma", str(fill(tmp_path / "half", {"train": [[1]]}))):
        refused(unknown, f"dataset={unknown}: .*one of alpha, beta")


def test_meta_comes_from_the_folder_or_is_gpt2(tmp_path):
    corpus = shards.open_corpus(str(fill(tmp_path)))
    assert corpus.meta == {"tokenizer": "gpt2", "vocab_size": 50257, "eot_token": 50256}
    assert corpus.bytes_per_token("train") is None
    counts = {"train": {"tokens": 8, "bytes": 20}, "val": {"tokens": 8}}
    (tmp_path / "meta.json").write_text(json.dumps({**META, **counts}))
    corpus = shards.open_corpus(str(tmp_path))
    assert corpus.meta == {**META, **counts}
    assert (corpus.bytes_per_token("train"), corpus.bytes_per_token("val")) == (2.5, None)
    (tmp_path / "meta.json").write_text("{}{")
    refused(tmp_path, r"meta\.json is damaged: .*; prepare the corpus again")
    (tmp_path / "meta.json").write_text('{"tokenizer": "gpt2"}')
    refused(tmp_path, r"meta\.json has no vocab_size; add it")


def test_shards_that_meta_lists_must_be_there_and_whole(tmp_path):
    write_meta(fill(tmp_path))
    assert_corpus(shards.open_corpus(str(tmp_path)), tmp_path)
    (tmp_path / "y_train_000009.bin").write_bytes(encode_shard([1]))
    refused(tmp_path, r"y_train_000009\.bin is not in the list of shards of .*meta\.json")
    (tmp_path / "y_train_000009.bin").unlink()
    shard = tmp_path / "x_train_000000.bin"
    shard.write_bytes(encode_shard([1, 2, 3, 4, 5, 6, 7]))
    refused(tmp_path, f"{shard.name} is not the shard of 2 tokens that meta.json lists")
    shard.unlink()
    refused(tmp_path, f"{shard.name} is not the shard of 2 tokens")


def test_identity_changes_with_any_shard_and_holds_no_list(tmp_path):
    def identity(sums):
        write_meta(tmp_path, sums)
        return shards.open_corpus(str(tmp_path)).identity

    fill(tmp_path)
    one = identity("abcde")
    assert identity("abcdf") != one == identity("abcde")
    assert "shards" not in one
    (tmp_path / "meta.json").unlink()
    plain = shards.open_corpus(str(tmp_path)).identity
    assert plain["train"]["tokens"] == sum(map(len, PARTS["train"]))
    assert "sha256" not in plain
