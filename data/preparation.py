"""From documents to token shards: what all `data/<corpus>/prepare.py` share.

Documents are read in order, tokenized by several threads, each preceded by an end-of-text token,
and cut into shards. After each shard, `preparation.json` records where in the documents the next one
begins. So a preparation that was killed at any moment resumes there, and its shards have the same
bytes as those of an uninterrupted one, whatever the number of threads. `meta.json` is written last:
a folder with the first file and without the second is not a complete corpus.
"""

import dataclasses
import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

from tqdm import tqdm

from configurator import option, read_command_line
from data import shards, tokenizer
from data.documents import Documents
from data.token_reader import TokenReader
from data.tokenizer import Tokenizer
from utils import files, machine

# values of --tokenizer, and that of shakespeare_char; any other one names a tokenizer.json
BUILT_IN_TOKENIZERS = ("gpt2", "bpe", "bytes", "characters")
TOKENIZER_HELP = (
    "GPT-2's tokenizer (gpt2), a byte-pair encoding trained on this corpus (bpe), one token per byte "
    "(bytes), or a tokenizer of your own: a folder with a tokenizer.json, the file itself, or a "
    "repository on the Hugging Face Hub (OWNER/NAME)"
)
# files that a preparation writes beside its shards
OWN_FILES = ("meta.json", "tokenizer.json", "preparation.json")


# ---- options ----


def is_own_tokenizer(name: str) -> bool:
    """Return whether --tokenizer names a tokenizer.json."""
    return name not in BUILT_IN_TOKENIZERS


@dataclass(frozen=True)
class PreparationOptions:
    """Options that the scripts of all corpora share."""

    workers: int = option(
        machine.count_cores(),
        "number of threads (default: number of CPU cores)",
        low=1,
    )
    tokenizer: str = option(
        "gpt2",
        TOKENIZER_HELP,
    )
    eot_token: str | None = option(
        None,
        "end-of-text token of your own tokenizer, such as </s> (default: eos_token of its "
        "tokenizer_config.json or special_tokens_map.json)",
    )
    vocab_size: int = option(
        4096,
        "vocabulary size of --tokenizer=bpe, including the end-of-text token",
        low=257,
        high=shards.MAX_UINT16_VOCAB,
    )
    tokenizer_bytes: int = option(
        100_000_000,
        "train --tokenizer=bpe on about this many bytes of the corpus, or on all if it has fewer",
        low=1,
    )
    shard_tokens: int = option(
        100_000_000,
        "number of tokens per shard",
        low=1,
        high=2**31 - 1,
    )
    val_tokens: int = option(
        100_000_000,
        "number of validation tokens, taken from the beginning",
        low=1,
    )
    max_tokens: int | None = option(
        None,
        "total number of tokens to prepare; rerun with a larger number to add tokens, after "
        "which runs on the smaller corpus can no longer be resumed (default: the entire source)",
        low=1,
    )
    out: str | None = option(
        None,
        "output folder for the token shards and meta.json (default: the folder of the script)",
    )
    overwrite: bool = option(
        False,
        "if the output folder holds shards that were prepared with other options, delete them and "
        "start over",
    )


def read_options(
    doc: str,
    folder: Path,
    *option_classes: type,
    fixed: dict[str, object] | None = None,
    argv: list[str] | None = None,
) -> SimpleNamespace:
    """Return the options of a script, which its command line gives.

    Args:
        doc: the script's docstring, which --help prints
        folder: default output folder, a folder of data/
        option_classes: dataclasses whose fields are the options of the script
        fixed: values of options that the script does not have
        argv: the command line; by default that of the process
    """
    args = read_command_line(doc, *option_classes, fixed=fixed, argv=argv)
    args.out = Path(args.out or folder)
    return args


# ---- plan and progress ----


class Stage(NamedTuple):
    """A part of a preparation: tokens of documents become the shards of a split."""

    split: str
    documents: Documents
    num_tokens: int | None  # None means all that are left


def split_one_source(documents: Documents, val_tokens: int) -> list[Stage]:
    """Return a plan in which the first tokens of the documents are the validation split."""
    return [Stage("val", documents, val_tokens), Stage("train", documents, None)]


@dataclass
class Progress:
    """What preparation.json says of a folder."""

    # what the shards depend on
    options: dict

    # of each complete shard its file, split, tokens, documents, bytes and sha256, and where the next
    # one begins: the state of the dataset, and how many tokens after it are used
    shards: list[dict] = field(default_factory=list)

    # the splits whose documents have ended
    ended: list[str] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """The number of tokens of all complete shards."""
        return sum(record["tokens"] for record in self.shards)

    def count_tokens_left(self, stage: Stage, max_tokens: int | None) -> int:
        """Return how many tokens a split may still get; 0 if its documents have ended."""
        if stage.split in self.ended:
            return 0
        tokens_left = sys.maxsize
        if stage.num_tokens is not None:
            records = [record for record in self.shards if record["split"] == stage.split]
            tokens_left = stage.num_tokens - sum(record["tokens"] for record in records)
        if max_tokens is not None:
            tokens_left = min(tokens_left, max_tokens - self.num_tokens)
        return tokens_left

    def save(self, out: Path) -> None:
        """Write preparation.json."""
        files.write_json(out / "preparation.json", dataclasses.asdict(self))


def list_options(args: SimpleNamespace, name: str, plan: list[Stage]) -> dict:
    """Return the options that the shards depend on."""
    options = {"name": name, "tokenizer": args.tokenizer, "shard_tokens": args.shard_tokens}
    if args.tokenizer == "bpe":
        options["vocab_size"] = args.vocab_size
        options["tokenizer_bytes"] = args.tokenizer_bytes
    elif is_own_tokenizer(args.tokenizer):
        options["eot_token"] = args.eot_token
    options["plan"] = {
        stage.split: {"tokens": stage.num_tokens, **stage.documents.identity} for stage in plan
    }
    return options


def read_progress(args: SimpleNamespace, options: dict) -> Progress:
    """Return the progress in a folder, as far as its shards are complete; start over if asked to.

    Raises:
        ValueError: the folder holds something else
    """
    out = args.out
    stored = shards.read_progress(out)
    if stored.get("options") == options:
        progress = Progress(**stored)
        complete = list(
            itertools.takewhile(lambda record: is_complete(out, record), progress.shards)
        )
        if complete != progress.shards:
            progress.shards = complete
            progress.ended = []
        # a kill may come between a complete shard and its record
        recorded = {record["file"] for record in complete}
        for path in out.glob(f"{options['name']}_*.bin*"):
            if path.name not in recorded:
                path.unlink()
        return progress
    paths = [*out.glob("*.bin"), *(out / name for name in OWN_FILES if (out / name).exists())]
    # a preparation that failed before its first shard may be corrected
    is_empty = bool(stored) and not stored["shards"]
    if paths and not args.overwrite and not is_empty:
        difference = "its options are unknown"
        if stored:
            difference = describe_difference(stored.get("options"), options)
        raise ValueError(
            f"{out} holds a corpus that was prepared with other options ({difference}); give the same "
            "ones to resume, another --out, or --overwrite to delete its files and start over"
        )
    for path in paths:
        path.unlink()
    return Progress(options)


def describe_difference(old: object, new: object, name: str = "options") -> str:
    """Name the first option that differs, with both of its values."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*new, *old]:
            if old.get(key) != new.get(key):
                return describe_difference(old.get(key), new.get(key), key)
    return f"{name} was {old!r} and is now {new!r}"


def is_complete(out: Path, record: dict) -> bool:
    """Return whether a shard is there with all of its tokens."""
    try:
        return len(shards.read_shard(out / record["file"])) == record["tokens"]
    except (shards.DamagedShard, OSError):
        return False


# ---- preparation ----


def prepare(args: SimpleNamespace, name: str, plan: list[Stage]) -> None:
    """Prepare the shards `<name>_<split>_<number>.bin` in args.out, or resume preparing them.

    Args:
        plan: consecutive stages with the same documents share them

    Raises:
        ValueError: the preparation cannot begin or continue; complete shards are kept
    """
    val_tokens = plan[0].num_tokens
    if val_tokens and args.max_tokens and args.max_tokens <= val_tokens:
        raise ValueError(
            f"--max_tokens={args.max_tokens} leaves nothing for training after "
            f"--val_tokens={val_tokens}; give a larger --max_tokens or a smaller --val_tokens"
        )
    out = args.out
    out.mkdir(parents=True, exist_ok=True)
    with shards.lock_folder(out):
        progress = read_progress(args, list_options(args, name, plan))
        if args.max_tokens and progress.num_tokens > args.max_tokens:
            raise ValueError(
                f"{out} holds {progress.num_tokens:,} tokens, more than --max_tokens={args.max_tokens}; "
                "give a larger --max_tokens, or another --out"
            )
        has_ended = not any(progress.count_tokens_left(stage, args.max_tokens) for stage in plan)
        if has_ended and (out / "meta.json").exists():
            print(f"{files.show_path(out)} is complete: {progress.num_tokens:,} tokens")
            return
        encoding = load_tokenizer(args, plan, progress)
        write_shards(args, name, plan, progress, encoding)
        splits = {record["split"] for record in progress.shards}
        if splits != {"val", "train"}:
            raise ValueError(
                f"the source holds {progress.num_tokens:,} tokens, which leave nothing for "
                f"{'validation' if 'train' in splits else 'training'}; give more text, or other "
                "numbers of tokens and --overwrite"
            )
        origin = progress.options["plan"]["train"]
        about = {
            key: origin[key] for key in ("source", "name", "revision", "commit") if origin.get(key)
        }
        shards.write_meta(out, progress.shards, tokenizer=encoding, about=about)


def load_tokenizer(args: SimpleNamespace, plan: list[Stage], progress: Progress) -> Tokenizer:
    """Return the tokenizer, which is kept beside the shards, since training it takes minutes."""
    path = args.out / "tokenizer.json"
    if path.exists():
        return tokenizer.read(args.out)
    encoding = build_tokenizer(args, plan)
    # preparation.json comes first: it tells that the files beside it are our own
    progress.save(args.out)
    files.write_json(path, encoding.to_json())
    return encoding


def build_tokenizer(args: SimpleNamespace, plan: list[Stage]) -> Tokenizer:
    """Build the tokenizer that the options name."""
    if args.tokenizer == "bytes":
        return tokenizer.byte_tokenizer()
    if args.tokenizer == "gpt2":
        return tokenizer.gpt2_tokenizer()
    if args.tokenizer == "characters":
        texts = [read_first_bytes(stage.documents, args.tokenizer_bytes) for stage in plan]
        return tokenizer.characters_tokenizer(itertools.chain(*texts))
    if args.tokenizer == "bpe":
        print(f"training a byte-pair tokenizer of {args.vocab_size:,} tokens", flush=True)
        texts = read_first_bytes(plan[-1].documents, args.tokenizer_bytes)
        return tokenizer.train_byte_pairs(texts, args.vocab_size)
    return tokenizer.read_own(args.tokenizer, args.eot_token)


def read_first_bytes(documents: Documents, num_bytes: int) -> Iterator[str]:
    """Yield texts of documents, until they have this many bytes."""
    for batch in documents.read():
        for text in batch.texts:
            if num_bytes <= 0:
                return
            yield text
            num_bytes -= len(text.encode())


def open_reader(
    args: SimpleNamespace,
    plan: list[Stage],
    documents: Documents,
    progress: Progress,
    encoding: Tokenizer,
) -> TokenReader:
    """Return a reader of the documents that begins after the tokens of the complete shards."""
    splits = [stage.split for stage in plan if stage.documents is documents]
    position = {}
    for record in progress.shards:
        if record["split"] in splits:
            position = record["next"]
    return TokenReader(documents, encoding, args.workers, **position)


def write_shards(
    args: SimpleNamespace, name: str, plan: list[Stage], progress: Progress, encoding: Tokenizer
) -> None:
    """Write the shards that follow the complete ones."""
    total = estimate_tokens(args, plan)
    print(
        f"{name}: {args.workers} threads, {encoding.name} ({encoding.n_vocab:,} tokens)", flush=True
    )
    progress_bar = tqdm(
        total=total,
        initial=progress.num_tokens,
        unit="tok",
        unit_scale=True,
        smoothing=0.05,
        disable=None,
    )
    reader = None
    for stage in plan:
        while tokens_left := progress.count_tokens_left(stage, args.max_tokens):
            if reader is None or reader.documents is not stage.documents:
                reader = open_reader(args, plan, stage.documents, progress, encoding)
            num_wanted = min(args.shard_tokens, tokens_left)
            tokens = reader.take(num_wanted, progress_bar)
            if tokens.size < num_wanted:
                progress.ended.append(stage.split)
            if tokens.size:
                # while it grows, the folder is not a complete corpus
                (args.out / "meta.json").unlink(missing_ok=True)
                path = args.out / f"{name}_{stage.split}_{len(progress.shards):06d}.bin"
                counts = shards.count_tokens(tokens, encoding.n_vocab)
                record = {
                    "file": path.name,
                    "split": stage.split,
                    "tokens": tokens.size,
                    "documents": int(counts[encoding.bos_token]),
                    "bytes": int(counts @ encoding.bytes_by_token()),
                    "sha256": shards.write_shard(
                        path, tokens, shards.choose_format(encoding.n_vocab)
                    ),
                    "next": {"state": reader.state, "num_used": reader.num_used},
                }
                progress.shards.append(record)
                tqdm.write(f"{path.name}: {progress.num_tokens:,} of about {total:,} tokens")
            progress.save(args.out)
    progress_bar.close()


def estimate_tokens(args: SimpleNamespace, plan: list[Stage]) -> int:
    """Return about how many tokens there will be, for the progress bar."""
    # a token of byte pairs has about four bytes
    bytes_per_token = 1 if args.tokenizer in ("bytes", "characters") else 4
    sizes = {id(stage.documents): stage.documents.num_bytes for stage in plan}
    num_tokens = sum(sizes.values()) // bytes_per_token
    return min(num_tokens, args.max_tokens or num_tokens)
