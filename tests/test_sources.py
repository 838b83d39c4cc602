"""Local files are read as documents, in a known order, and reading resumes from every cursor."""

import gzip
import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers import write_parquet

from data import sources
from data.hub import HubDataset
from data.sources import Batch, Files, NotTextError, Texts

TEXTS = [
    "One document.",
    "Ümlaute and 日本語.\n",
    "x" * 700,
    "👩‍👩‍👧 last\n\n",
    "a\nb\n",
    " ",
    "<|endoftext|>",
]


def write_json_lines(path: Path, rows: list[str | dict]) -> None:
    """Write a line for each row; a str is a line of its own."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def join_pieces(batches: Iterable[Batch]) -> list[str]:
    """Return the documents of batches; a text that continues another one is joined to it."""
    documents = []
    for batch in batches:
        starts = batch.starts or [True] * len(batch.texts)
        for text, is_start in zip(batch.texts, starts, strict=True):
            if is_start:
                documents.append(text)
            else:
                documents[-1] += text
    return documents


def read(*patterns: Path, **options) -> list[str]:
    return join_pieces(Files([str(pattern) for pattern in patterns], **options).read())


def assert_resumes_everywhere(source: Files | Texts) -> None:
    """Check that reading from every cursor, stored as JSON, yields the batches that followed it."""
    batches = list(source.read())
    assert len(batches) > 3
    for index, batch in enumerate(batches):
        assert list(source.read(json.loads(json.dumps(batch.cursor)))) == batches[index:]


@pytest.fixture
def _small_batches(monkeypatch) -> None:
    """Let little text have many pieces, batches and groups of rows."""
    monkeypatch.setattr(sources, "PIECE_BYTES", 64)
    monkeypatch.setattr(sources, "BATCH_CHARACTERS", 100)
    monkeypatch.setattr(sources, "ROWS", 3)


# ---- kinds of files ----


def test_parquet_rows_are_documents_and_null_is_none(tmp_path):
    rows = [None, *TEXTS[:4], None, None, *TEXTS[4:], None]
    write_parquet(tmp_path / "a.parquet", rows, 3)
    write_parquet(tmp_path / "b.parquet", [])
    write_parquet(tmp_path / "c.parquet", [None, None])
    assert read(tmp_path / "*.parquet") == TEXTS


@pytest.mark.parametrize(
    "column_type", [pa.large_string(), pa.dictionary(pa.int32(), pa.string())], ids=str
)
def test_parquet_columns_of_other_text_types_are_read(tmp_path, column_type):
    column = pa.array(TEXTS * 3, pa.string()).cast(column_type)
    pq.write_table(pa.table({"id": range(21), "body": column}), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet", column="body") == TEXTS * 3


@pytest.mark.usefixtures("_small_batches")
def test_json_lines_are_documents_and_blank_lines_are_none(tmp_path):
    rows = [{"text": text, "id": i} for i, text in enumerate(TEXTS)]
    write_json_lines(tmp_path / "a.jsonl", [rows[0], "", "  \t", *rows[1:]])
    assert read(tmp_path / "a.jsonl") == TEXTS


@pytest.mark.usefixtures("_small_batches")
def test_json_that_pythons_parser_cannot_hold_is_skipped_and_counted(tmp_path):
    """It is valid, so nothing is damaged: JSON limits neither its depth nor its digits."""
    deep = f'{{"text": "deep", "more": {"[" * 200_000}{"]" * 200_000}}}'
    long_number = f'{{"text": "long", "more": {"9" * 5000}}}'
    write_json_lines(tmp_path / "a.jsonl", [deep, long_number, deep, {"text": "last"}])
    source = Files([str(tmp_path)], column="text")
    assert [text for batch in source.read() for text in batch.texts] == ["long", "last"]
    [line] = source.describe_skipped()
    assert line == "rows skipped because they have no readable text in column text: 2"
    clone = HubDataset(str(tmp_path))
    assert [text for batch in clone.read() for text in batch.texts] == ["long", "last"]


def test_an_array_that_is_nested_too_deeply_is_called_so(tmp_path):
    (tmp_path / "a.json").write_text(f'[{{"text": {"[" * 200_000}{"]" * 200_000}}}]')
    with pytest.raises(NotTextError, match="maximum recursion depth"):
        read(tmp_path / "a.json")


@pytest.mark.usefixtures("_small_batches")
def test_the_last_json_line_may_lack_its_line_break(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"body": "no line break at the end"}')
    assert read(tmp_path / "a.jsonl", column="body") == ["no line break at the end"]


@pytest.mark.usefixtures("_small_batches")
def test_half_of_a_surrogate_pair_is_replaced(tmp_path):
    # JSON can hold half of a pair, but UTF-8 cannot
    write_json_lines(tmp_path / "a.jsonl", ['{"text": "a\\ud800"}', '{"text": "\\ud83d\\udc67"}'])
    assert read(tmp_path / "a.jsonl") == ["a?", "👧"]


@pytest.mark.usefixtures("_small_batches")
def test_an_empty_row_and_an_empty_file_are_no_documents(tmp_path):
    (tmp_path / "a.txt").touch()
    (tmp_path / "b.jsonl").touch()
    write_json_lines(tmp_path / "c.jsonl", [{"text": ""}])
    assert read(tmp_path / "*") == []


@pytest.mark.usefixtures("_small_batches")
def test_json_lines_may_end_in_spaces_and_carriage_returns(tmp_path):
    texts = [f"{i}é" * 20 for i in range(30)]
    content = "".join(json.dumps({"text": text}) + " \r\n \t\n\r\n" for text in texts)
    (tmp_path / "a.jsonl").write_bytes(content.encode())
    assert read(tmp_path / "a.jsonl") == texts
    assert_resumes_everywhere(Files([str(tmp_path / "a.jsonl")]))


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


@pytest.mark.parametrize("piece_bytes", [5, 64, 1000])
def test_pieces_of_a_large_file_join_to_the_file(tmp_path, monkeypatch, piece_bytes):
    monkeypatch.setattr(sources, "PIECE_BYTES", piece_bytes)
    for index, text in enumerate(LONG):
        (tmp_path / f"{index}.txt").write_bytes(text.encode())
    batches = list(Files([str(tmp_path)]).read())
    assert join_pieces(batches) == LONG
    pieces = [text for batch in batches for text in batch.texts]
    assert all(0 < len(text.encode()) <= piece_bytes for text in pieces)
    if piece_bytes < 1000:
        assert len(pieces) > 3 * len(LONG)


@pytest.mark.parametrize("text", LONG)
def test_a_compressed_text_is_decompressed_once(tmp_path, monkeypatch, text):
    """Its pieces are those of the plain file; only the first position is sought."""
    monkeypatch.setattr(sources, "PIECE_BYTES", 64)
    seek = gzip.GzipFile.seek
    offsets = []

    def record_seek(file, offset, *whence):
        offsets.append(offset)
        return seek(file, offset, *whence)

    monkeypatch.setattr(gzip.GzipFile, "seek", record_seek)
    (tmp_path / "a.txt").write_bytes(text.encode())
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(text.encode()))
    pieces = list(sources.read_text(tmp_path / "a.txt.gz", 0, refuse_zeros=True))
    assert pieces == list(sources.read_text(tmp_path / "a.txt", 0, refuse_zeros=True))
    assert len(pieces) > 1
    assert offsets == [0]


def write_mixed_folder(folder: Path) -> list[str]:
    """Write all kinds of files, with repetitions and empty rows, and return their documents in the order of names."""
    folder.mkdir(exist_ok=True)
    many = [f"{i % 17} " * (i % 29) for i in range(60)]
    write_parquet(folder / "a.parquet", [*many, None, *TEXTS], row_group_size=7)
    rows = [*TEXTS, *many[::-1], LONG[0]]
    write_json_lines(folder / "b.jsonl", [{"text": text} for text in rows])
    text_files = [*LONG, "short\n", LONG[2]]
    for index, text in enumerate(text_files):
        (folder / f"c_{index:02d}.txt").write_bytes(text.encode())
    last_rows = [*TEXTS, "short\n", "new at the end", LONG[1], LONG[1]]
    write_parquet(folder / "d.parquet", last_rows, row_group_size=2)
    documents = [*many, *TEXTS, *rows, *text_files, *last_rows]
    return [text for text in documents if text]


ROWS_OF_TABLE = [
    {"id": 0, "text": "a"},
    {"text": None},
    {"text": 'b,\n\ufeff"c"'},
    {"id": 3},
    {"text": 5},
    {"text": ""},
]


def write_table(path: Path) -> None:
    """Write rows, two of which have text, in the format of the suffix."""
    lines = "".join(json.dumps(row) + "\n" for row in ROWS_OF_TABLE).encode()
    name = path.name.lower()
    if ".csv" in name:
        # the mark of byte order is one at the start of the file alone
        lines = '\ufeffid,text\r\n0,a\r\n2,"b,\n\ufeff""c"""\r\n3\r\n4,\r\n'.encode()
    elif ".tsv" in name:
        lines = 'id\ttext\n0\ta\n2\t"b,\n\ufeff""c"""\n3\n4\t\n'.encode()
    elif name.startswith("array"):
        lines = json.dumps(ROWS_OF_TABLE, indent=1).encode()
    path.write_bytes(gzip.compress(lines) if name.endswith(".gz") else lines)


@pytest.mark.parametrize(
    "name",
    [
        "a.jsonl",
        "A.JSONL",
        "a.ndjson",
        "part-0.json",
        "array.json",
        "a.csv",
        "a.TSV",
        "a.JSONL.gz",
        "a.csv.gz",
    ],
)
def test_rows_of_tables_are_documents_and_rows_without_text_are_counted(tmp_path, name):
    write_table(tmp_path / name)
    source = Files([str(tmp_path / name)])
    assert join_pieces(source.read()) == ["a", 'b,\n\ufeff"c"']
    num_skipped = 2 if name.lower().startswith(("a.csv", "a.tsv")) else 4
    line = f"rows skipped because they have no readable text in column text: {num_skipped}"
    assert source.describe_skipped() == [line]


@pytest.mark.usefixtures("_small_batches")
@pytest.mark.parametrize("name", ["a.jsonl", "array.json", "a.csv.gz"])
def test_tables_are_read_on_from_every_cursor(tmp_path, monkeypatch, name):
    monkeypatch.setattr(sources, "BATCH_CHARACTERS", 1)
    write_table(tmp_path / name)
    (tmp_path / "b.txt").write_text("b")
    (tmp_path / "c.txt").write_text("c")
    assert_resumes_everywhere(Files([str(tmp_path)]))


def test_suffixes_select_compressed_files_and_capital_letters_too(tmp_path):
    for name in ("a.jsonl", "b.JSONL", "c.jsonl.gz"):
        write_table(tmp_path / name)
    (tmp_path / "d.txt").write_text("d")
    source = Files([str(tmp_path)], suffixes=(".jsonl",))
    assert [path.name for path in source.paths] == ["a.jsonl", "b.JSONL", "c.jsonl.gz"]


def test_a_byte_order_mark_is_not_part_of_a_text(tmp_path):
    (tmp_path / "a.txt").write_text("größe \ufeff", encoding="utf-8-sig")
    assert read(tmp_path) == ["größe \ufeff"]


def test_a_compressed_text_is_one_document(tmp_path):
    text = "größe\n" * 100
    (tmp_path / "a.txt.GZ").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "b.txt").write_text(text)
    assert Files([str(tmp_path / "a.txt.GZ")]).text_bytes() == len(text.encode())


def test_files_of_folders_that_only_look_like_tables_are_skipped(tmp_path):
    (tmp_path / "package.json").write_text(json.dumps({"name": "x"}, indent=1))
    (tmp_path / "one.json").write_text('{"name": "x"}')
    (tmp_path / "other.csv").write_text("id;body\n1;x\n")
    (tmp_path / "plain.gz").write_text("not compressed")
    (tmp_path / "a.txt").write_text("a")
    source = Files([str(tmp_path)])
    assert join_pieces(source.read()) == ["a"]
    assert len(source.not_text) == 4


# ---- order and cursors ----


@pytest.mark.usefixtures("_small_batches")
def test_files_are_read_in_the_order_of_their_names(tmp_path):
    assert write_mixed_folder(tmp_path / "in") == read(tmp_path / "in")


@pytest.mark.usefixtures("_small_batches")
def test_files_are_read_on_from_every_cursor(tmp_path):
    write_mixed_folder(tmp_path / "in")
    assert_resumes_everywhere(Files([str(tmp_path / "in")], shuffled=True))


def test_texts_in_memory_are_read_on_from_every_cursor():
    texts = [f"text {i}" for i in range(1300)]
    assert join_pieces(Texts(texts, "numbers").read()) == texts
    assert_resumes_everywhere(Texts(texts, "numbers"))


# ---- which files are read ----


@pytest.fixture
def tree(tmp_path) -> Path:
    """Return a folder with hidden, cached and binary files among others.

    The text of a file is its name. The folder is hidden itself, which has no effect if it is named.
    """
    root = tmp_path / ".own" / "root"
    names = ["b.txt", "a/z.txt", "a/code.py", "a/.hidden.txt", ".git/config"]
    for name in [*names, "a/__pycache__/m.txt", "c"]:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    (root / "picture.bin").write_bytes(b"\x89PNG\xff\xfe")
    (root / "zeros.dat").write_bytes(b"text\0text")
    return root


def test_hidden_and_binary_files_of_folders_are_skipped(tree):
    source = Files([str(tree)])
    assert join_pieces(source.read()) == ["a/code.py", "a/z.txt", "b.txt", "c"]
    assert {path.name for path in source.not_text} == {"picture.bin", "zeros.dat"}


def test_suffixes_select_files_of_folders(tree):
    assert read(tree, suffixes=(".txt", ".none")) == ["a/z.txt", "b.txt"]


def test_hidden_and_binary_files_that_are_named_are_read(tree):
    assert read(tree / "a" / ".hidden.txt", tree / "c") == ["a/.hidden.txt", "c"]
    assert read(tree / "zeros.dat") == ["text\0text"]


@pytest.fixture
def numbered(tmp_path) -> Path:
    """Return a folder of two folders of files, whose texts are their own paths."""
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        for number in range(8):
            path = tmp_path / folder / f"{number}.txt"
            path.write_text(str(path))
    return tmp_path


def list_paths(numbered: Path) -> list[str]:
    return [str(numbered / folder / f"{number}.txt") for folder in "ab" for number in range(8)]


@pytest.mark.parametrize("reverse", [False, True])
def test_order_does_not_depend_on_the_listing(numbered, monkeypatch, reverse):
    list_folder = sources.list_folder
    monkeypatch.setattr(
        sources, "list_folder", lambda folder: sorted(list_folder(folder), reverse=reverse)
    )
    by_name = list_paths(numbered)
    by_hash = sorted(by_name, key=lambda path: hashlib.sha256(path.encode()).hexdigest())
    assert by_hash != by_name
    assert read(numbered) == by_name
    assert read(numbered, shuffled=True) == by_hash


def test_a_file_that_several_patterns_name_is_read_once(numbered):
    # ** matches the folder and its contents
    assert read(numbered, numbered / "a" / "3.txt", numbered / "**") == list_paths(numbered)


@pytest.mark.parametrize("name", ["notes [2013].txt", "[c].txt", "a*.txt", "folder [1]/a.txt"])
def test_a_path_that_exists_is_not_a_pattern(tmp_path, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    for other in ("c.txt", "ab.txt", name):
        (tmp_path / other).write_text(other)
    assert read(tmp_path / name) == [name]
    assert name in read(tmp_path / name.partition("/")[0], tmp_path / "c.txt")


def test_links_to_folders_are_read_once(numbered):
    outside = numbered.parent / f"{numbered.name}_outside"
    outside.mkdir()
    (outside / "o.txt").write_text("outside")
    (numbered / "a" / "link").symlink_to(outside)
    (numbered / "a" / "again").symlink_to(numbered / "b")
    (numbered / "b" / "loop").symlink_to(numbered)
    (numbered / "broken").symlink_to("nowhere")
    assert sorted(read(numbered)) == sorted([*list_paths(numbered), "outside"])


# ---- identity and size ----


def test_the_identity_of_files_changes_with_names_sizes_and_options(tmp_path):
    def identify(**options) -> str:
        return json.dumps(Files([str(tmp_path)], **options).identity())

    (tmp_path / "a").write_text("abc")
    identities = [identify(), identify(column="body")]
    assert identify() == identities[0]
    (tmp_path / "b").write_text("")
    identities.append(identify())
    (tmp_path / "b").unlink()
    (tmp_path / "a").write_text("abcd")
    identities.append(identify())
    assert len(set(identities)) == 4


def test_the_identity_of_texts_is_their_checksum():
    checksums = [
        Texts(texts, "x").identity()["sha256"] for texts in (["a", "b"], ["b", "a"], ["ab"])
    ]
    assert len(set(checksums)) == 3
    assert Texts(["a", "b"], "x").identity() == {"source": "x", "sha256": checksums[0]}


def test_text_bytes_of_files_are_their_sizes(tmp_path):
    (tmp_path / "a.txt").write_text("x" * 1000)
    (tmp_path / "b.jsonl").write_text("x" * 500)
    assert Files([str(tmp_path)]).text_bytes() == 1500


def test_text_bytes_of_parquet_are_about_those_of_the_text(tmp_path):
    texts = [hashlib.sha256(bytes([i])).hexdigest() * 9 for i in range(200)]
    for number in (0, 1):
        write_parquet(tmp_path / f"{number}.parquet", texts, row_group_size=50, compression="zstd")
    num_bytes = Files([str(tmp_path / "*.parquet")]).text_bytes()
    assert num_bytes == pytest.approx(2 * sum(map(len, texts)), rel=0.1)


def test_text_bytes_of_parquet_are_those_of_the_column_behind_a_struct(tmp_path):
    texts = [f"document {number}" for number in range(100)]
    table = pa.table({"meta": [{"url": "x" * 500, "date": "y"}] * 100, "text": texts})
    pq.write_table(table, tmp_path / "a.parquet", use_dictionary=False)
    num_bytes = Files([str(tmp_path / "a.parquet")]).text_bytes()
    assert num_bytes == pytest.approx(sum(len(text) + 4 for text in texts), rel=0.05)
    with pytest.raises(
        ValueError, match=r"a\.parquet has no column body; name one of .*: meta.*text"
    ):
        Files([str(tmp_path / "a.parquet")], column="body").text_bytes()


def test_text_bytes_of_texts_are_those_of_utf_8():
    assert Texts(["größe", "x"], "x").text_bytes() == 8


# ---- files that cannot be read ----

FIRST = b'{"text": "first"}\n'
# without the time, so that every process collects the same names of tests
TRUNCATED_GZIP = gzip.compress(b"text" * 9, mtime=0)[:-9]
BROKEN = [
    ("a.txt", b"ok\n\xff\xfe", "is not UTF-8 text at byte 3; convert it to UTF-8"),
    ("a.jsonl", FIRST + b'{"text": "cut of', r"is damaged after row 0 \(Unterminated string"),
    ("a.jsonl", b'{"body": "x"}', "has no column text; name one of .* --column: body"),
    ("a.csv", b"id,body\n1,x\n", "has no column text; name one of .* --column: id, body"),
    ("a.jsonl.gz", b"plain", r"is not a complete \.gz file \(Not a gzipped file"),
    ("a.txt.gz", b"plain", r"is not a complete \.gz file \(Not a gzipped file"),
    ("a.txt.gz", TRUNCATED_GZIP, r"is not a complete \.gz file .*; download it"),
    ("a.parquet", b"", r"is not a complete parquet file .*; download it again"),
    ("a.parquet", b"PAR1" + b"x" * 200, r"is not a complete parquet file .*; download it again"),
]


@pytest.mark.parametrize(("name", "content", "message"), BROKEN)
def test_a_broken_file_is_named_with_its_place(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"{re.escape(name)} {message}"):
        read(tmp_path / name)


@pytest.mark.usefixtures("_small_batches")
@pytest.mark.parametrize("content", [b"\xff", b"\0"])
def test_a_file_that_is_no_text_after_its_beginning_is_refused(tmp_path, content):
    """It cannot be skipped any more, because its beginning has been read."""
    (tmp_path / "a.txt").write_bytes(b"0123456\n" * 20 + content)
    with pytest.raises(ValueError, match=r"a\.txt is not UTF-8 text at byte 160"):
        read(tmp_path)


@pytest.mark.parametrize("damaged_part", ["page header", "text"])
def test_damaged_pages_are_named_and_the_rows_before_them_are_read(tmp_path, damaged_part):
    texts = [f"größe {i} {hashlib.sha256(bytes([i % 256])).hexdigest()}" for i in range(1000)]
    # without compression, damaged text is no UTF-8
    path = write_parquet(
        tmp_path / "a.parquet",
        texts,
        row_group_size=256,
        compression="none",
        use_dictionary=False,
    )
    content = bytearray(path.read_bytes())
    # in the last of four groups of rows
    if damaged_part == "page header":
        start = pq.ParquetFile(path).metadata.row_group(3).column(0).data_page_offset
    else:
        start = content.index(texts[900].encode())
    content[start : start + 4] = b"\xff" * 4
    path.write_bytes(content)

    rows = []
    message = r"a\.parquet is damaged after row 767 .*; repair it, or download it again"
    with pytest.raises(ValueError, match=message):
        rows.extend(piece.text for piece in Files([str(path)]).read_pieces({"file": 0, "at": 0}))
    assert rows == texts[:768]


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ("text", r" has no column text; name one of .* --column: number, raw, list"),
        ("number", ": column number holds int64, not text; name another"),
        ("raw", ": column raw holds binary, not text; name another"),
        ("list", ": column list holds list<element: string>, not text; name another"),
    ],
)
def test_a_column_without_text_is_refused(tmp_path, column, message):
    columns = {"number": [1, 2], "raw": [b"x", b"\xff"], "list": [["a"], ["b"]]}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=rf"a\.parquet{message}"):
        read(tmp_path / "a.parquet", column=column)


@pytest.mark.parametrize("pattern", ["empty", "nowhere/**/*.txt", "typo.txt"])
@pytest.mark.parametrize(
    ("suffixes", "description"), [((), ""), ((".py", ".c"), " with suffix .py, .c")]
)
def test_a_pattern_without_files_is_refused_beside_others(numbered, pattern, suffixes, description):
    (numbered / "empty").mkdir()
    (numbered / "a" / "code.py").touch()
    message = f"{re.escape(str(numbered / pattern))}: there are no files{description}"
    with pytest.raises(ValueError, match=message):
        Files([str(numbered / "a"), str(numbered / pattern)], suffixes=suffixes)
