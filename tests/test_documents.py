"""Test the reading of documents: kinds of files, folders, resuming, mistakes."""

import gzip
import json
import os

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data import documents
from data.documents import Documents, SourceError, from_files, from_texts

ROWS = ["one", None, "", "größe 漢字\r\n", "2024-01-01", "007", " last\n"]
TEXTS = [text for text in ROWS if text]


def join(batches) -> list[str]:
    """Return the documents of batches."""
    texts = []
    for batch in batches:
        for text, starts in zip(batch.texts, batch.starts, strict=True):
            if starts:
                texts.append(text)
            else:
                texts[-1] += text
    return texts


def read(*patterns, **options) -> list[str]:
    return join(from_files(list(map(str, patterns)), **options).read())


def write(folder, name: str, content: str | bytes):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def write_tables(folder) -> None:
    """Write the rows as every kind of table, with other columns that differ between rows."""
    lines = [
        json.dumps({"text": text, "meta": {"a": 1} if number % 2 else "x"})
        for number, text in enumerate(ROWS)
    ]
    lines.insert(3, "")
    lines.insert(4, '{"other": 3}')
    content = "\n".join(lines)
    write(folder, "a.jsonl", content)
    write(folder, "b.ndjson", "\ufeff" + content + "\r\n")
    write(folder, "c.jsonl.gz", gzip.compress(content.encode()))
    write(folder, "d.jsonl.zst", pa.compress(content.encode(), "zstd", asbytes=True))
    write(folder, "e.json", json.dumps([{"text": text} for text in ROWS], indent=1))
    for name, separator in (("f.csv", ","), ("g.tsv", "\t")):
        rows = [f'{number}{separator}"{text or ""}"' for number, text in enumerate(ROWS)]
        write(folder, name, "\n".join([f"id{separator}text", *rows]))
    pq.write_table(pa.table({"text": ROWS, "id": range(7)}), folder / "h.parquet", row_group_size=3)
    pq.write_table(pa.table({"text": pa.array(ROWS, pa.large_string())}), folder / "i.parquet")
    datasets.Dataset.from_dict({"text": ROWS}).save_to_disk(folder / "saved")


@pytest.fixture
def tables(tmp_path):
    write_tables(tmp_path)
    return tmp_path


def test_rows_of_every_kind_of_table_are_documents(tables):
    names = sorted(path.name for path in tables.iterdir())
    assert len(names) == 10
    for name in names:
        assert read(tables / name) == TEXTS, name


@pytest.mark.parametrize("characters", [1, 10, 10**6])
def test_reading_goes_on_from_every_state(tables, monkeypatch, characters):
    monkeypatch.setattr(documents, "BATCH_CHARACTERS", characters)
    monkeypatch.setattr(documents, "PIECE_CHARACTERS", 7)
    write(tables, "long.txt", "a line\n" * 9 + "x" * 30)
    source = from_files([str(tables)])
    batches = list(source.read())
    assert join(batches) == TEXTS * 9 + [(tables / "long.txt").read_text()] + TEXTS
    for number, batch in enumerate(batches):
        state = json.loads(json.dumps(batch.state))
        assert [later[1:] for later in source.read(state)] == [
            later[1:] for later in batches[number:]
        ]


def test_texts_in_memory_are_documents():
    texts = [f"text {number}" for number in range(1300)]
    assert join(from_texts(texts, "numbers").read()) == texts
    assert from_texts(texts, "numbers").identity != from_texts(texts[1:], "numbers").identity


def test_files_are_documents_as_they_are(tmp_path):
    write(tmp_path, "a.txt", "one\r\ntwo\n\n")
    write(tmp_path, "b.txt", b"\xef\xbb\xbfno mark")
    write(tmp_path, "c.txt.gz", gzip.compress(b"compressed"))
    write(tmp_path, "empty.txt", "")
    assert read(tmp_path) == ["one\r\ntwo\n\n", "no mark", "compressed"]


def test_half_of_a_surrogate_pair_is_replaced(tmp_path):
    assert read(write(tmp_path, "a.jsonl", '{"text": "a\\ud800b"}')) == ["a?b"]


def test_of_folders_hidden_files_and_files_without_text_are_skipped(tmp_path, capsys):
    for name in ("b/2.md", "a/1.py", "a/sub [1]/3.txt"):
        write(tmp_path / "in", name, name)
    for name in (".git/config", "a/.hidden.txt", "__pycache__/x.txt"):
        write(tmp_path / "in", name, "hidden")
    write(tmp_path / "in", "picture.png", b"\x89PNG\0\xff")
    write(tmp_path / "in", "zero.bin", b"a\0b")
    write(tmp_path / "in", "utf16.txt", "text".encode("utf-16"))
    write(tmp_path / "in", "package.json", json.dumps({"name": "x"}, indent=1))
    write(tmp_path / "in", "other.csv", "id;body\n1;x\n")
    write(tmp_path / "linked", "4.txt", "linked")
    (tmp_path / "in" / "link").symlink_to(tmp_path / "linked")
    (tmp_path / "linked" / "cycle").symlink_to(tmp_path / "in")
    assert read(tmp_path / "in") == ["a/1.py", "a/sub [1]/3.txt", "b/2.md", "linked"]
    assert "5 files are skipped" in capsys.readouterr().out
    assert read(tmp_path / "in", suffixes=[".py", ".md"]) == ["a/1.py", "b/2.md"]
    assert read(tmp_path / "in/*/*.md", tmp_path / "in/b/2.md") == ["b/2.md"]


@pytest.mark.parametrize("name", ["notes [2013].txt", "[c].txt", "a*.txt", "folder [1]/a.txt"])
def test_a_path_that_exists_is_not_a_pattern(tmp_path, name):
    write(tmp_path, name, "text")
    write(tmp_path, "ab.txt", "other")
    assert read(tmp_path / name) == ["text"]


def test_the_order_does_not_depend_on_the_listing(tmp_path, monkeypatch):
    for number in np.random.default_rng(0).permutation(20):
        write(tmp_path, f"{number % 3}/{number}.txt", str(number))
    walk = os.walk
    expected = read(tmp_path), read(tmp_path, shuffled=True)
    monkeypatch.setattr(os, "walk", lambda *a, **k: ((p, f, n[::-1]) for p, f, n in walk(*a, **k)))
    assert expected == (read(tmp_path), read(tmp_path, shuffled=True))
    assert expected[0] != expected[1]


BROKEN = {
    "typo.txt": (None, "there are no files of text"),
    "a.jsonl": ('{"text": "one"}\n{"text": "tw', "a.jsonl is not text, or is damaged (Unterm"),
    "deep.jsonl": ('{"text": "x"}\n' + "[" * 100_000, "is damaged (maximum recursion"),
    "body.jsonl": ('{"body": "one"}', "body.jsonl has no column text; name one with --column"),
    "body.csv": ("id,body\n1,x\n", "has no column text"),
    "a.parquet": ("PAR1", "a.parquet is not text, or is damaged"),
    "a.txt": (b"text\xff", "a.txt is not text, or is damaged ('utf-8' codec"),
    "utf16.txt": ("text".encode("utf-16"), "is not text"),
    "a.txt.gz": (gzip.compress(b"text" * 99)[:-9], "a.txt.gz is not text, or is damaged"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_file_that_cannot_be_read_is_named(tmp_path, name):
    content, message = BROKEN[name]
    if content is not None:
        write(tmp_path, name, content)
    with pytest.raises(ValueError, match=r"^[^\n]+$") as error:
        read(tmp_path / name)
    assert message in str(error.value)
    assert str(tmp_path / name) in str(error.value)


def test_an_unexpected_error_of_a_library_names_the_source():
    def fail():
        raise RuntimeError("out of luck")

    with pytest.raises(
        SourceError, match=r"org/name cannot be read: RuntimeError\('out of luck'\)"
    ):
        list(Documents(fail, {"source": "org/name"}, 0).read())
