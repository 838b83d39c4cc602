"""From documents to token shards: what every `data/<corpus>/prepare.py` shares.

Documents are read in order, tokenised by several threads (tiktoken leaves Python's lock), preceded
by end-of-text, and cut into shards. After each whole shard, `preparation.json` records where in the
source the next one begins: killed at any moment and started again, a preparation goes on from
there, and its bytes are those of an uninterrupted one, whatever the number of workers. `meta.json`
is written last: a folder that has the first and not the second is no corpus.
"""

import errno
import os
import re
import shutil
import sys
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import numpy as np
import tiktoken
from tqdm import tqdm

import configurator
from data import hub, shards, tokenizer
from data.sources import Batch, Missing
from utils import errors, files

LONGEST_BLANK = 500_000  # tiktoken's regular expressions fail on a run of about a million
START = {"cursor": None, "skip": 0}


def arguments(
    doc: str,
    out: Path,
    fixed: dict | None = None,
    val_tokens_help: str = "number of validation tokens, 1 or more, taken from the beginning",
    **defaults,
) -> configurator.Parser:
    """Return a parser with the options that the scripts of all corpora share.

    Args:
        doc: the script's docstring, which --help prints
        out: default output folder, a folder of data/
        fixed: values of the options that this script does not have
        val_tokens_help: what --val_tokens means in this script
        defaults: values of options whose default is another one than below
    """
    parser = configurator.Parser(description=doc)
    fixed = fixed or {}

    def add(name: str, help: str, **keywords) -> None:
        if name not in fixed:
            parser.add_argument(f"--{name}", help=help, **keywords)

    add(
        "out",
        f"output folder for the token shards and meta.json (default: data/{out.name})",
        type=Path,
        default=out,
    )
    add(
        "workers",
        "number of threads, 1 or more (default: number of CPU cores)",
        type=int,
        default=len(os.sched_getaffinity(0)),
    )
    add(
        "tokenizer",
        "GPT-2's tokenizer (gpt2), a byte-pair encoding trained on this corpus (bpe), or one token "
        "per byte (bytes)",
        choices=("gpt2", "bpe", "bytes"),
        default="gpt2",
    )
    add(
        "vocab_size",
        "vocabulary size of --tokenizer=bpe, including the end-of-text token; 257 to 65536",
        type=int,
        default=4096,
    )
    add(
        "tokenizer_bytes",
        "train --tokenizer=bpe on at most this many bytes of the corpus, 1 or more",
        type=int,
        default=100_000_000,
    )
    add(
        "shard_tokens",
        "number of tokens per shard, 1 to 2147483647",
        type=int,
        default=100_000_000,
    )
    add("val_tokens", val_tokens_help, type=int, default=100_000_000)
    add(
        "max_tokens",
        "total number of tokens to prepare, 1 or more; rerun with a larger number to add tokens "
        "(default: the entire source)",
        type=int,
    )
    add(
        "overwrite",
        "if the output folder holds shards that were prepared with other options, delete them and "
        "start again",
        action="store_true",
    )
    add(
        "verify",
        "compare every shard with its SHA-256 in meta.json instead of preparing anything",
        action="store_true",
    )
    parser.set_defaults(**defaults, **fixed)
    return parser


def one_stream(source, val_tokens: int) -> list[tuple]:
    """A plan: the first tokens of a source are for validation, the others for training."""
    return [("val", source, val_tokens), ("train", source, None)]


def check(args) -> None:
    """ValueError: an option out of range."""
    for name in ("workers", "tokenizer_bytes", "shard_tokens", "val_tokens", "max_tokens"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise ValueError(f"--{name}={getattr(args, name)}: give 1 or more")
    if args.shard_tokens >= 2**31:
        raise ValueError(f"--shard_tokens={args.shard_tokens}: give less than 2147483648")
    if args.tokenizer != "ids" and not 257 <= args.vocab_size <= 2**16:
        give = "give 257 (bytes and end-of-text) to 65536"
        raise ValueError(f"--vocab_size={args.vocab_size}: {give}")


def prepare(args, name: str, plan: list[tuple], extra: dict | None = None) -> None:
    """Make the shards `<name>_<split>_<number>.bin` in args.out, or go on making them.

    plan: (split, source, tokens or None for all); consecutive entries of one source share its
    documents. extra goes into meta.json. ValueError: what ends the work; whole shards are kept.
    """
    check(args)
    if args.verify:
        return shards.verify(args.out, args.workers)
    args.out.mkdir(parents=True, exist_ok=True)
    with shards.only_one(args.out):
        Preparation(args, name, plan, extra or {}).run()


class Preparation:
    """One preparation of one folder; `records` lists the whole shards, each with what follows."""

    def __init__(self, args, name: str, plan: list[tuple], extra: dict):
        self.args, self.name, self.plan, self.extra, self.out = args, name, plan, extra, args.out
        self.sources = {split: source for split, source, _ in plan}
        self.stored = shards.read_json(self.out / "preparation.json")
        _, _, val_tokens = plan[0]
        if val_tokens and args.max_tokens and args.max_tokens <= val_tokens:
            nothing = f"leaves nothing for training after --val_tokens={val_tokens}"
            give = "give more, or a smaller --val_tokens"
            raise ValueError(f"--max_tokens={args.max_tokens} {nothing}: {give}")
        before = self.stored.get("options", {})
        options = self.options_at(before)
        if before and before != options and args.overwrite:
            options = self.options_at({})
        self.claim(before, options)

    def options_at(self, before: dict) -> dict:
        """What the shards follow from: at the commits of the options `before`, or the newest."""
        recorded, pinned = before.get("plan") or [{} for _ in self.plan], []
        for stage, (_, source, _) in zip(recorded, self.plan):
            # Both splits may share one source. A begun preparation stays at its commit.
            if isinstance(source, hub.Hub) and source not in pinned:
                source.pin(stage.get("commit"))
                source.downloads, pinned = self.out / "downloads", [*pinned, source]
        names = ["tokenizer", "shard_tokens"]
        names += ["vocab_size", "tokenizer_bytes"] * (self.args.tokenizer == "bpe")
        kind = {name: getattr(self.args, name) for name in names}
        plan = [{"split": split, "tokens": n, **of.identity()} for split, of, n in self.plan]
        return {"name": self.name, **kind, "plan": plan}

    def claim(self, before: dict, options: dict) -> None:
        """Refuse a folder that holds something else; with --overwrite, empty it."""
        files = list(self.out.glob("*.bin"))
        if before != options and (self.args.overwrite or not files):
            own = ("meta.json", "tokenizer.json", "fetched.json", "preparation.json")
            for file in (*(self.out / name for name in own), *files, *self.out.glob("*.bin.*")):
                file.unlink(missing_ok=True)
            self.stored = {}
        elif before != options:
            what, ways = "shards of unknown making", "give another --out"
            if before:
                what = f"another preparation ({first_difference(before, options)})"
                ways = "give that again to go on with it, another --out"
            # lstat: shards that others have made are links.
            size = shards.readable(sum(file.lstat().st_size for file in files))
            removes = f"--overwrite to remove its {len(files)} shards ({size}) and begin anew"
            raise ValueError(f"{self.out} holds {what}: {ways}, or {removes}")
        self.stored["options"] = options
        self.records = self.stored.setdefault("shards", [])
        self.present, most = tokens_of(self.records), self.args.max_tokens
        if most and self.present > most:
            more = f"{self.present:,} tokens, more than --max_tokens={most}"
            ways = f"give --max_tokens={self.present} or more, or another --out"
            raise ValueError(f"{self.out} holds {more}: {ways}")
        # A kill may come between a whole shard and its record.
        unlisted = f"{self.name}_*_{len(self.records):06d}.bin"
        for file in (*self.out.glob("*.bin.tmp"), *self.out.glob(unlisted)):
            file.unlink()

    def run(self) -> None:
        """Make what is missing; meta.json last."""
        missing = [number for number, r in enumerate(self.records) if not self.is_whole(r)]
        todo = [stage for stage in self.plan if self.left(*stage)]
        if not missing and not todo and (self.out / "meta.json").exists():
            print(f"{self.out} is complete: {self.present:,} tokens")
            return
        self.encoding = self.make_tokenizer()
        self.expected = self.expected_tokens()
        self.check_disk()
        self.save()
        kind = f"{self.encoding.name} ({self.encoding.n_vocab:,} tokens)"
        print(f"{self.name}: {self.args.workers} threads, {kind}", flush=True)
        keys = {"unit": "tok", "unit_scale": True, "smoothing": 0.05, "dynamic_ncols": True}
        self.bar = tqdm(total=self.expected, initial=self.present, disable=None, **keys)
        self.started = time.monotonic()
        try:
            for number in missing:
                self.make_again(number)
            self.make_shards(todo)
        except KeyboardInterrupt:
            errors.exit_with_message(self.how_to_go_on("interrupted"), 130)
        except (ValueError, OSError) as error:
            full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
            what = f"the disk of {self.out} is full" if full else str(error)
            again = not isinstance(error, Missing)  # else the same command would meet it again
            raise ValueError(self.how_to_go_on(what, again)) from error
        finally:
            self.bar.close()
        self.finish()

    def left(self, split: str, source, tokens: int | None) -> int:
        """How many tokens the split may still get; 0 where its source has ended."""
        own = [record for record in self.records if record["split"] == split]
        if own and own[-1]["ended"]:
            return 0
        limits = ((tokens, own), (self.args.max_tokens, self.records))
        rests = (most - tokens_of(records) for most, records in limits if most)
        return min(rests, default=sys.maxsize)

    def reader(self, number: int, source) -> "TokenReader":
        """The source from where shard `number` begins: after the one before, if of it too."""
        before = self.records[number - 1] if number else None
        start = before["next"] if before and self.sources[before["split"]] is source else START
        return TokenReader(source, self.encoding, self.args.workers, start, self.bar)

    def make_shards(self, plan: list[tuple]) -> None:
        reader = None
        for split, source, tokens in plan:
            if reader is None or reader.source is not source:
                reader = self.reader(len(self.records), source)
            while left := self.left(split, source, tokens):
                want = min(self.args.shard_tokens, left)
                taken = reader.take(want)
                if not taken.size:
                    break
                path = self.out / f"{self.name}_{split}_{len(self.records):06d}.bin"
                # While it grows, the folder is no corpus.
                (self.out / "meta.json").unlink(missing_ok=True)
                record = {"file": path.name, "split": split, "tokens": taken.size}
                record |= text_of(shards.token_counts(taken), self.encoding)
                record["sha256"] = shards.write_shard(path, taken)
                # Fewer than wanted: the source has ended. `next` is where another run goes on.
                record |= {"ended": taken.size < want, "next": reader.position}
                self.records.append(record)
                self.save()
                self.show(record)

    def make_again(self, number: int) -> None:
        """A shard that was deleted or cut. ValueError: the source gives another one now."""
        record = self.records[number]
        tokens = self.reader(number, self.sources[record["split"]]).take(record["tokens"])
        path = self.out / record["file"]
        # Source files may have changed and kept names and sizes: the content alone shows it.
        if shards.write_shard(path, tokens) != record["sha256"]:
            path.unlink()
            changed = f"{path.name} was made again and is another one: the source has changed"
            raise Missing(f"{changed}: give another --out to prepare it as it is now")
        tqdm.write(f"{path.name}: made again")

    def show(self, record: dict) -> None:
        """A line about a shard: tokens so far, speed and time left."""
        total = tokens_of(self.records)
        rate = (total - self.present) / max(time.monotonic() - self.started, 1e-9)
        left = self.expected - total
        eta = f", ETA {tqdm.format_interval(left / rate)}" if left > 0 else ""
        tqdm.write(f"{record['file']}: {total:,} tokens in all, {rate:,.0f} tokens/s{eta}")
        sys.stdout.flush()

    def is_whole(self, record: dict) -> bool:
        path = self.out / record["file"]
        return path.exists() and path.stat().st_size == shards.size_of(record["tokens"])

    def make_tokenizer(self):
        """The chosen one, which is kept beside the shards: training it can take minutes."""
        path, kind, args = self.out / "tokenizer.json", self.args.tokenizer, self.args
        if path.exists():
            return tokenizer.from_json(files.read_json(path))
        if kind == "ids":
            encoding = tokenizer.IdTokenizer(args.vocab_size)
        elif kind == "characters":
            sources, most = self.sources.values(), args.tokenizer_bytes
            texts = (text for source in sources for text in first_bytes(source, most))
            encoding = tokenizer.characters_tokenizer(texts)
        elif kind == "bytes":
            encoding = tokenizer.byte_tokenizer()
        elif kind == "gpt2":
            encoding = tokenizer.gpt2_tokenizer()
        else:
            print(f"training a byte-pair tokenizer of {args.vocab_size:,} tokens", flush=True)
            texts = first_bytes(self.plan[-1][1], args.tokenizer_bytes)
            encoding = tokenizer.train_byte_pairs(texts, args.vocab_size)
        shards.write_json(path, tokenizer.to_json(encoding))
        return encoding

    def expected_tokens(self) -> int:
        """About how many tokens there will be: a token of byte pairs is taken for four bytes."""
        per_token, total = 4 if self.args.tokenizer in ("gpt2", "bpe") else 1, 0
        for source in {id(source): source for source in self.sources.values()}.values():
            limits = [tokens for _, each, tokens in self.plan if each is source]
            of_hub = isinstance(source, hub.Hub)
            whole = source.tokens if of_hub else source.text_bytes() // per_token
            total += whole if None in limits else min(whole, sum(limits))
        return min(total, self.args.max_tokens or total)

    def check_disk(self) -> None:
        """ValueError: what is missing does not fit, two bytes a token."""
        free = shutil.disk_usage(self.out).free
        if 2 * (self.expected - self.present) > free:
            need = f"about {self.expected:,} tokens need {shards.readable(2 * self.expected)}"
            has = f"{self.out} has {shards.readable(free)} free"
            fits = int(0.95 * (free // 2 + self.present))
            raise ValueError(f"{need}, {has}: give --max_tokens={fits}, or --out on a larger disk")

    def save(self) -> None:
        shards.write_json(self.out / "preparation.json", self.stored)

    def how_to_go_on(self, what: str, again: bool = True) -> str:
        """What has happened, and what can be done; again: the same command goes on."""
        # As the file has it: Ctrl+C may come between a shard and its record.
        listed = shards.read_json(self.out / "preparation.json").get("shards", [])
        whole = [record for record in listed if self.is_whole(record)]
        ways = ["run the same command again to go on"] if again else []
        if whole == listed and {"val", "train"} <= {record["split"] for record in whole}:
            run = "or" if again else "run it"
            ways.append(f"{run} with --max_tokens={tokens_of(whole)} to end there")
        return f"{what}; {len(whole)} whole shards are kept{': ' if ways else ''}{', '.join(ways)}"

    def finish(self) -> None:
        shutil.rmtree(self.out / "downloads", ignore_errors=True)
        splits, tokens = {record["split"] for record in self.records}, tokens_of(self.records)
        if not {"train", "val"} <= splits:
            nothing = f"leave nothing for {'training' if 'val' in splits else 'validation'}"
            ways = f"give more text, or --val_tokens below {tokens} and --overwrite"
            raise ValueError(f"{tokens:,} tokens {nothing}: {ways}")
        about, keys = self.stored["options"]["plan"][-1], ("source", "name", "revision", "commit")
        source = {key: about[key] for key in keys if about.get(key)}
        meta = {**tokenizer.meta(self.encoding), **source, **self.extra}
        shards.write_meta(self.out, meta, self.records)


def tokens_of(records: list[dict]) -> int:
    """Tokens of shards together."""
    return sum(record["tokens"] for record in records)


def text_of(counts: np.ndarray, encoding) -> dict:
    """Documents and bytes of text in a shard that holds each token so often, int64 (n_vocab,)."""
    size = int(counts[: encoding.n_vocab] @ tokenizer.bytes_by_token(encoding))
    return {"documents": int(counts[encoding.eot_token]), "bytes": size}


class TokenReader:
    """The tokens of a source as one stream from a position on: a cursor of the source, and how
    many tokens after it are taken already.
    """

    def __init__(self, source, encoding, workers: int, position: dict, bar=None):
        self.source, self.bar = source, bar
        self.cursor, self.used = position["cursor"], position["skip"]
        self.batches = tokenised(source, self.cursor, encoding, workers)
        self.tokens = np.zeros(0, dtype=np.uint16)  # of the batch at the cursor

    @property
    def position(self) -> dict:
        return {"cursor": self.cursor, "skip": self.used}

    def take(self, count: int) -> np.ndarray:
        """The next `count` tokens, uint16, fewer where the source ends."""
        result, filled = np.empty(count, dtype=np.uint16), 0
        while filled < count:
            if self.used >= len(self.tokens):
                cursor, future = next(self.batches, (None, None))
                if future is None:
                    break
                # At a resumed position the first batch, or more if they are smaller now, is taken.
                self.used -= len(self.tokens)
                self.cursor, self.tokens = cursor, future.result()
                continue
            part = self.tokens[self.used : self.used + count - filled]
            result[filled : filled + len(part)] = part
            filled, self.used = filled + len(part), self.used + len(part)
            if self.bar is not None:
                self.bar.update(len(part))
        return result[:filled]


def tokenised(source, cursor, encoding, workers: int) -> Iterator[tuple[dict, Future]]:
    """Every batch's cursor and its tokens to come, in order; a bounded number is in work."""
    # Two batches a thread keep all busy; more would only take memory.
    with ThreadPoolExecutor(workers) as pool:
        pending = deque()
        for batch in source.read(cursor):
            pending.append((batch.cursor, pool.submit(encode, encoding, batch)))
            if len(pending) > 2 * workers:
                yield pending.popleft()
        yield from pending


def encode(encoding: tiktoken.Encoding, batch: Batch) -> np.ndarray:
    """Tokens of a batch's texts, uint16, each document after end-of-text."""
    parts = [np.zeros(0, dtype=np.uint32)]
    eot = np.array([encoding.eot_token], dtype=np.uint32)
    for text, start in zip(batch.texts, batch.starts or [True] * len(batch.texts)):
        if start:
            parts.append(eot)
        for piece in [text] if len(text) < LONGEST_BLANK else without_long_blanks(text):
            # disallowed_special: what looks like a special token is text.
            parts.append(encoding.encode_to_numpy(piece, disallowed_special=()))
    return np.concatenate(parts).astype(np.uint16)


def without_long_blanks(text: str) -> list[str]:
    """The text in pieces, cut within runs of blanks that are too long."""
    cuts = [0]
    # Tried once a run, not at each of its blanks.
    for run in re.finditer(rf"(?<!\s)\s{{{LONGEST_BLANK},}}", text):
        cuts += range(run.start(), run.end() + 1, LONGEST_BLANK)
    return [text[start:end] for start, end in pairwise([*cuts, len(text)])]


def first_bytes(source, count: int) -> Iterator[str]:
    """Texts of a source up to about `count` bytes."""
    for batch in source.read():
        for text in batch.texts:
            if count <= 0:
                return
            yield text
            count -= len(text.encode())


def first_difference(before: dict, now: dict) -> str:
    """The first option that differs, in words."""
    for key in [*now, *before]:
        old, new = before.get(key), now.get(key)
        if old != new and isinstance(old, list) and isinstance(new, list):
            pairs = (first_difference(a, b) for a, b in zip(old, new) if a != b)
            return next(pairs, f"{key} differ in number")
        if old != new:
            return f"{key} {old!r} there, {new!r} now"
    return "nothing"


def adopt(args) -> None:
    """Make GPT-2 shards in llm.c's format, from a folder or the hub, the corpus in args.out.

    A folder's are linked, not copied. ValueError: not such shards, or a folder in use.
    """
    source, out, origin = args.pretokenized, args.out, Path(args.pretokenized)
    if origin.is_dir():
        hub.refuse_options(args, "a folder of shards")
    out.mkdir(parents=True, exist_ok=True)
    with shards.only_one(out):
        if (out / "preparation.json").exists():
            raise ValueError(f"{out} holds a preparation of its own: give another --out")
        encoding, about, sums = tokenizer.gpt2_tokenizer(), {"source": source}, {}
        if not origin.is_dir():
            fetched = hub.fetch_shards(source, out, args.revision, args.retry_minutes)
            origin, about["commit"], sums = out, fetched["commit"], fetched["sums"]
        files = {split: shards.shard_files(origin, split) for split in ("val", "train")}
        if not all(files.values()):
            lack = "holds no *train_*.bin and *val_*.bin shards of the llm.c format"
            raise ValueError(f"{source} {lack}")
        records, splits = [], [(file, split) for split in files for file in files[split]]
        examined = shards.examined([file for file, _ in splits], encoding.n_vocab, args.workers)
        for (file, split), shard in zip(splits, examined):
            if isinstance(shard, ValueError):
                raise shard
            if shard["sha256"] != sums.get(file.name, shard["sha256"]):
                other = f"{file} came with other bytes than the hub's SHA-256 says"
                raise ValueError(f"{other}: delete it, and run the same command again")
            text = text_of(shard.pop("counts"), encoding)
            records.append({"file": file.name, "split": split, **shard, **text})
            # Linked and not copied: shards are tens of gigabytes.
            link = out / file.name
            if not link.exists():
                link.symlink_to(file.resolve())
            elif link.resolve() != file.resolve():
                raise ValueError(f"{link} is there already and another file: give another --out")
        shards.write_json(out / "tokenizer.json", tokenizer.to_json(encoding))
        shards.write_meta(out, {**tokenizer.meta(encoding), **about}, records)
