"""Read local files row by row: parquet, Arrow, JSON, CSV and text.

They are not read with the library `datasets`, which gives all rows of JSON lines the types of the
first ones, and so refuses files that differ in a column that is not used, and turns a text such as
2024-01-01 into a time. Its errors name neither the file nor the row, and importing it takes seconds.

A file that cannot be read as it was meant ends in an error that names the file and the row: no
document is cut or lost without a word.
"""

import contextlib
import csv
import functools
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pyarrow
from pyarrow import ipc, parquet

from utils import files

PIECE_CHARACTERS = 8 << 20  # text files are tokenized in pieces of about this size
ROWS = 256  # of a parquet file that are read at once
# pyarrow's name of the compression of text files, by suffix
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}

# what readers and the libraries below them raise
UNREADABLE = (ValueError, TypeError, OSError, RecursionError, csv.Error, pyarrow.ArrowException)

csv.field_size_limit(2**31 - 1)


class SourceError(ValueError):
    """A source that cannot be read; the message names the file or the dataset."""


class NoDocumentsError(SourceError):
    """A file that is not text, or a table without the column; in a folder, it is skipped."""


def get_kind(path: Path) -> str:
    """Return the suffix of a file in lower case, or of its content if it is compressed."""
    path = Path(path.name.lower())
    return Path(path.stem).suffix if path.suffix in COMPRESSIONS else path.suffix


def estimate_bytes(path: Path, column: str) -> int:
    """Return about how many bytes of text a file has once it is decompressed."""
    size = path.stat().st_size
    if path.suffix.lower() == ".gz" and size >= 4:
        with open(path, "rb") as file:
            # the last four bytes are the size of the content
            file.seek(-4, os.SEEK_END)
            return int.from_bytes(file.read(), "little")
    if path.suffix.lower() in COMPRESSIONS:
        return 3 * size
    if get_kind(path) == ".parquet":
        # a damaged file is an error when it is read
        with contextlib.suppress(*UNREADABLE):
            return count_parquet_bytes(path, column)
    return size


def count_parquet_bytes(path: Path, column: str) -> int:
    """Return the uncompressed size of a column of a parquet file."""
    metadata = parquet.read_metadata(pyarrow.OSFile(os.fsencode(path)))
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    return sum(
        group.column(index).total_uncompressed_size
        for group in groups
        for index in range(group.num_columns)
        if group.column(index).path_in_schema == column
    )


def read_file(path: Path, column: str) -> Iterator[dict]:
    """Yield the texts of a file, which are None where a table has none.

    Raises:
        NoDocumentsError: the file does not exist, does not begin with text, or has no such column
        SourceError: it is damaged, or a row is not what its header promises
    """
    read = READERS.get(get_kind(path))
    num_rows = 0
    num_without_text = 0
    try:
        if read is None:
            yield from read_text(path)
            return
        for value in read(path, column):
            if has_text(value):
                # JSON can hold half of a surrogate pair, but UTF-8 cannot
                value = value.encode("utf-8", "replace").decode()
            else:
                num_without_text += 1
            yield {"text": value}
            num_rows += 1
    except UNREADABLE as error:
        error_type = SourceError
        if isinstance(error, NoDocumentsError | FileNotFoundError):
            error_type = NoDocumentsError
        if num_rows == 0 and isinstance(error, UnicodeError | json.JSONDecodeError):
            error_type = NoDocumentsError
        location = str(path) if read is None else f"{path}, row {num_rows + 1:,}"
        raise error_type(f"{location}: {explain(error)}") from error
    if num_without_text:
        print_once(
            f"{files.show_path(path)}: {num_without_text:,} of {num_rows:,} rows have no text in column "
            f"{column}"
        )


@functools.cache  # a tokenizer is trained on the same files
def print_once(message: str) -> None:
    """Print a message, unless it has been printed before."""
    print(message)


def explain(error: Exception) -> str:
    """Say what is wrong with a row or a file, and what to do."""
    if isinstance(error, SourceError | TypeError):
        return str(error)
    if isinstance(error, UnicodeError):
        return "it is not UTF-8 text; convert it, for example with iconv, or unpack it"
    reason = str(error).partition("\n")[0][:200]
    return f"it is damaged ({reason}); repair or remove it"


def has_text(value: object) -> bool:
    """Return whether a value of a column of texts is one that is not empty.

    Raises:
        TypeError: it is something else
    """
    if not isinstance(value, str | None):
        raise TypeError(
            f"the column holds {type(value).__name__} instead of text; name another with --column"
        )
    return bool(value)


def open_text(path: Path) -> io.TextIOWrapper:
    """Open a text file, with its line breaks as they are; decompress it if need be.

    Bytes that are not UTF-8 become surrogates, so that who reads a row finds them in this row;
    otherwise they would be an error as soon as the buffer holds them, some rows before.
    """
    file = open(path, "rb")  # noqa: SIM115
    if path.suffix.lower() in COMPRESSIONS:
        file = pyarrow.CompressedInputStream(file, COMPRESSIONS[path.suffix.lower()])
    return io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="")


def read_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a text file with their line breaks.

    Raises:
        UnicodeError: a line is not UTF-8
    """
    with open_text(path) as file:
        for line in file:
            line.encode()  # a surrogate raises an error
            yield line


def read_text(path: Path) -> Iterator[dict]:
    """Yield the pieces of a text file, which end with a line break if there is one."""
    with open_text(path) as file:
        starts = True
        while piece := file.read(PIECE_CHARACTERS):
            piece += file.readline(PIECE_CHARACTERS)
            piece.encode()  # a surrogate raises an error
            if "\0" in piece:
                raise NoDocumentsError("it has zero bytes, and so is not text; unpack or omit it")
            yield {"text": piece, "starts": starts}
            starts = False


def check_column(column: str, columns: list[str]) -> None:
    """Raise SourceError unless exactly one of the columns has this name."""
    if column not in columns:
        shown = ", ".join(columns)[:200] or "none at all"
        raise NoDocumentsError(f"it has no column {column}, but {shown}; name one with --column")
    if columns.count(column) > 1:
        raise SourceError(f"it has {columns.count(column)} columns {column}; rename all but one")


def check_uncompressed(path: Path) -> None:
    """Raise SourceError if a table that is read at any position is compressed as a whole."""
    if path.suffix.lower() in COMPRESSIONS:
        raise SourceError(f"a {get_kind(path)} file cannot be read from {path.suffix}; unpack it")


def read_parquet(path: Path, column: str) -> Iterator[object]:
    """Yield the values of a column of a parquet file."""
    check_uncompressed(path)
    with parquet.ParquetFile(pyarrow.OSFile(os.fsencode(path))) as file:
        check_column(column, file.schema_arrow.names)
        for batch in file.iter_batches(ROWS, columns=[column]):
            yield from batch.column(0).to_pylist()


def read_arrow(path: Path, column: str) -> Iterator[object]:
    """Yield the values of a column of an Arrow file, or of a stream, as `datasets` writes it."""
    check_uncompressed(path)
    with pyarrow.memory_map(os.fsencode(path)) as file:
        is_stream = file.read(6) != b"ARROW1"
        file.seek(0)
        reader = ipc.open_stream(file) if is_stream else ipc.open_file(file)
        check_column(column, reader.schema.names)
        batches = reader if is_stream else map(reader.get_batch, range(reader.num_record_batches))
        for batch in batches:
            yield from batch.column(column).to_pylist()


def read_json(path: Path, column: str) -> Iterator[object]:
    """Yield the values of a key of JSON lines, or of the objects of one array; the first has the key."""
    for number, row in enumerate(parse_json(path)):
        if not isinstance(row, dict):
            error_type = SourceError if number else NoDocumentsError
            raise error_type("it is not a JSON object; give one object for each document")
        if number == 0:
            check_column(column, list(row))
        yield row.get(column)


def parse_json(path: Path) -> Iterator[object]:
    """Yield the values of JSON lines, or the items of one array."""
    lines = (line for line in read_lines(path) if line.strip())
    first_line = next(lines, "")
    if first_line.lstrip().startswith("["):
        yield from json.loads(first_line + "".join(lines))
    elif first_line:
        yield json.loads(first_line)
        yield from map(json.loads, lines)


def read_csv(path: Path, column: str) -> Iterator[str]:
    """Yield the values of a column of a .csv or .tsv file, whose first line names the columns."""
    delimiter = "\t" if get_kind(path) == ".tsv" else ","
    # strict, because a quotation mark that nothing closes would swallow the rows after it
    rows = csv.reader(read_lines(path), delimiter=delimiter, strict=True)
    header = next(rows, [])
    check_column(column, header)
    index = header.index(column)
    for row in rows:
        if row and len(row) != len(header):
            raise SourceError(
                f"it has {len(row)} fields, but the header has {len(header)}; put texts with commas, "
                "tabs or line breaks between quotation marks"
            )
        if row:
            yield row[index]


# by the suffix of the file, in lower case
READERS = {
    ".parquet": read_parquet,
    ".arrow": read_arrow,
    ".feather": read_arrow,
    ".jsonl": read_json,
    ".ndjson": read_json,
    ".json": read_json,
    ".csv": read_csv,
    ".tsv": read_csv,
}
