"""Test the reading of documents: kinds of files, folders, resuming, mistakes."""

import bz2
import gzip
import json
import os
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from in_process import call

from data import documents, readers
from data.documents import SourceError, from_files, from_texts

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
    # two members, as programs write that append to a .gz file
    write(folder, "c.jsonl.gz", gzip.compress(b"") + gzip.compress(content.encode()))
    halves = content.encode()[:40], content.encode()[40:]
    write(folder, "c.jsonl.bz2", b"".join(map(bz2.compress, halves)))
    write(folder, "d.jsonl.zst", pa.compress(content.encode(), "zstd", asbytes=True))
    write(folder, "e.json", json.dumps([{"text": text} for text in ROWS], indent=1))
    for name, separator in (("f.csv", ","), ("g.tsv", "\t")):
        rows = [f'{number}{separator}"{text or ""}"' for number, text in enumerate(ROWS)]
        write(folder, name, "\n".join([f"id{separator}text", *rows]))
    pq.write_table(pa.table({"text": ROWS, "id": range(7)}), folder / "h.parquet", row_group_size=3)
    pq.write_table(pa.table({"text": pa.array(ROWS, pa.large_string())}), folder / "i.parquet")
    pyarrow.feather.write_feather(pa.table({"id": range(7), "text": ROWS}), folder / "j.feather")
    with pa.ipc.new_file(folder / "k.arrow", pa.schema([("text", pa.string())])) as writer:
        writer.write_table(pa.table({"text": ROWS}), max_chunksize=3)
    datasets.Dataset.from_dict({"text": ROWS}).save_to_disk(folder / "saved")


@pytest.fixture
def tables(tmp_path):
    write_tables(tmp_path)
    return tmp_path


def test_rows_of_every_kind_of_table_are_documents(tables):
    names = sorted(path.name for path in tables.iterdir())
    assert len(names) == 13
    for name in names:
        assert read(tables / name) == TEXTS, name


@pytest.mark.parametrize("characters", [1, 10, 10**6])
def test_reading_goes_on_from_every_state(tables, monkeypatch, characters):
    monkeypatch.setattr(documents, "BATCH_CHARACTERS", characters)
    monkeypatch.setattr(readers, "PIECE_CHARACTERS", 7)
    write(tables, "long.txt", "a longer line\n" * 9 + "x" * 30)
    source = from_files([str(tables)])
    batches = list(source.read())
    assert join(batches) == TEXTS * 12 + [(tables / "long.txt").read_text()] + TEXTS
    # the pieces of a file are tokenized separately, and so end with a line
    pieces = [text for batch in batches for text in batch.texts if "longer" in text]
    assert pieces == ["a longer line\n"] * 9
    for number, batch in enumerate(batches):
        state = json.loads(json.dumps(batch.state))
        later_batches = [later[1:] for later in source.read(state)]
        assert later_batches == [later[1:] for later in batches[number:]]


def test_the_size_of_compressed_text_is_estimated(tmp_path):
    text = "".join(f"line {number}\n" for number in range(9000))
    paths = [
        write(tmp_path, "a.txt", text),
        write(tmp_path, "b.txt.gz", gzip.compress(text.encode())),
        tmp_path / "c.parquet",
    ]
    table = pa.table({"id": ["x" * 99] * 2, "text": [text, text[::-1]]})
    pq.write_table(table, paths[2], use_dictionary=False)
    sizes = [from_files([str(path)]).num_bytes for path in paths]
    assert sizes[:2] == [len(text)] * 2
    assert sizes[2] == pytest.approx(2 * len(text), rel=0.01)


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
    (tmp_path / "in" / "broken link").symlink_to(tmp_path / "nothing")
    write(tmp_path / "linked", "4.txt", "linked")
    (tmp_path / "in" / "link").symlink_to(tmp_path / "linked")
    (tmp_path / "linked" / "cycle").symlink_to(tmp_path / "in")
    assert read(tmp_path / "in") == ["a/1.py", "a/sub [1]/3.txt", "b/2.md", "linked"]
    skipped = "broken link, other.csv, package.json, picture.png, utf16.txt, ..."
    assert capsys.readouterr().out.endswith(
        f"6 files are skipped, because they are not UTF-8 text or have no column text: {skipped}\n"
    )
    assert read(tmp_path / "in", suffixes=[".py", ".md"]) == ["a/1.py", "b/2.md"]
    assert read(tmp_path / "in/*/*.md", tmp_path / "in/b/2.md") == ["b/2.md"]


@pytest.mark.parametrize("name", ["notes [2013].txt", "a*.txt"])
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


def test_files_whose_names_are_not_utf_8_are_read(tmp_path):
    folder = tmp_path / os.fsdecode(b"gr\xfc\xdfe")
    folder.mkdir()
    paths = [
        folder / os.fsdecode(name) for name in (b"a\xe9.txt", b"b\xfe.parquet", b"c\xfd.arrow")
    ]
    paths[0].write_text("text")
    # pyarrow itself takes no such name
    pq.write_table(pa.table({"text": ["parquet"]}), tmp_path / "table")
    (tmp_path / "table").rename(paths[1])
    pyarrow.feather.write_feather(pa.table({"text": ["arrow"]}), tmp_path / "table")
    (tmp_path / "table").rename(paths[2])
    write(folder, os.fsdecode(b"picture \xe0.png"), b"\xff")
    out = folder / "out"
    options = ("--tokenizer=bytes", "--val_tokens=9", f"--source={folder}", f"--out={out}")
    result = call("data/text/prepare.py", *options)
    assert result.returncode == 0, result.stderr
    assert rb"picture \xe0.png" in result.stdout
    names = ("val_000000", "train_000001")
    tokens = [np.fromfile(out / f"text_{name}.bin", "<u2", offset=1024) for name in names]
    texts = "".join(chr(token) for token in np.concatenate(tokens)).split(chr(256))[1:]
    assert sorted(texts) == ["arrow", "parquet", "text"]


def test_a_saved_dataset_is_read_without_its_caches(tmp_path):
    datasets.Dataset.from_dict({"text": ["one", "two"]}).save_to_disk(tmp_path / "saved")
    saved = datasets.load_from_disk(tmp_path / "saved")
    saved.map(lambda row: {"text": row["text"].upper()})
    assert list((tmp_path / "saved").glob("cache-*.arrow"))
    assert read(tmp_path) == ["one", "two"]


def test_the_splits_of_a_saved_dataset_are_not_mixed(tmp_path):
    split = datasets.Dataset.from_dict({"text": ["one"]})
    datasets.DatasetDict({"train": split, "test": split}).save_to_disk(tmp_path / "saved")
    with pytest.raises(ValueError, match="saved holds the splits of a DatasetDict, test, train; "):
        read(tmp_path)
    assert read(tmp_path / "saved" / "train") == ["one"]


def test_a_folder_that_cannot_be_searched_is_an_error(tmp_path, monkeypatch):
    write(tmp_path, "a/1.txt", "one")
    write(tmp_path, "b/2.txt", "two")
    scandir = os.scandir

    def refuse(path):
        if Path(path).name == "b":
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(PermissionError, match="/b'"):
        read(tmp_path)


def test_rows_without_text_are_counted(tmp_path, capsys):
    path = write(tmp_path, "a.jsonl", '{"text": "one"}\n{"text": ""}\n{"body": "two"}\n')
    assert read(path) == read(path) == ["one"]
    assert capsys.readouterr().out == f"{path}: 2 of 3 rows have no text in column text\n"


def parquet_bytes(values) -> bytes:
    file = pa.BufferOutputStream()
    pq.write_table(pa.table({"text": values}), file)
    return file.getvalue().to_pybytes()


def stream_bytes(values) -> bytes:
    file = pa.BufferOutputStream()
    with pa.ipc.new_stream(file, pa.schema([("text", pa.string())])) as writer:
        writer.write_table(pa.table({"text": values}), max_chunksize=1)
    return file.getvalue().to_pybytes()


LINE = b'{"text": "one"}\n'
UTF8 = "it is not UTF-8 text; convert it, for example with iconv, or unpack it"
# name of a file: its content, and what is wrong with it
BROKEN = {
    "torn.jsonl": (LINE + b'{"text": "tw', ", row 2: it is damaged (Unterminated string"),
    "deep.jsonl": (LINE + b"[" * 100_000, ", row 2: it is damaged (maximum recursion"),
    "body.jsonl": (b'{"body": "one"}', ", row 1: it has no column text, but body; name one with"),
    "latin.jsonl": (LINE * 300 + b'{"text": "\xe9"}\n' + LINE, f", row 301: {UTF8}"),
    "list.jsonl": (LINE + b'\n["two"]', ", row 2: it is not a JSON object; give one object for"),
    "type.jsonl": (LINE + b'{"text": 5}', ", row 2: the column holds int instead of text"),
    "twice.csv": (b"text,text\nx,y\n", ", row 1: it has 2 columns text; rename all but one"),
    "more.csv": (b"id,text\n1,x\n2,x, and y\n", ", row 2: it has 3 fields, but the header has 2"),
    "open.csv": (b'id,text\n1,x\n2,"y\n3,z\n', ", row 2: it is damaged (unexpected end of data)"),
    "torn.parquet": (parquet_bytes(["one"])[:-9], ", row 1: it is damaged ("),
    "a.parquet.gz": (gzip.compress(b"x"), "file cannot be read from .gz; unpack it"),
    "torn.arrow": (stream_bytes(["one", "two"])[:-20], ", row 2: it is damaged ("),
    "utf16.txt": ("text".encode("utf-16"), f": {UTF8}"),
    "member.txt.gz": (gzip.compress(b"x") + gzip.compress(b"y")[:9], ": it is damaged (Truncated"),
    "a.tar.gz": (gzip.compress(b"a.txt\0text"), ": it has zero bytes, and so is not text; un"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_file_that_cannot_be_read_is_named(tmp_path, name):
    content, message = BROKEN[name]
    path = write(tmp_path, name, content)
    with pytest.raises(SourceError, match=r"^[^\n]+$") as error:
        read(path)
    assert str(error.value).startswith(str(path))
    assert message in str(error.value)


# tables of other columns and files that are not text are skipped, damaged tables are not
@pytest.mark.parametrize("name", ["torn.jsonl", "torn.parquet", "member.txt.gz"])
def test_a_damaged_file_in_a_folder_is_not_skipped(tmp_path, name):
    write(tmp_path, name, BROKEN[name][0])
    write(tmp_path, "a.txt", "text")
    with pytest.raises(SourceError, match=name):
        read(tmp_path)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"typo\.txt: there are no files of text; give existing"):
        read(tmp_path / "typo.txt")
