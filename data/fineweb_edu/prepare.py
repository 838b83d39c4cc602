"""FineWeb-Edu as GPT-2 token shards: the first shard for validation, the others for training.

    python data/fineweb_edu/prepare.py                                        the 100B-token sample, 200 GB of shards
    python data/fineweb_edu/prepare.py --sample=sample-10BT --max_tokens=1000000000
    python data/fineweb_edu/prepare.py --source='fineweb/*.parquet'           from files with a column `text`

Documents come in the order of the source, each after an end-of-text token. Until all is written, a
file `incomplete` marks the folder and nothing trains on it; starting again starts over.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))
import configurator
from data import shards, tokenizer
from training.metrics import duration, short

REPOSITORY = "HuggingFaceFW/fineweb-edu"


def documents(source: str | None, sample: str) -> Iterator[list[str]]:
    """Batches of texts, streamed from the hub or from local parquet files. ValueError: neither can be read."""
    try:
        import datasets
    except ImportError as error:
        raise ValueError("preparing FineWeb-Edu needs the datasets package: pip install datasets") from error
    try:
        if source:
            stream = datasets.load_dataset("parquet", data_files=source, split="train", streaming=True)
        else:
            stream = datasets.load_dataset(REPOSITORY, name=sample, split="train", streaming=True)
    except (OSError, ValueError, datasets.exceptions.DatasetNotFoundError) as error:
        where = source or f"{REPOSITORY} ({sample})"
        raise ValueError(f"{where} cannot be read ({type(error).__name__}: {error}); --source takes files") from error
    return (batch["text"] for batch in stream.select_columns("text").iter(batch_size=1000))


def token_blocks(texts: Iterator[list[str]], encoding, size: int) -> Iterator[np.ndarray]:
    """All tokens in blocks of `size`, the last one shorter."""
    pending, count = [], 0
    for batch in texts:
        for document in encoding.encode_ordinary_batch(batch):
            pending.append(np.array([encoding.eot_token, *document], dtype=np.uint16))
            count += len(pending[-1])
        while count >= size:
            joined = np.concatenate(pending)
            yield joined[:size]
            pending, count = [joined[size:]], count - size
    if count:
        yield np.concatenate(pending)


def bytes_by_token(encoding) -> np.ndarray:
    """UTF-8 bytes that each token stands for; end-of-text stands for none."""
    lengths = np.zeros(encoding.n_vocab, dtype=np.int64)
    for token, rank in encoding._mergeable_ranks.items():
        lengths[rank] = len(token)
    return lengths


def prepare(args, encoding) -> None:
    texts = documents(args.source, args.sample)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / shards.INCOMPLETE).touch()
    for old in [*args.out.glob("fineweb_edu_*.bin"), args.out / "meta.json"]:
        old.unlink(missing_ok=True)
    lengths, started, total = bytes_by_token(encoding), time.monotonic(), 0
    meta = {"tokenizer": encoding.name, "vocab_size": encoding.n_vocab, "eot_token": encoding.eot_token}
    meta |= {"source": args.source or f"{REPOSITORY} {args.sample}"}
    meta |= {split: {"bytes": 0, "tokens": 0} for split in ("val", "train")}
    for index, block in enumerate(token_blocks(texts, encoding, args.shard_tokens)):
        if args.max_tokens:
            block = block[: args.max_tokens - total]
        split = "train" if index else "val"
        shards.write_shard(args.out / f"fineweb_edu_{split}_{index:06d}.bin", block)
        meta[split]["tokens"] += len(block)
        meta[split]["bytes"] += int(lengths[block].sum())
        total += len(block)
        seconds = time.monotonic() - started
        eta = f", ETA {duration((args.max_tokens - total) * seconds / total)}" if args.max_tokens else ""
        print(f"shard {index}: {short(total)} tokens, {short(total / seconds)} tok/s{eta}", flush=True)
        if total == args.max_tokens:
            break
    if not meta["train"]["tokens"]:
        raise ValueError(f"{total} tokens fill no training shard: give more text, or --shard_tokens below {total}")
    (args.out / "tokenizer.json").write_text(json.dumps(tokenizer.to_json(encoding)), encoding="utf-8")
    (args.out / "meta.json").write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")
    (args.out / shards.INCOMPLETE).unlink()


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    samples = ("sample-100BT", "sample-10BT", "sample-350BT")
    parser.add_argument("--sample", choices=samples, default=samples[0], help="which sample of the hub")
    parser.add_argument("--source", help="parquet files instead of the hub: a path or pattern")
    parser.add_argument("--max_tokens", type=int, help="stop after this many tokens, validation included")
    parser.add_argument("--shard_tokens", type=int, default=100_000_000, help="tokens per shard")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder for shards and meta.json")
    args = parser.parse_args()
    with configurator.one_line_errors():
        for name in ("max_tokens", "shard_tokens"):
            if getattr(args, name) is not None and getattr(args, name) < 1:
                raise ValueError(f"--{name}={getattr(args, name)}: give 1 or more")
        prepare(args, tokenizer.gpt2_tokenizer())


if __name__ == "__main__":
    main()
