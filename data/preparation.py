"""From documents to token shards: what every `data/<corpus>/prepare.py` shares.

Documents are read in order, tokenised by several threads (tiktoken leaves Python's lock), preceded by end-of-text, and
cut into shards. After each whole shard, `preparation.json` records where in the source the next one begins: killed at
any moment and started again, a preparation goes on from there, and its bytes are those of an uninterrupted one,
whatever the number of workers. `meta.json` is written last: a folder that has the first and not the second is not done.
A corpus that grows is none from its first new shard to its last.
"""

import errno
import json
import math
import os
import shutil
import sys
import time
from pathlib import Path

import tiktoken
from tqdm import tqdm

from configurator import Parser
from data import interruption, shards, tokenizer
from data.hub import Hub
from data.sources import Missing
from data.token_reader import START, TokenReader, first_bytes
from data.verification import verify


def arguments(doc: str, out: Path, fixed: dict | None = None, **defaults) -> Parser:
    """A parser with the options that corpora share: `defaults` replaces defaults, `fixed` options are not offered."""
    parser = Parser(description=doc)
    fixed = fixed or {}

    def add(option, **keys):
        if option.removeprefix("--") not in fixed:
            parser.add_argument(option, **keys)

    add("--out", type=Path, default=out, help="folder for shards and meta.json (default: this script's)")
    add("--workers", type=int, default=len(os.sched_getaffinity(0)), help="threads that tokenise (default: all cores)")
    add("--tokenizer", choices=("gpt2", "bpe", "bytes"), default="gpt2", help="bpe: trained on the corpus")
    add("--vocab_size", type=int, default=4096, help="tokens of a trained bpe, end-of-text included")
    add("--tokenizer_bytes", type=int, default=100_000_000, help="bytes of text that a bpe is trained on, at most")
    add("--shard_tokens", type=int, default=100_000_000, help="tokens per shard")
    add("--val_tokens", type=int, default=100_000_000, help="the first so many tokens are for validation")
    add("--max_tokens", type=int, help="stop after this many tokens, validation included; a later run may give more")
    add("--overwrite", action="store_true", help="remove another preparation's shards in --out, or those too many")
    add("--verify", action="store_true", help="prepare nothing; check every shard against its SHA-256")
    parser.set_defaults(**defaults, **fixed)
    return parser


def check(args) -> None:
    """ValueError: an option out of range."""
    for name in ("workers", "tokenizer_bytes", "shard_tokens", "val_tokens", "max_tokens"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise ValueError(f"--{name}={getattr(args, name)}: give 1 or more")
    if args.shard_tokens >= 2**31:
        raise ValueError(f"--shard_tokens={args.shard_tokens}: give less than 2147483648, which a shard cannot count")
    if args.tokenizer != "ids" and not 257 <= args.vocab_size <= 2**16:
        raise ValueError(f"--vocab_size={args.vocab_size}: give 257 (bytes and end-of-text) to 65536")


def prepare(args, name: str, plan: list[tuple], extra: dict | None = None) -> None:
    """Make the shards `<name>_<split>_<number>.bin` in args.out, as `plan` says, or go on making them.

    `plan` holds (split, source, tokens or None for all); consecutive entries of one source share its documents. `extra`
    goes into meta.json. ValueError: what a user can get wrong, and what ends the work early; whole shards are kept.
    """
    check(args)
    if args.verify:
        return verify(args.out, args.workers)
    args.out.mkdir(parents=True, exist_ok=True)
    with shards.only_one(args.out):
        Preparation(args, name, plan, extra or {}).run()


class Preparation:
    """One preparation of one folder. `stored["shards"]` lists what is whole, each with the position after it."""

    def __init__(self, args, name: str, plan: list[tuple], extra: dict):
        self.args, self.name, self.plan, self.extra, self.out = args, name, plan, extra, args.out
        self.stored = shards.read_json(self.out / "preparation.json")
        self.reader = None
        limits = [tokens for split, _, tokens in plan if split == "val" and tokens]
        if args.max_tokens and limits and args.max_tokens <= limits[0]:
            raise ValueError(
                f"--max_tokens={args.max_tokens} leaves nothing for training after --val_tokens={limits[0]}: "
                "give more, or a smaller --val_tokens"
            )
        before = self.stored.get("options", {})
        self.options = self._options(before)
        only_shrinks = args.max_tokens and self._present() > args.max_tokens and self.options == before
        if args.overwrite and before and not only_shrinks:
            self.options = self._options({})
        self._claim()

    def _options(self, before: dict) -> dict:
        """What the shards follow from, at the commits of the options `before`, where these have some, or the newest."""
        commits = {id(source): old.get("commit") for (_, source, _), old in zip(self.plan, before.get("plan", []))}
        for source in {id(source): source for _, source, _ in self.plan}.values():
            if isinstance(source, Hub):
                source.pin(commits.get(id(source)))
        kind = {"tokenizer": self.args.tokenizer, "shard_tokens": self.args.shard_tokens}
        if self.args.tokenizer == "bpe":
            kind |= {"vocab_size": self.args.vocab_size, "tokenizer_bytes": self.args.tokenizer_bytes}
        stages = [{"split": split, "tokens": tokens, **source.identity()} for split, source, tokens in self.plan]
        return {"name": self.name, **kind, "plan": stages}

    def _present(self) -> int:
        """Tokens of the shards that were made."""
        return sum(record["tokens"] for record in self.stored.get("shards", []))

    def _shards_there(self) -> str:
        """How many shards the folder holds, and their size: what --overwrite removes with another preparation."""
        files = list(self.out.glob("*.bin"))
        return f"{len(files)} shards ({shards.readable(sum(file.lstat().st_size for file in files))})"

    def _claim(self) -> None:
        """Refuse a folder that holds something else; with --overwrite, empty it."""
        own = [self.out / "meta.json"]  # first: what is half removed is no corpus
        own += [*self.out.glob("*.bin"), *self.out.glob("*.bin.*")]
        own += [self.out / file for file in ("tokenizer.json", "fetched.json", "preparation.json")]
        nothing_made = self.stored and not self.stored.get("shards") and not any(self.out.glob("*.bin"))
        if (self.args.overwrite or nothing_made) and self.stored.get("options") != self.options:
            for file in own:
                file.unlink(missing_ok=True)
            self.stored = {}
        if self.stored and self.stored.get("options") != self.options:
            changed = first_difference(self.stored.get("options", {}), self.options)
            raise ValueError(
                f"{self.out} holds another preparation ({changed}): give that again to go on with it, another --out, "
                f"or --overwrite to remove its {self._shards_there()} and begin anew"
            )
        if not self.stored and any(self.out.glob("*.bin")):
            raise ValueError(
                f"{self.out} holds shards of unknown making: give another --out, or --overwrite to remove its "
                f"{self._shards_there()}"
            )
        present = self._present()
        if self.args.max_tokens and present > self.args.max_tokens and not self.args.overwrite:
            raise ValueError(
                f"{self.out} holds {present:,} tokens, more than --max_tokens={self.args.max_tokens}: give "
                f"--max_tokens={present} or more to keep them, another --out, or --overwrite to remove those too many"
            )
        unlisted = (
            f"{self.name}_*_{len(self.stored.get('shards', [])):06d}.bin"  # whole, but killed before it was listed
        )
        for file in (*self.out.glob("*.bin.tmp"), *self.out.glob(unlisted)):
            file.unlink()

    def run(self) -> None:
        if (self.out / "meta.json").exists() and self._complete():
            print(f"{self.out} is complete: {sum(s['tokens'] for s in self.stored['shards']):,} tokens")
            return
        self.encoding = self._tokenizer()
        expected = self._expected_tokens()
        self._check_disk(expected)
        self.stored = {"options": self.options, "shards": self.stored.get("shards", [])}
        self._save()
        print(f"{self.name}: {self.args.workers} threads, {self.encoding.name} ({self.encoding.n_vocab:,} tokens)")
        self.progress = Progress(expected)
        interruption.advise(lambda: self._how_to_go_on("interrupted"))
        try:
            self._make_shards()
        except Missing as error:
            removes = f" (--overwrite removes the {self._shards_there()})" * ("--overwrite" in str(error))
            raise ValueError(self._how_to_go_on(f"{error}{removes}", "")) from error
        except (ValueError, OSError) as error:
            full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
            raise ValueError(self._how_to_go_on(f"the disk of {self.out} is full" if full else str(error))) from error
        finally:
            self._close_reader()
            self.progress.close()
        self._finish()

    def _complete(self) -> bool:
        """Whether meta.json's shards are all there and what --max_tokens asks for."""
        same = self.stored.get("max_tokens", "begun") == self.args.max_tokens
        return same and all(self._is_whole(record) for record in self.stored["shards"])

    def _tokenizer(self) -> tiktoken.Encoding:
        """The chosen one; a trained one is kept beside the shards and not trained again."""
        path = self.out / "tokenizer.json"
        if self.args.tokenizer == "ids":
            encoding = tokenizer.IdTokenizer(self.args.vocab_size)
        elif self.args.tokenizer == "characters":
            texts = (text for _, source, _ in self.plan for text in first_bytes(source, self.args.tokenizer_bytes))
            encoding = tokenizer.characters_tokenizer(texts)
        elif self.args.tokenizer != "bpe":
            encoding = tokenizer.byte_tokenizer() if self.args.tokenizer == "bytes" else tokenizer.gpt2_tokenizer()
        elif self.stored and path.exists():
            return tokenizer.from_json(json.loads(path.read_text(encoding="utf-8")))
        else:
            print(f"training a byte-pair tokenizer of {self.args.vocab_size:,} tokens", flush=True)
            texts = first_bytes(self.plan[-1][1], self.args.tokenizer_bytes)
            encoding = tokenizer.train_byte_pairs(texts, self.args.vocab_size)
        shards.write_json(path, tokenizer.to_json(encoding))
        return encoding

    def _expected_tokens(self) -> int | None:
        """About how many tokens there will be, None where nobody knows."""
        per_token, total = 1 if self.args.tokenizer in ("bytes", "ids", "characters") else 4, 0
        for source in {id(source): source for _, source, _ in self.plan}.values():
            limits = [tokens for _, each, tokens in self.plan if each is source]
            whole = source.tokens if isinstance(source, Hub) else source.text_bytes() // per_token
            total += least(whole, None if None in limits else sum(limits), default=math.inf)
        expected = min(total, self.args.max_tokens or math.inf)
        return None if expected == math.inf else expected

    def _check_disk(self, expected: int | None) -> None:
        present = self._present()
        free = shutil.disk_usage(self.out).free
        if expected is not None and 2 * (expected - present) > free:
            fits = int(0.95 * (free // 2 + present))
            need, has = shards.readable(2 * expected), shards.readable(free)
            raise ValueError(
                f"about {expected:,} tokens need {need}, {self.out} has {has} free: give "
                f"--max_tokens={fits}, or --out on a larger disk"
            )

    def _make_shards(self) -> None:
        index = total = 0
        for stage, (split, source, tokens) in enumerate(self.plan):
            if stage == 0 or source is not self.plan[stage - 1][1]:
                position = START
                self._close_reader()
            left = self._limit(tokens, total)
            while left > 0:
                want = min(self.args.shard_tokens, left)
                record = self.stored["shards"][index] if index < len(self.stored["shards"]) else None
                if record and record["split"] == split and self._has(record, want):
                    self._close_reader()
                    self.progress.found(record)
                else:
                    record = self._make_shard(index, split, want, self._reader_at(source, position), record)
                    if record is None:
                        break
                    self.stored["shards"][index : index + 1] = [record]
                    self._save()
                    self.progress.shard(record)
                position = record["next"]
                index, total, left = index + 1, total + record["tokens"], left - record["tokens"]
                if record["tokens"] < want:
                    break  # the source has ended
        if self.stored["shards"][index:]:
            (self.out / "meta.json").unlink(missing_ok=True)  # which names them
        for record in self.stored["shards"][index:]:
            (self.out / record["file"]).unlink(missing_ok=True)
        del self.stored["shards"][index:]

    def _reader_at(self, source, position: dict) -> TokenReader:
        """The reader that has come there, or a new one."""
        if self.reader is None:
            self.reader = TokenReader(source, self.encoding, self.args.workers, position, self.progress)
        return self.reader

    def _close_reader(self) -> None:
        """End its threads here, and not where the garbage collector happens to run, which may be one of them."""
        if self.reader:
            self.reader.batches.close()
        self.reader = None

    def _limit(self, tokens: int | None, total: int) -> int:
        left = None if self.args.max_tokens is None else self.args.max_tokens - total
        return least(tokens, left, default=sys.maxsize)

    def _has(self, record: dict, want: int) -> bool:
        """Whether the shard is there and what a preparation with these limits would make."""
        return (record["tokens"] == want or (record["ended"] and record["tokens"] < want)) and self._is_whole(record)

    def _is_whole(self, record: dict) -> bool:
        path = self.out / record["file"]
        return path.exists() and path.stat().st_size == shards.HEADER_BYTES + 2 * record["tokens"]

    def _make_shard(self, index: int, split: str, want: int, reader: TokenReader, before: dict | None) -> dict | None:
        """The record of the shard that is written now; None where the source has ended.

        Missing: the shard was there `before`, and the same source gives another one.
        """
        tokens, counts = reader.take(want)
        ended = tokens.size < want
        if before and (
            (ended and tokens.size < before["tokens"]) or (before["ended"] and tokens.size > before["tokens"])
        ):
            raise another(before)
        if not tokens.size:
            return None
        path = self.out / f"{self.name}_{split}_{index:06d}.bin"
        (self.out / "meta.json").unlink(missing_ok=True)
        digest = shards.write_shard(path, tokens)
        if before and before["tokens"] == tokens.size and before["sha256"] != digest:
            path.unlink()  # or the next run would take it for the one that was
            raise another(before)
        record = {"file": path.name, "split": split, "tokens": tokens.size, **counts, "sha256": digest}
        return {**record, "ended": ended, "next": reader.position}

    def _save(self) -> None:
        shards.write_json(self.out / "preparation.json", self.stored)

    def _how_to_go_on(self, what: str, go_on="run the same command again to go on") -> str:
        """What has happened, and what can be done; `go_on`: "" where doing the same again is no help."""
        # As the file has it: Ctrl+C may come between a shard and its record.
        listed = shards.read_json(self.out / "preparation.json").get("shards", [])
        kept = [record for record in listed if self._is_whole(record)]
        tokens = sum(record["tokens"] for record in kept)
        ways = [go_on] if go_on else []
        if kept == listed and {"val", "train"} <= {record["split"] for record in kept}:
            ways.append(f"{'or' if go_on else 'run it'} with --max_tokens={tokens} to end there")
        return f"{what}; {len(kept)} whole shards are kept{': ' * bool(ways)}{', '.join(ways)}"

    def _finish(self) -> None:
        records = self.stored["shards"]
        found = {record["split"] for record in records}
        tokens = sum(record["tokens"] for record in records)
        if "train" not in found or "val" not in found:
            raise ValueError(
                f"{tokens:,} tokens leave nothing for {'training' if 'val' in found else 'validation'}: give more "
                f"text, or --val_tokens below {tokens} and --overwrite, which removes the {self._shards_there()}"
            )
        self.stored["max_tokens"] = self.args.max_tokens
        self._save()
        source = {key: self.options["plan"][-1].get(key) for key in ("source", "name", "revision", "commit")}
        meta = {key: value for key, value in source.items() if value} | self.extra
        shards.write_meta(self.out, tokenizer.meta(self.encoding) | meta, records)


def another(record: dict) -> Missing:
    return Missing(
        f"{record['file']} was made again and is another one: the source has changed: give another --out to prepare it "
        "as it is now"
    )


class Progress:
    """A bar on a terminal, a line a shard everywhere: tokens, tokens/s and time left."""

    def __init__(self, expected: int | None):
        self.expected = expected
        self.bar = tqdm(total=expected, unit="tok", unit_scale=True, smoothing=0.05, disable=None, dynamic_ncols=True)
        self.started, self.made, self.present = time.monotonic(), 0, 0

    def advance(self, tokens: int) -> None:
        self.made += tokens
        self.bar.update(tokens)

    def found(self, record: dict) -> None:
        self.present += record["tokens"]
        self.bar.update(record["tokens"])

    def shard(self, record: dict) -> None:
        rate = self.made / max(time.monotonic() - self.started, 1e-9)
        left = (self.expected or 0) - self.present - self.made
        eta = f", ETA {tqdm.format_interval(left / rate)}" if left > 0 else ""
        tqdm.write(f"{record['file']}: {self.present + self.made:,} tokens in all, {rate:,.0f} tokens/s{eta}")
        sys.stdout.flush()

    def close(self) -> None:
        self.bar.close()


def least(*numbers, default):
    """The smallest of those that are not None."""
    return min((n for n in numbers if n is not None), default=default)


def first_difference(before: dict, now: dict) -> str:
    """The first option that differs, in words."""
    for key in [*now, *before]:
        old, new = before.get(key), now.get(key)
        if old != new and isinstance(old, list) and isinstance(new, list):
            return next((first_difference(a, b) for a, b in zip(old, new) if a != b), f"{key} differ in number")
        if old != new:
            return f"{key} {old!r} there, {new!r} now"
    return "nothing"
