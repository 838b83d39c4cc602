"""Documents of local files: what is read, in which order, and that every cursor is a place to go on
from.
"""

import hashlib
import json
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers import write_parquet

from data import sources
from data.sources import Files, Texts

TEXTS = ["One document.", "Ümlaute and 日本語.\n", "", "x" * 700, "👩‍👩‍👧 last\n\n", "a\nb\n"]
TEXTS += [" ", "<|endoftext|>"]


def write_json_lines(path, rows):
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def documents(batches) -> list[str]:
    """Whole documents: texts that continue one are joined to it."""
    result = []
    for batch in batches:
        for text, start in zip(batch.texts, batch.starts or [True] * len(batch.texts), strict=True):
            result += [text] if start else [result.pop() + text]
    return result


def read(*patterns, **keys) -> list[str]:
    return documents(Files([str(pattern) for pattern in patterns], **keys).read())


def assert_resumes_everywhere(source):
    """From every cursor, as JSON keeps it, come the batches that followed it."""
    batches = list(source.read())
    assert len(batches) > 3
    for index, batch in enumerate(batches):
        assert list(source.read(json.loads(json.dumps(batch.cursor)))) == batches[index:]


@pytest.fixture
def small(monkeypatch):
    """Pieces, batches and groups of rows so small that little text has many."""
    monkeypatch.setattr(sources, "PIECE_BYTES", 64)
    monkeypatch.setattr(sources, "BATCH_CHARACTERS", 100)
    monkeypatch.setattr(sources, "ROWS", 3)


def test_parquet_rows_are_documents_and_null_is_none(tmp_path):
    rows = [None, *TEXTS[:4], None, None, *TEXTS[4:], None]
    write_parquet(tmp_path / "a.parquet", rows, 3)
    write_parquet(tmp_path / "b.parquet", [])
    write_parquet(tmp_path / "c.parquet", [None, None])
    assert read(tmp_path / "*.parquet") == TEXTS
    for kind in (pa.large_string(), pa.dictionary(pa.int32(), pa.string())):
        column = pa.array(TEXTS * 3, pa.string()).cast(kind)
        pq.write_table(pa.table({"id": range(24), "body": column}), tmp_path / "d.parquet")
        assert read(tmp_path / "d.parquet", column="body") == TEXTS * 3


def test_json_lines_are_documents(tmp_path, small):
    rows = [{"text": text, "id": i} for i, text in enumerate(TEXTS)]
    write_json_lines(tmp_path / "a.jsonl", [rows[0], "", "  \t", *rows[1:]])
    assert read(tmp_path / "a.jsonl") == TEXTS
    (tmp_path / "b.jsonl").write_bytes(b'{"body": "no line break at the end"}')
    assert read(tmp_path / "b.jsonl", column="body") == ["no line break at the end"]
    # JSON can hold half of a pair, UTF-8 cannot.
    write_json_lines(tmp_path / "c.jsonl", ['{"text": "a\\ud800"}', '{"text": "\\ud83d\\udc67"}'])
    assert read(tmp_path / "c.jsonl") == ["a?", "👧"]
    for name in ("d.txt", "e.jsonl"):  # no document; an empty row is one
        (tmp_path / name).touch()
    write_json_lines(tmp_path / "f.jsonl", [{"text": ""}])
    assert read(tmp_path / "[def]*") == [""]
    texts = [f"{i}é" * 20 for i in range(30)]
    ends = "".join(json.dumps({"text": text}) + " \r\n \t\n\r\n" for text in texts)
    (tmp_path / "g.jsonl").write_bytes(ends.encode())
    assert read(tmp_path / "g.jsonl") == texts
    assert_resumes_everywhere(Files([str(tmp_path / "g.jsonl")]))


LONG = [
    "".join(f"{'é日👧x'[i % 4] * (i % 23)}\n" for i in range(200)),
    "é" * 500,
    "x" + "日" * 400,  # the other phases of three bytes
    "xy" + "日" * 400,
    "👧" * 300,
    "x" * 63 + "\n" + "y" * 64 + "\n\n",
    "x" * 128,
    "\n" * 200,
]


@pytest.mark.parametrize("piece", [5, 64, 1000])
def test_pieces_of_a_large_file_join_to_the_file(tmp_path, monkeypatch, piece):
    monkeypatch.setattr(sources, "PIECE_BYTES", piece)
    for index, text in enumerate(LONG):
        (tmp_path / f"{index}.txt").write_bytes(text.encode())
    batches = list(Files([str(tmp_path)]).read())
    assert documents(batches) == LONG
    pieces = [text for batch in batches for text in batch.texts]
    assert all(0 < len(text.encode()) <= piece for text in pieces)
    assert (len(pieces) > 3 * len(LONG)) is (piece < 1000)


def mixed_folder(folder):
    """All kinds of files, with repetitions within and between them; the documents in name order."""
    folder.mkdir(exist_ok=True)
    many = [f"{i % 17} " * (i % 29) for i in range(60)]
    write_parquet(folder / "a.parquet", [*many, None, *TEXTS], row_group_size=7)
    rows = [*TEXTS, *many[::-1], LONG[0]]
    write_json_lines(folder / "b.jsonl", [{"text": text} for text in rows])
    for index, text in enumerate([*LONG, "short\n", LONG[2]]):
        (folder / f"c_{index:02d}.txt").write_bytes(text.encode())
    ends = [*TEXTS, "short\n", "new at the end", LONG[1], LONG[1]]
    write_parquet(folder / "d.parquet", ends, row_group_size=2)
    return [*many, *TEXTS, *rows, *LONG, "short\n", LONG[2], *ends]


@pytest.mark.parametrize("unique", [False, True])
def test_files_are_read_in_name_order_each_document_once_if_asked(tmp_path, small, unique):
    expected = mixed_folder(tmp_path / "in")
    expected = list(dict.fromkeys(expected)) if unique else expected
    assert read(tmp_path / "in", unique=unique) == expected
    assert_resumes_everywhere(Files([str(tmp_path / "in")], unique=unique, shuffled=True))


def test_texts_in_memory_go_on_from_every_cursor():
    texts = [f"text {i}" for i in range(1300)]
    assert documents(Texts(texts, "numbers").read()) == texts
    assert_resumes_everywhere(Texts(texts, "numbers"))


TREE = "b.txt a/z.txt a/code.py a/.hidden.txt .git/config a/__pycache__/m.txt c".split()


def test_hidden_and_binary_files_of_folders_are_left_out(tmp_path):
    root = tmp_path / ".own" / "root"  # a folder that is named itself may be hidden
    for name in TREE:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    (root / "picture.bin").write_bytes(b"\x89PNG\xff\xfe")
    (root / "zeros.dat").write_bytes(b"text\0text")
    source = Files([str(root)])
    assert documents(source.read()) == ["a/code.py", "a/z.txt", "b.txt", "c"]
    assert {path.name for path in source.not_text} == {"picture.bin", "zeros.dat"}
    assert read(root, suffixes=(".txt", ".none")) == ["a/z.txt", "b.txt"]
    assert read(root / "a" / ".hidden.txt", root / "c") == ["a/.hidden.txt", "c"]  # by name
    assert read(root / "zeros.dat") == ["text\0text"]


def test_order_does_not_depend_on_the_listing(tmp_path, monkeypatch):
    names = [f"{folder}/{i}.txt" for folder in "ab" for i in range(8)]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(str(tmp_path / name))
    by_name = sorted(str(tmp_path / name) for name in names)
    by_hash = sorted(by_name, key=lambda name: hashlib.sha256(name.encode()).hexdigest())
    listing = Path.rglob
    for reverse in (False, True):
        monkeypatch.setattr(Path, "rglob", lambda p, s, r=reverse: sorted(listing(p, s), reverse=r))
        assert read(tmp_path) == by_name
        assert read(tmp_path, shuffled=True) == by_hash != by_name
    # A file that several patterns name is read once; ** matches the folder and what is in it.
    assert read(tmp_path, tmp_path / "a" / "3.txt", tmp_path / "**") == by_name


def test_identity_tells_names_and_sizes(tmp_path):
    def identity(**keys):
        return json.dumps(Files([str(tmp_path)], **keys).identity())

    (tmp_path / "a").write_text("abc")
    seen = [identity(), identity(unique=True), identity(column="body")]
    assert seen[0] == identity()
    (tmp_path / "b").write_text("")
    seen.append(identity())
    (tmp_path / "b").unlink()
    (tmp_path / "a").write_text("abcd")
    seen.append(identity())
    assert len(set(seen)) == 5
    sums = [Texts(texts, "x").identity()["sha256"] for texts in (["a", "b"], ["b", "a"], ["ab"])]
    assert len(set(sums)) == 3
    assert Texts(["a", "b"], "x").identity() == {"source": "x", "sha256": sums[0]}


def test_text_bytes_are_about_right(tmp_path):
    for name, size in (("a.txt", 1000), ("b.jsonl", 500)):
        (tmp_path / name).write_text("x" * size)
    assert Files([str(tmp_path)]).text_bytes() == 1500
    texts = [hashlib.sha256(bytes([i])).hexdigest() * 9 for i in range(200)]
    for number in (0, 1):
        write_parquet(tmp_path / f"{number}.parquet", texts, row_group_size=50, compression="zstd")
    parquet_bytes = Files([str(tmp_path / "*.parquet")]).text_bytes()
    assert parquet_bytes == pytest.approx(2 * sum(map(len, texts)), rel=0.1)
    assert Texts(["größe", "x"], "x").text_bytes() == 8


# What cannot be read

FIRST = b'{"text": "first"}\n'
NO_TEXT = r"has no text under the key 'text' in the line at byte 18; name another key with --column"
BROKEN = [
    ("a.txt", b"ok\n\xff\xfe", "is not UTF-8 text at byte 3; convert it to UTF-8"),
    ("a.jsonl", FIRST + b'{"text": "cut of', "has a line that is not JSON at byte 18"),
    ("a.jsonl", FIRST + b'{"body": "x"}', NO_TEXT),
    ("a.jsonl", FIRST + b'{"text": null}', NO_TEXT),
    ("a.jsonl", FIRST + b'"text"', NO_TEXT),
    ("a.parquet", b"", r"is not a complete parquet file .*; download it again"),
    ("a.parquet", b"PAR1" + b"x" * 200, r"is not a complete parquet file .*; download it again"),
]


@pytest.mark.parametrize(("name", "content", "message"), BROKEN)
def test_a_broken_file_is_named_with_its_place(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"{re.escape(name)} {message}"):
        read(tmp_path / name)


@pytest.mark.parametrize("bad", [b"\xff", b"\0"])
def test_what_turns_out_late_to_be_no_text_is_refused_with_its_place(tmp_path, small, bad):
    """Its beginning is among the documents already: it cannot be left out any more."""
    (tmp_path / "a.txt").write_bytes(b"0123456\n" * 20 + bad)
    with pytest.raises(ValueError, match=r"a\.txt is not UTF-8 text at byte 160"):
        read(tmp_path)


@pytest.mark.parametrize("where", ["page header", "text"])
def test_damaged_pages_are_named_and_the_rows_before_them_come(tmp_path, where):
    """Bytes overwritten in the last of four groups; in text that is stored plainly, what remains is
    no UTF-8.
    """
    texts = [f"größe {i} {hashlib.sha256(bytes([i % 256])).hexdigest()}" for i in range(1000)]
    keys = {"row_group_size": 256, "compression": "none", "use_dictionary": False}
    path = write_parquet(tmp_path / "a.parquet", texts, **keys)
    content = bytearray(path.read_bytes())
    start = pq.ParquetFile(path).metadata.row_group(3).column(0).data_page_offset
    start = start if where == "page header" else content.index(texts[900].encode())
    content[start : start + 4] = b"\xff" * 4
    path.write_bytes(content)
    before = []
    with pytest.raises(
        ValueError, match=r"a\.parquet is damaged near row 768 .*; download it again"
    ):
        before.extend(piece.text for piece in Files([str(path)]).read_pieces({"file": 0, "at": 0}))
    assert before == texts[:768]


def test_no_such_column_or_one_that_is_no_text(tmp_path):
    path = tmp_path / "a.parquet"
    columns = {"number": [1, 2], "raw": [b"x", b"\xff"], "list": [["a"], ["b"]]}
    pq.write_table(pa.table(columns), path)
    message = r"a\.parquet has no column text; name one of .* --column: number, raw, list"
    for use in (lambda source: list(source.read()), Files.text_bytes):
        with pytest.raises(ValueError, match=message):
            use(Files([str(path)]))
    for column, kind in (("number", "int"), ("raw", "bytes"), ("list", "list")):
        message = rf"a\.parquet: column {column} holds {kind}, not text; name another column"
        with pytest.raises(ValueError, match=message):
            read(path, column=column)


@pytest.mark.parametrize("suffixes", [(), (".py", ".c")])
def test_nothing_there_is_refused(tmp_path, suffixes):
    (tmp_path / "in").mkdir()
    which = " with suffix .py, .c" if suffixes else ""
    for pattern in ("in", "nowhere/**/*.txt"):
        with pytest.raises(ValueError, match=f"{re.escape(pattern)}: there are no files{which}"):
            Files([str(tmp_path / pattern)], suffixes=suffixes)
