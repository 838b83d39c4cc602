"""From documents to token shards: what all `data/<corpus>/prepare.py` share.

Documents are read in order, tokenized by several threads, each preceded by an end-of-text token,
and cut into shards. After each complete shard, `preparation.json` records where in the source the
next one begins. So a preparation that was killed at any moment resumes there, and its shards have
the same bytes as those of an uninterrupted one, whatever the number of threads. `meta.json` is
written last: a folder with the first file and without the second is not a complete corpus.
"""

import dataclasses
import errno
import itertools
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from configurator import option, read_command_line
from data import hub, library_tokenizer, shards, tokenizer
from data.library_tokenizer import TokenizerFiles
from data.sources import PermanentSourceError, Source
from data.token_reader import TokenReader
from data.tokenizer_base import Tokenizer
from utils import errors, files, machine, units

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
# of preparation.json: one that an earlier version began cannot be resumed
VERSION = 2
# folder of files from the Hub, until they are tokenized; hidden, because it is deleted
DOWNLOADS = ".hub_downloads"


# ---- options ----


def is_own_tokenizer(name: str) -> bool:
    """Return whether --tokenizer names a tokenizer.json."""
    return name not in (*BUILT_IN_TOKENIZERS, *TASK_TOKENIZERS)


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
        f"{hub.RETRY_MINUTES:g}, but 0 if it cannot be reached at all)",
        low=0,
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


# ---- the plan and the record of a preparation ----


class Stage(NamedTuple):
    """A part of the plan of a preparation: tokens of a source become shards of a split."""

    split: str
    source: Source
    num_tokens: int | None  # None means all that are left


def split_one_source(source: Source, val_tokens: int) -> list[Stage]:
    """Return a plan in which the first tokens of a source are the validation split."""
    return [Stage("val", source, val_tokens), Stage("train", source, None)]


@dataclass(frozen=True)
class ShardRecord:
    """What preparation.json says of a complete shard."""

    file: str
    split: str
    tokens: int
    documents: int
    bytes: int  # of text that the tokens stand for
    sha256: str

    # where in the source the next shard begins: the batch, and how many of its tokens precede it
    cursor: dict | None
    skip: int


@dataclass
class Preparation:
    """The preparation of one folder: what is asked for, and the shards that are complete."""

    args: SimpleNamespace
    name: str
    plan: list[Stage]

    # what the shards depend on, as preparation.json stores it
    options: dict = field(default_factory=dict)
    # of a tokenizer.json of your own
    tokenizer_sha256: str | None = None

    records: list[ShardRecord] = field(default_factory=list)
    # the splits whose sources have ended
    ended: list[str] = field(default_factory=list)

    encoding: Tokenizer | None = None
    progress_bar: tqdm | None = None

    @property
    def out(self) -> Path:
        return self.args.out

    @property
    def num_tokens(self) -> int:
        """The number of tokens of all complete shards."""
        return sum(record.tokens for record in self.records)

    @property
    def sources(self) -> list[Source]:
        """The sources of the plan, each once, although both splits may read from one."""
        return list({id(stage.source): stage.source for stage in self.plan}.values())

    def save(self) -> None:
        """Write preparation.json."""
        records = [dataclasses.asdict(record) for record in self.records]
        progress = {"options": self.options, "ended": self.ended, "shards": records}
        files.write_json(self.out / "preparation.json", progress)


def count_text(counts: np.ndarray, encoding: Tokenizer) -> dict[str, int]:
    """Return the documents and bytes of text of a shard.

    Args:
        counts: how often each token occurs, int64 (n_vocab,)
    """
    return {
        "documents": int(counts[encoding.bos_token]),
        "bytes": int(counts @ encoding.bytes_by_token()),
    }


# ---- preparation ----


def prepare(
    args: SimpleNamespace,
    name: str,
    plan: list[Stage],
    extra: dict | None = None,
) -> None:
    """Prepare the shards `<name>_<split>_<number>.bin` in args.out, or resume preparing them.

    Args:
        plan: consecutive stages of the same source share its documents
        extra: further entries of meta.json

    Raises:
        ValueError: the preparation cannot continue; complete shards are kept
    """
    val_tokens = plan[0].num_tokens
    if val_tokens and args.max_tokens and args.max_tokens <= val_tokens:
        raise ValueError(
            f"--max_tokens={args.max_tokens} leaves nothing for training after "
            f"--val_tokens={val_tokens}; give a larger --max_tokens or a smaller --val_tokens"
        )
    args.out.mkdir(parents=True, exist_ok=True)
    with shards.lock_folder(args.out):
        job = Preparation(args, name, plan)
        own_tokenizer = claim_folder(job)
        missing = [
            number for number, record in enumerate(job.records) if not is_complete(job.out, record)
        ]
        has_ended = not missing and not any(count_tokens_left(job, stage) for stage in plan)
        if has_ended and (job.out / "meta.json").exists():
            print(f"{job.out} is complete: {job.num_tokens:,} tokens")
            return
        job.encoding = load_tokenizer(job, own_tokenizer)
        expected_tokens = estimate_tokens(job)
        check_disk(job, expected_tokens)
        print(
            f"{name}: {args.workers} threads, tokenizer {job.encoding.name} "
            f"({job.encoding.n_vocab:,} tokens)",
            flush=True,
        )
        job.progress_bar = tqdm(
            total=expected_tokens,
            initial=job.num_tokens,
            unit="tok",
            unit_scale=True,
            smoothing=0.05,
            dynamic_ncols=True,
            disable=None,
        )
        with job.progress_bar:
            try:
                for number in missing:
                    restore_shard(job, number)
                write_shards(job, expected_tokens)
            except KeyboardInterrupt:
                errors.exit_with_message(describe_resuming(job, "interrupted"), errors.INTERRUPTED)
            except (ValueError, OSError) as error:
                reason = str(error)
                if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                    reason = f"the disk of {job.out} is full"
                can_resume = not isinstance(error, PermanentSourceError)
                raise ValueError(describe_resuming(job, reason, can_resume)) from error
        finish(job, extra or {})


# what the shards depend on


def claim_folder(job: Preparation) -> TokenizerFiles | None:
    """Set the options and the complete shards of a preparation; prepare its folder for them.

    With --overwrite, everything that was prepared with other options is deleted.

    Returns:
        A tokenizer.json of your own, unless the folder has its copy already.

    Raises:
        ValueError: the folder holds something else
    """
    args = job.args
    progress = shards.read_progress(job.out)
    old_options = progress.get("options", {})
    own_tokenizer = None
    # with the same commits and tokenizer, what differs is what the command asks for
    if old_options.get("version") == VERSION:
        own_tokenizer = pin(job, old_options)
    job.options = list_options(job)
    if job.options == old_options:
        job.records = [ShardRecord(**record) for record in progress["shards"]]
        job.ended = progress["ended"]
    else:
        obsolete_files = find_obsolete_files(job, old_options)
        own_tokenizer = pin(job, {})
        job.options = list_options(job)
        for path in obsolete_files:
            path.unlink()
    if args.max_tokens and job.num_tokens > args.max_tokens:
        raise ValueError(
            f"{job.out} holds {job.num_tokens:,} tokens, more than --max_tokens={args.max_tokens}; "
            f"give --max_tokens={job.num_tokens} or more, or another --out"
        )
    # a kill may come between a complete shard and its record
    unrecorded = job.out.glob(f"{job.name}_*_{len(job.records):06d}.bin")
    for path in (*job.out.glob("*.bin.*tmp"), *unrecorded):
        path.unlink()
    return own_tokenizer


def pin(job: Preparation, old_options: dict) -> TokenizerFiles | None:
    """Decide on the commits of the sources, and on the content of a tokenizer of your own.

    Args:
        old_options: of the preparation that is resumed, whose commits and tokenizer are kept; {}
            takes the latest ones

    Returns:
        The tokenizer, unless the folder has its copy already.
    """
    args = job.args
    old_plan = old_options.get("plan", {})
    for source in job.sources:
        if isinstance(source, hub.HubDataset):
            [split, *_] = [stage.split for stage in job.plan if stage.source is source]
            source.pin(old_plan.get(split, {}).get("commit"))
            source.download_folder = job.out / DOWNLOADS
    if not is_own_tokenizer(args.tokenizer):
        return None
    has_copy = (
        (job.out / "tokenizer.json").exists()
        and old_options.get("tokenizer") == args.tokenizer
        and old_options.get("eot_token") == args.eot_token
    )
    # A local file is compared with the copy in the folder, because it may have changed. The Hub is
    # asked only once.
    if has_copy and not Path(args.tokenizer).expanduser().exists():
        job.tokenizer_sha256 = old_options["tokenizer_sha256"]
        return None
    own_tokenizer = library_tokenizer.read_files(args.tokenizer, args.eot_token, args.retry_minutes)
    job.tokenizer_sha256 = own_tokenizer.sha256
    return own_tokenizer


def list_options(job: Preparation) -> dict:
    """Return the options that the shards depend on."""
    args = job.args
    options = {
        "version": VERSION,
        "name": job.name,
        "tokenizer": args.tokenizer,
        "shard_tokens": args.shard_tokens,
    }
    if args.tokenizer == "bpe":
        options["vocab_size"] = args.vocab_size
        options["tokenizer_bytes"] = args.tokenizer_bytes
    elif is_own_tokenizer(args.tokenizer):
        options["eot_token"] = args.eot_token
        options["tokenizer_sha256"] = job.tokenizer_sha256
    options["plan"] = {
        stage.split: {"tokens": stage.num_tokens, **stage.source.identity()} for stage in job.plan
    }
    return options


def find_obsolete_files(job: Preparation, old_options: dict) -> list[Path]:
    """Return the files that a preparation with other options left in the folder.

    Raises:
        ValueError: the user has to allow with --overwrite that they are deleted
    """
    out = job.out
    overwrite = job.args.overwrite
    shard_paths = list(out.glob("*.bin"))
    own_paths = [out / name for name in OWN_FILES if (out / name).exists()]
    if shard_paths and not overwrite:
        size = units.format_bytes(sum(path.stat().st_size for path in shard_paths))
        if not old_options:
            raise ValueError(
                f"{out} holds shards of unknown origin; give another --out, or --overwrite to "
                f"delete its {len(shard_paths)} shards ({size}) and start again"
            )
        raise ValueError(
            f"{out} holds shards that were prepared with other options "
            f"({describe_difference(old_options, job.options)}); give the same options as before to "
            f"resume, another --out, or --overwrite to delete its {len(shard_paths)} shards ({size}) "
            "and start again"
        )
    if own_paths and not old_options and not overwrite:
        names = ", ".join(path.name for path in own_paths)
        raise ValueError(
            f"{out} holds {names}, which this script would replace; give another --out, or "
            "--overwrite to delete them"
        )
    return [*own_paths, *shard_paths]


def describe_difference(old: object, new: object, name: str = "options") -> str:
    """Name the first option that differs, with both of its values."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*new, *old]:
            if old.get(key) != new.get(key):
                return describe_difference(old.get(key), new.get(key), key)
    return f"{name} was {old!r} and is now {new!r}"


def load_tokenizer(job: Preparation, own_tokenizer: TokenizerFiles | None) -> Tokenizer:
    """Return the tokenizer, which is kept beside the shards, since training it takes minutes."""
    path = job.out / "tokenizer.json"
    if path.exists():
        return tokenizer.read(job.out)
    # preparation.json comes before it: it tells that the files beside it are our own
    if own_tokenizer is not None:
        encoding = tokenizer.from_json(own_tokenizer.describe())
        encoding.encode("")  # an error of the library comes before anything is written
        job.save()
        own_tokenizer.write(job.out)
    else:
        encoding = build_tokenizer(job)
        job.save()
        files.write_json(path, encoding.to_json())
    return encoding


def build_tokenizer(job: Preparation) -> Tokenizer:
    """Build the tokenizer that the options name, if it is not your own."""
    args = job.args
    if args.tokenizer == "ids":
        return tokenizer.IdTokenizer(args.vocab_size)
    if args.tokenizer == "bytes":
        return tokenizer.byte_tokenizer()
    if args.tokenizer == "gpt2":
        return tokenizer.gpt2_tokenizer()
    if args.tokenizer == "characters":
        return tokenizer.characters_tokenizer(
            text
            for source in job.sources
            for text in read_first_bytes(source, args.tokenizer_bytes)
        )
    print(f"training a byte-pair tokenizer of {args.vocab_size:,} tokens", flush=True)
    texts = read_first_bytes(job.plan[-1].source, args.tokenizer_bytes)
    first_text = next(texts, None)
    if first_text is None:
        raise ValueError(describe_empty(job))
    return tokenizer.train_byte_pairs(itertools.chain([first_text], texts), args.vocab_size)


def describe_empty(job: Preparation) -> str:
    """Say that the sources hold no text, and what they hold instead."""
    skipped = [line for source in job.sources for line in source.describe_skipped()]
    return "; ".join(["the source holds no text", *skipped])


# shards


def count_tokens_left(job: Preparation, stage: Stage) -> int:
    """Return how many tokens a split may still get; 0 if its source has ended."""
    if stage.split in job.ended:
        return 0
    tokens_left = sys.maxsize
    if stage.num_tokens:
        tokens_left = stage.num_tokens - sum(
            record.tokens for record in job.records if record.split == stage.split
        )
    if job.args.max_tokens:
        tokens_left = min(tokens_left, job.args.max_tokens - job.num_tokens)
    return tokens_left


def open_reader(job: Preparation, number: int, source: Source) -> "TokenReader":
    """Return a reader of the source that begins with the tokens of shard `number`."""
    splits = [stage.split for stage in job.plan if stage.source is source]
    reader = TokenReader(source, job.encoding, job.args.workers, job.progress_bar)
    for record in job.records[:number]:
        if record.split in splits:
            reader.cursor = record.cursor
            reader.num_used = record.skip
    return reader


def write_shards(job: Preparation, expected_tokens: int) -> None:
    """Write the shards that follow the complete ones."""
    start_time = time.monotonic()
    tokens_before = job.num_tokens
    reader = None
    for stage in job.plan:
        while tokens_left := count_tokens_left(job, stage):
            if reader is None or reader.source is not stage.source:
                reader = open_reader(job, len(job.records), stage.source)
            num_wanted = min(job.args.shard_tokens, tokens_left)
            tokens = reader.take(num_wanted)
            if tokens.size < num_wanted:
                job.ended.append(stage.split)
            if not tokens.size:
                job.save()
                break
            path = job.out / f"{job.name}_{stage.split}_{len(job.records):06d}.bin"
            # while it grows, the folder is not a complete corpus
            (job.out / "meta.json").unlink(missing_ok=True)
            counts = shards.count_tokens(tokens, job.encoding.n_vocab)
            record = ShardRecord(
                file=path.name,
                split=stage.split,
                tokens=tokens.size,
                **count_text(counts, job.encoding),
                sha256=shards.write_shard(path, tokens, get_format(job)),
                cursor=reader.cursor,
                skip=reader.num_used,
            )
            job.records.append(record)
            job.save()
            seconds = max(time.monotonic() - start_time, 1e-9)
            tokens_per_second = (job.num_tokens - tokens_before) / seconds
            print_progress(record, job.num_tokens, expected_tokens, tokens_per_second)


def restore_shard(job: Preparation, number: int) -> None:
    """Prepare a shard again that was deleted or damaged.

    Raises:
        PermanentSourceError: the source has changed, and yields another shard
    """
    record = job.records[number]
    [source] = [stage.source for stage in job.plan if stage.split == record.split]
    tokens = open_reader(job, number, source).take(record.tokens)
    path = job.out / record.file
    # files may have changed without changing their names and sizes
    if shards.write_shard(path, tokens, get_format(job)) != record.sha256:
        path.unlink()
        raise PermanentSourceError(
            f"{path.name} was prepared again and differs from the earlier shard, because the "
            "source has changed, or because it was prepared when rows of empty text were still "
            "documents; give another --out to prepare the source as it is now"
        )
    tqdm.write(f"{path.name}: prepared again")


def get_format(job: Preparation) -> shards.ShardFormat:
    """Return the format of the shards of a preparation."""
    return shards.choose_format(job.encoding.n_vocab)


def is_complete(out: Path, record: ShardRecord) -> bool:
    """Return whether a shard is there with all of its tokens."""
    try:
        return len(shards.read_shard(out / record.file)) == record.tokens
    except (shards.DamagedShard, OSError):
        return False


def print_progress(
    record: ShardRecord, num_tokens: int, expected_tokens: int, tokens_per_second: float
) -> None:
    """Print a line about a shard: tokens so far, speed and remaining time."""
    line = f"{record.file}: {num_tokens:,} tokens in total, {tokens_per_second:,.0f} tokens/s"
    if num_tokens < expected_tokens:
        seconds_left = (expected_tokens - num_tokens) / tokens_per_second
        line = f"{line}, ETA {tqdm.format_interval(seconds_left)}"
    tqdm.write(line)
    sys.stdout.flush()


def describe_resuming(job: Preparation, reason: str, can_resume: bool = True) -> str:
    """Say why the preparation ended, and what can be done.

    Args:
        can_resume: whether rerunning the same command may help
    """
    complete = [record for record in job.records if is_complete(job.out, record)]
    choices = []
    if can_resume:
        choices.append("rerun the same command to resume")
    if complete == job.records and {"val", "train"} <= {record.split for record in complete}:
        choices.append(f"add --max_tokens={job.num_tokens} to finish with them")
    message = f"{reason}; {len(complete)} complete shards are kept"
    return f"{message}: {', or '.join(choices)}" if choices else message


def estimate_tokens(job: Preparation) -> int:
    """Return approximately how many tokens there will be."""
    # a token of byte pairs has about four bytes
    bytes_per_token = 1 if job.args.tokenizer in ("bytes", *TASK_TOKENIZERS) else 4
    total = 0
    for source in job.sources:
        if isinstance(source, hub.HubDataset):
            num_bytes = 4 * source.num_tokens
        else:
            num_bytes = source.text_bytes()
        num_tokens = num_bytes // bytes_per_token
        limits = [stage.num_tokens for stage in job.plan if stage.source is source]
        if None not in limits:
            num_tokens = min(num_tokens, sum(limits))
        total += num_tokens
    return min(total, job.args.max_tokens or total)


def check_disk(job: Preparation, expected_tokens: int) -> None:
    """Raise ValueError if the shards that are missing do not fit on the disk."""
    free_bytes = shutil.disk_usage(job.out).free
    token_bytes = get_format(job).dtype.itemsize
    missing_tokens = expected_tokens - job.num_tokens
    if token_bytes * missing_tokens > free_bytes:
        # five percent are left free
        fitting_tokens = job.num_tokens + int(0.95 * free_bytes / token_bytes)
        tokens = "more tokens" if job.num_tokens else "tokens"
        raise ValueError(
            f"about {missing_tokens:,} {tokens} need "
            f"{units.format_bytes(token_bytes * missing_tokens)}, but the disk of {job.out} has "
            f"{units.format_bytes(free_bytes)} free; give --max_tokens={fitting_tokens}, or --out "
            "on a larger disk"
        )


def finish(job: Preparation, extra: dict) -> None:
    """Write meta.json, and say what was skipped.

    Raises:
        ValueError: a split has no tokens
    """
    shutil.rmtree(job.out / DOWNLOADS, ignore_errors=True)
    if not job.records:
        raise ValueError(describe_empty(job))
    splits = {record.split for record in job.records}
    for split, use in (("train", "training"), ("val", "validation")):
        if split in splits:
            continue
        if job.args.val_tokens is None or job.args.max_tokens:
            raise ValueError(
                f"{job.num_tokens:,} tokens leave nothing for {use}; give a larger --max_tokens"
            )
        raise ValueError(
            f"{job.num_tokens:,} tokens leave nothing for {use}; give more text, or --val_tokens "
            f"below {job.num_tokens} and --overwrite"
        )
    origin = job.options["plan"]["train"]
    about = {
        "tokenizer_sha256": job.tokenizer_sha256,
        **{key: origin.get(key) for key in ("source", "name", "revision", "commit")},
    }
    about = {key: value for key, value in about.items() if value}
    shards.write_meta(
        job.out,
        [dataclasses.asdict(record) for record in job.records],
        tokenizer=job.encoding,
        shard_format=get_format(job),
        about={**about, **extra},
    )
    for source in job.sources:
        for line in source.describe_skipped():
            print(line)


def read_first_bytes(source: Source, num_bytes: int) -> Iterator[str]:
    """Yield texts of a source, until they have this many bytes."""
    for batch in source.read():
        for text in batch.texts:
            if num_bytes <= 0:
                return
            yield text
            num_bytes -= len(text.encode())
