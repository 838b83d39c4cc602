"""The shard format, byte by byte from its description, and the folders that hold shards."""

import errno
import json
import os
import struct
from pathlib import Path

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


COMPLETE = encode_shard([3, 1, 4, 1, 5])
BROKEN = [
    (b"", "not a token shard"),
    (COMPLETE[:1023], "not a token shard"),
    (encode_shard([1, 2], magic=MAGIC + 1), "not a token shard"),
    (struct.pack(">256i", MAGIC, VERSION, *[0] * 254), "not a token shard"),
    (encode_shard([1, 2], version=2), "shard version 2, but this code reads version 1"),
    (COMPLETE[:-1], "damaged: 5 tokens need 1034 bytes, but the file has 1033"),
    (COMPLETE + b"\0\0", "damaged: 5 tokens need 1034 bytes, but the file has 1036"),
    (encode_shard([1, 2], count=-1), "damaged"),
]


@pytest.mark.parametrize(("content", "message"), BROKEN)
def test_a_file_that_is_not_a_complete_shard_is_refused_by_name(tmp_path, content, message):
    path = tmp_path / "bad_train_000000.bin"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"bad_train_000000\.bin .*{message}"):
        shards.read_shard(path)


PARTS = {"train": [[1, 2], [3], [4, 5]], "val": [[6], [7, 8]]}


def write_shards(folder: Path, splits: dict[str, list[list[int]]] = PARTS) -> Path:
    """Write shards `x_<split>_<number>.bin` into a folder, from last to first, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, parts in splits.items():
        for number, tokens in reversed(list(enumerate(parts))):
            (folder / f"x_{split}_{number:06d}.bin").write_bytes(encode_shard(tokens))
    return folder


def assert_corpus(corpus: shards.Corpus, folder: Path) -> None:
    """Assert that a corpus has the tokens of PARTS and lies in a folder."""
    assert corpus.path == folder
    parts = {"train": corpus.train, "val": corpus.val}
    assert {split: [part.tolist() for part in parts[split]] for split in parts} == PARTS


def assert_refused(name: str | Path, message: str) -> None:
    """Assert that a corpus of this name or path is refused with this message."""
    with pytest.raises(ValueError, match=message):
        shards.open_corpus(str(name))


META = {"tokenizer": "bytes", "vocab_size": 257, "eot_token": 256}


def write_meta(folder: Path, digests: str = "abcde") -> None:
    """Write meta.json with the shards of a folder.

    digests: a letter for each shard, which stands for its SHA-256 sum
    """
    files = [(split, file) for split in PARTS for file in shards.find_shards(folder, split)]
    records = [
        {
            "file": file.name,
            "split": split,
            "tokens": len(shards.read_shard(file)),
            "sha256": digest,
        }
        for (split, file), digest in zip(files, digests)
    ]
    (folder / "meta.json").write_text(json.dumps({**META, "shards": records}))


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


@pytest.fixture
def data_folder(tmp_path, monkeypatch) -> Path:
    """Return a repository's folder data/ in which two corpora can be prepared."""
    folder = tmp_path / "data"
    for name in ("alpha", "beta"):
        (folder / name).mkdir(parents=True)
        (folder / name / "prepare.py").touch()
    monkeypatch.setattr(shards, "__file__", str(folder / "shards.py"))
    return folder


def test_a_corpus_is_opened_by_its_path(data_folder, tmp_path):
    elsewhere = write_shards(tmp_path / "elsewhere")
    assert_corpus(shards.open_corpus(str(elsewhere)), elsewhere)


def test_a_corpus_is_opened_by_its_name(data_folder):
    write_shards(data_folder / "alpha")
    assert_corpus(shards.open_corpus("alpha"), data_folder / "alpha")


def test_an_incomplete_corpus_names_its_command(data_folder):
    write_shards(data_folder / "beta", {"val": [[1]]})
    assert_refused("beta", r"dataset=beta .*python data/beta/prepare\.py")


def test_an_unknown_corpus_is_answered_with_the_known_ones(data_folder):
    assert_refused("gamma", "dataset=gamma: .*one of alpha, beta")


def test_an_incomplete_folder_is_answered_with_the_known_corpora(data_folder, tmp_path):
    half = write_shards(tmp_path / "half", {"train": [[1]]})
    assert_refused(half, f"dataset={half}: .*one of alpha, beta")


# ---- meta.json ----


def test_a_corpus_without_meta_has_tokens_of_gpt2(tmp_path):
    corpus = shards.open_corpus(str(write_shards(tmp_path)))
    assert corpus.meta == {"tokenizer": "gpt2", "vocab_size": 50257, "eot_token": 50256}


def test_a_corpus_without_meta_has_no_bytes_per_token(tmp_path):
    corpus = shards.open_corpus(str(write_shards(tmp_path)))
    assert corpus.bytes_per_token("train") is None


COUNTS = {"train": {"tokens": 8, "bytes": 20}, "val": {"tokens": 8}}


@pytest.fixture
def counted_corpus(tmp_path) -> shards.Corpus:
    """Return a corpus whose meta.json counts tokens, and bytes of the training split."""
    write_shards(tmp_path)
    (tmp_path / "meta.json").write_text(json.dumps({**META, **COUNTS}))
    return shards.open_corpus(str(tmp_path))


def test_meta_is_that_of_the_folder(counted_corpus):
    assert counted_corpus.meta == {**META, **COUNTS}


def test_bytes_per_token_follow_from_the_counts(counted_corpus):
    assert counted_corpus.bytes_per_token("train") == 2.5
    assert counted_corpus.bytes_per_token("val") is None


def test_a_damaged_meta_is_refused(tmp_path):
    (write_shards(tmp_path) / "meta.json").write_text("{}{")
    assert_refused(tmp_path, r"meta\.json is damaged: .*; prepare the corpus again")


def test_a_meta_without_a_key_is_refused(tmp_path):
    (write_shards(tmp_path) / "meta.json").write_text('{"tokenizer": "gpt2"}')
    assert_refused(tmp_path, r"meta\.json has no vocab_size; add it")


def test_a_corpus_of_documents_of_one_length_is_of_an_earlier_version(tmp_path):
    write_shards(tmp_path)
    (tmp_path / "meta.json").write_text(json.dumps({**META, "window_tokens": 4}))
    assert_refused(tmp_path, "holds a packed corpus or a synthetic task of an earlier version")


def test_a_corpus_with_the_shards_of_its_meta_is_opened(tmp_path):
    write_meta(write_shards(tmp_path))
    assert_corpus(shards.open_corpus(str(tmp_path)), tmp_path)


def test_a_shard_that_meta_does_not_list_is_refused(tmp_path):
    write_meta(write_shards(tmp_path))
    (tmp_path / "y_train_000009.bin").write_bytes(encode_shard([1]))
    assert_refused(tmp_path, r"y_train_000009\.bin is not in the list of shards of .*meta\.json")


def test_a_shard_of_another_size_than_meta_lists_is_refused(tmp_path):
    write_meta(write_shards(tmp_path))
    shard = tmp_path / "x_train_000000.bin"
    shard.write_bytes(encode_shard([1, 2, 3, 4, 5, 6, 7]))
    assert_refused(tmp_path, f"{shard.name} is not the shard of 2 tokens that meta.json lists")


def test_a_missing_shard_that_meta_lists_is_refused(tmp_path):
    write_meta(write_shards(tmp_path))
    shard = tmp_path / "x_train_000000.bin"
    shard.unlink()
    assert_refused(tmp_path, f"{shard.name} is not the shard of 2 tokens")


def get_identity(folder: Path, digests: str) -> dict:
    """Return the identity of a corpus whose shards have these digests."""
    write_meta(folder, digests)
    return shards.open_corpus(str(folder)).identity


def test_the_identity_changes_with_any_shard(tmp_path):
    write_shards(tmp_path)
    first_identity = get_identity(tmp_path, "abcde")
    assert get_identity(tmp_path, "abcde") == first_identity
    assert get_identity(tmp_path, "abcdf") != first_identity


def test_the_identity_has_no_list_of_shards(tmp_path):
    write_shards(tmp_path)
    assert "shards" not in get_identity(tmp_path, "abcde")


def test_the_identity_without_meta_counts_tokens(tmp_path):
    identity = shards.open_corpus(str(write_shards(tmp_path))).identity
    assert identity["train"]["tokens"] == sum(map(len, PARTS["train"]))
    assert "sha256" not in identity


def test_the_identity_without_meta_changes_with_the_last_token(tmp_path):
    folder = write_shards(tmp_path)
    first_identity = shards.open_corpus(str(folder)).identity
    last_shard = max(folder.glob("x_train_*.bin"))
    tokens = shards.read_shard(last_shard).tolist()
    last_shard.write_bytes(encode_shard([*tokens[:-1], tokens[-1] + 1]))
    identity = shards.open_corpus(str(folder)).identity
    assert identity != first_identity
