"""Token shards in the format of llm.c and modded-nanogpt, and the folder that holds them.

A shard is 256 int32 (magic 20240520, version 1, token count, zeros), then uint16 token ids. Its name contains
`train_` or `val_`, or ends so. `meta.json` beside the shards says which tokenizer made them; without one, GPT-2's.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

MAGIC, VERSION, HEADER_INTS = 20240520, 1, 256
HEADER_BYTES = 4 * HEADER_INTS
INCOMPLETE = "incomplete"  # a file of this name marks a folder whose preparation has not ended
GPT2_META = {"tokenizer": "gpt2", "vocab_size": 50257, "eot_token": 50256}


def write_shard(path: Path, tokens: np.ndarray) -> None:
    """Write tokens (1-D, ids below 65536) as one shard: complete under its name, or absent."""
    if tokens.size and not 0 <= tokens.min() <= tokens.max() < 2**16:
        raise ValueError(f"{path}: token ids must lie in 0..65535, got {tokens.min()}..{tokens.max()}")
    header = np.zeros(HEADER_INTS, dtype="<i4")
    header[:3] = MAGIC, VERSION, tokens.size
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        file.write(header.tobytes())
        file.write(tokens.astype("<u2").tobytes())
    temporary.replace(path)


def read_shard(path: Path) -> np.ndarray:
    """The shard's tokens, uint16 (count,), memory-mapped. ValueError: not a whole shard of version 1."""
    size = path.stat().st_size
    header = np.fromfile(path, dtype="<i4", count=HEADER_INTS)
    if header.size < HEADER_INTS or header[0] != MAGIC:
        raise ValueError(f"{path} is not a token shard (no magic {MAGIC}): prepare the corpus again")
    if header[1] != VERSION:
        raise ValueError(f"{path} has shard version {header[1]}, this code reads {VERSION}")
    count = int(header[2])
    if size != HEADER_BYTES + 2 * count:
        raise ValueError(
            f"{path} is damaged: {count} tokens need {HEADER_BYTES + 2 * count} bytes, it has {size}: prepare it again"
        )
    if count == 0:
        return np.zeros(0, dtype="<u2")
    return np.memmap(path, dtype="<u2", mode="r", offset=HEADER_BYTES, shape=(count,))


@dataclass(frozen=True)
class Corpus:
    """A folder of shards: `train` and `val` memory-mapped in name order, and its meta.json."""

    path: Path
    meta: dict
    train: list[np.ndarray]
    val: list[np.ndarray]

    def bytes_per_token(self, split: str) -> float | None:
        """UTF-8 bytes of the split's text per token, where meta.json knows them."""
        counts = self.meta.get(split, {})
        return counts["bytes"] / counts["tokens"] if "bytes" in counts else None


def open_corpus(dataset: str) -> Corpus:
    """The corpus in `data/<dataset>` or in the folder `dataset`.

    ValueError: no such folder or no shards in it (the message names the command that makes them), or a damaged one.
    """
    named = Path(__file__).parent / dataset
    path = named if named.is_dir() else Path(dataset)
    shards = {s: sorted({*path.glob(f"*{s}_*.bin"), *path.glob(f"*{s}.bin")}) for s in ("train", "val")}
    if (path / INCOMPLETE).exists():
        raise ValueError(f"{path} was not prepared to its end ({INCOMPLETE} is there): run its prepare.py again")
    if not all(shards.values()):
        script = f"data/{dataset}/prepare.py"
        known = sorted(folder.parent.name for folder in Path(__file__).parent.glob("*/prepare.py"))
        if dataset in known:
            raise ValueError(f"dataset={dataset} has no token shards yet: run `python {script}`")
        raise ValueError(
            f"dataset={dataset}: {path} holds no *train_*.bin and *val_*.bin shards; "
            f"give a folder that does, or one of {', '.join(known)}"
        )
    meta_path = path / "meta.json"
    try:
        meta = json.loads(meta_path.read_text(encoding="utf-8")) if meta_path.exists() else GPT2_META
    except json.JSONDecodeError as error:
        raise ValueError(f"{meta_path} is damaged ({error}): prepare the corpus again") from error
    if not isinstance(meta, dict) or type(meta.get("vocab_size")) is not int:
        raise ValueError(f"{meta_path} has no vocab_size: add it, or prepare the corpus again")
    return Corpus(path, meta, *([read_shard(file) for file in shards[split]] for split in ("train", "val")))
