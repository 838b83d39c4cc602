"""Test the preparation of token shards: tokens, kills, damage, errors."""

import errno
import fcntl
import functools
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

from data import hub, preparation, shards, sources, tokenizer
from data.preparation import PreparationOptions, read_options
from data.shards import Corpus, open_corpus
from data.sources import Batch, Files, Texts
from data.token_reader import encode_batch, tokenize
from utils import files
from utils.units import format_bytes

EOT = 256
FINEWEB = "data/fineweb_edu/prepare.py"


def byte_tokens(texts) -> list[int]:
    """Return end-of-text and the bytes of each document."""
    return [token for text in texts for token in (EOT, *text.encode())]


def draw_texts(count=200) -> list[str]:
    """Draw documents of very different lengths, some empty, some with characters of many bytes."""
    generator = np.random.default_rng(0)
    letters = list("abc é日👧\n")
    texts = []
    for _ in range(count):
        num_characters = int(generator.integers(0, 60)) ** 2 // 20
        texts.append("".join(generator.choice(letters, num_characters)))
    return texts


TEXTS = draw_texts()
# empty rows are skipped
TOKENS = byte_tokens(text for text in TEXTS if text)


@pytest.fixture
def folder(tmp_path) -> Path:
    """Write the documents into three parquet files."""
    (tmp_path / "in").mkdir()
    for index, (first, last) in enumerate(((0, 70), (70, 110), (110, 200))):
        write_parquet(tmp_path / "in" / f"{index}.parquet", TEXTS[first:last], 20)
    return tmp_path / "in"


@pytest.fixture(autouse=True)
def _small_batches(monkeypatch):
    """Make batches so small that a shard has several and a batch belongs to several shards."""
    monkeypatch.setattr(sources, "BATCH_CHARACTERS", 300)
    monkeypatch.setattr(sources, "ROWS", 7)


def prepare(out: Path, plan, *options: str, name="x", extra=None) -> Corpus:
    """Prepare a corpus of bytes in shards of 300 tokens, unless options say otherwise."""
    arguments = ["--tokenizer=bytes", "--workers=2", "--shard_tokens=300", *options]
    args = read_options("", out, PreparationOptions, argv=arguments)
    preparation.prepare(args, name, plan, extra)
    return open_corpus(str(out))


def plan_files(folder: Path, val_tokens=1000):
    return preparation.split_one_source(Files([str(folder)]), val_tokens)


def read_tokens(corpus: Corpus) -> list[int]:
    return np.concatenate(corpus.val + corpus.train).tolist()


def read_files(folder: Path) -> dict[str, bytes]:
    """Return the content of each file but the lock."""
    paths = [path for path in sorted(folder.iterdir()) if path.name != "lock"]
    return {path.name: path.read_bytes() for path in paths}


def read_stamps(folder: Path, names=None) -> dict[str, tuple[int, int]]:
    """Return times and inodes, which differ once a file, of all or of the named ones, is rewritten."""
    paths = folder.iterdir() if names is None else [folder / name for name in names]
    return {path.name: (path.stat().st_mtime_ns, path.stat().st_ino) for path in paths}


def list_complete_shards(out: Path) -> list[str]:
    """Return the files of the shards that preparation.json lists as complete."""
    records = shards.read_progress(out).get("shards", [])
    return [record["file"] for record in records]


# ---- tokens ----


def test_a_special_token_in_a_text_is_plain_text():
    encoding = tokenizer.train_byte_pairs(["the cat sat on the mat. " * 9], 265)
    texts = ["the <|endoftext|> mat", "👧", ""]
    expected = [token for text in texts for token in (encoding.eot_token, *encoding.encode(text))]
    assert encode_batch(encoding, Batch({}, texts)).tolist() == expected


def test_a_text_that_continues_the_one_before_has_no_end_of_text_before_it():
    batch = Batch({}, ["ab", "cd", "", "e"], [True, False, True, False])
    tokens = encode_batch(tokenizer.byte_tokenizer(), batch)
    assert tokens.tolist() == [EOT, *b"abcd", EOT, *b"e"]


@pytest.mark.parametrize("blanks", [" " * 1_500_000, "x" + (" " * 499_999 + "y") * 2])
def test_a_run_of_blanks_that_tiktoken_cannot_split_is_encoded(blanks):
    """Split it first: the regular expression of GPT-2 panics on about a million blanks."""
    encoding = tokenizer.gpt2_tokenizer()
    text = "before" + blanks + "after"
    tokens = encode_batch(encoding, Batch({}, [text]))
    assert encoding.decode(tokens[1:].tolist()) == text


def test_a_long_run_of_blanks_is_encoded_as_by_tiktoken():
    encoding = tokenizer.gpt2_tokenizer()
    # the last of several blanks belongs to the next word: a cut within a run would show
    text = "word" + " " * 300_000 + "word" * 60_000 + " " * 100_000 + "word"
    assert encode_batch(encoding, Batch({}, [text])).tolist()[1:] == encoding.encode(text)


def test_few_batches_are_read_ahead():
    class CountingSource:
        num_read = 0

        def read(self, cursor):
            for index in range(100):
                self.num_read += 1
                yield Batch({"index": index}, [f"{index}"])

    source = CountingSource()
    batches = tokenize(source, None, tokenizer.byte_tokenizer(), 2)
    for index, (cursor, tokens) in enumerate(batches):
        assert source.num_read <= index + 2 * 2 + 1
        assert cursor["index"] == index
        assert tokens.result().tolist() == byte_tokens([str(index)])


# ---- complete preparations ----


def test_shards_hold_every_document_after_end_of_text(folder, tmp_path):
    assert read_tokens(prepare(tmp_path / "out", plan_files(folder))) == TOKENS


def test_shards_have_the_size_that_was_asked_for(folder, tmp_path):
    corpus = prepare(tmp_path / "out", plan_files(folder))
    assert [len(shard) for shard in corpus.val] == [300, 300, 300, 100]
    rest = len(TOKENS) - 1000
    assert [len(shard) for shard in corpus.train] == [300] * (rest // 300) + [rest % 300]


def test_shards_are_numbered_and_recorded(folder, tmp_path):
    out = tmp_path / "out"
    corpus = prepare(out, plan_files(folder))
    train_numbers = range(4, 4 + len(corpus.train))
    names = [
        *(f"x_val_{i:06d}.bin" for i in range(4)),
        *(f"x_train_{i:06d}.bin" for i in train_numbers),
    ]
    assert sorted(read_files(out)) == sorted(
        [*names, "meta.json", "preparation.json", "tokenizer.json"]
    )
    assert [record["file"] for record in corpus.meta["shards"]] == names


def test_meta_counts_documents_bytes_and_tokens(folder, tmp_path):
    corpus = prepare(tmp_path / "out", plan_files(folder))
    for split, tokens in (("val", TOKENS[:1000]), ("train", TOKENS[1000:])):
        num_documents = tokens.count(EOT)
        assert corpus.meta[split] == {
            "documents": num_documents,
            "bytes": len(tokens) - num_documents,
            "tokens": len(tokens),
        }


def test_meta_names_tokenizer_source_and_extra_entries(folder, tmp_path):
    corpus = prepare(tmp_path / "out", plan_files(folder), extra={"note": "for you"})
    expected = {
        "tokenizer": "bytes",
        "vocab_size": 257,
        "eot_token": 256,
        "source": str(folder),
        "note": "for you",
    }
    assert expected.items() <= corpus.meta.items()


def test_the_progress_is_printed(folder, tmp_path, capsys):
    prepare(tmp_path / "out", plan_files(folder))
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(
        r"x_val_000001\.bin: 600 tokens in total, [\d,]+ tokens/s, ETA 00:.*", lines[2]
    )


def test_a_complete_corpus_is_not_prepared_again(folder, tmp_path, capsys):
    out = tmp_path / "out"
    prepare(out, plan_files(folder))
    stamps = read_stamps(out)
    capsys.readouterr()
    prepare(out, plan_files(folder), "--workers=1")
    assert read_stamps(out) == stamps
    assert capsys.readouterr().out == f"{out} is complete: {len(TOKENS):,} tokens\n"


@pytest.mark.parametrize("seed", range(6))
def test_a_preparation_killed_after_any_file_resumes(folder, tmp_path, monkeypatch, seed):
    """Kill it until it ends, with other threads and other batches each time."""
    generator = np.random.default_rng(seed)
    replace = Path.replace
    plan = plan_files(folder, int(generator.integers(1, 3000)))
    shard_tokens = f"--shard_tokens={int(generator.integers(90, 900))}"
    monkeypatch.setattr(sources, "BATCH_CHARACTERS", int(generator.integers(1, 900)))
    assert read_tokens(prepare(tmp_path / "complete", plan, shard_tokens)) == TOKENS
    out = tmp_path / "out"
    ended = False
    previous_stamps = {}
    while not ended:
        numbers = itertools.count()
        last_number = generator.integers(0, 12)

        def replace_and_fail(path, target, numbers=numbers, last_number=last_number):
            replace(path, target)
            if next(numbers) == last_number:
                raise MemoryError("killed")

        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", replace_and_fail)
            try:
                workers = f"--workers={generator.integers(1, 4)}"
                ended = bool(prepare(out, plan, shard_tokens, workers))
            except MemoryError:
                (out / "x_train_000000.bin.tmp").write_bytes(b"left by a kill")
        stamps = read_stamps(out, list_complete_shards(out))
        assert stamps.items() >= previous_stamps.items()  # complete shards are not rewritten
        previous_stamps = stamps
    assert read_files(out) == read_files(tmp_path / "complete")


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_a_killed_process_leaves_what_the_next_resumes(folder, tmp_path, monkeypatch, kills):
    """Send SIGKILL at random moments, every second time to another number of threads."""
    monkeypatch.undo()  # batches are as large as those of other processes
    options = [f"--source={folder}", "--val_tokens=1000", "--shard_tokens=80", "--tokenizer=bytes"]
    assert call(FINEWEB, *options, f"--out={tmp_path / 'complete'}").returncode == 0
    out = tmp_path / "out"
    out.mkdir()
    generator = np.random.default_rng(kills)
    killed_while_running = 0
    for kill in range(kills):
        # no fork: a child that is killed would keep the lock that tqdm shares with it
        process = subprocess.Popen(
            [
                sys.executable,
                ROOT / FINEWEB,
                *options,
                f"--workers={1 + kill % 2}",
                f"--out={out}",
            ],
            stdout=subprocess.DEVNULL,
        )
        goal = len(list_complete_shards(out)) + 8
        wait_for(
            lambda process=process, goal=goal: (
                process.poll() is not None or len(list_complete_shards(out)) >= goal
            )
        )
        time.sleep(generator.random() * 0.05)
        if process.poll() is None:
            killed_while_running += 1
        process.kill()
        process.wait(timeout=20)
    assert killed_while_running >= 2
    assert call(FINEWEB, *options, f"--out={out}").returncode == 0
    # no .tmp, and preparation.json too
    assert read_files(out) == read_files(tmp_path / "complete")


TRAIN_TOKENIZER = ("--tokenizer=bpe", "--vocab_size=290", "--tokenizer_bytes=3000")


def test_a_tokenizer_is_trained_on_the_first_bytes(folder, tmp_path):
    prepare(tmp_path / "out", plan_files(folder), *TRAIN_TOKENIZER, "--max_tokens=2000")
    stored = json.loads((tmp_path / "out" / "tokenizer.json").read_bytes())
    first = [text for i, text in enumerate(TEXTS) if len("".join(TEXTS[:i]).encode()) < 3000]
    assert tokenizer.train_byte_pairs(first, 290).to_json() == stored


def test_a_trained_tokenizer_is_kept(folder, tmp_path, monkeypatch):
    prepare(tmp_path / "out", plan_files(folder), *TRAIN_TOKENIZER, "--max_tokens=2000")
    encoding = tokenizer.from_json(json.loads((tmp_path / "out" / "tokenizer.json").read_bytes()))
    monkeypatch.setattr(tokenizer, "train_byte_pairs", None)  # takes minutes on a large corpus
    corpus = prepare(tmp_path / "out", plan_files(folder), *TRAIN_TOKENIZER)
    expected = [token for text in TEXTS if text for token in (289, *encoding.encode(text))]
    assert read_tokens(corpus) == expected


def test_max_tokens_may_grow(folder, tmp_path):
    out = tmp_path / "out"
    for limit in (1001, 1300, 4444):
        stamps = read_stamps(out, list_complete_shards(out))
        corpus = prepare(out, plan_files(folder), f"--max_tokens={limit}")
        assert read_tokens(corpus) == TOKENS[:limit]
        assert read_stamps(out).items() >= stamps.items()
        # a kill may leave a complete shard that is not listed
        names = list_complete_shards(out)
        shutil.copy(out / names[-1], out / f"x_train_{len(names):06d}.bin")
        prepare(out, plan_files(folder), f"--max_tokens={limit}")
    assert read_tokens(prepare(out, plan_files(folder), "--max_tokens=1000000000")) == TOKENS


@pytest.mark.parametrize("more", [[], ["--overwrite"]])
def test_a_smaller_max_tokens_removes_nothing(folder, tmp_path, more):
    out = tmp_path / "out"
    prepare(out, plan_files(folder), "--max_tokens=4444")
    stamps = read_stamps(out)
    message = r"holds 4,444 tokens, more than --max_tokens=4443; give --max_tokens=4444 or"
    with pytest.raises(ValueError, match=message):
        prepare(out, plan_files(folder), "--max_tokens=4443", *more)
    assert read_stamps(out) == stamps


def test_a_corpus_that_is_being_extended_is_not_complete(folder, tmp_path, monkeypatch):
    out = tmp_path / "out"
    prepare(out, plan_files(folder), "--max_tokens=4444")
    with monkeypatch.context() as patch:
        # the preparation ends after the first new shard
        patch.setattr(preparation, "print_progress", None)
        with pytest.raises(TypeError):
            prepare(out, plan_files(folder))
    with pytest.raises(ValueError, match="is not prepared completely"):
        open_corpus(str(out))


def test_max_tokens_of_a_corpus_that_ends_with_a_shard(tmp_path):
    plan = preparation.split_one_source(Texts(["x" * 99] * 20, "x"), 200)
    for limit in ([], ["--max_tokens=2001"], []):
        corpus = prepare(tmp_path, plan, "--shard_tokens=100", *limit)
        assert read_tokens(corpus) == byte_tokens(["x" * 99] * 20)


def plan_two_sources() -> list[preparation.Stage]:
    """Return a plan in which each split has a source; that of validation has 600 tokens."""
    return [
        preparation.Stage("val", Texts(["v" * 99] * 6, "v"), None),
        preparation.Stage("train", Texts(["t" * 99] * 7, "t"), None),
    ]


def test_a_validation_source_that_ends_with_a_shard_is_not_written_again(tmp_path, capsys):
    plan = plan_two_sources()
    expected = byte_tokens(["v" * 99] * 6 + ["t" * 99] * 7)
    for _ in range(2):
        assert read_tokens(prepare(tmp_path, plan)) == expected
    assert capsys.readouterr().out.endswith(f"is complete: {len(expected):,} tokens\n")


def test_a_corpus_without_training_shards_is_not_finished_by_max_tokens(tmp_path):
    with pytest.raises(ValueError, match="leave nothing for training; give a larger --max_tokens"):
        prepare(tmp_path, plan_two_sources(), "--max_tokens=500")
    with pytest.raises(ValueError, match=r"prepare\.py to resume$"):
        open_corpus(str(tmp_path))


@pytest.fixture
def prepared_text(tmp_path) -> Path:
    """Prepare a text, and change it without changing its name or its size; return the corpus.

    Only a shard that is prepared again shows the difference.
    """
    out = tmp_path / "out"
    (tmp_path / "a.txt").write_text("abc\n" * 1000)
    prepare(out, plan_files(tmp_path / "a.txt"))
    (tmp_path / "a.txt").write_text("abd\n" * 1000)
    return out


def test_a_changed_source_is_refused_when_a_shard_is_prepared_again(prepared_text, tmp_path):
    (prepared_text / "x_train_000006.bin").unlink()
    message = r"^x_train_000006\.bin was prepared again and differs from the earlier shard, .*; 14 complete shards are"
    for _ in range(2):  # the second attempt does not accept the shard of the first
        with pytest.raises(ValueError, match=message) as error:
            prepare(prepared_text, plan_files(tmp_path / "a.txt"))
        assert "rerun the same command" not in str(error.value)  # which does not help


def test_a_source_that_is_restored_is_accepted(prepared_text, tmp_path):
    expected = read_files(prepared_text)
    (prepared_text / "x_train_000006.bin").unlink()
    with pytest.raises(ValueError, match="differs from the earlier shard"):
        prepare(prepared_text, plan_files(tmp_path / "a.txt"))
    (tmp_path / "a.txt").write_text("abc\n" * 1000)
    prepare(prepared_text, plan_files(tmp_path / "a.txt"))
    assert read_files(prepared_text) == expected


# ---- other preparations, faults and mistakes ----


def message_of_other_preparation(out: Path, difference: str) -> str:
    names = list_complete_shards(out)
    size = format_bytes(sum((out / name).stat().st_size for name in names))
    return (
        rf"{out} holds shards that were prepared with other options \({difference}\); .*"
        rf"--overwrite to delete its {len(names)} shards \({size}\) and start again$"
    )


@pytest.mark.parametrize(
    ("options", "source", "val_tokens", "difference"),
    [
        (
            ["--tokenizer=bpe", "--vocab_size=300"],
            "in",
            1000,
            "tokenizer was 'bytes' and is now 'bpe'",
        ),
        ([], "in", 999, "tokens was 1000 and is now 999"),
        ([], "other", 1000, "source was '.*/in' and is now '.*/other'"),
    ],
)
def test_another_preparation_is_refused(folder, tmp_path, options, source, val_tokens, difference):
    shutil.copytree(folder, tmp_path / "other")
    out = tmp_path / "out"
    prepare(out, plan_files(folder))
    stamps = read_stamps(out)
    with pytest.raises(ValueError, match=message_of_other_preparation(out, difference)):
        prepare(out, plan_files(tmp_path / source, val_tokens), *options)
    assert read_stamps(out) == stamps


def test_a_preparation_of_an_earlier_version_is_not_resumed(folder, tmp_path):
    """Its positions are counted in another way."""
    out = tmp_path / "out"
    prepare(out, plan_files(folder))
    progress = shards.read_progress(out)
    del progress["options"]["version"]
    progress["options"]["plan"] = []
    files.write_json(out / "preparation.json", progress)
    with pytest.raises(ValueError, match=r"other options \(version was None and is now 2\)"):
        prepare(out, plan_files(folder))
    assert read_tokens(prepare(out, plan_files(folder), "--overwrite")) == TOKENS


def test_overwrite_resumes_the_same_preparation(folder, tmp_path):
    out = tmp_path / "out"
    prepare(out, plan_files(folder))
    (out / "meta.json").unlink()
    stamps = read_stamps(out, list_complete_shards(out))
    prepare(out, plan_files(folder), "--overwrite")
    assert read_stamps(out).items() >= stamps.items()


def test_overwrite_replaces_another_preparation(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "other")
    out = tmp_path / "out"
    prepare(out, plan_files(folder))
    prepare(out, plan_files(tmp_path / "other"), "--overwrite")
    prepare(tmp_path / "expected", plan_files(tmp_path / "other"))
    assert read_files(out) == read_files(tmp_path / "expected")


@pytest.fixture
def folder_with_other_shard(tmp_path) -> Path:
    """Write a shard that no preparation has recorded."""
    (tmp_path / "out").mkdir()
    shards.write_shard(tmp_path / "out" / "foreign_train_000000.bin", np.arange(9))
    return tmp_path / "out"


def test_a_folder_with_shards_of_unknown_origin_is_refused(folder, folder_with_other_shard):
    out = folder_with_other_shard
    message = rf"{out} holds shards of unknown origin; .* to delete its 1 shards \(1\.02 KiB"
    with pytest.raises(ValueError, match=message):
        prepare(out, plan_files(folder))
    assert list(read_files(out)) == ["foreign_train_000000.bin"]


def test_overwrite_removes_shards_of_unknown_origin(folder, folder_with_other_shard):
    corpus = prepare(folder_with_other_shard, plan_files(folder), "--overwrite")
    assert read_tokens(corpus) == TOKENS
    assert not (folder_with_other_shard / "foreign_train_000000.bin").exists()


@pytest.mark.parametrize("name", ["tokenizer_config.json", "meta.json"])
def test_a_file_of_unknown_origin_is_refused_and_kept(folder, tmp_path, name):
    out = tmp_path / "out"
    out.mkdir()
    (out / name).write_text("{}")
    with pytest.raises(ValueError, match=f"{out} holds {name}, which this script would replace"):
        prepare(out, plan_files(folder))
    assert read_files(out) == {name: b"{}"}
    prepare(out, plan_files(folder), "--overwrite")


def test_files_that_are_not_of_the_preparation_are_kept(tmp_path):
    """The documents lie in a folder below the corpus, beside an index of another model's files."""
    documents = tmp_path / "corpus" / "downloads"
    documents.mkdir(parents=True)
    for number in range(3):
        (documents / f"{number}.txt").write_text(f"document {number} " * 200)
    index = tmp_path / "corpus" / "pytorch_model.bin.index.json"
    index.write_text("{}")
    result = call(
        "data/text/prepare.py",
        f"--source={documents}",
        f"--out={tmp_path / 'corpus'}",
        "--tokenizer=bytes",
        "--val_tokens=500",
    )
    assert result.returncode == 0, result.stderr.decode()
    assert len(list(documents.iterdir())) == 3
    assert index.read_text() == "{}"


def test_a_folder_that_another_process_prepares_is_refused(folder, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    # opened for writing, because NFS refuses an exclusive lock otherwise
    with open(out / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match=rf"{out} is being prepared by another process"):
            prepare(out, plan_files(folder))
    prepare(out, plan_files(folder))


def test_a_complete_corpus_may_be_read_only(folder, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    prepare(out, plan_files(folder))
    (out / "lock").unlink()
    # root may write to every folder, whatever its permissions
    monkeypatch.setattr(os, "access", lambda path, mode: path != out)
    prepare(out, plan_files(folder))
    assert capsys.readouterr().out.endswith(f"{out} is complete: {len(TOKENS):,} tokens\n")
    assert not (out / "lock").exists()


def test_a_file_system_without_locks_is_prepared_on(folder, tmp_path, monkeypatch):
    def has_no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", has_no_locks)
    assert read_tokens(prepare(tmp_path / "out", plan_files(folder))) == TOKENS


def test_a_damaged_record_of_a_preparation_is_refused(folder, tmp_path):
    prepare(tmp_path, plan_files(folder))
    (tmp_path / "preparation.json").write_text("{")
    with pytest.raises(ValueError, match=r"preparation\.json is damaged"):
        prepare(tmp_path, plan_files(folder))


NUM_ESTIMATED = 99_990  # tokens of ten documents of 9,999 bytes, without their end-of-text


@pytest.fixture
def plan_of_ten():
    return preparation.split_one_source(Texts(["x" * 9999] * 10, "x"), 1000)


@pytest.fixture
def set_free_space(monkeypatch):
    """Return a function that sets how many bytes of the disk are free."""

    def set_free(num_bytes: int) -> None:
        usage = SimpleNamespace(free=num_bytes)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)

    return set_free


def refuse_for_space(out: Path, plan) -> int:
    """Expect that the disk is too small, and return the max_tokens that the message offers."""
    message = (
        rf"about {NUM_ESTIMATED:,} tokens need 195 KiB, but the disk of {out} has .*"
        r" --max_tokens=(\d+)"
    )
    with pytest.raises(ValueError, match=message) as error:
        prepare(out, plan)
    return int(re.search(r"--max_tokens=(\d+)", str(error.value))[1])


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(
    plan_of_ten, set_free_space, tmp_path
):
    set_free_space(2 * NUM_ESTIMATED - 2)
    limit = refuse_for_space(tmp_path / "out", plan_of_ten)
    assert not list((tmp_path / "out").glob("*.bin"))
    assert 0.9 * NUM_ESTIMATED < limit < NUM_ESTIMATED


def test_the_max_tokens_that_the_message_offers_fits(plan_of_ten, set_free_space, tmp_path):
    set_free_space(2 * NUM_ESTIMATED - 2)
    limit = refuse_for_space(tmp_path / "out", plan_of_ten)
    corpus = prepare(tmp_path / "out", plan_of_ten, f"--max_tokens={limit}")
    assert len(read_tokens(corpus)) == limit


def test_complete_shards_need_no_space_again(plan_of_ten, set_free_space, tmp_path):
    out = tmp_path / "out"
    set_free_space(2 * NUM_ESTIMATED - 2)
    limit = refuse_for_space(out, plan_of_ten)
    prepare(out, plan_of_ten, f"--max_tokens={limit}")
    set_free_space(2 * (NUM_ESTIMATED - limit) - 2)
    num_missing = NUM_ESTIMATED - limit
    message = rf"about {num_missing:,} more tokens need .* give --max_tokens=(\d+)"
    with pytest.raises(ValueError, match=message) as raised:
        prepare(out, plan_of_ten)
    new_limit = int(re.search(message, str(raised.value))[1])
    assert limit <= new_limit < NUM_ESTIMATED
    assert len(read_tokens(open_corpus(str(out)))) == limit  # as it was before the error
    set_free_space(2 * (NUM_ESTIMATED - limit))
    assert len(read_tokens(prepare(out, plan_of_ten))) == NUM_ESTIMATED + 10


@pytest.mark.parametrize(("name", "num_tokens"), [("gpt2", 1000), ("bpe", 1000), ("bytes", 4000)])
def test_a_dataset_of_the_hub_is_estimated_in_tokens_of_the_tokenizer(name, num_tokens):
    """The dataset has 1000 tokens of GPT-2, of about four bytes each."""
    args = SimpleNamespace(tokenizer=name, max_tokens=None)
    plan = preparation.split_one_source(hub.HubDataset("x", num_tokens=1000), 100)
    assert preparation.estimate_tokens(preparation.Preparation(args, "x", plan)) == num_tokens


def press_ctrl_c(record, *_):
    """Send SIGINT at the seventh shard."""
    if record.file.endswith("000006.bin"):
        os.kill(os.getpid(), signal.SIGINT)


def open_on_full_disk(path, *arguments, **keys):
    """Open /dev/full in place of the eighth shard; it fails as a full disk does, when flushed."""
    return open("/dev/full" if "train_000007" in str(path) else path, *arguments, **keys)


@pytest.mark.parametrize(
    ("owner", "name", "fault", "code", "message"),
    [
        (preparation, "print_progress", press_ctrl_c, 130, "prepare.py: interrupted"),
        (shards, "open", open_on_full_disk, 2, "prepare.py: error: the disk of {out} is full"),
    ],
    ids=["interrupted", "full disk"],
)
def test_a_preparation_that_ends_early_keeps_complete_shards_and_says_how_to_resume(
    folder, tmp_path, monkeypatch, owner, name, fault, code, message
):
    out = tmp_path / "out"
    prepare_script = functools.partial(
        call,
        FINEWEB,
        f"--source={folder}",
        "--tokenizer=bytes",
        "--shard_tokens=300",
        "--val_tokens=1000",
        f"--out={out}",
    )
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fault, raising=False)
        result = prepare_script()
    assert result.returncode == code
    assert result.stderr.decode() == (
        f"{message.format(out=out)}; 7 complete shards are kept: "
        "rerun the same command to resume, or add --max_tokens=1900 to finish with them\n"
    )
    with pytest.raises(ValueError, match=r"is not prepared completely; .* --max_tokens=1900$"):
        open_corpus(str(out))
    for limit in (1900, len(TOKENS)):
        assert prepare_script(f"--max_tokens={limit}").returncode == 0
        assert read_tokens(open_corpus(str(out))) == TOKENS[:limit]


MISTAKES = [
    ("--val_tokens=500 --max_tokens=500", "--max_tokens=500 leaves nothing for training"),
    ("--val_tokens=99999", f"{len(TOKENS):,} tokens leave nothing for training; give more text"),
    ("--workers=0", "--workers=0: give a number at least 1"),
    (
        "--shard_tokens=2147483648",
        "--shard_tokens=2147483648: give a number at least 1 and at most 2147483647",
    ),
    (
        "--tokenizer=bpe --vocab_size=256",
        "--vocab_size=256: give a number at least 257 and at most 65536",
    ),
    ("--tokenizer=bpe --vocab_size=65537", "--vocab_size=65537: give a number from 257"),
    (
        "--tokenizer=words",
        "--tokenizer=words: there is no such file or folder; give one that exists, gpt2, bpe",
    ),
    ("--column=body", "has no column body; name one of its columns with --column: text, id"),
    ("--revision=v2", "--revision has no effect on --source; omit it"),
    ("--sample=sample-10BT", "--sample has no effect on --source; omit it"),
    ("--repository=org/name", "--repository has no effect on --source; omit it"),
    ("--max_token=5", "unknown key --max_token, did you mean max_tokens, "),
]


@pytest.mark.parametrize(("options", "message"), MISTAKES)
def test_mistakes_end_in_one_line_without_a_corpus(folder, tmp_path, options, message):
    result = call(
        FINEWEB,
        f"--source={folder}",
        "--tokenizer=bytes",
        "--val_tokens=1000",
        *options.split(),
        f"--out={tmp_path / 'out'}",
    )
    assert message in one_line_error(result)
    assert not (tmp_path / "out" / "meta.json").exists()
