"""Prepare wikitext, openwebtext, text, shakespeare_char and python_stdlib from small sources."""

import hashlib
import importlib
import itertools
import platform
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers import one_line_error
from in_process import call

from data import tokenizer
from data.python_stdlib.prepare import LEFT_OUT, source_files, split_by_hash
from data.shards import Corpus, open_corpus

EOT = 256


@pytest.fixture(autouse=True)
def _bytes_for_gpt2(monkeypatch):
    """Let the byte tokenizer stand for GPT-2's."""
    monkeypatch.setattr(tokenizer, "gpt2_tokenizer", tokenizer.byte_tokenizer)


@pytest.fixture
def prepare(monkeypatch) -> Callable[..., Corpus]:
    """Return a function that calls data/NAME/prepare.py, and returns the corpus that it writes."""

    def prepare_and_open(name: str, out: Path, *arguments) -> Corpus:
        monkeypatch.setattr(sys, "argv", ["prepare.py", f"--out={out}", *map(str, arguments)])
        importlib.import_module(f"data.{name}.prepare").main()
        return open_corpus(str(out))

    return prepare_and_open


def documents(shards: list[np.ndarray]) -> list[str]:
    """Return the documents of a split of byte tokens; an end-of-text token precedes each."""
    tokens = np.concatenate(shards).tolist()
    assert tokens[0] == EOT
    ends = [i for i, token in enumerate(tokens) if token == EOT] + [len(tokens)]
    return [bytes(tokens[a + 1 : b]).decode() for a, b in itertools.pairwise(ends)]


# ---- WikiText ----

SCHEMA = """---
configs:
- config_name: wikitext-2-raw-v1
  data_files:
  - {split: train, path: wikitext-2-raw-v1/train-*}
  - {split: validation, path: wikitext-2-raw-v1/validation-*}
---
"""
FIRST_ARTICLE = [
    " = Robert <unk> = \n",
    "",
    " Robert is an actor . x = y and a = = b . \n",
    " = = Career = = \n",
    " = = = \n",
    " = = = 2000 — 2005 = = = \n",
    " In 2000 = = = he left . \n",
]
SECOND_ARTICLE = [
    " = You 're = ( song ) = \n",
    "",
    " Größe = \n",
    " = no title\n",
    "= no title = \n",
    " = no title= \n",
    " = no title = = \n",
    " = = no title = \n",
    " = no title = \n = no title = \n",
    " = no title = ",
]
WIKI = {
    "train": ["", *FIRST_ARTICLE, *SECOND_ARTICLE, " = X = \n", ""],
    "validation": SECOND_ARTICLE,
}


@pytest.fixture(scope="module")
def wikitext(tmp_path_factory) -> Path:
    """Return a clone of Salesforce/wikitext, whose rows are lines."""
    root = tmp_path_factory.mktemp("wikitext")
    (root / "README.md").write_text(SCHEMA)
    (root / "wikitext-2-raw-v1").mkdir()
    for split, lines in WIKI.items():
        path = root / "wikitext-2-raw-v1" / f"{split}-00000-of-00001.parquet"
        pq.write_table(pa.table({"text": lines}), path, row_group_size=3)
    return root


def test_wikitext_articles_are_documents_whose_lines_are_tokenized_one_by_one(
    wikitext, tmp_path, prepare
):
    corpus = prepare(
        "wikitext",
        tmp_path / "out",
        f"--repository={wikitext}",
        "--version=2",
        "--tokenizer=bpe",
        "--vocab_size=270",
    )
    encoding = tokenizer.read(tmp_path / "out")
    titles = (FIRST_ARTICLE[0], SECOND_ARTICLE[0], " = X = \n")
    for lines, shards in ((WIKI["train"], corpus.train), (WIKI["validation"], corpus.val)):
        expected = []
        for line in lines:
            if line in titles:
                expected.append(encoding.eot_token)
            expected.extend(encoding.encode(line))
        assert np.concatenate(shards).tolist() == expected
    assert corpus.meta["train"]["documents"] == 3
    assert corpus.meta["name"] == "wikitext-2-raw-v1"


# ---- OpenWebText ----


def test_openwebtext_from_a_clone(tmp_path, prepare):
    texts = [f"page {i} " * (1 + i % 5) for i in range(50)]
    clone = tmp_path / "clone"
    clone.mkdir()
    for index in (0, 1):
        table = pa.table({"body": texts[25 * index :][:25], "text": ["title"] * 25})
        pq.write_table(table, clone / f"train-{index:05d}-of-00002.parquet")
    corpus = prepare(
        "openwebtext",
        tmp_path / "out",
        f"--repository={clone}",
        "--column=body",
        "--val_tokens=100",
        "--shard_tokens=70",
    )
    assert documents(corpus.val + corpus.train) == texts
    assert sum(map(len, corpus.val)) == 100
    assert corpus.path.joinpath("openwebtext_val_000001.bin").exists()
    assert corpus.meta["source"] == str(clone)
    assert not {"revision", "commit"} & corpus.meta.keys()


# ---- a user's own text ----


def test_text_keeps_the_validation_split_of_its_first_tokens_until_it_is_overwritten(
    tmp_path, prepare
):
    """It is a share of the tokens, whose number is estimated from the size of the files."""
    (tmp_path / "a.txt").write_text("abc\n" * 5000)
    source = f"--source={tmp_path / 'a.txt'}"
    byte_pairs = ["--tokenizer=bpe", "--vocab_size=257"]
    for options, num_val_tokens, num_tokens in (
        (["--tokenizer=bytes", "--max_tokens=1000"], 20, 1000),
        (["--tokenizer=bytes", "--max_tokens=5000"], 20, 5000),
        (["--tokenizer=bytes", "--val_share=0.1"], 20, 20_001),
        (["--tokenizer=bytes", "--val_share=0.1", "--overwrite"], 2000, 20_001),
        # as if a token of byte pairs had four bytes
        ([*byte_pairs, "--val_share=0.1", "--overwrite"], 500, 20_001),
    ):
        corpus = prepare("text", tmp_path / "out", source, *options)
        assert sum(map(len, corpus.val)) == num_val_tokens
        assert sum(map(len, corpus.val + corpus.train)) == num_tokens


MISTAKES = [
    ("text", "", "--source is missing: give files, glob patterns or folders"),
    ("text", "--source . --suffixes .none", "--source=.: there are no files of text"),
    ("text", "--source a.txt", "vocab_size=4096, but the text yields only 259 tokens; give that"),
    ("openwebtext", "--repository=. --revision=v9", "--revision=v9 has no effect on the local fol"),
    ("shakespeare_char", "--source=a.txt", "is not nanoGPT's text"),
    ("shakespeare_char", "--source=none", "cannot be read"),
]


@pytest.mark.parametrize(("name", "arguments", "message"), MISTAKES)
def test_mistakes_are_answered_in_one_line(tmp_path, name, arguments, message, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("ab ab ab")
    result = call(f"data/{name}/prepare.py", "--out=out", *arguments.split())
    assert message in one_line_error(result)
    assert {path.name for path in tmp_path.glob("out/*")} <= {"lock"}


# ---- Shakespeare by characters ----

PLAY = "First Citizen:\nSpeak, speak.\n\nAll:\nWe know't, we know't!\n" * 3


def test_characters_have_nanogpts_ids(tmp_path, prepare, monkeypatch):
    play = tmp_path / "input.txt"
    play.write_text(PLAY)
    module = importlib.import_module("data.shakespeare_char.prepare")
    monkeypatch.setattr(module, "SHA256", hashlib.sha256(PLAY.encode()).hexdigest())
    corpus = prepare("shakespeare_char", tmp_path / "out", f"--source={play}")
    ids = {character: number for number, character in enumerate(sorted(set(PLAY)))}
    train_length = int(0.9 * len(PLAY))
    for shards, text in ((corpus.train, PLAY[:train_length]), (corpus.val, PLAY[train_length:])):
        assert np.concatenate(shards).tolist() == [EOT, *(ids[character] for character in text)]
    encoding = tokenizer.read(corpus.path)
    assert encoding.decode(list(ids.values())) == "".join(sorted(set(PLAY)))
    assert encoding.decode(encoding.encode("é~")) == "é~"


# ---- the standard library ----


@pytest.fixture
def library(tmp_path, monkeypatch) -> Path:
    """Write a library, in a folder whose path has the name of a folder that is skipped below it."""
    root = tmp_path / "test" / "lib"
    skipped_folders = ("test", "a/tests", "idlelib/deep", *LEFT_OUT)
    files = {
        "b.py": "b = 1\n",
        "a/z.py": "z = 'größe'\n",
        "a.py": "a = 1\n",
        "test.py": "keep = 'a file, not a folder'\n",
        "a/copy_of_b.py": "b = 1\n",
        "c_copy_of_b.py": "b = 1\n",
        "empty.py": "",
        "a/blank.py": " \n\t\n",
        "a/notes.txt": "no source\n",
        "../outside.py": "outside = 1\n",
        **{f"{folder}/m.py": f"# {folder}\n" for folder in skipped_folders},
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(text.encode())
    (root / "latin.py").write_bytes("größe = 1\n".encode("latin-1"))
    monkeypatch.setattr("sysconfig.get_path", {"stdlib": str(root)}.__getitem__)
    return root


def test_source_files_are_neither_copies_nor_tests_nor_empty(library):
    assert source_files(library) == {
        "a.py": "a = 1\n",
        "a/copy_of_b.py": "b = 1\n",  # the first of several copies is kept
        "a/z.py": "z = 'größe'\n",
        "test.py": "keep = 'a file, not a folder'\n",
    }


@pytest.fixture
def sources() -> dict[str, str]:
    """Return 300 sources of random lengths by path."""
    sizes = np.random.default_rng(0).integers(10, 3000, 300).tolist()
    return {
        f"pkg{i % 7}/m{i}.py": ("é" if i % 3 == 0 else "x") * size for i, size in enumerate(sizes)
    }


def test_sources_are_split_in_the_order_of_their_hashes_with_four_percent_for_validation(sources):
    splits = split_by_hash(sources)
    assert {**splits["val"], **splits["train"]} == sources
    by_hash = sorted(sources, key=lambda path: hashlib.sha256(path.encode()).hexdigest())
    assert [*splits["val"], *splits["train"]] == by_hash
    cumulative_sizes = np.cumsum([len(text.encode()) for text in splits["val"].values()])
    target = 0.04 * sum(len(text.encode()) for text in sources.values())
    assert cumulative_sizes[-1] >= target > cumulative_sizes[-2]


def test_shards_of_the_standard_library_decode_to_its_sources(library, tmp_path, prepare):
    (library / "special.py").write_text("x = '<|endoftext|>'\n" * 9)  # which is plain text
    corpus = prepare("python_stdlib", tmp_path / "new" / "out", "--vocab_size=260")
    encoding = tokenizer.read(corpus.path)
    assert encoding.name == corpus.meta["tokenizer"] == "bpe260"
    assert corpus.meta["source"] == f"standard library of Python {platform.python_version()}"
    for split, texts in split_by_hash(source_files(library)).items():
        [tokens] = getattr(corpus, split)
        assert tokens.tolist().count(encoding.eot_token) == len(texts)
        joined = "".join("<|endoftext|>" + text for text in texts.values())
        assert encoding.decode(tokens.tolist()) == joined


def test_a_library_without_sources_is_refused(library, tmp_path):
    for file in library.rglob("*.py"):
        file.unlink()
    result = call("data/python_stdlib/prepare.py", f"--out={tmp_path / 'out'}")
    assert "holds no standard library source" in one_line_error(result)
    assert not (tmp_path / "out").exists()
