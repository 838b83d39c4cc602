"""The scripts of wikitext, openwebtext, text, shakespeare_char and python_stdlib, each on a small
source.
"""

import hashlib
import importlib
import itertools
import json
import platform
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers import one_line_error
from in_process import call

from data import tokenizer
from data.python_stdlib.prepare import LEFT_OUT, source_files, split_by_hash
from data.shards import open_corpus
from data.wikitext.prepare import TITLE

EOT = 256


@pytest.fixture(autouse=True)
def _bytes_for_gpt2(monkeypatch):
    monkeypatch.setattr(tokenizer, "gpt2_tokenizer", tokenizer.byte_tokenizer)


def run(monkeypatch, corpus, out, *arguments):
    monkeypatch.setattr(sys, "argv", ["prepare.py", f"--out={out}", *map(str, arguments)])
    importlib.import_module(f"data.{corpus}.prepare").main()
    return open_corpus(str(out))


def documents(parts) -> list[str]:
    """Texts of byte tokens: what lies between end-of-text tokens, the first of which opens the
    split.
    """
    tokens = np.concatenate(parts).tolist()
    assert tokens[0] == EOT
    cuts = [i for i, token in enumerate(tokens) if token == EOT] + [len(tokens)]
    return [bytes(tokens[a + 1 : b]).decode() for a, b in itertools.pairwise(cuts)]


# WikiText

SCHEMA = """---
configs:
- config_name: wikitext-2-raw-v1
  data_files:
  - {split: train, path: wikitext-2-raw-v1/train-*}
  - {split: validation, path: wikitext-2-raw-v1/validation-*}
  - {split: test, path: wikitext-2-raw-v1/test-*}
---
"""
FIRST = [" = Robert <unk> = \n", "", " Robert is an actor . x = y and a = = b . \n"]
FIRST += [" = = Career = = \n", "", " = = = 2000 — 2005 = = = \n", " In 2000 = = = he left . \n"]
SECOND = [" = You 're = ( song ) = \n", "", " Größe = \n", " = no title\n", "= no title = \n"]
SECOND += [" = = Notes = = \n"]
WIKI = {"train": ["", *FIRST, *SECOND, " = X = \n", ""], "validation": SECOND}
WIKI["test"] = [" = T = \n", " t \n"]


@pytest.fixture(scope="module")
def wikitext(tmp_path_factory):
    """A clone of Salesforce/wikitext: a row a line."""
    root = tmp_path_factory.mktemp("wikitext")
    (root / "README.md").write_text(SCHEMA)
    (root / "wikitext-2-raw-v1").mkdir()
    for split, lines in WIKI.items():
        path = root / "wikitext-2-raw-v1" / f"{split}-00000-of-00001.parquet"
        pq.write_table(pa.table({"text": lines}), path, row_group_size=3)
    return root


OTHERS = [
    " = = Section = = \n",
    " = = = \n",
    " = Title = = \n",
    "",
    " = = Title = \n",
    " = Title= \n",
]
OTHERS += [" = Title = ", " = Title \n", "= Title = \n", " = a = \n = b = \n"]


def test_titles():
    assert all(map(TITLE.fullmatch, (" = Title = \n", " = A = B = \n")))
    assert not any(map(TITLE.fullmatch, OTHERS))


def test_wikitext_articles_are_documents(wikitext, tmp_path, monkeypatch):
    arguments = [tmp_path / "out", f"--repository={wikitext}", "--version=2"]
    corpus = run(monkeypatch, "wikitext", *arguments)
    # What precedes the first title has no end-of-text: an empty line here.
    assert documents(corpus.train) == ["".join(FIRST), "".join(SECOND), " = X = \n"]
    assert documents(corpus.val) == ["".join(SECOND)]
    assert corpus.meta["train"]["documents"] == 3
    assert corpus.meta["name"] == "wikitext-2-raw-v1"
    arguments += ["--val_split=test", "--overwrite", "--shard_tokens=10"]
    assert documents(run(monkeypatch, "wikitext", *arguments).val) == [" = T = \n t \n"]


def test_wikitext_lines_are_tokenised_one_by_one(wikitext, tmp_path, monkeypatch):
    options = ["--version=2", "--tokenizer=bpe", "--vocab_size=270"]
    corpus = run(monkeypatch, "wikitext", tmp_path / "out", f"--repository={wikitext}", *options)
    encoding = tokenizer.from_json(tokenizer.describe(tmp_path / "out"))
    expected = []
    for line in WIKI["train"]:
        is_title = line in (FIRST[0], SECOND[0], " = X = \n")
        expected += [encoding.eot_token] * is_title + encoding.encode(line)
    assert np.concatenate(corpus.train).tolist() == expected


# OpenWebText


def test_openwebtext_from_a_clone_and_from_files(tmp_path, monkeypatch):
    texts, clone = [f"page {i} " * (i % 5) for i in range(50)], tmp_path / "clone"
    clone.mkdir()
    for index in (0, 1):
        table = pa.table({"text": texts[25 * index :][:25]})
        pq.write_table(table, clone / f"train-{index:05d}-of-00002.parquet")
    options = ["--val_tokens=100", "--shard_tokens=70"]
    for name, where in (("a", f"--repository={clone}"), ("b", f"--source={clone}/*.parquet")):
        corpus = run(monkeypatch, "openwebtext", tmp_path / name, where, *options)
        assert documents(corpus.val + corpus.train) == texts
        assert sum(map(len, corpus.val)) == 100
        assert corpus.path.joinpath("openwebtext_val_000001.bin").exists()
        assert corpus.meta["source"] == where.partition("=")[2]


# Text of one's own


@pytest.fixture
def notes(tmp_path):
    """A folder of texts with copies of some, and files that are no documents."""
    root = tmp_path / "notes"
    files = {f"{i % 4}/{i}.txt": f"note {i}: größe\n" * (1 + i % 6) for i in range(40)}
    files |= {"copy.txt": files["1/1.txt"], "2/copy.md": files["3/3.txt"], "code.py": "x = 1\n"}
    texts = dict(files)
    files |= dict.fromkeys((".git/config", "0/.hidden.txt", "a/__pycache__/m.txt"), "hidden")
    files["empty.txt"] = ""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "picture.png").write_bytes(b"\x89PNG\0\xff")
    (root / "utf16.txt").write_bytes("text".encode("utf-16"))
    rows = [{"text": text} for text in ("from jsonl", texts["2/2.txt"], "from jsonl")]
    (root / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return root, texts, [row["text"] for row in rows]


def test_text_drops_copies_and_what_is_no_text(notes, tmp_path, monkeypatch, capsys):
    root, texts, rows = notes
    options = ["--tokenizer=bytes", f"--source={root}", "--val_tokens=300"]
    corpus = run(monkeypatch, "text", tmp_path / "out", *options)
    assert sum(map(len, corpus.val)) == 300
    of_files = {**{name: [text] for name, text in texts.items()}, "rows.jsonl": rows}
    by_hash = lambda name: hashlib.sha256(f"{root}/{name}".encode()).hexdigest()  # noqa: E731
    everything = [text for name in sorted(of_files, key=by_hash) for text in of_files[name]]
    assert documents(corpus.val + corpus.train) == list(dict.fromkeys(everything))
    printed = capsys.readouterr().out
    assert "files skipped because they are not UTF-8 text: 2\n" in printed
    copies, whole = len(everything) - len(set(everything)), "".join(everything)
    size = len(whole.encode()) - len("".join(set(everything)).encode())
    assert f"\ndocuments dropped as exact duplicates: {copies} ({size} bytes)\n" in printed
    assert copies
    corpus = run(monkeypatch, "text", tmp_path / "kept", *options, "--duplicates=keep")
    assert documents(corpus.val + corpus.train) == everything


@pytest.mark.parametrize(("share", "kind"), [(0.02, "bytes"), (0.3, "bpe")])
def test_text_holds_out_a_share(notes, tmp_path, monkeypatch, share, kind):
    """Of the files' bytes, which for byte pairs are taken for four times the tokens."""
    root, _, _ = notes
    options = [f"--tokenizer={kind}", "--vocab_size=257", "--source", root, f"--val_share={share}"]
    corpus = run(monkeypatch, "text", tmp_path / "out", *options)
    hidden = (".git", "__pycache__", ".hidden.txt")
    files = [path for path in root.rglob("*") if not set(hidden).intersection(path.parts)]
    size = sum(path.stat().st_size for path in files if path.is_file())
    assert corpus.meta["val"]["tokens"] == int(share * size / (1 if kind == "bytes" else 4))


def test_text_expands_home_and_trains_byte_pairs_by_default(notes, tmp_path, monkeypatch):
    root, _, _ = notes
    monkeypatch.setenv("HOME", str(root.parent))
    options = ["--source", "~/notes/0", "~/notes/1", "--vocab_size=265"]
    corpus = run(monkeypatch, "text", tmp_path / "out", *options)
    assert corpus.meta["tokenizer"] == "bpe265"
    assert corpus.meta["val"]["documents"] + corpus.meta["train"]["documents"] == 20


MISTAKES = [
    ("", "--source is missing: give files, glob patterns or folders"),
    ("--source a.txt --val_share=0", "--val_share=0.0: give a number above 0 to below 1"),
    ("--source nowhere", "--source=nowhere: there are no files; give existing"),
    ("--source . --suffixes .none", "--source=.: there are no files with suffix .none"),
    ("--source a.txt --vocab_size=5", "--vocab_size=5: give a number from 257"),
    ("--source a.txt --val_tokens=0", "--val_tokens=0: give 1 or more"),
    ("--source a.txt", "vocab_size=4096, but the text yields only 259 tokens; give that"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES)
def test_text_answers_mistakes_in_one_line(tmp_path, arguments, message, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("ab ab ab")
    result = call("data/text/prepare.py", "--out=out", *arguments.split())
    assert message in one_line_error(result)
    assert not list(tmp_path.glob("out/*"))


# Shakespeare by characters


def test_characters_have_nano_gpts_ids(tmp_path, monkeypatch):
    """Of another text, whose hash is put in the place of Shakespeare's."""
    module = importlib.import_module("data.shakespeare_char.prepare")
    text = "First Citizen:\nSpeak, speak.\n\nAll:\nWe know't, we know't!\n" * 3
    file, out = tmp_path / "input.txt", f"--out={tmp_path / 'out'}"
    file.write_text(text)
    for source, wrong in ((file, "is not nanoGPT's text"), ("none", "cannot be read")):
        refused = call("data/shakespeare_char/prepare.py", f"--source={source}", out)
        assert wrong in one_line_error(refused)
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(module, "SHA256", hashlib.sha256(text.encode()).hexdigest())
    corpus = run(monkeypatch, "shakespeare_char", tmp_path / "out", f"--source={file}")
    ids = {character: number for number, character in enumerate(sorted(set(text)))}
    cut = int(0.9 * len(text))
    for split, part in (("train", text[:cut]), ("val", text[cut:])):
        expected = [EOT, *(ids[character] for character in part)]
        assert np.concatenate(getattr(corpus, split)).tolist() == expected
    encoding = tokenizer.from_json(tokenizer.describe(corpus.path))
    assert encoding.decode(list(ids.values())) == "".join(sorted(set(text)))
    assert encoding.decode(encoding.encode("é~")) == "é~"


# The standard library


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """Sources under a folder whose own path holds a name that is left out below it."""
    root = tmp_path / "test" / "lib"
    files = {"b.py": "b = 1\n", "a/z.py": "z = 'größe'\n", "a.py": "a = 1\n"}
    files |= {"test.py": "keep = 'a file, not a folder'\n", "a/copy_of_b.py": "b = 1\n"}
    files |= {"c_copy_of_b.py": "b = 1\n", "empty.py": "", "a/blank.py": " \n\t\n"}
    files |= {"a/notes.txt": "no source\n", "../outside.py": "outside = 1\n"}
    folders = ("test", "a/tests", "idlelib/deep", *LEFT_OUT)
    files |= {f"{folder}/m.py": f"# {folder}\n" for folder in folders}
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(text.encode())
    (root / "latin.py").write_bytes("größe = 1\n".encode("latin-1"))
    monkeypatch.setattr("sysconfig.get_path", {"stdlib": str(root)}.__getitem__)
    return root


def test_source_files_leave_out_what_is_no_source_of_its_own(tree):
    # The first of several copies stays: a/copy_of_b.py comes before b.py.
    expected = {"a.py": "a = 1\n", "a/copy_of_b.py": "b = 1\n", "a/z.py": "z = 'größe'\n"}
    expected["test.py"] = "keep = 'a file, not a folder'\n"
    assert source_files(tree) == expected


def test_the_first_by_hash_are_validation_up_to_four_percent_of_the_bytes():
    sizes = np.random.default_rng(0).integers(10, 3000, 300).tolist()
    texts = {f"pkg{i % 7}/m{i}.py": "xé"[i % 3 == 0] * size for i, size in enumerate(sizes)}
    splits = split_by_hash(texts)
    assert splits["val"] | splits["train"] == texts
    by_hash = sorted(texts, key=lambda path: hashlib.sha256(path.encode()).hexdigest())
    assert [*splits["val"], *splits["train"]] == by_hash
    taken = np.cumsum([len(text.encode()) for text in splits["val"].values()])
    whole = sum(len(text.encode()) for text in texts.values())
    assert taken[-1] >= 0.04 * whole > taken[-2]
    after = split_by_hash({"a.py": "y" * 2000, **texts})["val"]
    assert len((splits["val"].keys() ^ after.keys()) - {"a.py"}) <= 2  # a new file moves few others


def test_shards_of_the_standard_library_decode_to_its_sources(tree, tmp_path, monkeypatch):
    (tree / "special.py").write_text("x = '<|endoftext|>'\n" * 9)  # which is plain text
    corpus = run(monkeypatch, "python_stdlib", tmp_path / "new" / "out", "--vocab_size=260")
    encoding = tokenizer.from_json(tokenizer.describe(corpus.path))
    assert encoding.name == corpus.meta["tokenizer"] == "bpe260"
    assert corpus.meta["source"] == f"standard library of Python {platform.python_version()}"
    for split, texts in split_by_hash(source_files(tree)).items():
        [tokens] = getattr(corpus, split)
        assert tokens.tolist().count(encoding.eot_token) == len(texts)
        joined = "".join("<|endoftext|>" + text for text in texts.values())
        assert encoding.decode(tokens.tolist()) == joined
    for file in tree.rglob("*.py"):
        file.unlink()
    refused = call("data/python_stdlib/prepare.py", f"--out={tmp_path / 'none'}")
    assert "holds no standard library source" in one_line_error(refused)
    assert not (tmp_path / "none").exists()
