"""From documents to token shards: what all `data/<corpus>/prepare.py` share.

Documents are read in order, tokenized by several threads, each preceded by an end-of-text token,
and cut into shards. After each complete shard, `preparation.json` records where in the source the
next one begins. So a preparation that was killed at any moment resumes there, and its shards have
the same bytes as those of an uninterrupted one, whatever the number of threads. `meta.json` is
written last: a folder with the first file and without the second is not a complete corpus.
"""

import argparse
import dataclasses
import errno
import shutil
import sys
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from data import hub, library_tokenizer, shards, tokenizer
from data.library_tokenizer import TokenizerFiles
from data.options import OptionParser
from data.sources import Batch, PermanentSourceError, Source
from data.tokenizer_base import Tokenizer
from model.options import collect_options, option
from utils import errors, machine, units

# values of --tokenizer; any other one names a tokenizer.json
BUILT_IN_TOKENIZERS = ("gpt2", "bpe", "bytes")
# the tokenizers of scripts that have no --tokenizer
TASK_TOKENIZERS = ("characters", "ids")
TOKENIZER_HELP = (
    "GPT-2's tokenizer (gpt2), a byte-pair encoding trained on this corpus (bpe), one token per byte "
    "(bytes), or a tokenizer of your own: a folder with a tokenizer.json, the file itself, or a "
    "repository on the Hugging Face Hub (OWNER/NAME)"
)
# files that a preparation writes beside its shards
OWN_FILES = (
    "meta.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "fetched.json",
    "preparation.json",
)
# folder of files from the Hub, until they are tokenized; hidden, because it is deleted
DOWNLOADS = ".hub_downloads"


# ---- options ----


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
    retry_minutes: float | None = option(
        None,
        "number of minutes to keep retrying while the Hugging Face Hub does not respond (default: "
        f"{hub.RETRY_MINUTES:g})",
        low=0,
    )
    overwrite: bool = option(
        False,
        "if the output folder holds shards that were prepared with other options, delete them and "
        "start over",
    )
    verify: bool = option(
        False,
        "compare every shard with its SHA-256 in meta.json instead of preparing anything",
    )


def make_parser(
    doc: str,
    folder: Path,
    *option_classes: type,
    fixed: dict[str, object] | None = None,
) -> OptionParser:
    """Return the parser of a script.

    Args:
        doc: the script's docstring, which --help prints
        folder: default output folder, a folder of data/
        option_classes: dataclasses whose fields are the options of the script
        fixed: values of options that the script does not have
    """
    parser = OptionParser(doc, collect_options(*option_classes), fixed)
    parser.set_defaults(fixed=frozenset(fixed or {}))  # names of options that it does not have
    parser.add_argument(
        "--out",
        type=Path,
        default=folder,
        help=f"output folder for the token shards and meta.json (default: data/{folder.name})",
    )
    return parser


# ---- the plan and the record of a preparation ----


class Stage(NamedTuple):
    """A part of the plan of a preparation: tokens of a source become shards of a split."""

    split: str
    source: Source
    num_tokens: int | None  # None means all that are left


def split_one_source(source: Source, val_tokens: int) -> list[Stage]:
    """Return a plan in which the first tokens of a source are the validation split."""
    return [Stage("val", source, val_tokens), Stage("train", source, None)]


class Position(NamedTuple):
    """A position in the tokens of a source."""

    # of the batch that the next token is in
    cursor: dict | None

    # number of tokens of that batch that precede it
    skip: int


START = Position(cursor=None, skip=0)


@dataclass(frozen=True)
class ShardRecord:
    """What preparation.json says of a complete shard."""

    file: str
    split: str
    tokens: int
    documents: int
    bytes: int  # of text that the tokens stand for
    sha256: str
    ended: bool = True  # whether the source ended with this shard
    next: dict = dataclasses.field(default_factory=dict)  # position after it, for resuming

    @property
    def next_position(self) -> Position:
        return Position(**self.next)


def count_record_tokens(records: list[ShardRecord]) -> int:
    """Return the number of tokens of shards together."""
    return sum(record.tokens for record in records)


def count_text(counts: np.ndarray, encoding: Tokenizer) -> dict[str, int]:
    """Return the documents and bytes of text of a shard.

    Args:
        counts: how often each token occurs, int64 (n_vocab,)
    """
    return {
        "documents": int(counts[encoding.eot_token]),
        "bytes": int(counts @ encoding.bytes_by_token()),
    }


# ---- preparation ----


def prepare(
    args: argparse.Namespace, name: str, plan: list[Stage], extra: dict | None = None
) -> None:
    """Prepare the shards `<name>_<split>_<number>.bin` in args.out, or resume preparing them.

    Args:
        plan: consecutive stages of the same source share its documents
        extra: further entries of meta.json

    Raises:
        ValueError: the preparation cannot continue; complete shards are kept
    """
    if args.verify:
        shards.verify(args.out, args.workers)
        return
    check_tokenizer_options(args)
    args.out.mkdir(parents=True, exist_ok=True)
    with shards.lock_folder(args.out):
        Preparation(args, name, plan, extra or {}).run()


class Preparation:
    """The preparation of one folder."""

    def __init__(self, args: argparse.Namespace, name: str, plan: list[Stage], extra: dict):
        self.args = args
        self.name = name
        self.plan = plan
        self.extra = extra
        self.out = args.out
        self.sources = {stage.split: stage.source for stage in plan}
        # the content of preparation.json
        self.progress = shards.read_progress(self.out)
        # the complete shards
        self.records: list[ShardRecord] = []
        # read from a tokenizer.json of your own, unless the folder has its copy already
        self.tokenizer_files: TokenizerFiles | None = None

        val_tokens = plan[0].num_tokens
        if val_tokens and args.max_tokens and args.max_tokens <= val_tokens:
            raise ValueError(
                f"--max_tokens={args.max_tokens} leaves nothing for training after "
                f"--val_tokens={val_tokens}; give a larger --max_tokens or a smaller --val_tokens"
            )
        old_options = self.progress.get("options", {})
        options = self.list_options(old_options)
        if old_options and old_options != options and args.overwrite:
            options = self.list_options({})
        self.claim_folder(old_options, options)

    # what the shards depend on

    def list_options(self, old_options: dict) -> dict:
        """Return the options that the shards depend on.

        Args:
            old_options: of the preparation that is resumed, whose commits are kept; {} takes the
                latest ones
        """
        self.pin_commits(old_options.get("plan", []))
        return {
            "name": self.name,
            "tokenizer": self.args.tokenizer,
            "shard_tokens": self.args.shard_tokens,
            **self.collect_tokenizer_options(old_options),
            "plan": [
                {"split": stage.split, "tokens": stage.num_tokens, **stage.source.identity()}
                for stage in self.plan
            ],
        }

    def pin_commits(self, old_stages: list[dict]) -> None:
        """Pin each dataset of the Hub to the commit of the old plan, or to the latest."""
        pinned = []
        for number, stage in enumerate(self.plan):
            # both splits may read from one source
            if not isinstance(stage.source, hub.HubDataset) or stage.source in pinned:
                continue
            old_stage = old_stages[number] if number < len(old_stages) else {}
            stage.source.pin(old_stage.get("commit"))
            stage.source.download_folder = self.out / DOWNLOADS
            pinned.append(stage.source)

    def collect_tokenizer_options(self, old_options: dict) -> dict:
        """Return the further options that the tokens depend on."""
        args = self.args
        if args.tokenizer == "bpe":
            return {"vocab_size": args.vocab_size, "tokenizer_bytes": args.tokenizer_bytes}
        if not is_own_tokenizer(args.tokenizer):
            return {}
        # A local file is compared with the copy in the folder, because it may have changed. The
        # Hub is asked only once.
        is_local = Path(args.tokenizer).expanduser().exists()
        has_copy = (
            (self.out / "tokenizer.json").exists()
            and old_options.get("tokenizer") == args.tokenizer
            and old_options.get("eot_token") == args.eot_token
        )
        if has_copy and not is_local:
            digest = old_options["tokenizer_sha256"]
        else:
            self.tokenizer_files = library_tokenizer.read_files(
                args.tokenizer, args.eot_token, args.retry_minutes
            )
            digest = self.tokenizer_files.sha256
        return {"eot_token": args.eot_token, "tokenizer_sha256": digest}

    def claim_folder(self, old_options: dict, options: dict) -> None:
        """Prepare the folder for these options, and read the records of its complete shards.

        With --overwrite, everything that was prepared with other options is deleted.

        Raises:
            ValueError: the folder holds something else
        """
        shard_paths = list(self.out.glob("*.bin"))
        if old_options != options:
            if shard_paths and not self.args.overwrite:
                raise ValueError(self.describe_conflict(old_options, options, shard_paths))
            own_paths = [self.out / name for name in OWN_FILES if (self.out / name).exists()]
            if own_paths and not old_options and not self.args.overwrite:
                names = ", ".join(path.name for path in own_paths)
                raise ValueError(
                    f"{self.out} holds {names}, which this script would replace; give another "
                    "--out, or --overwrite to delete them"
                )
            for path in (*own_paths, *shard_paths, *self.out.glob("*.bin.tmp")):
                path.unlink()
            self.progress = {}
        self.progress["options"] = options
        self.records = [ShardRecord(**record) for record in self.progress.get("shards", [])]
        self.tokens_before = count_record_tokens(self.records)
        max_tokens = self.args.max_tokens
        if max_tokens and self.tokens_before > max_tokens:
            raise ValueError(
                f"{self.out} holds {self.tokens_before:,} tokens, more than "
                f"--max_tokens={max_tokens}; give --max_tokens={self.tokens_before} or more, or "
                "another --out"
            )
        # a kill may come between a complete shard and its record
        unrecorded = self.out.glob(f"{self.name}_*_{len(self.records):06d}.bin")
        for path in (*self.out.glob("*.bin.tmp"), *unrecorded):
            path.unlink()

    def describe_conflict(self, old_options: dict, options: dict, shard_paths: list[Path]) -> str:
        """Say what else the folder holds, and what can be done."""
        content = "shards of unknown origin"
        choices = "give another --out"
        if old_options:
            content = (
                "shards that were prepared with other options "
                f"({describe_difference(old_options, options)})"
            )
            choices = "give the same options as before to resume, another --out"
        # lstat, because existing shards of others are links
        size = units.format_bytes(sum(path.lstat().st_size for path in shard_paths))
        return (
            f"{self.out} holds {content}; {choices}, or --overwrite to delete its "
            f"{len(shard_paths)} shards ({size}) and start again"
        )

    # running

    def run(self) -> None:
        """Prepare all shards that are missing, and then meta.json."""
        missing = [
            number for number, record in enumerate(self.records) if not self.is_complete(record)
        ]
        stages = [stage for stage in self.plan if self.count_tokens_left(stage) > 0]
        if not missing and not stages and (self.out / "meta.json").exists():
            print(f"{self.out} is complete: {self.tokens_before:,} tokens")
            return
        self.encoding = self.make_tokenizer()
        self.shard_format = shards.choose_format(self.encoding.n_vocab)
        self.expected_tokens = self.estimate_tokens()
        self.check_disk()
        self.save_progress()
        print(
            f"{self.name}: {self.args.workers} threads, tokenizer {self.encoding.name} "
            f"({self.encoding.n_vocab:,} tokens)",
            flush=True,
        )
        self.progress_bar = tqdm(
            total=self.expected_tokens,
            initial=self.tokens_before,
            unit="tok",
            unit_scale=True,
            smoothing=0.05,
            dynamic_ncols=True,
            disable=None,
        )
        self.start_time = time.monotonic()
        try:
            for number in missing:
                self.restore_shard(number)
            self.write_shards(stages)
        except KeyboardInterrupt:
            errors.exit_with_message(self.describe_resuming("interrupted"), errors.INTERRUPTED)
        except (ValueError, OSError) as error:
            reason = str(error)
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                reason = f"the disk of {self.out} is full"
            can_resume = not isinstance(error, PermanentSourceError)
            raise ValueError(self.describe_resuming(reason, can_resume)) from error
        finally:
            self.progress_bar.close()
        self.finish()

    def count_tokens_left(self, stage: Stage) -> int:
        """Return how many tokens a split may still get; 0 if its source has ended."""
        split_records = [record for record in self.records if record.split == stage.split]
        if split_records and split_records[-1].ended:
            return 0
        tokens_left = sys.maxsize
        if stage.num_tokens:
            tokens_left = stage.num_tokens - count_record_tokens(split_records)
        if self.args.max_tokens:
            tokens_left = min(tokens_left, self.args.max_tokens - count_record_tokens(self.records))
        return tokens_left

    def open_reader(self, number: int, source: Source) -> "TokenReader":
        """Return a reader of the source that begins with the tokens of shard `number`."""
        start = START
        for record in self.records[:number]:
            if self.sources[record.split] is source:
                start = record.next_position
        return TokenReader(source, self.encoding, self.args.workers, start, self.progress_bar)

    def write_shards(self, stages: list[Stage]) -> None:
        """Write the shards that follow the complete ones."""
        reader = None
        for stage in stages:
            if reader is None or reader.source is not stage.source:
                reader = self.open_reader(len(self.records), stage.source)
            while tokens_left := self.count_tokens_left(stage):
                num_wanted = min(self.args.shard_tokens, tokens_left)
                tokens = reader.take(num_wanted)
                if not tokens.size:
                    self.record_end(stage.split)
                    break
                path = self.out / f"{self.name}_{stage.split}_{len(self.records):06d}.bin"
                # while it grows, the folder is not a complete corpus
                (self.out / "meta.json").unlink(missing_ok=True)
                counts = shards.count_tokens(tokens, self.encoding.n_vocab)
                record = ShardRecord(
                    file=path.name,
                    split=stage.split,
                    tokens=tokens.size,
                    **count_text(counts, self.encoding),
                    sha256=shards.write_shard(path, tokens, self.shard_format),
                    ended=tokens.size < num_wanted,
                    next=reader.position._asdict(),
                )
                self.records.append(record)
                self.save_progress()
                self.show(record)

    def record_end(self, split: str) -> None:
        """Record that the source of a split has ended with its last complete shard."""
        numbers = [number for number, record in enumerate(self.records) if record.split == split]
        if numbers:
            last = numbers[-1]
            self.records[last] = dataclasses.replace(self.records[last], ended=True)
            self.save_progress()

    def restore_shard(self, number: int) -> None:
        """Prepare a shard again that was deleted or damaged.

        Raises:
            PermanentSourceError: the source has changed, and yields another shard
        """
        record = self.records[number]
        reader = self.open_reader(number, self.sources[record.split])
        path = self.out / record.file
        sha256 = shards.write_shard(path, reader.take(record.tokens), self.shard_format)
        # files may have changed without changing their names and sizes
        if sha256 != record.sha256:
            path.unlink()
            raise PermanentSourceError(
                f"{path.name} was prepared again and differs from the earlier shard, because the "
                "source has changed; give another --out to prepare the source as it is now"
            )
        tqdm.write(f"{path.name}: prepared again")

    def show(self, record: ShardRecord) -> None:
        """Print a line about a shard: tokens so far, speed and remaining time."""
        total = count_record_tokens(self.records)
        seconds = max(time.monotonic() - self.start_time, 1e-9)
        tokens_per_second = (total - self.tokens_before) / seconds
        line = f"{record.file}: {total:,} tokens in total, {tokens_per_second:,.0f} tokens/s"
        tokens_left = self.expected_tokens - total
        if tokens_left > 0:
            line = f"{line}, ETA {tqdm.format_interval(tokens_left / tokens_per_second)}"
        tqdm.write(line)
        sys.stdout.flush()

    def is_complete(self, record: ShardRecord) -> bool:
        """Return whether a shard is there with all of its tokens."""
        try:
            return len(shards.read_shard(self.out / record.file)) == record.tokens
        except (shards.DamagedShard, OSError):
            return False

    def make_tokenizer(self) -> Tokenizer:
        """Return the tokenizer, which is kept beside the shards, since training it takes minutes."""
        path = self.out / "tokenizer.json"
        if path.exists():
            return tokenizer.from_json(tokenizer.describe(self.out))
        # preparation.json comes first: it tells that the files beside it are our own
        if self.tokenizer_files is not None:
            encoding = tokenizer.from_json(self.tokenizer_files.describe())
            self.save_progress()
            self.tokenizer_files.write(self.out)
            return encoding
        encoding = self.build_tokenizer()
        self.save_progress()
        shards.write_json(path, tokenizer.to_json(encoding))
        return encoding

    def build_tokenizer(self) -> Tokenizer:
        """Build the tokenizer that the options name, if it is not your own."""
        args = self.args
        if args.tokenizer == "ids":
            return tokenizer.IdTokenizer(args.vocab_size)
        if args.tokenizer == "characters":
            texts = (
                text
                for source in self.sources.values()
                for text in read_first_bytes(source, args.tokenizer_bytes)
            )
            return tokenizer.characters_tokenizer(texts)
        if args.tokenizer == "bytes":
            return tokenizer.byte_tokenizer()
        if args.tokenizer == "gpt2":
            return tokenizer.gpt2_tokenizer()
        print(f"training a byte-pair tokenizer of {args.vocab_size:,} tokens", flush=True)
        train_source = self.plan[-1].source
        return tokenizer.train_byte_pairs(
            read_first_bytes(train_source, args.tokenizer_bytes), args.vocab_size
        )

    def estimate_tokens(self) -> int:
        """Return approximately how many tokens there will be."""
        # a token of byte pairs has about four bytes
        bytes_per_token = 1 if self.args.tokenizer in ("bytes", *TASK_TOKENIZERS) else 4
        total = 0
        # both splits may read from one source
        for source in {id(source): source for source in self.sources.values()}.values():
            if isinstance(source, hub.HubDataset):
                num_tokens = source.num_tokens
            else:
                num_tokens = source.text_bytes() // bytes_per_token
            limits = [stage.num_tokens for stage in self.plan if stage.source is source]
            if None not in limits:
                num_tokens = min(num_tokens, sum(limits))
            total += num_tokens
        return min(total, self.args.max_tokens or total)

    def check_disk(self) -> None:
        """Raise ValueError if the shards that are missing do not fit on the disk."""
        free_bytes = shutil.disk_usage(self.out).free
        token_bytes = self.shard_format.dtype.itemsize
        missing_tokens = self.expected_tokens - self.tokens_before
        if token_bytes * missing_tokens > free_bytes:
            # five percent are left free
            fitting_tokens = self.tokens_before + int(0.95 * free_bytes / token_bytes)
            tokens = "more tokens" if self.tokens_before else "tokens"
            raise ValueError(
                f"about {missing_tokens:,} {tokens} need "
                f"{units.format_bytes(token_bytes * missing_tokens)}, but the disk of {self.out} "
                f"has {units.format_bytes(free_bytes)} free; give --max_tokens={fitting_tokens}, or "
                "--out on a larger disk"
            )

    def save_progress(self) -> None:
        """Write preparation.json."""
        self.progress["shards"] = [dataclasses.asdict(record) for record in self.records]
        shards.write_json(self.out / "preparation.json", self.progress)

    def describe_resuming(self, reason: str, can_resume: bool = True) -> str:
        """Say why the preparation ended, and what can be done.

        Args:
            can_resume: whether rerunning the same command may help
        """
        # as the file lists them, because Ctrl+C may come between a shard and its record
        progress = shards.read_progress(self.out)
        listed = [ShardRecord(**record) for record in progress.get("shards", [])]
        complete = [record for record in listed if self.is_complete(record)]
        choices = []
        if can_resume:
            choices.append("rerun the same command to resume")
        if complete == listed and {"val", "train"} <= {record.split for record in complete}:
            choices.append(f"add --max_tokens={count_record_tokens(complete)} to finish with them")
        message = f"{reason}; {len(complete)} complete shards are kept"
        return f"{message}: {', or '.join(choices)}" if choices else message

    def finish(self) -> None:
        """Write meta.json.

        Raises:
            ValueError: a split has no tokens
        """
        shutil.rmtree(self.out / DOWNLOADS, ignore_errors=True)
        splits = {record.split for record in self.records}
        num_tokens = count_record_tokens(self.records)
        for split, use in (("train", "training"), ("val", "validation")):
            if split not in splits:
                if "val_tokens" in self.args.fixed or self.args.max_tokens:
                    raise ValueError(
                        f"{num_tokens:,} tokens leave nothing for {use}; give a larger --max_tokens"
                    )
                raise ValueError(
                    f"{num_tokens:,} tokens leave nothing for {use}; give more text, or "
                    f"--val_tokens below {num_tokens} and --overwrite"
                )
        options = self.progress["options"]
        origin = options["plan"][-1]
        meta = tokenizer.meta_entries(self.encoding)
        meta.update(describe_format(self.shard_format))
        if "tokenizer_sha256" in options:
            meta["tokenizer_sha256"] = options["tokenizer_sha256"]
        for key in ("source", "name", "revision", "commit"):
            if origin.get(key):
                meta[key] = origin[key]
        records = [dataclasses.asdict(record) for record in self.records]
        shards.write_meta(self.out, {**meta, **self.extra}, records)
        # both splits may read from one source
        for source in {id(source): source for source in self.sources.values()}.values():
            for line in source.describe_skipped():
                print(line)


def is_own_tokenizer(name: str) -> bool:
    """Return whether --tokenizer names a tokenizer.json."""
    return name not in (*BUILT_IN_TOKENIZERS, *TASK_TOKENIZERS)


def check_tokenizer_options(args: argparse.Namespace) -> None:
    """Raise ValueError if an option of other tokenizers is given."""
    for name in ("vocab_size", "tokenizer_bytes"):
        value = getattr(args, name)
        is_given = name not in args.fixed and value != getattr(PreparationOptions, name)
        if is_given and args.tokenizer != "bpe":
            raise ValueError(
                f"--{name}={value} has no effect with --tokenizer={args.tokenizer}; add "
                "--tokenizer=bpe, or omit it"
            )
    if args.eot_token is not None and not is_own_tokenizer(args.tokenizer):
        raise ValueError(
            f"--eot_token={args.eot_token} has no effect with --tokenizer={args.tokenizer}; omit "
            "one of them"
        )


def describe_format(shard_format: shards.ShardFormat) -> dict[str, str]:
    """Return what meta.json says of the format of shards: the dtype, if it is not uint16."""
    if shard_format == shards.UINT16_FORMAT:
        return {}
    return {"dtype": shard_format.dtype.name}


def describe_difference(old_options: dict, new_options: dict) -> str:
    """Name the first option that differs, with both of its values."""
    for key in [*new_options, *old_options]:
        old = old_options.get(key)
        new = new_options.get(key)
        if old == new:
            continue
        if not isinstance(old, list) or not isinstance(new, list):
            return f"{key} was {old!r} and is now {new!r}"
        for old_entry, new_entry in zip(old, new):
            if old_entry != new_entry:
                return describe_difference(old_entry, new_entry)
        return f"{key} had {len(old)} entries and now has {len(new)}"
    return "no difference"


# ---- tokens ----


class TokenReader:
    """Reads the tokens of a source as one stream, from a position on."""

    def __init__(
        self,
        source: Source,
        encoding: Tokenizer,
        workers: int,
        start: Position,
        progress_bar: tqdm | None = None,
    ):
        self.source = source
        self.progress_bar = progress_bar
        self.dtype = shards.choose_format(encoding.n_vocab).dtype
        self.batches = tokenize(source, start.cursor, encoding, workers)
        # the batch at the cursor, and how many of its tokens have been taken
        self.cursor = start.cursor
        self.tokens = np.zeros(0, dtype=self.dtype)
        self.num_used = start.skip

    @property
    def position(self) -> Position:
        """The position of the next token."""
        return Position(self.cursor, self.num_used)

    def take(self, count: int) -> np.ndarray:
        """Return the next `count` tokens, uint16 or uint32; fewer if the source ends."""
        result = np.empty(count, dtype=self.dtype)
        filled = 0
        while filled < count:
            if self.num_used >= len(self.tokens):
                cursor, future = next(self.batches, (None, None))
                if future is None:
                    break
                # The start may lie beyond the first batch, if batches are smaller than those of the
                # run that recorded it.
                self.num_used -= len(self.tokens)
                self.cursor = cursor
                self.tokens = future.result()
                continue
            part = self.tokens[self.num_used : self.num_used + count - filled]
            result[filled : filled + len(part)] = part
            filled += len(part)
            self.num_used += len(part)
            if self.progress_bar is not None:
                self.progress_bar.update(len(part))
        return result[:filled]


def tokenize(
    source: Source, cursor: dict | None, encoding: Tokenizer, workers: int
) -> Iterator[tuple[dict, Future]]:
    """Yield the cursor and the future tokens of each batch, in order, from a cursor on."""
    # Two batches per thread keep all threads busy; more would only take memory.
    with ThreadPoolExecutor(workers) as pool:
        pending = deque()
        for batch in source.read(cursor):
            pending.append((batch.cursor, pool.submit(encode_batch, encoding, batch)))
            if len(pending) > 2 * workers:
                yield pending.popleft()
        yield from pending


def encode_batch(encoding: Tokenizer, batch: Batch) -> np.ndarray:
    """Return the tokens of a batch, in which end-of-text precedes each document.

    Returns:
        uint16 or uint32 (num_tokens,)
    """
    end_of_text = np.array([encoding.eot_token], dtype=np.uint32)
    starts = batch.starts or [True] * len(batch.texts)
    parts = [np.zeros(0, dtype=np.uint32)]
    for tokens, starts_document in zip(encoding.encode_batch(batch.texts), starts):
        if starts_document:
            parts.append(end_of_text)
        parts.append(tokens)
    return np.concatenate(parts).astype(shards.choose_format(encoding.n_vocab).dtype)


def read_first_bytes(source: Source, num_bytes: int) -> Iterator[str]:
    """Yield texts of a source, until they have this many bytes."""
    for batch in source.read():
        for text in batch.texts:
            if num_bytes <= 0:
                return
            yield text
            num_bytes -= len(text.encode())


# ---- existing shards ----


UNUSED_WITH_EXISTING_SHARDS = (
    "source",
    "max_tokens",
    "val_tokens",
    "shard_tokens",
    "overwrite",
    "vocab_size",
    "tokenizer_bytes",
)


def adopt(args: argparse.Namespace) -> None:
    """Make existing shards in llm.c's formats the corpus in args.out.

    The shards of a folder are linked, and those of a repository of the Hub are downloaded. Their
    tokenizer is GPT-2's, unless args.tokenizer names a tokenizer.json.

    Raises:
        ValueError: there are no such shards, or args.out holds something else
    """
    out = args.out
    folder = Path(args.pretokenized)
    is_local = folder.is_dir()
    for name in UNUSED_WITH_EXISTING_SHARDS:
        if getattr(args, name) != getattr(PreparationOptions, name, None):
            raise ValueError(f"--{name} has no effect on --pretokenized; omit it")
    check_tokenizer_options(args)
    if is_local:
        hub.check_unused(args, "a folder of shards")
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

        meta = {
            **tokenizer.meta_entries(encoding),
            **describe_format(adopted.shard_format),
            "source": args.pretokenized,
        }
        if tokenizer_files is not None:
            tokenizer_files.write(out)
            meta["tokenizer_sha256"] = tokenizer_files.sha256
        else:
            shards.write_json(out / "tokenizer.json", tokenizer.to_json(encoding))
        if fetched.commit is not None:
            meta["commit"] = fetched.commit
        shards.write_meta(out, meta, adopted.records)


class AdoptedShards(NamedTuple):
    """Existing shards in the order of meta.json, and the format of the largest ids."""

    records: list[dict]
    shard_format: shards.ShardFormat


def link_shards(
    args: argparse.Namespace, folder: Path, encoding: Tokenizer, sha256_of: dict[str, str]
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
