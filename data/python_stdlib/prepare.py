"""The source text of the running interpreter's standard library as a small corpus. No network.

    python data/python_stdlib/prepare.py [--tokenizer=bpe|bytes|gpt2] [--vocab_size=4096] [--out=FOLDER]

Shards, tokenizer.json and meta.json go to this folder, or to --out.
"""

import argparse
import hashlib
import json
import platform
import sys
import sysconfig
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))
import configurator
from data import shards, tokenizer

LEFT_OUT = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "lib2to3", "turtledemo"}
LEFT_OUT |= {"ensurepip", "pydoc_data", "encodings"}
VALIDATION_SHARE = 0.04  # of the bytes, at least


def source_files(root: Path) -> dict[str, str]:
    """Text by relative path, in path order: every UTF-8 .py file below root, the folders left out and copies aside."""
    texts, seen = {}, set()
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if LEFT_OUT.intersection(relative.parts):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, IsADirectoryError):
            continue
        if text.strip() and text not in seen:
            seen.add(text)
            texts[relative.as_posix()] = text
    return texts


def split_by_hash(texts: dict[str, str]) -> dict[str, dict[str, str]]:
    """Files in the order of their path's hash: the first, up to the validation share of all bytes, are validation."""
    order = sorted(texts, key=lambda path: hashlib.sha256(path.encode()).digest())
    total = sum(len(text.encode()) for text in texts.values())
    splits, taken = {"val": {}, "train": {}}, 0
    for path in order:
        split = "val" if taken < VALIDATION_SHARE * total else "train"
        splits[split][path] = texts[path]
        taken += len(texts[path].encode())
    return splits


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", choices=("bpe", "bytes", "gpt2"), default="bpe")
    parser.add_argument("--vocab_size", type=int, default=4096, help="tokens of the trained byte-pair vocabulary")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder for shards and meta.json")
    args = parser.parse_args()
    with configurator.one_line_errors():
        root = Path(sysconfig.get_path("stdlib"))
        splits = split_by_hash(source_files(root))
        if not splits["train"]:
            raise ValueError(f"{root} holds no standard library source: run this with a full Python installation")
        if args.tokenizer == "bpe":
            encoding = tokenizer.train_byte_pairs(splits["train"].values(), args.vocab_size)
        else:
            encoding = tokenizer.byte_tokenizer() if args.tokenizer == "bytes" else tokenizer.gpt2_tokenizer()
        write(args.out, splits, encoding)


def write(out: Path, splits: dict[str, dict[str, str]], encoding) -> None:
    """The tokenizer, then shards, then meta.json; what an earlier preparation left is removed first."""
    out.mkdir(parents=True, exist_ok=True)
    (out / shards.INCOMPLETE).touch()
    for old in [*out.glob("python_*.bin"), out / "meta.json"]:
        old.unlink(missing_ok=True)
    (out / "tokenizer.json").write_text(json.dumps(tokenizer.to_json(encoding)), encoding="utf-8")
    meta = {"tokenizer": encoding.name, "vocab_size": encoding.n_vocab, "eot_token": encoding.eot_token}
    meta["source"] = f"standard library of Python {platform.python_version()}"
    for split, texts in splits.items():
        encoded = encoding.encode_ordinary_batch(list(texts.values()))
        tokens = np.concatenate([[encoding.eot_token, *document] for document in encoded])
        shards.write_shard(out / f"python_{split}_000000.bin", tokens)
        size = sum(len(text.encode()) for text in texts.values())
        meta[split] = {"documents": len(texts), "bytes": size, "tokens": len(tokens)}
        print(
            f"{split}: {len(texts)} files, {size:,} bytes, {len(tokens):,} tokens ({size / len(tokens):.2f} bytes each)"
        )
    (out / "meta.json").write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")
    (out / shards.INCOMPLETE).unlink()


if __name__ == "__main__":
    main()
