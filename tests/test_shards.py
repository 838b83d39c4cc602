"""The shard format, byte by byte from its description, and the folders that hold shards."""

import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest
from helpers import MAGIC, encode_shard

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
    (COMPLETE[:1023], "not a token shard"),
    (encode_shard([1, 2], magic=MAGIC + 1), "not a token shard"),
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
META = {"tokenizer": "bytes", "vocab_size": 257, "eot_token": 256}


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


@pytest.mark.parametrize(
    ("file", "split"),
    [
        ("fineweb_val_000000.bin", "val"),
        ("train.bin", "train"),
        ("train_00_of_10.bin", "train"),
        ("medieval_train_000000.bin", "train"),
        ("train_of_7b_val_000000.bin", "val"),
        ("training_000000.bin", None),
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


def test_a_corpus_is_opened_by_its_path_or_its_name(data_folder, tmp_path):
    elsewhere = write_shards(tmp_path / "elsewhere")
    assert_corpus(shards.open_corpus(str(elsewhere)), elsewhere)
    write_shards(data_folder / "alpha")
    assert_corpus(shards.open_corpus("alpha"), data_folder / "alpha")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("beta", r"dataset=beta .*python data/beta/prepare\.py"),
        ("gamma", "dataset=gamma: .*one of alpha, beta"),
        ("{folder}/half", "dataset=.*half: .*one of alpha, beta"),
    ],
)
def test_an_incomplete_corpus_is_answered_with_its_command_or_the_known_ones(
    data_folder, tmp_path, name, message
):
    write_shards(data_folder / "beta", {"val": [[1]]})
    write_shards(tmp_path / "half", {"train": [[1]]})
    with pytest.raises(ValueError, match=message):
        shards.open_corpus(name.format(folder=tmp_path))


# ---- meta.json ----


def test_a_corpus_without_meta_has_tokens_of_gpt2(tmp_path):
    corpus = shards.open_corpus(str(write_shards(tmp_path)))
    assert corpus.meta == {"tokenizer": "gpt2", "vocab_size": 50257, "eot_token": 50256}
    assert corpus.bytes_per_token("train") is None


def test_bytes_per_token_follow_from_the_counts_of_meta(tmp_path):
    counts = {"train": {"tokens": 8, "bytes": 20}, "val": {"tokens": 8}}
    (write_shards(tmp_path) / "meta.json").write_text(json.dumps({**META, **counts}))
    corpus = shards.open_corpus(str(tmp_path))
    assert corpus.meta == {**META, **counts}
    assert corpus.bytes_per_token("train") == 2.5
    assert corpus.bytes_per_token("val") is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}{", r"meta\.json is damaged: .*; prepare the corpus again"),
        ('{"tokenizer": "gpt2"}', r"meta\.json has no vocab_size; add it"),
        ('{"window_tokens": 4}', "a packed corpus or a synthetic task of an earlier version"),
    ],
)
def test_a_meta_that_does_not_describe_a_corpus_is_refused(tmp_path, content, message):
    (write_shards(tmp_path) / "meta.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        shards.open_corpus(str(tmp_path))


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
    ("file", "content", "message"),
    [
        ("y_train_000009.bin", encode_shard([1]), "is not in the list of shards of .*meta"),
        ("x_train_000000.bin", encode_shard([1, 2, 3]), "is not the shard of 2 tokens that meta"),
        ("x_train_000000.bin", None, "is not the shard of 2 tokens that meta"),
    ],
)
def test_other_shards_than_meta_lists_are_refused(tmp_path, file, content, message):
    write_meta(write_shards(tmp_path))
    assert_corpus(shards.open_corpus(str(tmp_path)), tmp_path)
    if content is None:
        (tmp_path / file).unlink()
    else:
        (tmp_path / file).write_bytes(content)
    with pytest.raises(ValueError, match=f"{file} {message}"):
        shards.open_corpus(str(tmp_path))


def test_the_identity_changes_with_the_digest_of_any_shard(tmp_path):
    write_shards(tmp_path)
    identities = []
    for digests in ("abcde", "abcde", "abcdf"):
        write_meta(tmp_path, digests)
        identities.append(shards.open_corpus(str(tmp_path)).identity)
    assert identities[0] == identities[1] != identities[2]
    assert "shards" not in identities[0]


def test_the_identity_without_meta_changes_with_the_ends_of_a_shard(tmp_path):
    tokens = list(range(10_000))
    identities = []
    for first, last in ((0, 9), (1, 9), (0, 8)):
        write_shards(tmp_path, {**PARTS, "train": [[first, *tokens, last]]})
        identities.append(shards.open_corpus(str(tmp_path)).identity)
    assert identities[0]["train"]["tokens"] == 10_002
    assert len({identity["sample_sha256"] for identity in identities}) == 3
