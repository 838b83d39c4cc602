"""Test the preparation of token shards: tokens, kills, other options, mistakes."""

import errno
import fcntl
import itertools
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from helpers import one_line_error, write_parquet
from in_process import call

from data import documents, preparation, shards, tokenizer
from data.documents import Batch, from_files, from_texts
from data.preparation import PreparationOptions, Stage, read_options
from data.shards import Corpus, open_corpus
from data.token_reader import encode_batch, tokenize

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
    monkeypatch.setattr(documents, "BATCH_CHARACTERS", 300)


def prepare(out: Path, plan, *options: str) -> Corpus:
    """Prepare a corpus of bytes in shards of 300 tokens, unless options say otherwise."""
    arguments = ["--tokenizer=bytes", "--workers=2", "--shard_tokens=300", *options]
    args = read_options("", out, PreparationOptions, argv=arguments)
    preparation.prepare(args, "x", plan)
    return open_corpus(str(out))


def plan_files(folder: Path, val_tokens=1000):
    return preparation.split_one_source(from_files([str(folder)]), val_tokens)


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
    assert encode_batch(encoding, Batch(None, texts, [True] * 3)).tolist() == expected


def test_a_text_that_continues_the_one_before_has_no_end_of_text_before_it():
    batch = Batch(None, ["ab", "cd", "", "e"], [True, False, True, False])
    tokens = encode_batch(tokenizer.byte_tokenizer(), batch)
    assert tokens.tolist() == [EOT, *b"abcd", EOT, *b"e"]


@pytest.mark.parametrize(
    "text",
    [
        "before" + " " * 1_500_000 + "after",
        "before x" + (" " * 499_999 + "y") * 2 + "after",
        # the last of several blanks belongs to the next word: a cut within a run would show
        "word" + " " * 300_000 + "word" * 60_000 + " " * 100_000 + "word",
    ],
    ids=["cut", "barely not cut", "not cut"],
)
def test_a_long_run_of_blanks_is_cut_only_where_tiktoken_fails(text):
    """The regular expression of GPT-2 panics on about a million blanks."""
    encoding = tokenizer.gpt2_tokenizer()
    tokens = encode_batch(encoding, Batch(None, [text], [True])).tolist()
    assert encoding.decode(tokens[1:]) == text
    if " " * tokenizer.MAX_BLANKS not in text:
        assert tokens[1:] == encoding.encoding.encode_ordinary(text)


def test_few_batches_are_read_ahead():
    class CountingDocuments:
        num_read = 0

        def read(self, _state):
            for index in range(100):
                self.num_read += 1
                yield Batch({"index": index}, [f"{index}"], [True])

    counting = CountingDocuments()
    batches = tokenize(counting, None, tokenizer.byte_tokenizer(), 2)
    for index, (state, tokens) in enumerate(batches):
        assert counting.num_read <= index + 2 * 2 + 1
        assert state["index"] == index
        assert tokens.result().tolist() == byte_tokens([str(index)])


# ---- complete preparations ----


def test_shards_hold_the_documents_in_the_size_that_was_asked_for(folder, tmp_path, capsys):
    out = tmp_path / "out"
    corpus = prepare(out, plan_files(folder))
    assert read_tokens(corpus) == TOKENS
    assert [len(shard) for shard in corpus.val] == [300, 300, 300, 100]
    num_full, rest = divmod(len(TOKENS) - 1000, 300)
    assert [len(shard) for shard in corpus.train] == [300] * num_full + [rest]
    names = [f"x_val_{number:06d}.bin" for number in range(4)]
    names += [f"x_train_{number:06d}.bin" for number in range(4, 5 + num_full)]
    own_files = ["meta.json", "preparation.json", "tokenizer.json"]
    assert sorted(read_files(out)) == sorted([*names, *own_files])
    assert [record["file"] for record in corpus.meta["shards"]] == names
    assert "x_val_000001.bin: 600 of about " in capsys.readouterr().out


def test_meta_names_the_source_and_counts_documents_bytes_and_tokens(folder, tmp_path):
    corpus = prepare(tmp_path / "out", plan_files(folder))
    expected = {"tokenizer": "bytes", "vocab_size": 257, "eot_token": 256, "source": str(folder)}
    assert expected.items() <= corpus.meta.items()
    for split, tokens in (("val", TOKENS[:1000]), ("train", TOKENS[1000:])):
        num_documents = tokens.count(EOT)
        assert corpus.meta[split] == {
            "documents": num_documents,
            "bytes": len(tokens) - num_documents,
            "tokens": len(tokens),
        }


@pytest.mark.parametrize("is_read_only", [False, True])
def test_a_complete_corpus_is_not_prepared_again(
    folder, tmp_path, monkeypatch, capsys, is_read_only
):
    out = tmp_path / "out"
    prepare(out, plan_files(folder))
    if is_read_only:
        (out / "lock").unlink()
        # root may write to every folder, whatever its permissions
        monkeypatch.setattr(os, "access", lambda path, mode: path != out)
    stamps = read_stamps(out)
    capsys.readouterr()
    prepare(out, plan_files(folder), "--workers=1")
    assert read_stamps(out) == stamps
    assert capsys.readouterr().out == f"{out} is complete: {len(TOKENS):,} tokens\n"


# ---- resuming ----


@pytest.mark.parametrize("seed", range(4))
def test_a_preparation_killed_after_any_file_resumes(folder, tmp_path, monkeypatch, seed):
    """Kill it until it ends, first after one file, with other threads and batches each time."""
    generator = np.random.default_rng(seed)
    replace = Path.replace
    plan = plan_files(folder, int(generator.integers(1, 3000)))
    shard_tokens = f"--shard_tokens={int(generator.integers(90, 900))}"
    monkeypatch.setattr(documents, "BATCH_CHARACTERS", int(generator.integers(1, 900)))
    assert read_tokens(prepare(tmp_path / "complete", plan, shard_tokens)) == TOKENS
    out = tmp_path / "out"
    ended = False
    previous_stamps = {}
    last_number = 0
    while not ended:
        numbers = itertools.count()

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
        last_number = generator.integers(0, 12)
    assert read_files(out) == read_files(tmp_path / "complete")


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: os.truncate(path, 1100)])
def test_shards_from_a_damaged_one_on_are_prepared_again(folder, tmp_path, damage):
    out = tmp_path / "out"
    prepare(out, plan_files(folder))
    expected = read_files(out)
    names = list_complete_shards(out)
    stamps = read_stamps(out, names[:5])
    damage(out / names[5])
    prepare(out, plan_files(folder))
    assert read_files(out) == expected
    assert read_stamps(out).items() >= stamps.items()


TRAIN_TOKENIZER = ("--tokenizer=bpe", "--vocab_size=290", "--tokenizer_bytes=3000")


def test_a_tokenizer_is_trained_on_the_first_bytes_and_kept(folder, tmp_path, monkeypatch):
    out = tmp_path / "out"
    prepare(out, plan_files(folder), *TRAIN_TOKENIZER, "--max_tokens=2000")
    first = [text for i, text in enumerate(TEXTS) if len("".join(TEXTS[:i]).encode()) < 3000]
    encoding = tokenizer.train_byte_pairs(first, 290)
    assert tokenizer.read(out).to_json() == encoding.to_json()
    monkeypatch.setattr(tokenizer, "train_byte_pairs", None)  # takes minutes on a large corpus
    corpus = prepare(out, plan_files(folder), *TRAIN_TOKENIZER)
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
    message = r"holds 4,444 tokens, more than --max_tokens=4443; give a larger"
    with pytest.raises(ValueError, match=message):
        prepare(out, plan_files(folder), "--max_tokens=4443", *more)
    assert read_stamps(out) == stamps


def test_a_corpus_that_is_being_extended_is_not_complete(folder, tmp_path, monkeypatch):
    out = tmp_path / "out"
    prepare(out, plan_files(folder), "--max_tokens=4444")
    with monkeypatch.context() as patch:
        # the preparation ends after the first new shard
        patch.setattr(preparation.Progress, "save", None)
        with pytest.raises(TypeError):
            prepare(out, plan_files(folder))
    with pytest.raises(ValueError, match="is not prepared completely"):
        open_corpus(str(out))


def test_max_tokens_of_a_corpus_that_ends_with_a_shard(tmp_path):
    plan = preparation.split_one_source(from_texts(["x" * 99] * 20, "x"), 200)
    for limit in ([], ["--max_tokens=2001"], []):
        corpus = prepare(tmp_path, plan, "--shard_tokens=100", *limit)
        assert read_tokens(corpus) == byte_tokens(["x" * 99] * 20)


def plan_two_sources() -> list[Stage]:
    """Return a plan in which each split has documents of its own; those of validation have 600 tokens."""
    return [
        Stage("val", from_texts(["v" * 99] * 6, "v"), None),
        Stage("train", from_texts(["t" * 99] * 7, "t"), None),
    ]


def test_a_validation_source_that_ends_with_a_shard_is_not_written_again(tmp_path, capsys):
    plan = plan_two_sources()
    expected = byte_tokens(["v" * 99] * 6 + ["t" * 99] * 7)
    for _ in range(2):
        assert read_tokens(prepare(tmp_path, plan)) == expected
    assert capsys.readouterr().out.endswith(f"is complete: {len(expected):,} tokens\n")


def test_a_split_without_tokens_is_refused(tmp_path):
    with pytest.raises(ValueError, match="which leave nothing for training; give more text"):
        prepare(tmp_path, plan_two_sources(), "--max_tokens=500")
    with pytest.raises(ValueError, match=r"rerun its prepare\.py to resume, or to end sooner"):
        open_corpus(str(tmp_path))


# ---- other options, faults and mistakes ----


OTHER_OPTIONS = [
    (["--shard_tokens=301"], "shard_tokens was 300 and is now 301"),
    (["--tokenizer=bpe", "--vocab_size=300"], "tokenizer was 'bytes' and is now 'bpe'"),
]


@pytest.mark.parametrize(("options", "difference"), OTHER_OPTIONS)
def test_other_options_are_refused_unless_the_corpus_is_overwritten(
    folder, tmp_path, options, difference
):
    out = tmp_path / "out"
    prepare(out, plan_files(folder))
    stamps = read_stamps(out)
    with pytest.raises(ValueError, match=f"prepared with other options \\({difference}\\)"):
        prepare(out, plan_files(folder), *options)
    assert read_stamps(out) == stamps
    prepare(out, plan_files(folder), *options, "--overwrite")
    prepare(tmp_path / "new", plan_files(folder), *options)
    assert read_files(out) == read_files(tmp_path / "new")


def test_other_documents_are_refused(folder, tmp_path):
    (folder / "notes.txt").write_text("a")
    prepare(tmp_path / "out", plan_files(folder))
    (folder / "notes.txt").write_text("ab")
    with pytest.raises(ValueError, match="prepared with other options \\(sha256 was"):
        prepare(tmp_path / "out", plan_files(folder))


@pytest.mark.parametrize("name", ["other_train_000000.bin", "meta.json", "tokenizer.json"])
def test_files_of_unknown_origin_are_kept_unless_they_are_overwritten(folder, tmp_path, name):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text("{}")
    with pytest.raises(ValueError, match="its options are unknown"):
        prepare(tmp_path / "out", plan_files(folder))
    assert read_files(tmp_path / "out") == {name: b"{}"}
    assert read_tokens(prepare(tmp_path / "out", plan_files(folder), "--overwrite")) == TOKENS


def test_a_folder_that_another_process_prepares_is_refused(folder, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    # opened for writing, because NFS refuses an exclusive lock otherwise
    with open(out / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match=rf"{out} is being prepared by another process"):
            prepare(out, plan_files(folder))
    prepare(out, plan_files(folder))


def test_a_file_system_without_locks_is_prepared_on(folder, tmp_path, monkeypatch):
    lock = fcntl.flock

    def has_no_locks(file, operation):
        if Path(getattr(file, "name", "")).name == "lock":  # the cache of datasets has other ones
            raise OSError(errno.ENOLCK, "No locks available")
        lock(file, operation)

    monkeypatch.setattr(fcntl, "flock", has_no_locks)
    assert read_tokens(prepare(tmp_path / "out", plan_files(folder))) == TOKENS


MISTAKES = [
    ("--val_tokens=500 --max_tokens=500", "--max_tokens=500 leaves nothing for training"),
    ("--val_tokens=99999", f"{len(TOKENS):,} tokens, which leave nothing for training; give more"),
    ("--workers=0", "--workers=0: give a number at least 1"),
    ("--tokenizer=words", "--tokenizer=words: there is no such file or folder, and the Hugging"),
    ("--column=body", "there are no files of text"),
    ("--revision=v2", "--revision=v2 has no effect on --source; omit it"),
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
