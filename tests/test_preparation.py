"""Preparing token shards: killed, resumed, grown, shrunk and refused, against tokens computed document by document."""

import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import ROOT, one_line_error, script, write_parquet
from in_process import call

from data import preparation, shards, sources, token_reader, tokenizer
from data.shards import open_corpus
from data.sources import Batch, Files, Texts
from data.token_reader import START, TokenReader, encode, tokenised

EOT = 256
FINEWEB = ROOT / "data" / "fineweb_edu" / "prepare.py"


def stream(texts) -> list[int]:
    """Byte tokens of documents: end-of-text, then the text's bytes."""
    return [token for text in texts for token in (EOT, *text.encode())]


def some_texts(count=200, seed=0):
    """Documents of very different lengths, some empty, some with characters of several bytes."""
    draw = np.random.default_rng(seed)
    return ["".join(draw.choice(list("abc é日👧\n"), int(draw.integers(0, 60)) ** 2 // 20)) for _ in range(count)]


@pytest.fixture
def parquet(tmp_path):
    """A folder of three files, its documents."""
    texts = some_texts()
    (tmp_path / "in").mkdir()
    for index, first in enumerate((0, 70, 110)):
        write_parquet(tmp_path / "in" / f"{index}.parquet", texts[first : (70, 110, 200)[index]], 20)
    return tmp_path / "in", texts


@pytest.fixture
def small(monkeypatch):
    """Batches so small that a shard has several and a batch belongs to several shards."""
    monkeypatch.setattr(sources, "BATCH_CHARACTERS", 300)
    monkeypatch.setattr(sources, "ROWS", 7)


def run(out, plan, *options, name="x", extra=None):
    args = preparation.arguments("", out).parse_args(["--tokenizer=bytes", "--workers=2", *options])
    preparation.prepare(args, name, plan, extra)
    return open_corpus(str(out))


def files_plan(folder, val_tokens=1000):
    source = Files([str(folder)])
    return [("val", source, val_tokens), ("train", source, None)]


def tokens_of(corpus) -> list[int]:
    return np.concatenate(corpus.val + corpus.train).tolist()


def contents(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def stamps(folder) -> dict:
    return {path.name: (path.stat().st_mtime_ns, path.stat().st_ino) for path in folder.iterdir()}


# Tokens


def test_tokens_of_what_looks_special():
    bpe = tokenizer.train_byte_pairs(["the cat sat on the mat. " * 9], 265)
    texts = ["the <|endoftext|> mat", "👧", ""]
    expected = [token for text in texts for token in (bpe.eot_token, *bpe.encode_ordinary(text))]
    tokens = encode(bpe, Batch({}, texts))
    assert tokens.dtype == np.uint16
    assert tokens.tolist() == expected
    assert encode(bpe, Batch({}, [])).size == 0


def test_a_text_that_goes_on_has_no_end_of_text_within():
    tokens = encode(tokenizer.byte_tokenizer(), Batch({}, ["ab", "cd", "", "e"], [True, False, True, False]))
    assert tokens.tolist() == [EOT, *b"abcd", EOT, *b"e"]


@pytest.mark.parametrize("blanks", [" " * 2_000_000, "x" + (" " * 499_999 + "y") * 2, "\t \n" * 400_000])
def test_a_run_of_blanks_that_tiktoken_cannot_split(blanks):
    """GPT-2's regular expression runs out of stack on about a million blanks and panics."""
    encoding = tokenizer.gpt2_tokenizer()
    text = "before" + blanks + "after"
    tokens = encode(encoding, Batch({}, [text]))
    assert tokens[0] == encoding.eot_token
    assert encoding.decode(tokens[1:].tolist()) == text


def test_texts_below_the_limit_are_not_cut():
    """The last of several blanks belongs to the next word: a cut within a run would show."""
    encoding = tokenizer.gpt2_tokenizer()
    text = "word" + " " * 300_000 + "word" * 60_000 + " " * 100_000 + "word"
    assert len(text) > token_reader.LONGEST_BLANK
    assert encode(encoding, Batch({}, [text])).tolist() == [encoding.eot_token, *encoding.encode_ordinary(text)]


@pytest.mark.parametrize("workers", [1, 3])
def test_the_stream_can_be_taken_up_at_any_token(parquet, small, workers):
    _, texts = parquet
    texts = texts[:40]
    encoding = tokenizer.byte_tokenizer()
    expected = stream(texts)
    draw = np.random.default_rng(0)
    source = Texts(texts, "x")
    for _ in range(8):
        position, taken = START, 0
        while taken < len(expected):
            reader = TokenReader(source, encoding, workers, json.loads(json.dumps(position)))
            for _ in range(draw.integers(1, 4)):
                count = int(draw.integers(1, 2500))
                tokens, counts = reader.take(count)
                part = expected[taken : taken + count]
                assert tokens.tolist() == part
                assert counts == {"documents": part.count(EOT), "bytes": len(part) - part.count(EOT)}
                taken += len(part)
            position = reader.position
        tokens, counts = reader.take(5)
        assert (tokens.size, counts) == (0, {"documents": 0, "bytes": 0})


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_few_batches_are_read_ahead(workers):
    class Counting:
        read_so_far = 0

        def read(self, cursor):
            for index in range(100):
                self.read_so_far += 1
                yield Batch({"index": index}, [f"{index}"])

    source, order = Counting(), []
    for index, (batch, tokens) in enumerate(tokenised(source, None, tokenizer.byte_tokenizer(), workers)):
        assert source.read_so_far <= index + 2 * workers + 1
        order.append(batch.cursor["index"])
        assert tokens.tolist() == stream([str(index)])
    assert order == list(range(100))


# Whole preparations


@pytest.mark.parametrize("workers", [1, 2])
def test_shards_hold_every_document_after_end_of_text(parquet, small, tmp_path, workers):
    folder, texts = parquet
    corpus = run(
        tmp_path / "out", files_plan(folder), "--shard_tokens=300", f"--workers={workers}", extra={"note": "kept"}
    )
    expected = stream(texts)
    assert [len(shard) for shard in corpus.val] == [300, 300, 300, 100]
    rest = len(expected) - 1000
    assert [len(shard) for shard in corpus.train] == [300] * (rest // 300) + [rest % 300]
    assert tokens_of(corpus) == expected
    names = [f"x_val_{i:06d}.bin" for i in range(4)] + [f"x_train_{i:06d}.bin" for i in range(4, 4 + len(corpus.train))]
    others = ["meta.json", "preparation.json", "tokenizer.json"]
    assert sorted(contents(tmp_path / "out")) == sorted([*names, *others])
    assert [record["file"] for record in corpus.meta["shards"]] == names
    for split, part in (("val", expected[:1000]), ("train", expected[1000:])):
        documents = part.count(EOT)
        assert corpus.meta[split] == {"documents": documents, "bytes": len(part) - documents, "tokens": len(part)}
    about = {key: corpus.meta[key] for key in ("tokenizer", "vocab_size", "eot_token", "source", "note")}
    assert about == {"tokenizer": "bytes", "vocab_size": 257, "eot_token": 256, "source": str(folder), "note": "kept"}


def test_a_trained_tokenizer_is_kept_and_its_tokens_are_those_of_each_document(parquet, small, tmp_path, monkeypatch):
    folder, texts = parquet
    options = ("--tokenizer=bpe", "--vocab_size=290", "--shard_tokens=400", "--tokenizer_bytes=3000")
    corpus = run(tmp_path / "out", files_plan(folder), *options, "--max_tokens=2000")
    stored = (tmp_path / "out" / "tokenizer.json").read_bytes()
    encoding = tokenizer.from_json(json.loads(stored))
    expected = [token for text in texts for token in (289, *encoding.encode_ordinary(text))]
    assert tokens_of(corpus) == expected[:2000]
    first = [text for i, text in enumerate(texts) if len("".join(texts[:i]).encode()) < 3000]
    assert tokenizer.to_json(tokenizer.train_byte_pairs(first, 290)) == json.loads(stored)
    monkeypatch.setattr(tokenizer, "train_byte_pairs", None)  # minutes on a large corpus: not trained again
    assert tokens_of(run(tmp_path / "out", files_plan(folder), *options)) == expected
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == stored


# The fineweb_edu script on real text, killed


def standard_library(folder, size):
    """Parquet files in FineWeb-Edu's schema of the interpreter's own source, about `size` characters."""
    texts = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        try:
            texts.append(path.read_text(encoding="utf-8"))
        except UnicodeDecodeError:
            continue
        size -= len(texts[-1])
        if size < 0:
            break
    folder.mkdir()
    third = -(-len(texts) // 3)
    for index in range(3):
        write_parquet(folder / f"{index:03d}.parquet", texts[index * third : (index + 1) * third], row_group_size=30)
    return folder


# Files of the standard library are long: with a million characters a batch there would be few.
SMALL_BATCHES = f"import runpy, sys; sys.path.insert(0, {str(ROOT)!r}); import data.sources as s; "
SMALL_BATCHES += "s.BATCH_CHARACTERS = 50_000; sys.argv.pop(0); runpy.run_path(sys.argv[0], run_name='__main__')"


def start(*arguments):
    return subprocess.Popen(
        [sys.executable, "-c", SMALL_BATCHES, str(FINEWEB), *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def listed(out) -> list[str]:
    """Files of the shards that preparation.json calls whole."""
    return [record["file"] for record in shards.read_json(out / "preparation.json").get("shards", [])]


@pytest.mark.parametrize(
    ("kills", "kind", "size"),
    [
        (3, "bytes", 2_000_000),
        pytest.param(20, "bytes", 8_000_000, marks=pytest.mark.slow),
        pytest.param(20, "bpe", 16_000_000, marks=pytest.mark.slow),
    ],
)
def test_killed_at_random_moments_the_shards_are_those_of_an_uninterrupted_run(tmp_path, kills, kind, size):
    source = standard_library(tmp_path / "in", size)
    options = [f"--source={source}", f"--tokenizer={kind}", f"--shard_tokens={size // (50 * kills)}"]
    options += [f"--val_tokens={size // 15}", "--vocab_size=1000", "--tokenizer_bytes=300000"]
    process = start(*options, "--workers=2", f"--out={tmp_path / 'whole'}")
    _, errors = process.communicate()
    assert (process.returncode, errors) == (0, "")
    whole = contents(tmp_path / "whole")
    count = sum(name.endswith(".bin") for name in whole)
    assert count > 20 * kills

    out, draw = tmp_path / "out", np.random.default_rng(kills)
    during, made = 0, {}
    for kill in range(kills):
        process = start(*options, f"--workers={1 + kill % 2}", f"--out={out}")
        if kill % 5 == 4:
            time.sleep(draw.uniform(0.1, 1.2))  # from the process's start: imports, the trained tokenizer
        else:
            # After some of its new shards, at any moment of the few after them; by the child's pace, not by the clock
            # of an earlier run, so that a machine busy with other work makes no difference.
            began, seen = None, 0
            shards_first = draw.integers(1, 2 * (count - len(made)) // (kills - kill + 2) + 2)
            while seen < shards_first and (line := process.stdout.readline()):
                began = began or time.monotonic()
                seen += ".bin:" in line
            time.sleep(draw.uniform(0, 3) * (time.monotonic() - began) / max(seen, 1))
        process.kill()
        process.communicate()
        found = stamps(out) if out.exists() else {}
        after = {name: found[name] for name in listed(out) if name in found}
        assert after.items() >= made.items()  # what was whole has not been made again
        during += process.returncode == -signal.SIGKILL and len(after) > len(made) and len(after) < count
        made = after
    assert during >= kills // 2, (during, len(made), count)

    process = start(*options, f"--out={out}")
    output, errors = process.communicate()
    assert (process.returncode, errors) == (0, "")
    lines = [line for line in output.splitlines() if ".bin:" in line]
    assert len(lines) == count - len(made)
    assert stamps(out).items() >= made.items()
    assert contents(out) == whole  # no .tmp, and preparation.json too


# Limits and damage


def test_max_tokens_grown_later_are_those_of_once(parquet, small, tmp_path):
    folder, texts = parquet
    at_once = run(tmp_path / "once", files_plan(folder), "--shard_tokens=300", "--max_tokens=4444")
    assert tokens_of(at_once) == stream(texts)[:4444]
    out = tmp_path / "out"
    for limit in (1001, 1300, 1301, 2000, 4444):
        before = {name: stamp for name, stamp in stamps(out).items() if out.exists()} if out.exists() else {}
        full = [name for name in before if name.endswith(".bin") and (out / name).stat().st_size == 1024 + 2 * 300]
        corpus = run(out, files_plan(folder), "--shard_tokens=300", f"--max_tokens={limit}")
        assert tokens_of(corpus) == stream(texts)[:limit]
        assert {name: stamps(out)[name] for name in full} == {name: before[name] for name in full}
    assert contents(out) == contents(tmp_path / "once")
    for limit in ([], ["--max_tokens=1000000000"]):
        assert tokens_of(run(out, files_plan(folder), "--shard_tokens=300", *limit)) == stream(texts)


@pytest.mark.parametrize("first", [[], ["--max_tokens=4444"]])
def test_smaller_max_tokens_remove_nothing_unless_asked(parquet, small, tmp_path, first):
    folder, _ = parquet
    run(tmp_path / "once", files_plan(folder), "--shard_tokens=300", "--max_tokens=1700")
    out = tmp_path / "out"
    tokens = len(tokens_of(run(out, files_plan(folder), "--shard_tokens=300", *first)))
    for unfinished in (False, True):
        if unfinished:  # nor do the whole shards of a preparation that was interrupted
            (out / "meta.json").unlink()
        before = stamps(out)
        for limit in (1700, tokens - 1):
            with pytest.raises(ValueError, match=rf"holds {tokens:,} tokens, more than --max_tokens={limit}: .*=") as e:
                run(out, files_plan(folder), "--shard_tokens=300", f"--max_tokens={limit}")
            assert stamps(out) == before
        assert f"give --max_tokens={tokens} or more" in str(e.value)
        for same in (first, [f"--max_tokens={tokens}"]):
            assert len(tokens_of(run(out, files_plan(folder), "--shard_tokens=300", *same))) == tokens
    run(out, files_plan(folder), "--shard_tokens=300", "--max_tokens=1700", "--overwrite")
    assert contents(out) == contents(tmp_path / "once")


def test_killed_while_it_shrinks_it_is_no_corpus_that_names_shards_it_lacks(parquet, small, tmp_path, monkeypatch):
    folder, texts = parquet
    out = tmp_path / "out"
    run(out, files_plan(folder), "--shard_tokens=300", "--max_tokens=4444")
    arguments = [out, files_plan(folder), "--shard_tokens=300", "--max_tokens=1750", "--overwrite"]
    unlink = Path.unlink

    def killed(path, **keys):
        if path.name == "x_train_000009.bin":
            raise KeyboardInterrupt
        unlink(path, **keys)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", killed)
        with pytest.raises(KeyboardInterrupt):
            run(*arguments)
    assert not (out / "x_train_000008.bin").exists()
    with pytest.raises(ValueError, match="was not prepared to its end"):
        open_corpus(str(out))
    assert tokens_of(run(*arguments)) == stream(texts)[:1750]


class Unreachable(Files):
    """A source that gives so many batches, then fails."""

    batches = 0

    def read(self, cursor=None):
        for number, batch in enumerate(super().read(cursor)):
            if number == self.batches:
                raise ValueError("no connection")
            yield batch


@pytest.mark.parametrize("batches", [0, 15])
def test_growth_that_fails_loses_nothing(parquet, small, tmp_path, batches):
    """Before the first new shard the corpus is as it was; after it, what is whole ends at will, or goes on."""
    folder, texts = parquet
    out = tmp_path / "out"
    run(out, files_plan(folder), "--shard_tokens=300", "--max_tokens=1750")
    before = stamps(out)
    source = Unreachable([str(folder)])
    source.batches = batches
    plan = [("val", source, 1000), ("train", source, None)]
    with pytest.raises(ValueError, match=r"^no connection; \d+ whole shards are kept"):
        run(out, plan, "--shard_tokens=300")
    if batches:
        with pytest.raises(ValueError, match="was not prepared to its end"):
            open_corpus(str(out))
        assert len(listed(out)) > 7
    else:
        assert tokens_of(open_corpus(str(out))) == stream(texts)[:1750]
    shutil.copytree(out, tmp_path / "smaller")
    smaller = ["--shard_tokens=300", "--max_tokens=1750", "--overwrite"]
    assert tokens_of(run(tmp_path / "smaller", files_plan(folder), *smaller)) == stream(texts)[:1750]
    run(out, files_plan(folder), "--shard_tokens=300")
    run(tmp_path / "once", files_plan(folder), "--shard_tokens=300")
    assert contents(out) == contents(tmp_path / "once")
    kept = {name: stamp for name, stamp in before.items() if name.endswith(".bin") and "000006" not in name}
    assert stamps(out).items() >= kept.items()  # of 300 tokens each; the last one had fewer


@pytest.mark.parametrize("written", range(6))
def test_killed_after_any_file_that_growth_writes(parquet, small, tmp_path, monkeypatch, written):
    """A shard that was written and not yet listed is removed where it is too many; the next run finishes."""
    folder, texts = parquet
    out, writes = tmp_path / "out", iter(range(99))
    run(out, files_plan(folder), "--shard_tokens=3000", "--max_tokens=4000")
    replace = Path.replace

    def killed(path, target):
        replace(path, target)
        if next(writes) == written:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            run(out, files_plan(folder), "--shard_tokens=3000", "--max_tokens=8000")
    present = sum(record["tokens"] for record in shards.read_json(out / "preparation.json")["shards"])
    for limit in ([f"--max_tokens={present}"], []):
        expected = stream(texts)[: present if limit else None]
        assert tokens_of(run(out, files_plan(folder), "--shard_tokens=3000", *limit)) == expected


def test_a_source_that_ends_with_a_shard(tmp_path):
    texts = ["x" * 99] * 20
    plan = [("val", source := Texts(texts, "x"), 200), ("train", source, None)]
    once = run(tmp_path / "out", plan, "--shard_tokens=100")
    assert tokens_of(once) == stream(texts)
    before = stamps(tmp_path / "out")
    run(tmp_path / "out", plan, "--shard_tokens=100", "--max_tokens=2001")
    run(tmp_path / "out", plan, "--shard_tokens=100")
    shards_before = {name: stamp for name, stamp in before.items() if name.endswith(".bin")}
    assert stamps(tmp_path / "out").items() >= shards_before.items()


def test_complete_says_so_and_touches_nothing(parquet, tmp_path, capsys):
    folder, texts = parquet
    run(tmp_path / "out", files_plan(folder), "--shard_tokens=300")
    before = stamps(tmp_path / "out")
    capsys.readouterr()
    run(tmp_path / "out", files_plan(folder), "--shard_tokens=300", "--workers=1")
    assert stamps(tmp_path / "out") == before
    assert capsys.readouterr().out == f"{tmp_path / 'out'} is complete: {len(stream(texts)):,} tokens\n"


@pytest.mark.parametrize(
    ("damage", "split"), [("deleted", "val"), ("cut", "train"), ("longer", "val"), ("two", "train"), ("last", "train")]
)
def test_damaged_shards_alone_are_made_again(parquet, small, tmp_path, damage, split):
    folder, _ = parquet
    out = tmp_path / "out"
    run(out, files_plan(folder), "--shard_tokens=300")
    before, when = contents(out), stamps(out)
    names = [name for name in before if split in name]
    damaged = {"two": [names[1], names[-2]], "last": names[-1:]}.get(damage, names[2:3])
    for name in damaged:
        if damage == "cut":
            os.truncate(out / name, 1024 + 200)
        elif damage == "longer":
            (out / name).write_bytes(before[name] + b"\0\0")
        else:
            (out / name).unlink()
    (out / "x_train_000009.bin.tmp").write_bytes(b"left by a kill")
    run(out, files_plan(folder), "--shard_tokens=300")
    assert contents(out) == before
    others = [name for name in before if name.endswith(".bin") and name not in damaged]
    assert {name: stamps(out)[name] for name in others} == {name: when[name] for name in others}


def test_a_changed_source_is_refused_when_a_shard_is_made_again(parquet, small, tmp_path):
    """Names and sizes are as they were, so only the remade shard shows it; and it does not get in a second time."""
    out = tmp_path / "out"
    (tmp_path / "a.txt").write_text("abc\n" * 1000)
    run(out, files_plan(tmp_path / "a.txt"), "--shard_tokens=300")
    before = contents(out)
    (tmp_path / "a.txt").write_text("abd\n" * 1000)
    (out / "x_train_000006.bin").unlink()
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^x_train_000006\.bin was made again and is another one: the ") as error:
            run(out, files_plan(tmp_path / "a.txt"), "--shard_tokens=300")
        assert "run the same command again" not in str(error.value)  # which is no help
        assert str(error.value).endswith("give another --out to prepare it as it is now; 14 whole shards are kept")
    (tmp_path / "a.txt").write_text("abc\n" * 1000)
    run(out, files_plan(tmp_path / "a.txt"), "--shard_tokens=300")
    assert contents(out) == before


@pytest.mark.parametrize("change", [40, -2000])
def test_a_source_that_has_become_shorter_or_longer_is_refused(small, tmp_path, change):
    """The file keeps its size: what one key loses the other gains."""

    def write(length):
        lines = [json.dumps({"text": "a" * (length // 10), "other": "b" * (400 - length // 10)}) for _ in range(10)]
        (tmp_path / "a.jsonl").write_text("\n".join(lines))

    out = tmp_path / "out"
    write(2990)
    run(out, files_plan(tmp_path / "a.jsonl"), "--shard_tokens=300")
    last = sorted(out.glob("x_train_*.bin"))[-1]
    last.unlink()
    write(2990 + change)
    with pytest.raises(ValueError, match=rf"{last.name} was made again and is another one"):
        run(out, files_plan(tmp_path / "a.jsonl"), "--shard_tokens=300")
    assert not last.exists()


# Refusals


@pytest.mark.parametrize(
    ("options", "plan", "name", "difference"),
    [
        (["--shard_tokens=3001"], {}, "x", "shard_tokens 3000 there, 3001 now"),
        (["--tokenizer=bpe", "--vocab_size=300"], {}, "x", "tokenizer 'bytes' there, 'bpe' now"),
        ([], {"val_tokens": 999}, "x", "tokens 1000 there, 999 now"),
        ([], {}, "y", "name 'x' there, 'y' now"),
        ([], {"folder": "other"}, "x", "source '.*/in' there, '.*/other' now"),
    ],
)
def test_another_preparation_is_refused_and_overwritten_if_asked(parquet, tmp_path, options, plan, name, difference):
    folder, texts = parquet
    write_parquet(tmp_path / "other", texts)
    shutil.copytree(folder, tmp_path / "other_folder")
    (tmp_path / "other").unlink()
    (tmp_path / "other_folder").rename(tmp_path / "other")
    out = tmp_path / "out"
    run(out, files_plan(folder), "--shard_tokens=3000")
    before = stamps(out)
    plan = files_plan(**{"folder": folder, **plan, **({"folder": tmp_path / "other"} if "folder" in plan else {})})
    options = ["--shard_tokens=3000", *options]
    made = listed(out)
    size = shards.readable(sum((out / file).stat().st_size for file in made))
    there = rf"--overwrite to remove its {len(made)} shards \({size}\) and begin anew$"
    with pytest.raises(ValueError, match=rf"{out} holds another preparation \({difference}\): .*{there}"):
        run(out, plan, *options, name=name)
    assert stamps(out) == before
    run(out, plan, *options, "--overwrite", name=name)
    run(tmp_path / "fresh", plan, *options, name=name)
    assert contents(out) == contents(tmp_path / "fresh")


def test_overwrite_goes_on_with_the_same_preparation(parquet, tmp_path):
    """Killed after --overwrite, the same command is not to begin again."""
    folder, _ = parquet
    run(tmp_path / "out", files_plan(folder), "--shard_tokens=300")
    (tmp_path / "out" / "meta.json").unlink()
    before = {name: stamp for name, stamp in stamps(tmp_path / "out").items() if name.endswith(".bin")}
    run(tmp_path / "out", files_plan(folder), "--shard_tokens=300", "--overwrite")
    assert stamps(tmp_path / "out").items() >= before.items()


def test_shards_of_unknown_making_are_refused(parquet, tmp_path):
    folder, texts = parquet
    out = tmp_path / "out"
    out.mkdir()
    shards.write_shard(out / "foreign_train_000000.bin", np.arange(9))
    (out / "fetched.json").write_text("{}")
    message = (
        rf"{out} holds shards of unknown making: give another --out, or --overwrite to remove its 1 shards \(1\.0 KB"
    )
    with pytest.raises(ValueError, match=message):
        run(out, files_plan(folder))
    assert list(contents(out)) == ["fetched.json", "foreign_train_000000.bin"]
    assert tokens_of(run(out, files_plan(folder), "--overwrite")) == stream(texts)
    assert not (out / "foreign_train_000000.bin").exists()
    assert not (out / "fetched.json").exists()


def test_a_damaged_state_is_refused(parquet, tmp_path):
    folder, _ = parquet
    (tmp_path / "preparation.json").write_text("{")
    with pytest.raises(ValueError, match=r"preparation\.json is damaged"):
        run(tmp_path, files_plan(folder))


def test_two_at_once_are_refused(parquet, tmp_path):
    folder, texts = parquet
    out = tmp_path / "out"
    out.mkdir()
    other = os.open(out, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    with pytest.raises(ValueError, match=rf"{out} is being prepared by another process"):
        run(out, files_plan(folder))
    assert not list(out.iterdir())
    os.close(other)
    assert tokens_of(run(out, files_plan(folder))) == stream(texts)
    with shards.only_one(out):  # given back
        pass


def test_a_disk_that_is_too_small_is_known_before(tmp_path, monkeypatch):
    out = tmp_path / "out"
    source = Texts(["x" * 9999] * 10, "x")
    plan = [("val", source, 1000), ("train", source, None)]
    size = 99_990
    free = 2 * size - 2
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    with pytest.raises(
        ValueError, match=rf"about {size:,} tokens need 200\.0 KB, {out} has .* --max_tokens=(\d+)"
    ) as e:
        run(out, plan, "--shard_tokens=3000")
    assert not list(out.glob("*.bin"))
    limit = int(str(e.value).split("--max_tokens=")[1].split(",")[0])
    assert 0.9 * size < limit < size
    run(out, plan, "--shard_tokens=3000", f"--max_tokens={limit}")
    free = 2 * (size - limit) - 2
    with pytest.raises(ValueError, match=rf"about {size:,} tokens need"):
        run(out, plan, "--shard_tokens=3000")
    assert len(tokens_of(open_corpus(str(out)))) == limit  # the refusal left the corpus as it was
    free = 2 * (size - limit)  # what is there needs no room again
    assert len(tokens_of(run(out, plan, "--shard_tokens=3000"))) == size + 10


def test_a_full_disk_keeps_whole_shards_and_the_run_goes_on_after(parquet, small, tmp_path, monkeypatch):
    """/dev/full answers as a full disk does, when the buffer is flushed."""
    folder, texts = parquet
    run(tmp_path / "once", files_plan(folder), "--shard_tokens=300")
    out = tmp_path / "out"

    def full(path, *arguments, **keys):
        return open("/dev/full" if "train_000007" in str(path) else path, *arguments, **keys)

    message = f"^the disk of {out} is full; 7 whole shards are kept: run the same command"
    with monkeypatch.context() as patch:
        patch.setattr(shards, "open", full, raising=False)
        with pytest.raises(ValueError, match=message) as e:
            run(out, files_plan(folder), "--shard_tokens=300")
    assert e.value.__cause__.errno == errno.ENOSPC
    assert str(e.value).endswith("to go on, or with --max_tokens=1900 to end there")
    assert sum(name.endswith(".bin") for name in contents(out)) == 7
    with pytest.raises(ValueError, match="was not prepared to its end"):
        open_corpus(str(out))
    assert tokens_of(run(out, files_plan(folder), "--shard_tokens=300")) == stream(texts)
    assert contents(out) == contents(tmp_path / "once")


def stopped(process) -> str:
    """The line of a script that Ctrl+C ends."""
    process.send_signal(signal.SIGINT)
    errors = process.communicate(timeout=20)[1]
    assert process.returncode == 130, errors
    assert errors.count("\n") == 1, errors
    assert errors.startswith("prepare.py: interrupted")
    return errors


def test_interrupted_by_hand_while_it_grows(tmp_path):
    """The line names the ways to go on."""
    source = standard_library(tmp_path / "in", 3_000_000)
    options = [f"--source={source}", "--tokenizer=bytes", "--shard_tokens=30000", "--val_tokens=40000"]
    out = tmp_path / "out"
    assert start(*options, f"--out={out}", "--max_tokens=100000").wait(timeout=60) == 0
    process = start(*options, f"--out={out}")
    while "train_000006.bin" not in process.stdout.readline():
        pass
    line = stopped(process)
    kept = sum(record["tokens"] for record in shards.read_json(out / "preparation.json")["shards"])
    assert f"{len(listed(out))} whole shards are kept: run the same command again to go on, or with " in line
    assert f"--max_tokens={kept} to end there" in line
    assert start(*options, f"--out={out}", f"--max_tokens={kept}").wait(timeout=60) == 0
    assert len(tokens_of(open_corpus(str(out)))) == kept


@pytest.mark.parametrize(("corpus", "later"), [("copy_task", 0), ("fineweb_edu", 0), ("fineweb_edu", 0.06)])
def test_interrupted_during_the_imports(tmp_path, corpus, later):
    """As soon as the thread is there that listens, and a little later."""
    arguments = [sys.executable, ROOT / "data" / corpus / "prepare.py", f"--out={tmp_path / 'out'}"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(arguments, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while len(list(Path(f"/proc/{process.pid}/task").iterdir())) == 1:
        assert process.poll() is None
        time.sleep(0.001)
    time.sleep(later)
    assert stopped(process) == "prepare.py: interrupted\n"


def test_interrupted_while_a_tokenizer_is_trained(tmp_path):
    """Which another language does, and does not come back for seconds."""
    source = standard_library(tmp_path / "in", 8_000_000)
    options = [f"--source={source}", "--tokenizer=bpe", "--vocab_size=60000", "--tokenizer_bytes=8000000"]
    process = start(*options, f"--out={tmp_path / 'out'}")
    assert "training a byte-pair tokenizer" in process.stdout.readline()
    time.sleep(0.3)
    assert stopped(process) == "prepare.py: interrupted\n"


def damaged_parquet(folder):
    texts = [f"row {i} größe {'x' * 50}" for i in range(100)]
    path = write_parquet(folder / "a.parquet", texts, row_group_size=20, compression="none", use_dictionary=False)
    content = path.read_bytes()
    path.write_bytes(content.replace("row 70 größe".encode(), b"row 70 gr\xff\xffe"))
    return texts


def damaged_json_lines(folder):
    texts = [f"row {i} größe {'x' * 50}" for i in range(100)]
    lines = [json.dumps({"text": text}) for text in texts]
    (folder / "a.jsonl").write_text("\n".join([*lines[:70], '{"text": "row 70', *lines[71:]]))
    return texts


def damaged_text(folder):
    """The second half of a file with a byte that is no UTF-8."""
    text = "".join(f"row {i} größe {'x' * 50}\n" for i in range(100))
    (folder / "a.txt").write_bytes(text.encode() + b"\xff" + text.encode())
    return [text + text]


@pytest.mark.parametrize("damaged", [damaged_parquet, damaged_json_lines, damaged_text])
def test_a_damaged_source_leaves_whole_shards_and_a_way_to_end(tmp_path, small, monkeypatch, damaged):
    monkeypatch.setattr(sources, "PIECE_BYTES", 500)
    (tmp_path / "in").mkdir()
    expected = stream(damaged(tmp_path / "in"))
    out = tmp_path / "out"
    for _ in range(2):  # the second time finds what the first one left
        with pytest.raises(
            ValueError, match=r"/a\.\w+ (is damaged|holds no JSON|is not UTF-8).* whole shards"
        ) as error:
            run(out, files_plan(tmp_path / "in"), "--shard_tokens=300")
    end = int(str(error.value).split("--max_tokens=")[1].split()[0])
    assert end >= 2700  # and the damage begins after 4600 or 6800
    with pytest.raises(ValueError, match=f"--max_tokens={end}"):
        open_corpus(str(out))
    assert (
        tokens_of(run(out, files_plan(tmp_path / "in"), "--shard_tokens=300", f"--max_tokens={end}")) == expected[:end]
    )


def test_nothing_left_for_a_split(parquet, tmp_path):
    folder, texts = parquet
    count = len(stream(texts))
    for val_tokens in (count, count + 1):
        with pytest.raises(ValueError, match=rf"{count:,} tokens leave nothing for training: .* below {count} "):
            run(tmp_path / "out", files_plan(folder, val_tokens), "--overwrite")
        assert not (tmp_path / "out" / "meta.json").exists()
    with pytest.raises(ValueError, match="0 tokens leave nothing for validation"):
        run(tmp_path / "none", [("val", none := Texts([], "x"), 5), ("train", none, None)])
    assert tokens_of(run(tmp_path / "out", files_plan(folder, count - 1), "--overwrite")) == stream(texts)


# Options


@pytest.mark.parametrize(
    ("option", "message"),
    [
        *((f"--{name}=0", f"--{name}=0: give 1 or more") for name in ("workers", "shard_tokens", "val_tokens")),
        ("--max_tokens=-5", "--max_tokens=-5: give 1 or more"),
        ("--max_tokens=1000", "--max_tokens=1000 leaves nothing for training after --val_tokens=1000"),
        ("--tokenizer_bytes=0", "--tokenizer_bytes=0: give 1 or more"),
        ("--vocab_size=256", "--vocab_size=256: give 257"),
        (f"--shard_tokens={2**31}", f"--shard_tokens={2**31}: give"),  # the format counts in int32
    ],
)
def test_options_out_of_range_write_nothing(parquet, tmp_path, option, message):
    folder, _ = parquet
    with pytest.raises(ValueError, match=message):
        run(tmp_path / "out", files_plan(folder), option)
    assert not list(tmp_path.glob("out/*"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--source=nowhere/*.parquet"], "--source=nowhere/*.parquet: no files there"),
        (["--column=body"], "0.parquet has no column body, it has text, id, score, token_count: give --column"),
        (["--pretokenized=nowhere", "--workers=0"], "--workers=0: give 1 or more"),
        (["--verify"], "has no meta.json with SHA-256 sums: prepare the corpus first"),
    ],
)
def test_mistakes_end_in_one_line(parquet, tmp_path, arguments, message):
    options = ["--tokenizer=bytes", f"--source={parquet[0]}", f"--out={tmp_path / 'out'}", *arguments]
    assert message in one_line_error(call("data/fineweb_edu/prepare.py", *options))
    assert not (tmp_path / "out" / "meta.json").exists()


def test_a_script_prints_a_line_a_shard_and_no_bar(parquet, tmp_path):
    folder, texts = parquet
    options = [f"--source={folder}", "--tokenizer=bytes", f"--out={tmp_path / 'out'}", "--val_tokens=1000"]
    result = script(FINEWEB, *options, "--shard_tokens=2000")
    assert (result.returncode, result.stderr) == (0, b"")
    count = -(-(len(stream(texts)) - 1000) // 2000)
    assert sum(b"train_" in line for line in result.stdout.splitlines()) == count
    line = one_line_error(script(FINEWEB, *options, "--shard_tokens=2001"))
    assert "another preparation (shard_tokens 2000 there, 2001 now)" in line
