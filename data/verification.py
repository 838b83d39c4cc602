"""Check token shards against their SHA-256, and take over shards that others have made."""

import hashlib
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from tqdm import tqdm

from data import interruption, shards, tokenizer
from data.hub import AHEAD, Hub, RemoteFile, refuse_options

CHUNK = 4_000_000  # tokens
ATTEMPTS = 5  # to fetch a file whose bytes are those that the hub says


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


def adopt(args) -> None:
    """Make GPT-2 shards in llm.c's format, from a folder or the hub, the corpus in args.out: examine all, sum up.

    A folder's shards are linked, not copied. ValueError: not such shards, not all to be had, or a folder in use.
    """
    if Path(args.pretokenized).is_dir():
        refuse_options(args, "a folder of shards")
    args.out.mkdir(parents=True, exist_ok=True)
    with shards.only_one(args.out):
        if (args.out / "preparation.json").exists():
            raise ValueError(f"{args.out} holds a preparation of its own: give another --out")
        take_over(args)


def take_over(args) -> None:
    source, out, workers = args.pretokenized, args.out, args.workers
    encoding = tokenizer.gpt2_tokenizer()
    about = {"source": source}
    origin = Path(source)
    if not origin.is_dir():
        origin, about["commit"] = out, fetch(source, out, args.revision, args.retry_minutes)
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
    shards.write_meta(out, {**tokenizer.meta(encoding), **about}, records)


def fetch(repository: str, out: Path, revision: str | None, retry_minutes: float | None) -> str:
    """Download a data set's .bin files to `out`, each compared with the hub's size and SHA-256; returns their commit.

    `fetched.json` notes the commit, so that a fetch that is begun again goes on with that one.
    """
    otherwise = "--pretokenized takes the folder of such shards too"
    anew = f"delete {out / 'fetched.json'} and the shards beside it to fetch the newest"
    hub = Hub(repository, None, revision=revision, retry_minutes=retry_minutes, otherwise=otherwise, anew=anew)
    asked, before = {"source": repository, "revision": revision}, shards.read_json(out / "fetched.json")
    if before and {key: before.get(key) for key in asked} != asked:
        holds = f"{before.get('source')}, revision {before.get('revision')}"
        raise ValueError(f"{out} holds shards of {holds}: give another --out")
    commit = hub.pin(before.get("commit"))
    shards.write_json(out / "fetched.json", {**asked, "commit": commit})
    files = [file for file in hub.ask(hub.files_of_commit) if file.path.endswith(".bin")]
    interruption.advise(lambda: how_to_go_on(out, files))
    with ThreadPoolExecutor(8) as pool, tqdm(total=len(files), unit="shard", disable=None) as bar:
        for _ in pool.map(lambda file: fetch_one(hub, file, out), files):
            bar.update()
    return commit


def how_to_go_on(out: Path, files: list) -> str:
    """What Ctrl+C leaves of a fetch."""
    here = sum((out / file.path).exists() for file in files)
    return f"interrupted; {here} of {len(files)} shards are here: run the same command again to go on"


def fetch_one(hub: Hub, file, out: Path) -> None:
    """One file, complete and compared under its name, or as `.part`, which the next call goes on with."""
    path, part = out / file.path, out / f"{file.path}.part"
    if path.exists():
        if not is_that_of_the_hub(path, file):
            raise ValueError(f"{path} is not what {hub.repository} has: delete it to fetch it, or give another --out")
        return
    wrong = f"{file.path} came with other bytes than the hub's SHA-256 says"
    for attempt in range(1, ATTEMPTS + 1):
        fetch_rest(hub.remote(file.path), part)
        if is_that_of_the_hub(part, file):
            part.replace(path)
            return
        part.unlink()
        tqdm.write(f"{hub.repository}: attempt {attempt} failed ({wrong})", file=sys.stderr)
    raise ValueError(f"{wrong}, {ATTEMPTS} times: give another --revision, or {hub.otherwise}")


def fetch_rest(remote: RemoteFile, part: Path) -> None:
    """Append to `part` what it lacks of the file; a `remote` of its own, which holds nothing of an earlier attempt."""
    with open(part, "ab") as target:
        remote.seek(target.tell())
        while content := remote.read(AHEAD):
            target.write(content)
        os.fsync(target.fileno())


def is_that_of_the_hub(path: Path, file) -> bool:
    """Whether size and, where the hub knows it, SHA-256 are those of its listing."""
    if path.stat().st_size != file.size:
        return False
    with open(path, "rb") as content:
        return file.lfs is None or hashlib.file_digest(content, "sha256").hexdigest() == file.lfs.sha256
