"""Token shards in the formats of llm.c, and the folder of shards that is a corpus.

A shard is a header of 256 int32 (magic number, version, number of tokens, zeros), followed by the
token ids, little-endian. There are two formats:

    magic 20240520, version 1   uint16 ids; GPT-2's and every other vocabulary of up to 65,536 ids
    magic 20240801, version 7   uint32 ids; larger vocabularies

The name of a shard contains `train_` or `val_`, or ends in `train.bin` or `val.bin`. The file
`meta.json` beside the shards describes the tokenizer; without it, the tokens are GPT-2's.
"""

import contextlib
import hashlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from utils import files

if TYPE_CHECKING:
    from data.tokenizer import Tokenizer

HEADER_INTS = 256
HEADER_BYTES = 4 * HEADER_INTS
MAX_UINT16_VOCAB = 2**16
GPT2_META = {"tokenizer": "gpt2", "vocab_size": 50257, "eot_token": 50256}


class ShardFormat(NamedTuple):
    """One of llm.c's formats: the first two numbers of its header, and the dtype of its ids."""

    magic: int
    version: int
    dtype: np.dtype


UINT16_FORMAT = ShardFormat(magic=20240520, version=1, dtype=np.dtype("<u2"))
UINT32_FORMAT = ShardFormat(magic=20240801, version=7, dtype=np.dtype("<u4"))
FORMATS = {shard_format.magic: shard_format for shard_format in (UINT16_FORMAT, UINT32_FORMAT)}


class DamagedShard(ValueError):  # noqa: N818 (the name says what is wrong, as the message does)
    """A shard that cannot be what its preparation wrote; the message names it."""


class MissingCorpus(ValueError):  # noqa: N818 (the name says what is wrong, as the message does)
    """A corpus that is not prepared, or not completely; the message says how to prepare it."""


# ---- one shard ----


def choose_format(vocab_size: int) -> ShardFormat:
    """Return the format of the shards of a vocabulary."""
    return UINT16_FORMAT if vocab_size <= MAX_UINT16_VOCAB else UINT32_FORMAT


def write_shard(path: Path, tokens: np.ndarray, shard_format: ShardFormat = UINT16_FORMAT) -> str:
    """Write token ids (1-D) as one shard, atomically.

    Returns:
        The SHA-256 of the file in hex.

    Raises:
        ValueError: an id does not fit into the format
    """
    max_id = np.iinfo(shard_format.dtype).max
    if tokens.size and not 0 <= tokens.min() <= tokens.max() <= max_id:
        raise ValueError(
            f"{path}: token ids must be between 0 and {max_id}, but are between {tokens.min()} and "
            f"{tokens.max()}"
        )
    header = np.zeros(HEADER_INTS, dtype="<i4")
    header[:3] = shard_format.magic, shard_format.version, tokens.size
    digest = hashlib.sha256()
    with files.atomic_path(path) as temporary, open(temporary, "wb") as file:
        for part in (header, np.ascontiguousarray(tokens, dtype=shard_format.dtype)):
            file.write(part.data)
            digest.update(part.data)
        # flushed before it is renamed, so that a power cut cannot leave an incomplete shard
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def compute_shard_bytes(num_tokens: int, dtype: np.dtype) -> int:
    """Return the size of a shard of this many tokens."""
    return HEADER_BYTES + num_tokens * dtype.itemsize


def read_shard(path: Path) -> np.ndarray:
    """Return the token ids of a shard, memory-mapped, uint16 or uint32 (num_tokens,).

    Raises:
        DamagedShard: the file is not a shard, or not complete
    """
    file_bytes = path.stat().st_size
    header = np.fromfile(path, dtype="<i4", count=HEADER_INTS)
    if header.size < HEADER_INTS or int(header[0]) not in FORMATS:
        raise DamagedShard(
            f"{path} is not a token shard, because it does not begin with the number "
            f"{UINT16_FORMAT.magic} or {UINT32_FORMAT.magic}; prepare the corpus again"
        )
    shard_format = FORMATS[int(header[0])]
    if header[1] != shard_format.version:
        raise DamagedShard(
            f"{path} has shard version {header[1]}, but this code reads version "
            f"{shard_format.version}; prepare the corpus again"
        )
    num_tokens = int(header[2])
    expected_bytes = compute_shard_bytes(num_tokens, shard_format.dtype)
    if file_bytes != expected_bytes:
        raise DamagedShard(
            f"{path} is damaged: {num_tokens} tokens need {expected_bytes} bytes, but the file has "
            f"{file_bytes}; delete it and prepare the corpus again"
        )
    if num_tokens == 0:
        # an empty range of a file cannot be mapped
        return np.zeros(0, dtype=shard_format.dtype)
    return np.memmap(
        path, dtype=shard_format.dtype, mode="r", offset=HEADER_BYTES, shape=(num_tokens,)
    )


def count_tokens(tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    """Return how often each id occurs, int64 (vocab_size,).

    Raises:
        ValueError: an id is vocab_size or more
    """
    counts = np.zeros(vocab_size, dtype=np.int64)
    # in chunks, because bincount converts its input to int64
    chunk_size = 4_000_000
    for start in range(0, len(tokens), chunk_size):
        chunk = tokens[start : start + chunk_size]
        # checked first, because a damaged id of 32 bits would make bincount allocate gigabytes
        if chunk.max() >= vocab_size:
            raise ValueError(
                f"token id {chunk.max()} is outside of the vocabulary, which has {vocab_size} ids"
            )
        counts += np.bincount(chunk, minlength=vocab_size)
    return counts


# ---- the folder ----


def read_meta(folder: Path) -> dict:
    """Return meta.json of a corpus; {} if there is none.

    Raises:
        ValueError: the file is damaged
    """
    return read_optional_json(folder / "meta.json")


def read_progress(folder: Path) -> dict:
    """Return preparation.json, the progress of a preparation; {} if there is none.

    Raises:
        ValueError: the file is damaged
    """
    return read_optional_json(folder / "preparation.json")


def read_optional_json(path: Path) -> dict:
    """Return the JSON object that a file of a corpus holds; {} if there is no such file."""
    if not path.exists():
        return {}
    try:
        return files.read_json(path)
    except ValueError as error:
        raise ValueError(f"{error}; prepare the corpus again") from error


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Keep other processes from preparing a corpus in this folder while the block runs.

    Raises:
        ValueError: another process is preparing it
    """
    if not os.access(folder, os.W_OK):
        # a complete corpus may be read-only; nothing will be written to it
        yield
        return
    try:
        file = files.lock_file(folder / "lock")
    except BlockingIOError as error:
        raise ValueError(
            f"{folder} is being prepared by another process; wait for it, or give another --out"
        ) from error
    with file:
        yield


def write_meta(
    folder: Path,
    records: list[dict],
    *,
    tokenizer: "Tokenizer",
    about: dict,
) -> None:
    """Write meta.json, and print the sums of both splits.

    Args:
        records: of each shard its file, split, tokens, sha256, documents and bytes
        about: further entries: where the documents come from
    """
    meta = {
        "tokenizer": tokenizer.name,
        "vocab_size": tokenizer.n_vocab,
        "eot_token": tokenizer.eot_token,
    }
    if tokenizer.bos_token != tokenizer.eot_token:
        meta["bos_token"] = tokenizer.bos_token
    shard_format = choose_format(tokenizer.n_vocab)
    if shard_format != UINT16_FORMAT:
        meta["dtype"] = shard_format.dtype.name
    meta.update(about)
    for split in ("val", "train"):
        split_records = [record for record in records if record["split"] == split]
        sums = {
            key: sum(record[key] for record in split_records)
            for key in ("documents", "bytes", "tokens")
        }
        meta[split] = sums
        summary = ", ".join(f"{value:,} {key}" for key, value in sums.items())
        print(f"{split}: {summary} ({sums['bytes'] / sums['tokens']:.2f} bytes per token)")
    listed_keys = ("file", "split", "tokens", "sha256")
    meta["shards"] = [{key: record[key] for key in listed_keys} for record in records]
    files.write_json(folder / "meta.json", meta)


@dataclass(frozen=True)
class Corpus:
    """A folder of shards."""

    path: Path

    # the content of meta.json
    meta: dict

    # memory-mapped token ids of the shards of each split, by name; a synthetic task has none
    train: list[np.ndarray]
    val: list[np.ndarray]

    @property
    def is_task(self) -> bool:
        """Whether meta.json describes a synthetic task (data/tasks.py)."""
        return "task" in self.meta

    @property
    def identity(self) -> dict:
        """Return what distinguishes this corpus from others: meta.json, and a digest of its shards.

        If meta.json has no digests, the first and last tokens of every shard take their place.
        """
        if self.is_task:
            return self.meta
        about = {key: value for key, value in self.meta.items() if key != "shards"}
        for split, split_shards in (("train", self.train), ("val", self.val)):
            num_tokens = sum(len(shard) for shard in split_shards)
            about[split] = {**about.get(split, {}), "tokens": num_tokens}
        digests = "".join(record["sha256"] for record in self.meta.get("shards", []))
        if digests:
            about["sha256"] = hashlib.sha256(digests.encode()).hexdigest()
        else:
            about["sample_sha256"] = self.hash_sample()
        return about

    def hash_sample(self, num_tokens: int = 4096) -> str:
        """Return a hash of the first and the last tokens of every shard."""
        digest = hashlib.sha256()
        for shard in (*self.train, *self.val):
            digest.update(shard[:num_tokens].tobytes())
            digest.update(shard[-num_tokens:].tobytes())
        return digest.hexdigest()

    def bytes_per_token(self, split: str) -> float | None:
        """Return the UTF-8 bytes of text per token of a split; None if meta.json does not say."""
        counts = self.meta.get(split, {})
        if "bytes" not in counts:
            return None
        return counts["bytes"] / counts["tokens"]


def find_shards(folder: Path, split: str) -> list[Path]:
    """Return the shards of a split, by name.

    The last word `train` or `val` in a name is its split: medieval_train_000000.bin is for training.
    """
    return [path for path in sorted(folder.glob("*.bin")) if read_split(path.stem) == split]


def read_split(name: str) -> str | None:
    """Return the last word `train` or `val` in the name of a shard; None without any."""
    words = re.findall(r"(?<![A-Za-z])(train|val)(?![A-Za-z])", name)
    return words[-1] if words else None


def find_folder(dataset: str) -> Path:
    """Return the folder `data/<dataset>` if it exists, else the folder `dataset`."""
    corpus_folder = Path(__file__).parent / dataset
    return corpus_folder if corpus_folder.is_dir() else Path(dataset)


def make_location_absolute(dataset: str) -> str:
    """Return a name of a corpus that is valid in every working directory.

    It is the absolute path, unless the corpus is in data/ or does not exist.
    """
    folder = find_folder(dataset)
    is_relative_path = folder == Path(dataset) and folder.is_dir()
    return str(folder.absolute()) if is_relative_path else dataset


def open_corpus(dataset: str) -> Corpus:
    """Open the corpus in `data/<dataset>`, or in the folder `dataset`.

    Raises:
        MissingCorpus: it is not prepared, or not completely
        ValueError: it is damaged
    """
    folder = find_folder(dataset)
    paths = {split: find_shards(folder, split) for split in ("train", "val")}
    meta = read_meta(folder)
    if "task" in meta:
        return Corpus(path=folder, meta=meta, train=[], val=[])
    if "window_tokens" in meta:
        raise ValueError(
            f"{folder} holds a packed corpus or a synthetic task of an earlier version; prepare it "
            "again with another --out"
        )
    check_prepared(dataset, folder, paths, meta)
    meta = meta or GPT2_META
    if type(meta.get("vocab_size")) is not int:
        raise ValueError(
            f"{folder / 'meta.json'} has no vocab_size; add it, or prepare the corpus again"
        )
    opened = {path: read_shard(path) for split in paths for path in paths[split]}
    check_listed(folder, meta, opened)
    return Corpus(
        path=folder,
        meta=meta,
        train=[opened[path] for path in paths["train"]],
        val=[opened[path] for path in paths["val"]],
    )


def check_prepared(dataset: str, folder: Path, paths: dict[str, list[Path]], meta: dict) -> None:
    """Raise MissingCorpus if a corpus is not prepared, or not completely."""
    if not meta and (folder / "preparation.json").exists():
        raise MissingCorpus(
            f"{folder} is not prepared completely; rerun its prepare.py to resume, or to end sooner "
            "with --max_tokens"
        )
    if all(paths.values()):
        return
    corpora = sorted(path.parent.name for path in Path(__file__).parent.glob("*/prepare.py"))
    if dataset in corpora:
        raise MissingCorpus(
            f"dataset={dataset} is not prepared yet; run `python data/{dataset}/prepare.py`"
        )
    raise MissingCorpus(
        f"dataset={dataset}: {folder} does not hold *train_*.bin and *val_*.bin shards; give a "
        f"folder that does, or one of {', '.join(corpora)}"
    )


def check_listed(folder: Path, meta: dict, opened: dict[Path, np.ndarray]) -> None:
    """Raise ValueError if the shards in a folder are not those that its meta.json lists."""
    listed = {folder / record["file"]: record["tokens"] for record in meta.get("shards", [])}
    if not listed:
        return
    for path in opened:
        if path not in listed:
            raise ValueError(
                f"{path} is not in the list of shards of {folder / 'meta.json'}; move it elsewhere"
            )
    for path, num_tokens in listed.items():
        if path not in opened or len(opened[path]) != num_tokens:
            raise ValueError(
                f"{path} is not the shard of {num_tokens:,} tokens that meta.json lists; delete it "
                "and rerun prepare.py, which prepares it again"
            )
