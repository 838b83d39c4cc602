"""Check token shards against their SHA-256, and take over shards that others have made."""

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from tqdm import tqdm

from data import shards, tokenizer

CHUNK = 4_000_000  # tokens


def verify(folder: Path, workers: int) -> None:
    """Read every shard of a prepared folder. ValueError: names each that is missing, damaged or not as it was made."""
    meta = shards.read_json(folder / "meta.json")
    if "shards" not in meta:
        raise ValueError(f"{folder} has no meta.json with SHA-256 sums: prepare the corpus first")
    bad = []
    for record, found in zip(meta["shards"], examined(folder, meta["shards"], meta["vocab_size"], workers)):
        if isinstance(found, ValueError):
            bad.append(str(found))
        elif found["sha256"] != record["sha256"]:
            bad.append(f"{folder / record['file']} is not as it was made (SHA-256 {found['sha256'][:12]}...)")
    if bad:
        raise ValueError(
            f"{len(bad)} of {len(meta['shards'])} shards are damaged: {'; '.join(bad)}: delete them and run the same "
            "command without --verify, which makes them again"
        )
    print(f"{len(meta['shards'])} shards, {sum(r['tokens'] for r in meta['shards']):,} tokens: all as they were made")


def examined(folder: Path, records: list[dict], vocab_size: int, workers: int) -> Iterator[dict | ValueError]:
    """`examine` of each record's file in order, with progress; a ValueError in place of what failed."""

    def one(record):
        try:
            return examine(folder / record["file"], vocab_size)
        except (ValueError, OSError) as error:
            return ValueError(str(error))

    with ThreadPoolExecutor(workers) as pool, tqdm(total=len(records), unit="shard", disable=None) as bar:
        for found in pool.map(one, records):
            bar.update()
            yield found


def examine(path: Path, vocab_size: int) -> dict:
    """SHA-256 of a shard's file, tokens, and how often each token occurs. ValueError: damaged, or ids too large."""
    tokens = shards.read_shard(path)
    counts = np.zeros(2**16, dtype=np.int64)
    for first in range(0, len(tokens), CHUNK):
        counts += np.bincount(tokens[first : first + CHUNK], minlength=2**16)
    if len(tokens) and (largest := int(counts.nonzero()[0].max())) >= vocab_size:
        raise ValueError(f"{path} holds token id {largest}, the vocabulary has {vocab_size}")
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"sha256": digest, "tokens": len(tokens), "counts": counts[:vocab_size]}


def adopt(source: str, out: Path, workers: int) -> None:
    """Make GPT-2 shards in llm.c's format, from a folder or the hub, the corpus in `out`: examine all, write meta.json.

    A folder's shards are linked, not copied. ValueError: not such shards, or not all to be had.
    """
    encoding = tokenizer.gpt2_tokenizer()
    out.mkdir(parents=True, exist_ok=True)
    if (out / "preparation.json").exists():
        raise ValueError(f"{out} holds a preparation of its own: give another --out")
    origin = Path(source) if Path(source).is_dir() else fetch(source, out)
    records = [
        {"file": file.name, "split": split} for split in ("val", "train") for file in shards.shard_files(origin, split)
    ]
    if {record["split"] for record in records} != {"val", "train"}:
        raise ValueError(f"{source} holds no *train_*.bin and *val_*.bin shards of the llm.c format")
    lengths = tokenizer.bytes_by_token(encoding)
    for record, found in zip(records, examined(origin, records, encoding.n_vocab, workers)):
        if isinstance(found, ValueError):
            raise found
        record |= {"tokens": found["tokens"], "sha256": found["sha256"]}
        record |= {"bytes": int(found["counts"] @ lengths), "documents": int(found["counts"][encoding.eot_token])}
    for record in records:
        link = out / record["file"]
        if not link.exists():
            link.symlink_to((origin / record["file"]).resolve())
        elif link.resolve() != (origin / record["file"]).resolve():
            raise ValueError(f"{link} is there already and another file: give another --out")
    shards.write_json(out / "tokenizer.json", tokenizer.to_json(encoding))
    shards.write_meta(out, {**tokenizer.meta(encoding), "source": source}, records)


def fetch(repository: str, out: Path) -> Path:
    """Download a data set's .bin files to `out`; what is there already is not fetched again."""
    try:
        import huggingface_hub
    except ImportError as error:
        raise ValueError("fetching from the hub needs the datasets package: pip install datasets") from error
    try:
        folder = huggingface_hub.snapshot_download(
            repository, repo_type="dataset", local_dir=out, allow_patterns="*.bin"
        )
    except Exception as error:  # the hub's client and its transport raise many kinds; the cause is kept
        cause = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"
        raise ValueError(
            f"--pretokenized={repository}: no such folder, and it cannot be fetched from the hub ({cause}); "
            "run the same command again to go on where it stopped"
        ) from error
    return Path(folder)
