"""Token shards in the format of llm.c and modded-nanogpt, and the folder that holds them.

A shard is 256 int32 (magic 20240520, version 1, token count, zeros), then uint16 token ids. Its
name contains `train_` or `val_`, or ends so. `meta.json` beside them names the tokenizer, or GPT-2.
"""

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from utils import files

MAGIC, VERSION, HEADER_INTS = 20240520, 1, 256
GPT2_META = {"tokenizer": "gpt2", "vocab_size": 50257, "eot_token": 50256}


class DamagedShard(ValueError):  # noqa: N818 (says what is wrong, as the message does)
    """A shard that cannot be what its preparation wrote; the message names it."""


class MissingCorpus(ValueError):  # noqa: N818 (says what is wrong, as the message does)
    """A corpus that has not been prepared, or not to its end; the message says how to do that."""


def write_shard(path: Path, tokens: np.ndarray) -> str:
    """Write tokens (1-D, ids below 65536) as one shard, whole under its name or absent; the file's
    SHA-256 in hex.
    """
    if tokens.size and not 0 <= tokens.min() <= tokens.max() < 2**16:
        got = f"got {tokens.min()}..{tokens.max()}"
        raise ValueError(f"{path}: token ids must lie in 0..65535, {got}")
    header = np.zeros(HEADER_INTS, dtype="<i4")
    header[:3] = MAGIC, VERSION, tokens.size
    digest = hashlib.sha256()
    with files.atomic_path(path) as temporary, open(temporary, "wb") as file:
        for part in (header, np.ascontiguousarray(tokens, dtype="<u2")):
            file.write(part.data)
            digest.update(part.data)
        # On the disk before it has its name, also when power fails.
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def size_of(tokens: int) -> int:
    """Bytes of a shard of so many tokens."""
    return 4 * HEADER_INTS + 2 * tokens


def read_shard(path: Path) -> np.ndarray:
    """The shard's tokens, uint16 (count,), memory-mapped. DamagedShard: no whole one."""
    size = path.stat().st_size
    header = np.fromfile(path, dtype="<i4", count=HEADER_INTS)
    if header.size < HEADER_INTS or header[0] != MAGIC:
        what = f"{path} is not a token shard (no magic {MAGIC})"
        raise DamagedShard(f"{what}: prepare the corpus again")
    if header[1] != VERSION:
        raise DamagedShard(f"{path} has shard version {header[1]}, this code reads {VERSION}")
    count = int(header[2])
    if size != size_of(count):
        what = f"{count} tokens need {size_of(count)} bytes, it has {size}"
        raise DamagedShard(f"{path} is damaged: {what}: prepare it again")
    if count == 0:  # nothing that could be mapped
        return np.zeros(0, dtype="<u2")
    return np.memmap(path, dtype="<u2", mode="r", offset=size_of(0), shape=(count,))


def token_counts(tokens: np.ndarray) -> np.ndarray:
    """How often each id occurs, int64 (65536,)."""
    counts = np.zeros(2**16, dtype=np.int64)
    for first in range(0, len(tokens), 4_000_000):  # bincount makes int64 of them
        counts += np.bincount(tokens[first : first + 4_000_000], minlength=2**16)
    return counts


def readable(size: int) -> str:
    """Bytes in the unit that fits: 512 bytes, 4.1 KB, 200.0 GB."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size} bytes"


def write_json(path: Path, value) -> None:
    """Complete on the disk under its name, or as it was."""
    files.write_text(path, json.dumps(value, indent=1) + "\n")


def read_json(path: Path) -> dict:
    """The file's object, {} without a file. ValueError: it holds something else."""
    try:
        return files.read_json(path) if path.exists() else {}
    except ValueError as error:
        raise ValueError(f"{error}: prepare the corpus again") from error


@contextlib.contextmanager
def only_one(folder: Path):
    """Hold the folder's lock, which ends with the process. ValueError: another process holds it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        # The system frees the lock when the process ends, however that happens.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        other = f"{folder} is being prepared by another process"
        raise ValueError(f"{other}: wait for it, or give another --out") from error
    finally:
        os.close(descriptor)


def write_meta(folder: Path, about: dict, records: list[dict]) -> None:
    """meta.json: `about` (tokenizer, vocab_size, eot_token, source), sums by split, every shard
    with its SHA-256.
    """
    meta, counted = dict(about), ("documents", "bytes", "tokens")
    if meta["tokenizer"] == "ids":  # which stand for no bytes
        counted = ("documents", "tokens")
    for split in ("val", "train"):
        own = [record for record in records if record["split"] == split]
        sums = meta[split] = {key: sum(record[key] for record in own) for key in counted}
        each = f" ({sums['bytes'] / sums['tokens']:.2f} bytes each)" if "bytes" in sums else ""
        print(f"{split}: {', '.join(f'{value:,} {key}' for key, value in sums.items())}{each}")
    keys = ("file", "split", "tokens", "sha256")
    meta["shards"] = [{key: record[key] for key in keys} for record in records]
    write_json(folder / "meta.json", meta)


@dataclass(frozen=True)
class Corpus:
    """A folder of shards: `train` and `val` memory-mapped in name order, and its meta.json."""

    path: Path
    meta: dict
    train: list[np.ndarray]
    val: list[np.ndarray]

    @property
    def identity(self) -> dict:
        """What tells this corpus from another: meta.json, its list of shards as one digest."""
        about = {key: value for key, value in self.meta.items() if key != "shards"}
        for split, shards in (("train", self.train), ("val", self.val)):
            about[split] = {**about.get(split, {}), "tokens": sum(map(len, shards))}
        sums = "".join(record["sha256"] for record in self.meta.get("shards", []))
        return {**about, "sha256": hashlib.sha256(sums.encode()).hexdigest()} if sums else about

    def bytes_per_token(self, split: str) -> float | None:
        """UTF-8 bytes of the split's text per token, where meta.json knows them."""
        counts = self.meta.get(split, {})
        return counts["bytes"] / counts["tokens"] if "bytes" in counts else None


def shard_files(folder: Path, split: str) -> list[Path]:
    """The split's shards by name."""
    return sorted({*folder.glob(f"*{split}_*.bin"), *folder.glob(f"*{split}.bin")})


def folder_of(dataset: str) -> Path:
    """`data/<dataset>` where that is a folder, else the folder `dataset`."""
    named = Path(__file__).parent / dataset
    return named if named.is_dir() else Path(dataset)


def vocab_size_of(dataset: str) -> int | None:
    """Tokens of the corpus's tokenizer, end-of-text included; None: the corpus does not say."""
    size = read_json(folder_of(dataset) / "meta.json").get("vocab_size")
    return size if type(size) is int else None


def open_corpus(dataset: str) -> Corpus:
    """The corpus in `data/<dataset>` or in the folder `dataset`. ValueError: not there, and which
    command makes it, or not whole.
    """
    path = folder_of(dataset)
    files = {split: shard_files(path, split) for split in ("train", "val")}
    meta = read_json(path / "meta.json")
    if begun := not meta and read_json(path / "preparation.json"):
        kept = sum(record["tokens"] for record in begun.get("shards", []))
        end_here = ", or, to end with the whole shards that are there, with --max_tokens="
        what = f"{path} was not prepared to its end: run its prepare.py again to go on"
        raise MissingCorpus(what + f"{end_here}{kept}" * bool(kept))
    if not all(files.values()):
        known = sorted(folder.parent.name for folder in Path(__file__).parent.glob("*/prepare.py"))
        if dataset in known:
            run = f"run `python data/{dataset}/prepare.py`"
            raise MissingCorpus(f"dataset={dataset} has no token shards yet: {run}")
        lack = f"{path} holds no *train_*.bin and *val_*.bin shards"
        ways = f"give a folder that does, or one of {', '.join(known)}"
        raise MissingCorpus(f"dataset={dataset}: {lack}; {ways}")
    meta = meta or GPT2_META
    if type(meta.get("vocab_size")) is not int:
        lack = f"{path / 'meta.json'} has no vocab_size"
        raise ValueError(f"{lack}: add it, or prepare the corpus again")
    opened = {file: read_shard(file) for split in files for file in files[split]}
    listed = {path / record["file"]: record["tokens"] for record in meta.get("shards", [])}
    if listed and (others := [file for file in opened if file not in listed]):
        what = f"{others[0]} is no shard that {path / 'meta.json'} lists"
        raise ValueError(f"{what}: move it elsewhere")
    for file, tokens in listed.items():
        if file not in opened or len(opened[file]) != tokens:
            what = f"{file} is not the shard of {tokens:,} tokens that meta.json lists"
            raise ValueError(f"{what}: delete it and run prepare.py again, which makes it again")
    return Corpus(path, meta, *([opened[file] for file in files[split]] for split in files))


def verify(folder: Path, workers: int) -> None:
    """Compare every shard's SHA-256 with the one in meta.json. ValueError: names each that is
    missing, damaged or not as it was made.
    """
    meta = read_json(folder / "meta.json")
    if "shards" not in meta:
        raise ValueError(f"{folder} has no meta.json with SHA-256 sums: prepare the corpus first")
    records, bad = meta["shards"], []
    paths = [folder / record["file"] for record in records]
    for record, found in zip(records, examined(paths, meta["vocab_size"], workers)):
        if isinstance(found, ValueError):
            bad.append(str(found))
        elif found["sha256"] != record["sha256"]:
            sha256 = found["sha256"][:12]
            bad.append(f"{folder / record['file']} is not as it was made (SHA-256 {sha256}...)")
    if bad:
        what = f"{len(bad)} of {len(records)} shards are damaged: {'; '.join(bad)}"
        again = "run the same command without --verify, which makes them again"
        raise ValueError(f"{what}: delete them and {again}")
    tokens = sum(record["tokens"] for record in records)
    print(f"{len(records)} shards, {tokens:,} tokens: all as they were made")


def examined(paths: list[Path], vocab_size: int, workers: int) -> Iterator[dict | ValueError]:
    """Of each shard: SHA-256 of its file, tokens, and how often each token occurs ("counts"); or a
    ValueError: it is damaged, or holds ids beyond the vocabulary.
    """
    from tqdm import tqdm

    def examine(path):
        try:
            tokens = read_shard(path)
            counts = token_counts(tokens)
            if (largest := int(counts.nonzero()[0].max(initial=0))) >= vocab_size:
                beyond = f"holds token id {largest}, the vocabulary has {vocab_size}"
                raise ValueError(f"{path} {beyond}")
            with open(path, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        # Returned and not raised: the other shards are examined as well.
        except (ValueError, OSError) as error:
            return ValueError(str(error))
        return {"sha256": digest, "tokens": len(tokens), "counts": counts}

    with ThreadPoolExecutor(workers) as pool:
        results = pool.map(examine, paths)
        yield from tqdm(results, total=len(paths), unit="shard", disable=None)
