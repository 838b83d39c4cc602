"""Existing shards in llm.c's formats become a corpus: data/fineweb_edu/prepare.py --pretokenized."""

from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

from data import hub, library_tokenizer, shards, tokenizer
from data.preparation import count_text, is_own_tokenizer
from data.tokenizer_base import Tokenizer
from utils import files

UNUSED_OPTIONS = (
    "sample",
    "repository",
    "source",
    "column",
    "max_tokens",
    "val_tokens",
    "shard_tokens",
    "overwrite",
)


def adopt(args: SimpleNamespace, options: type) -> None:
    """Make existing shards in llm.c's formats the corpus in args.out.

    The shards of a folder are linked, and those of a repository of the Hub are downloaded. Their
    tokenizer is GPT-2's, unless args.tokenizer names a tokenizer.json.

    Args:
        options: the dataclass of the script's options, which has their defaults

    Raises:
        ValueError: there are no such shards, or args.out holds something else
    """
    out = args.out
    folder = Path(args.pretokenized)
    is_local = folder.is_dir()
    hub.check_unused(args, options, "--pretokenized", UNUSED_OPTIONS)
    if is_local:
        hub.check_unused(args, options, "a folder of shards")
    if args.tokenizer in ("bpe", "bytes"):
        raise ValueError(
            f"--tokenizer={args.tokenizer} cannot be the tokenizer of existing shards; omit it if "
            "they hold GPT-2's tokens, or give their tokenizer.json"
        )
    out.mkdir(parents=True, exist_ok=True)
    with shards.lock_folder(out):
        if (out / "preparation.json").exists():
            raise ValueError(
                f"{out} holds a corpus that was prepared from documents; give another --out"
            )
        tokenizer_files = None
        if is_own_tokenizer(args.tokenizer):
            tokenizer_files = library_tokenizer.read_files(
                args.tokenizer, args.eot_token, args.retry_minutes
            )
            encoding = tokenizer.from_json(tokenizer_files.describe())
        else:
            encoding = tokenizer.gpt2_tokenizer()
        fetched = hub.FetchedShards(commit=None, sha256={})
        if not is_local:
            fetched = hub.fetch_shards(args.pretokenized, out, args.revision, args.retry_minutes)
            folder = out
        adopted = link_shards(args, folder, encoding, fetched.sha256)

        about = {"source": args.pretokenized}
        if tokenizer_files is not None:
            tokenizer_files.write(out)
            about["tokenizer_sha256"] = tokenizer_files.sha256
        else:
            files.write_json(out / "tokenizer.json", encoding.to_json())
        if fetched.commit is not None:
            about["commit"] = fetched.commit
        shards.write_meta(
            out,
            adopted.records,
            tokenizer=encoding,
            shard_format=adopted.shard_format,
            about=about,
        )


class AdoptedShards(NamedTuple):
    """Existing shards in the order of meta.json, and the format of the largest ids."""

    records: list[dict]
    shard_format: shards.ShardFormat


def link_shards(
    args: SimpleNamespace, folder: Path, encoding: Tokenizer, sha256_of: dict[str, str]
) -> AdoptedShards:
    """Read all shards of a folder, and link them into args.out, unless they are there already.

    Args:
        sha256_of: the SHA-256 that some of the files must have, by name

    Raises:
        ValueError: a shard is damaged or has other tokens, or args.out has another file of its name
    """
    split_of = {
        path: split for split in ("val", "train") for path in shards.find_shards(folder, split)
    }
    if set(split_of.values()) != {"val", "train"}:
        raise ValueError(
            f"{args.pretokenized} holds no *train_*.bin and *val_*.bin shards in llm.c's formats; "
            "give a folder or repository that does"
        )
    shard_format = shards.UINT16_FORMAT
    for path in split_of:
        if shards.read_shard(path).dtype == shards.UINT32_FORMAT.dtype:
            shard_format = shards.UINT32_FORMAT
            if not is_own_tokenizer(args.tokenizer):
                raise ValueError(
                    f"{path} contains 32-bit ids (llm.c's version 7), which GPT-2's tokenizer does "
                    "not produce; name the tokenizer.json of these shards with --tokenizer"
                )
    contents = shards.examine_shards(list(split_of), encoding.n_vocab, args.workers)
    records = []
    for (path, split), content in zip(split_of.items(), contents):
        if isinstance(content, ValueError):
            raise content
        if content.sha256 != sha256_of.get(path.name, content.sha256):
            raise ValueError(
                f"{path} does not have the SHA-256 that the Hub reports; delete it and rerun the "
                "same command to download it again"
            )
        # linked instead of copied, because shards are tens of gigabytes
        link = args.out / path.name
        if not link.exists():
            link.symlink_to(path.resolve())
        elif link.resolve() != path.resolve():
            raise ValueError(f"{link} already exists and is a different file; give another --out")
        records.append(
            {
                "file": path.name,
                "split": split,
                "sha256": content.sha256,
                "tokens": content.num_tokens,
                **count_text(content.counts, encoding),
            }
        )
    return AdoptedShards(records, shard_format)
