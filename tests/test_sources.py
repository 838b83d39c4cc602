"""Documents of local files: what is read, in which order, and that every cursor is a place to go on
from.
"""

import gc
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


@pytest.mark.parametrize("row_group_size", [1, 3, 1000])
def test_parquet_rows_are_documents_and_null_is_none(tmp_path, row_group_size):
    rows = [None, *TEXTS[:4], None, None, *TEXTS[4:], None]
    write_parquet(tmp_path / "a.parquet", rows, row_group_size)
    assert read(tmp_path / "a.parquet") == TEXTS
    write_parquet(tmp_path / "b.parquet", [])
    write_parquet(tmp_path / "c.parquet", [None, None])
    assert read(tmp_path / "*.parquet") == TEXTS
    for kind in (pa.large_string(), pa.dictionary(pa.int32(), pa.string())):
        column = pa.array(TEXTS * 3, pa.string()).cast(kind)
        pq.write_table(pa.table({"id": range(24), "body": column}), tmp_path / "d.parquet")
        assert read(tmp_path / "d.parquet", column="body") == TEXTS * 3


def test_json_lines_are_documents(tmp_path):
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


def test_json_lines_go_on_after_blank_lines_and_other_line_ends(tmp_path, small):
    lines = [json.dumps({"text": f"{i}é" * 20}) for i in range(30)]
    (tmp_path / "a.jsonl").write_bytes("".join(f"{line} \r\n \t\n\r\n" for line in lines).encode())
    source = Files([str(tmp_path)])
    assert documents(source.read()) == [f"{i}é" * 20 for i in range(30)]
    assert_resumes_everywhere(source)


LONG = [
    "".join(f"{'é日👧x'[i % 4] * (i % 23)}\n" for i in range(200)),
    "é" * 500,
    "x" + "日" * 400,  # the other phases of three bytes
    "xy" + "日" * 400,
    "👧" * 300,
    "x" * 63 + "\n" + "y" * 64 + "\n\n",
    "x" * 64,
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
    many = [f"{i % 17} " * (i % 29) for i in range(120)]
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
    for shuffled in (False, True):
        keys = {"unique": unique, "shuffled": shuffled}
        assert_resumes_everywhere(Files([str(tmp_path / "in")], **keys))


def test_texts_in_memory_go_on_from_every_cursor():
    texts = [f"text {i}" for i in range(1300)]
    source = Texts(texts, "numbers")
    assert documents(source.read()) == texts
    assert_resumes_everywhere(source)


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


@pytest.mark.parametrize("content", [b"ok\n\xff\xfe", "größe".encode("latin-1")])
def test_a_file_given_by_name_must_be_text(tmp_path, content):
    (tmp_path / "a.txt").write_bytes(content)
    place = content.index(max(content))
    with pytest.raises(ValueError, match=rf"a\.txt is not UTF-8 text at byte {place}: leave"):
        read(tmp_path / "*.txt")


@pytest.mark.parametrize("bad", [b"\xff", b"\0"])
def test_what_turns_out_late_to_be_no_text_is_refused_with_its_place(tmp_path, small, bad):
    """Its beginning is among the documents already: it cannot be left out any more."""
    (tmp_path / "a.txt").write_bytes(b"0123456\n" * 20 + bad)
    with pytest.raises(ValueError, match=r"a\.txt is not UTF-8 text at byte 160"):
        read(tmp_path)


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
        assert read(tmp_path, shuffled=True) == by_hash
    assert by_hash != by_name
    # A file that several patterns name is read once; ** matches the folder and what is in it.
    assert read(tmp_path, tmp_path / "a" / "3.txt", tmp_path / "*") == by_name
    assert read(tmp_path / "**") == by_name


def test_identity_tells_names_and_sizes(tmp_path):
    def identity(**keys):
        return Files([str(tmp_path)], **keys).identity()

    (tmp_path / "a").write_text("abc")
    first = identity()
    assert json.loads(json.dumps(first)) == first
    assert first == identity()
    assert first["source"] == str(tmp_path)
    assert first != identity(unique=True)
    assert first != identity(column="body")
    (tmp_path / "b").write_text("")
    assert identity()["sha256"] != first["sha256"]
    (tmp_path / "b").unlink()
    (tmp_path / "a").write_text("abcd")
    assert identity()["sha256"] != first["sha256"]

    ab, ba, joined = (Texts(texts, "x").identity() for texts in (["a", "b"], ["b", "a"], ["ab"]))
    assert len({ab["sha256"], ba["sha256"], joined["sha256"]}) == 3
    assert ab == Texts(["a", "b"], "x").identity()
    assert ab["source"] == "x"


def test_text_bytes_are_about_right(tmp_path):
    for name, size in (("a.txt", 1000), ("b.jsonl", 500)):
        (tmp_path / name).write_text("x" * size)
    assert Files([str(tmp_path)]).text_bytes() == 1500
    texts = [hashlib.sha256(bytes([i])).hexdigest() * 9 for i in range(200)]
    for number in (0, 1):
        write_parquet(tmp_path / f"{number}.parquet", texts, row_group_size=50, compression="zstd")
    parquet_bytes = Files([str(tmp_path / "*.parquet")]).text_bytes()
    assert parquet_bytes == pytest.approx(2 * sum(map(len, texts)), rel=0.1)
    assert parquet_bytes > 3 * sum(path.stat().st_size for path in tmp_path.glob("*.parquet"))
    assert Texts(["größe", "x"], "x").text_bytes() == 8


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "cut of', "holds no JSON at byte 18"),
        ("{'text': 'Python'}", "holds no JSON at byte 18"),
        ('{"body": "x"}', "has no text under 'text' in the line at byte 18: give --column"),
        ('{"text": null}', "has no text under 'text'"),
        ('{"text": ["x"]}', "has no text under 'text'"),
        ('["text"]', "has no text under 'text'"),
        ('"text"', "has no text under 'text'"),
    ],
)
def test_broken_json_lines_are_named_with_their_place(tmp_path, line, message):
    write_json_lines(tmp_path / "a.jsonl", ['{"text": "first"}', line, '{"text": "last"}'])
    with pytest.raises(ValueError, match=rf"a\.jsonl {message}"):
        read(tmp_path)


USES = (lambda source: list(source.read()), Files.text_bytes)


@pytest.mark.parametrize("cut", [0, 1, 4, 100, -1, -20])
def test_a_truncated_parquet_file_is_named(tmp_path, cut):
    path = write_parquet(tmp_path / "a.parquet", TEXTS * 50)
    path.write_bytes(path.read_bytes()[:cut])
    for use in USES:
        with pytest.raises(ValueError, match=r"a\.parquet is no whole parquet file .*: fetch it a"):
            use(Files([str(tmp_path)]))


@pytest.mark.parametrize("compression", ["snappy", "none"])
@pytest.mark.parametrize("where", ["page header", "text"])
def test_damaged_pages_are_named_and_the_rows_before_them_come(tmp_path, compression, where):
    """Bytes overwritten in the last of four groups; in text that is stored plainly, what remains is
    no UTF-8.
    """
    texts = [f"größe {i} {hashlib.sha256(bytes([i % 256])).hexdigest()}" for i in range(1000)]
    keys = {"row_group_size": 256, "compression": compression, "use_dictionary": False}
    path = write_parquet(tmp_path / "a.parquet", texts, **keys)
    column = pq.ParquetFile(path).metadata.row_group(3).column(0)
    content = bytearray(path.read_bytes())
    if where == "page header":
        start = column.data_page_offset
    elif compression == "none":
        start = content.index(texts[900].encode())
    else:
        start = column.data_page_offset + column.total_compressed_size // 2
    content[start : start + 4] = b"\xff" * 4
    path.write_bytes(content)
    found = []
    with pytest.raises(ValueError, match=r"a\.parquet is damaged near row 768 .*: fetch it again"):
        found.extend(text for _, _, text, _ in Files([str(path)]).documents({"file": 0, "at": 0}))
    assert found == texts[:768]
    gc.collect()  # pyarrow's reader is done with the file


def test_no_such_column_or_one_that_is_no_text(tmp_path):
    path = tmp_path / "a.parquet"
    columns = {"number": [1, 2], "raw": [b"x", b"\xff"], "list": [["a"], ["b"]]}
    pq.write_table(pa.table(columns | {"row": [{"text": "a"}] * 2}), path)
    message = r"a\.parquet has no column text, it has number, raw, list, row: give --c"
    for use in USES:
        with pytest.raises(ValueError, match=message):
            use(Files([str(path)]))
    for column, kind in (("number", "int"), ("raw", "bytes"), ("list", "list"), ("row", "dict")):
        assert Files([str(path)], column).text_bytes() > 0
        message = rf"a\.parquet: column {column} holds {kind}, not text: give --column"
        with pytest.raises(ValueError, match=message):
            read(path, column=column)


@pytest.mark.parametrize("suffixes", [(), (".py", ".c")])
def test_nothing_there_is_refused(tmp_path, suffixes):
    (tmp_path / "in").mkdir()
    which = " with suffix .py, .c" if suffixes else ""
    for pattern in ("in", "in/*", "nowhere/**/*.txt"):
        with pytest.raises(ValueError, match=f"{re.escape(pattern)}: no files{which} there"):
            Files([str(tmp_path / pattern)], suffixes=suffixes)
