"""Preparing token shards, against tokens computed document by document; kills, damage, refusals."""

import fcntl
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import ROOT, one_line_error, wait_for, write_parquet
from in_process import call

from data import preparation, shards, sources, tokenizer
from data.preparation import PreparationOptions, encode_batch, make_parser, tokenize
from data.shards import open_corpus
from data.sources import Batch, Files, Texts
from utils.units import format_bytes

EOT = 256
FINEWEB = "data/fineweb_edu/prepare.py"


def stream(texts) -> list[int]:
    """Byte tokens of documents: end-of-text, then the text's bytes."""
    return [token for text in texts for token in (EOT, *text.encode())]


def some_texts(count=200):
    """Documents of very different lengths, some empty, some with characters of several bytes."""
    draw, letters = np.random.default_rng(0), list("abc é日👧\n")
    sizes = lambda: int(draw.integers(0, 60)) ** 2 // 20  # noqa: E731
    return ["".join(draw.choice(letters, sizes())) for _ in range(count)]


TEXTS = some_texts()
STREAM = stream(TEXTS)


@pytest.fixture
def folder(tmp_path):
    """Three parquet files with the documents."""
    (tmp_path / "in").mkdir()
    for index, (first, last) in enumerate(((0, 70), (70, 110), (110, 200))):
        write_parquet(tmp_path / "in" / f"{index}.parquet", TEXTS[first:last], 20)
    return tmp_path / "in"


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """Batches so small that a shard has several and a batch belongs to several shards."""
    monkeypatch.setattr(sources, "BATCH_CHARACTERS", 300)
    monkeypatch.setattr(sources, "ROWS", 7)


def run(out, plan, *options, name="x", extra=None):
    words = ["--tokenizer=bytes", "--workers=2", "--shard_tokens=300", *options]
    args = make_parser("", out, PreparationOptions).parse_args(words)
    preparation.prepare(args, name, plan, extra)
    return open_corpus(str(out))


def files_plan(folder, val_tokens=1000):
    return preparation.split_one_source(Files([str(folder)]), val_tokens)


def tokens_of(corpus) -> list[int]:
    return np.concatenate(corpus.val + corpus.train).tolist()


def contents(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def stamps(folder, names=None) -> dict:
    """What shows whether files, all or the named ones, were written anew."""
    paths = folder.iterdir() if names is None else [folder / name for name in names]
    return {path.name: (path.stat().st_mtime_ns, path.stat().st_ino) for path in paths}


def listed(out) -> list[str]:
    """Files of the shards that preparation.json calls whole."""
    records = shards.read_progress(out).get("shards", [])
    return [record["file"] for record in records]


def write(path, content):
    path.write_bytes(content)


# ---- tokens ----


def test_tokens_of_what_looks_special_and_of_texts_that_go_on():
    bpe = tokenizer.train_byte_pairs(["the cat sat on the mat. " * 9], 265)
    texts = ["the <|endoftext|> mat", "👧", ""]
    expected = [token for text in texts for token in (bpe.eot_token, *bpe.encode(text))]
    assert encode_batch(bpe, Batch({}, texts)).tolist() == expected
    going_on = Batch({}, ["ab", "cd", "", "e"], [True, False, True, False])
    tokens = encode_batch(tokenizer.byte_tokenizer(), going_on)
    assert tokens.tolist() == [EOT, *b"abcd", EOT, *b"e"]


@pytest.mark.parametrize("blanks", [" " * 1_500_000, "x" + (" " * 499_999 + "y") * 2])
def test_a_run_of_blanks_that_tiktoken_cannot_split(blanks):
    """GPT-2's regular expression runs out of stack on about a million blanks and panics."""
    encoding, text = tokenizer.gpt2_tokenizer(), "before" + blanks + "after"
    tokens = encode_batch(encoding, Batch({}, [text]))
    assert encoding.decode(tokens[1:].tolist()) == text
    # The last of several blanks belongs to the next word: a cut within a run would show.
    text = "word" + " " * 300_000 + "word" * 60_000 + " " * 100_000 + "word"
    assert encode_batch(encoding, Batch({}, [text])).tolist()[1:] == encoding.encode(text)


def test_few_batches_are_read_ahead():
    class Counting:
        read_so_far = 0

        def read(self, cursor):
            for index in range(100):
                self.read_so_far += 1
                yield Batch({"index": index}, [f"{index}"])

    source = Counting()
    for index, made in enumerate(tokenize(source, None, tokenizer.byte_tokenizer(), 2)):
        assert source.read_so_far <= index + 2 * 2 + 1
        assert (made[0]["index"], made[1].result().tolist()) == (index, stream([str(index)]))


# ---- whole preparations ----


def test_shards_hold_every_document_after_end_of_text(folder, tmp_path, capsys):
    out = tmp_path / "out"
    corpus = run(out, files_plan(folder), extra={"note": "for you"})
    assert [len(shard) for shard in corpus.val] == [300, 300, 300, 100]
    rest = len(STREAM) - 1000
    assert [len(shard) for shard in corpus.train] == [300] * (rest // 300) + [rest % 300]
    assert tokens_of(corpus) == STREAM
    trained = range(4, 4 + len(corpus.train))
    names = [f"x_val_{i:06d}.bin" for i in range(4)] + [f"x_train_{i:06d}.bin" for i in trained]
    others = ["meta.json", "preparation.json", "tokenizer.json"]
    assert sorted(contents(out)) == sorted([*names, *others])
    assert [record["file"] for record in corpus.meta["shards"]] == names
    for split, part in (("val", STREAM[:1000]), ("train", STREAM[1000:])):
        counts = {"documents": part.count(EOT), "bytes": len(part) - part.count(EOT)}
        assert corpus.meta[split] == {**counts, "tokens": len(part)}
    about = {"tokenizer": "bytes", "vocab_size": 257, "eot_token": 256, "source": str(folder)}
    assert {**about, "note": "for you"}.items() <= corpus.meta.items()
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(
        r"x_val_000001\.bin: 600 tokens in total, [\d,]+ tokens/s, ETA 00:.*", lines[2]
    )
    before = stamps(out)
    run(out, files_plan(folder), "--workers=1")  # complete: it says so and touches nothing
    assert stamps(out) == before
    assert capsys.readouterr().out == f"{out} is complete: {len(STREAM):,} tokens\n"


@pytest.mark.parametrize("seed", range(6))
def test_killed_after_any_file_it_goes_on_with_the_same(folder, tmp_path, monkeypatch, seed):
    """With other threads and other batches each time, until it ends."""
    draw, replace = np.random.default_rng(seed), Path.replace
    plan, size = files_plan(folder, int(draw.integers(1, 3000))), int(draw.integers(90, 900))
    monkeypatch.setattr(sources, "BATCH_CHARACTERS", int(draw.integers(1, 900)))
    assert tokens_of(run(tmp_path / "whole", plan, f"--shard_tokens={size}")) == STREAM
    out, ended, before = tmp_path / "out", False, {}
    while not ended:
        writes, last = itertools.count(), draw.integers(0, 12)

        def killed(path, target, writes=writes, last=last):
            replace(path, target)
            if next(writes) == last:
                raise MemoryError("killed")

        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", killed)
            try:
                workers = f"--workers={draw.integers(1, 4)}"
                ended = bool(run(out, plan, f"--shard_tokens={size}", workers))
            except MemoryError:
                (out / "x_train_000000.bin.tmp").write_bytes(b"left by a kill")
        made = stamps(out, listed(out))
        assert made.items() >= before.items()  # what was whole has not been made again
        before = made
    assert contents(out) == contents(tmp_path / "whole")


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_a_killed_process_leaves_what_the_next_goes_on_with(folder, tmp_path, monkeypatch, kills):
    """SIGKILL at random moments, half of them with another number of threads."""
    monkeypatch.undo()  # batches are as large as those of other processes
    options = [f"--source={folder}", "--val_tokens=1000", "--shard_tokens=80", "--tokenizer=bytes"]
    assert call(FINEWEB, *options, f"--out={tmp_path / 'whole'}").returncode == 0
    out, draw, during = tmp_path / "out", np.random.default_rng(kills), 0
    out.mkdir()
    for kill in range(kills):
        # No fork: a child that is killed would keep the lock that tqdm shares with it.
        words = [sys.executable, ROOT / FINEWEB, *options, f"--workers={1 + kill % 2}"]
        process = subprocess.Popen([*words, f"--out={out}"], stdout=subprocess.DEVNULL)
        before = len(listed(out))
        wait_for(lambda p=process, n=before: p.poll() is not None or len(listed(out)) >= n + 8)
        time.sleep(draw.random() * 0.05)
        during += process.poll() is None
        process.kill()
        process.wait(timeout=20)
    assert during >= 2
    assert call(FINEWEB, *options, f"--out={out}").returncode == 0
    assert contents(out) == contents(tmp_path / "whole")  # no .tmp, and preparation.json too


def test_a_trained_tokenizer_is_kept(folder, tmp_path, monkeypatch):
    options = ("--tokenizer=bpe", "--vocab_size=290", "--tokenizer_bytes=3000")
    run(tmp_path / "out", files_plan(folder), *options, "--max_tokens=2000")
    stored = json.loads((tmp_path / "out" / "tokenizer.json").read_bytes())
    encoding = tokenizer.from_json(stored)
    expected = [token for text in TEXTS for token in (289, *encoding.encode(text))]
    first = [text for i, text in enumerate(TEXTS) if len("".join(TEXTS[:i]).encode()) < 3000]
    assert tokenizer.to_json(tokenizer.train_byte_pairs(first, 290)) == stored
    monkeypatch.setattr(tokenizer, "train_byte_pairs", None)  # minutes on a large corpus
    assert tokens_of(run(tmp_path / "out", files_plan(folder), *options)) == expected


def test_max_tokens_may_grow_and_a_smaller_one_removes_nothing(folder, tmp_path, monkeypatch):
    out = tmp_path / "out"
    for limit in (1001, 1300, 4444):
        before = stamps(out, listed(out))
        assert tokens_of(run(out, files_plan(folder), f"--max_tokens={limit}")) == STREAM[:limit]
        assert stamps(out).items() >= before.items()
        made = listed(out)  # a kill may leave a whole shard that is not listed
        shutil.copy(out / made[-1], out / f"x_train_{len(made):06d}.bin")
        run(out, files_plan(folder), f"--max_tokens={limit}")
    before = stamps(out)
    message = r"holds 4,444 tokens, more than --max_tokens=4443; give --max_tokens=4444 or"
    for more in ([], ["--overwrite"]):
        with pytest.raises(ValueError, match=message):
            run(out, files_plan(folder), "--max_tokens=4443", *more)
    assert stamps(out) == before
    with monkeypatch.context() as patch:
        patch.setattr(preparation.Preparation, "show", None)  # it ends after the first new shard
        with pytest.raises(TypeError):
            run(out, files_plan(folder))
    with pytest.raises(ValueError, match="is not prepared completely"):
        open_corpus(str(out))
    assert tokens_of(run(out, files_plan(folder), "--max_tokens=1000000000")) == STREAM
    plan = preparation.split_one_source(Texts(["x" * 99] * 20, "x"), 200)  # it ends with a shard
    for limit in ([], ["--max_tokens=2001"], []):
        even = run(tmp_path / "even", plan, "--shard_tokens=100", *limit)
        assert tokens_of(even) == stream(["x" * 99] * 20)


def test_a_changed_source_is_refused_when_a_shard_is_made_again(tmp_path):
    """Names and sizes are as they were, so only the remade shard shows it."""
    out, text = tmp_path / "out", tmp_path / "a.txt"
    text.write_text("abc\n" * 1000)
    run(out, files_plan(text))
    before = contents(out)
    text.write_text("abd\n" * 1000)
    (out / "x_train_000006.bin").unlink()
    for _ in range(2):  # nor does it get in a second time
        message = r"^x_train_000006\.bin was prepared again and differs from before, .*; 14 complete shards are"
        with pytest.raises(ValueError, match=message) as error:
            run(out, files_plan(text))
        assert "rerun the same command" not in str(error.value)  # which is no help
    text.write_text("abc\n" * 1000)
    run(out, files_plan(text))
    assert contents(out) == before


# ---- what ends it early ----


ANOTHER = [
    (["--tokenizer=bpe", "--vocab_size=300"], {}, "tokenizer was 'bytes' and is now 'bpe'"),
    ([], {"val_tokens": 999}, "tokens was 1000 and is now 999"),
    ([], {"folder": "other"}, "source was '.*/in' and is now '.*/other'"),
]


def test_another_preparation_is_refused_or_overwritten(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "other")
    out = tmp_path / "out"
    run(out, files_plan(folder))
    before, made = stamps(out), listed(out)
    size = format_bytes(sum((out / file).stat().st_size for file in made))
    there = rf"--overwrite to delete its {len(made)} shards \({size}\) and start again$"
    for options, changes, difference in ANOTHER:
        val_tokens = changes.get("val_tokens", 1000)
        plan = files_plan(tmp_path / changes.get("folder", "in"), val_tokens)
        message = rf"{out} holds another preparation \({difference}\); .*{there}"
        with pytest.raises(ValueError, match=message):
            run(out, plan, *options)
        assert stamps(out) == before
    (out / "meta.json").unlink()
    before = stamps(out, made)
    run(out, files_plan(folder), "--overwrite")  # the same preparation: it goes on
    assert stamps(out).items() >= before.items()
    run(out, plan, "--overwrite")
    run(tmp_path / "fresh", plan)
    assert contents(out) == contents(tmp_path / "fresh")


def test_a_folder_of_another_use_is_refused(folder, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    shards.write_shard(out / "foreign_train_000000.bin", np.arange(9))
    message = rf"{out} holds shards of unknown origin; .* to delete its 1 shards \(1\.02 KiB"
    with pytest.raises(ValueError, match=message):
        run(out, files_plan(folder))
    assert list(contents(out)) == ["foreign_train_000000.bin"]
    assert tokens_of(run(out, files_plan(folder), "--overwrite")) == STREAM
    assert not (out / "foreign_train_000000.bin").exists()
    other = os.open(out, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    with pytest.raises(ValueError, match=rf"{out} is being prepared by another process"):
        run(out, files_plan(folder))
    os.close(other)
    (out / "preparation.json").write_text("{")
    with pytest.raises(ValueError, match=r"preparation\.json is damaged"):
        run(out, files_plan(folder))


def test_a_disk_that_is_too_small_is_known_before(tmp_path, monkeypatch):
    out, size, free = tmp_path / "out", 99_990, 2 * 99_990 - 2
    plan = preparation.split_one_source(Texts(["x" * 9999] * 10, "x"), 1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    message = (
        rf"about {size:,} tokens need 195 KiB, but the disk of {out} has .* --max_tokens=(\d+)"
    )
    with pytest.raises(ValueError, match=message) as error:
        run(out, plan)
    assert not list(out.glob("*.bin"))
    limit = int(re.search(r"--max_tokens=(\d+)", str(error.value))[1])
    assert 0.9 * size < limit < size
    run(out, plan, f"--max_tokens={limit}")
    free = 2 * (size - limit) - 2
    with pytest.raises(ValueError, match=rf"about {size:,} tokens need"):
        run(out, plan)
    assert len(tokens_of(open_corpus(str(out)))) == limit  # the refusal left it as it was
    free = 2 * (size - limit)  # what is there needs no room again
    assert len(tokens_of(run(out, plan))) == size + 10


def pressed(self, record):
    """Ctrl+C at the seventh shard."""
    if record.file.endswith("000006.bin"):
        os.kill(os.getpid(), signal.SIGINT)


def full(path, *arguments, **keys):
    """/dev/full answers as a full disk does, when the buffer is flushed."""
    return open("/dev/full" if "train_000007" in str(path) else path, *arguments, **keys)


EARLY = [
    (preparation.Preparation, "show", pressed, 130, "prepare.py: interrupted"),
    (shards, "open", full, 2, "prepare.py: error: the disk of {out} is full"),
]


@pytest.mark.parametrize(("owner", "name", "fault", "code", "message"), EARLY)
def test_what_ends_it_early_keeps_whole_shards_and_says_how_to_go_on(
    folder, tmp_path, monkeypatch, owner, name, fault, code, message
):
    out, options = tmp_path / "out", [f"--source={folder}", "--tokenizer=bytes"]
    options += ["--shard_tokens=300", "--val_tokens=1000", f"--out={out}"]
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fault, raising=False)
        result = call(FINEWEB, *options)
    assert result.returncode == code
    choices = "rerun the same command to resume, or add --max_tokens=1900 to finish with them"
    line = f"{message.format(out=out)}; 7 complete shards are kept: {choices}\n"
    assert result.stderr.decode() == line
    with pytest.raises(ValueError, match=r"is not prepared completely; .* --max_tokens=1900$"):
        open_corpus(str(out))
    for limit in (1900, len(STREAM)):
        assert call(FINEWEB, *options, f"--max_tokens={limit}").returncode == 0
        assert tokens_of(open_corpus(str(out))) == STREAM[:limit]


REFUSED = [
    ("--val_tokens=500 --max_tokens=500", "--max_tokens=500 leaves nothing for training"),
    ("--val_tokens=99999", f"{len(STREAM):,} tokens leave nothing for training; give more text"),
    ("--workers=0", "--workers=0: give 1 or more"),
    ("--shard_tokens=2147483648", "--shard_tokens=2147483648: give a number from 1 to 2147483647"),
    ("--tokenizer=bpe --vocab_size=256", "--vocab_size=256: give a number from 257 to 65536"),
    ("--tokenizer=bpe --vocab_size=65537", "--vocab_size=65537: give a number from 257"),
    (
        "--tokenizer=words",
        "--tokenizer=words: there is no such file or folder; give one that exists, gpt2, bpe",
    ),
    ("--column=body", "has no column body; name one of its columns with --column: text, id"),
    ("--revision=v2", "--revision has no effect on --source; omit it"),
    ("--max_token=5", "unknown option --max_token, did you mean --max_tokens, "),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_mistakes_end_in_one_line_without_a_corpus(folder, tmp_path, options, message):
    words = [f"--source={folder}", "--tokenizer=bytes", "--val_tokens=1000", *options.split()]
    assert message in one_line_error(call(FINEWEB, *words, f"--out={tmp_path / 'out'}"))
    assert not (tmp_path / "out" / "meta.json").exists()


# ---- shards that are there ----


DAMAGE = [
    (Path.unlink, "No such file"),
    (lambda path: os.truncate(path, 1100), "is damaged"),
    (lambda path: write(path, path.read_bytes() + b"\0\0"), "is damaged"),
    (lambda path: write(path, path.read_bytes()[:-2] + b"\1\0"), "was changed (its SHA-256"),
    (
        lambda path: write(path, path.read_bytes()[:-2] + b"\xff\xff"),
        "token id 65535 is outside of the vocabulary",
    ),
]


def test_verify_names_every_damaged_shard_and_these_alone_are_made_again(folder, tmp_path):
    out = tmp_path / "out"
    run(out, files_plan(folder))
    before, names = contents(out), listed(out)
    printed = call(FINEWEB, "--verify", f"--out={out}").stdout.decode()
    assert f"{len(names)} shards, {len(STREAM):,} tokens: all are as" in printed
    for damage, what in DAMAGE:
        damaged = [names[1], names[-1]]
        for name in damaged:
            damage(out / name)
        line = one_line_error(call(FINEWEB, "--verify", f"--out={out}"))
        assert f"error: 2 of {len(names)} shards are damaged: " in line
        assert line.count(what) == 2
        assert all(name in line for name in damaged)
        if what != "is damaged":  # a wrong size is seen without being told
            for name in damaged:
                (out / name).unlink(missing_ok=True)
        when = stamps(out, set(names) - set(damaged))
        run(out, files_plan(folder))
        assert contents(out) == before
        assert stamps(out).items() >= when.items()


@pytest.mark.parametrize("script", [path.parent.name for path in ROOT.glob("data/*/prepare.py")])
def test_every_script_verifies(corpus, script):
    refused = call(f"data/{script}/prepare.py", "--verify", f"--out={corpus}")
    assert "has no meta.json with SHA-256" in one_line_error(refused)


FOREIGN = {
    "edu_fineweb_val_000000.bin": [256, *b"held out", 256, *b"text"],
    "edu_fineweb_train_000001.bin": [256, *b"x" * 500, 256],
    "edu_fineweb_train_000002.bin": [*b"goes on", 0, 255],
}


@pytest.fixture
def foreign(tmp_path, monkeypatch):
    """A folder of shards that others have made; of bytes, and not GPT-2's tokens."""
    monkeypatch.setattr(tokenizer, "gpt2_tokenizer", tokenizer.byte_tokenizer)
    (tmp_path / "foreign").mkdir()
    for name, tokens in FOREIGN.items():
        shards.write_shard(tmp_path / "foreign" / name, np.array(tokens))
    return tmp_path / "foreign"


def test_shards_of_a_folder_are_linked_and_counted(foreign, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    twice = [("new/out", foreign)] * 2
    for out, source in (*twice, ("rel", "foreign"), (foreign, foreign)):
        assert call(FINEWEB, f"--out={out}", f"--pretokenized={source}").returncode == 0
        corpus = open_corpus(str(out))
        assert tokens_of(corpus) == [token for tokens in FOREIGN.values() for token in tokens]
        about = {"tokenizer": "bytes", "vocab_size": 257, "eot_token": 256, "source": str(source)}
        about["val"] = {"documents": 2, "bytes": 12, "tokens": 14}
        about["train"] = {"documents": 2, "bytes": 509, "tokens": 511}
        assert about.items() <= corpus.meta.items()
        assert [record["file"] for record in corpus.meta["shards"]] == list(FOREIGN)
        linked = [(tmp_path / out / name).is_symlink() for name in FOREIGN]
        assert linked == [out != foreign] * 3
    assert call(FINEWEB, "--out=rel", "--verify").returncode == 0


BAD_SHARDS = [
    (
        lambda f: shards.write_shard(f / "x_train_2.bin", np.array([0, 257])),
        "token id 257 is outside of the vocabulary",
    ),
    (lambda f: write(f / "x_train_0.bin", b"no shard"), "x_train_0.bin is not a token shard"),
    (lambda f: (f / "edu_fineweb_val_000000.bin").unlink(), "holds no *train_*.bin and *val_*.bin"),
    (
        lambda f: (f / "preparation.json").write_text("{}"),
        "holds a corpus that was prepared from documents",
    ),
]


@pytest.mark.parametrize(("damage", "message"), BAD_SHARDS)
def test_what_is_not_gpt2_shards_is_refused(foreign, tmp_path, damage, message):
    out = foreign if "prepared from" in message else tmp_path / "out"
    damage(foreign)
    for more, what in (([], message), (["--revision=v2"], "no effect on a folder of shards")):
        assert what in one_line_error(
            call(FINEWEB, f"--out={out}", f"--pretokenized={foreign}", *more)
        )
    assert not (out / "meta.json").exists()
    if out != foreign:
        write(out / "edu_fineweb_train_000001.bin", b"mine")
        one_line_error(call(FINEWEB, f"--out={out}", f"--pretokenized={foreign}"))
        assert (out / "edu_fineweb_train_000001.bin").read_bytes() == b"mine"
