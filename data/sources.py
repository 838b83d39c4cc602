"""Where the documents of a corpus come from: local files, or texts in memory.

A source yields batches of texts, each with a cursor (JSON). An interrupted preparation reopens its
source at a cursor. The texts that follow a cursor do not depend on where reading began.
data/hub.py has the source that reads datasets of the Hugging Face Hub.
"""

import contextlib
import csv
import glob
import gzip
import hashlib
import io
import itertools
import json
import os
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import IO, Any, NamedTuple

from utils import errors

BATCH_CHARACTERS = 1_000_000
PIECE_BYTES = 8 << 20  # text files are read in pieces of at most this size
ROWS = 256  # rows of a parquet file that are read at once

# the csv module refuses fields of more than 128 KB otherwise
csv.field_size_limit(2**31 - 1)


class PermanentSourceError(ValueError):
    """An error of a source that rerunning the same command does not resolve."""


class NotTextError(PermanentSourceError):
    """A file that is not text, or a table without the column of the text."""


@dataclass(frozen=True)
class Batch:
    """Texts of a source, in order."""

    # where reading resumes to yield this batch again
    cursor: dict

    texts: list[str]

    # Whether each text begins a document; the others continue the document before them. None means
    # that all of them do.
    starts: list[bool] | None = None


class Source:
    """What documents are read from."""

    def identity(self) -> dict:
        """Return what distinguishes these documents from others, as JSON."""
        raise NotImplementedError

    def read(self, cursor: dict | None = None) -> Iterator[Batch]:
        """Yield batches from a cursor on, or from the beginning."""
        raise NotImplementedError

    def describe_skipped(self) -> list[str]:
        """Return a line for each kind of text that the last reading skipped."""
        return []


@dataclass
class Texts(Source):
    """A source of texts in memory, each of which is a document."""

    texts: list[str]
    name: str

    def identity(self) -> dict:
        """Return what distinguishes these documents from others."""
        digest = hashlib.sha256()
        for text in self.texts:
            digest.update(hashlib.sha256(text.encode()).digest())
        return {"source": self.name, "sha256": digest.hexdigest()}

    def text_bytes(self) -> int:
        """Return the size of all texts in UTF-8."""
        return sum(len(text.encode()) for text in self.texts)

    def read(self, cursor: dict | None = None) -> Iterator[Batch]:
        """Yield batches from a cursor on, or from the beginning."""
        start = cursor["text"] if cursor else 0
        for first in range(start, len(self.texts), ROWS):
            yield Batch({"text": first}, self.texts[first : first + ROWS])


class Piece(NamedTuple):
    """A document of a file, or a part of it."""

    file: int  # index among the files
    position: int  # in the file: a byte of a text, or a row of a table
    text: str
    starts_document: bool


def batch_pieces(pieces: Iterable[Piece]) -> Iterator[Batch]:
    """Yield batches of consecutive pieces, of about BATCH_CHARACTERS each."""
    batch = None
    num_characters = 0
    for piece in pieces:
        if batch is None:
            # the position of its first text, so that the whole batch is read again from there
            batch = Batch({"file": piece.file, "at": piece.position}, [], [])
        batch.texts.append(piece.text)
        batch.starts.append(piece.starts_document)
        num_characters += len(piece.text)
        if num_characters >= BATCH_CHARACTERS:
            yield batch
            batch = None
            num_characters = 0
    if batch is not None:
        yield batch


class Files(Source):
    """A source of local files.

    Each row of a table (see READERS) is a document, and so is every other file, which is UTF-8 text.
    Of folders, all files below them are read, except hidden files and files that are not text.

    Args:
        patterns: files, glob patterns and folders
        column: the column of tables that holds the text; rows without text are skipped
        suffixes: if given, only files with these suffixes are read from folders
        shuffled: whether files are ordered by a hash of their names instead of by name

    Raises:
        ValueError: there are no such files; while reading, a file is damaged or has no such column
    """

    def __init__(
        self,
        patterns: list[str],
        column: str = "text",
        suffixes: Iterable[str] = (),
        shuffled: bool = False,
    ):
        self.patterns = patterns
        self.column = column
        # files that were found in folders, and are skipped if they are not text
        self.skippable: set[Path] = set()
        # several patterns may name the same file
        paths = {path for pattern in patterns for path in self.find_files(pattern, suffixes)}
        self.paths = sorted(paths)
        if shuffled:
            self.paths.sort(key=lambda path: hashlib.sha256(path.as_posix().encode()).digest())
        # what the last reading skipped
        self.not_text: set[Path] = set()
        self.rows_without_text: Counter[Path] = Counter()

    def find_files(self, pattern: str, suffixes: Iterable[str]) -> list[Path]:
        """Return the files that a path or a glob pattern names, and those below its folders."""
        # a path that exists is that path, whatever brackets or stars are in its name
        matches = [pattern] if os.path.lexists(pattern) else glob.glob(pattern, recursive=True)
        paths = []
        for match in map(Path, matches):
            if match.is_dir():
                files_below = [
                    path
                    for path in list_folder(match)
                    if not suffixes or path.suffix in suffixes or get_kind(path) in suffixes
                ]
                paths += files_below
                self.skippable |= {
                    path for path in files_below if get_kind(path) not in STRICT_KINDS
                }
            else:
                paths.append(match)
        if not paths:
            condition = f" with suffix {', '.join(suffixes)}" if suffixes else ""
            raise ValueError(
                f"--source={pattern}: there are no files{condition}; give existing files, glob "
                "patterns or folders"
            )
        return paths

    def identity(self) -> dict:
        """Return what must not change between two runs: patterns, and names and sizes of files."""
        return {
            "source": " ".join(self.patterns),
            "column": self.column,
            "files": len(self.paths),
            "sha256": compute_listing_digest(self.paths),
        }

    def text_bytes(self) -> int:
        """Return approximately how much text there is, uncompressed."""
        return sum(count_text_bytes(path, self.column) for path in self.paths)

    def describe_skipped(self) -> list[str]:
        lines = []
        if self.not_text:
            lines.append(f"files skipped because they are not UTF-8 text: {len(self.not_text):,}")
        if self.rows_without_text:
            lines.append(
                f"rows skipped because they have no readable text in column {self.column}: "
                f"{self.rows_without_text.total():,}"
            )
        return lines

    def read(self, cursor: dict | None = None) -> Iterator[Batch]:
        """Yield batches from a cursor on, or from the beginning."""
        cursor = cursor or {"file": 0, "at": 0}
        self.not_text.clear()
        self.rows_without_text.clear()
        yield from batch_pieces(self.read_pieces(cursor))

    def read_pieces(self, cursor: dict) -> Iterator[Piece]:
        """Yield the pieces from a cursor on."""
        start = cursor["at"]
        for number in range(cursor["file"], len(self.paths)):
            path = self.paths[number]
            try:
                if get_kind(path) in READERS:
                    for row, text in read_table(path, self.column, start):
                        if text is None:
                            self.rows_without_text[path] += 1
                        else:
                            yield Piece(number, row, text, starts_document=True)
                else:
                    for position, text in read_text(path, start, path in self.skippable):
                        yield Piece(number, position, text, starts_document=position == 0)
            except NotTextError:
                if path not in self.skippable:
                    raise
                self.not_text.add(path)
                del self.rows_without_text[path]
            start = 0


# ---- files ----


def list_folder(folder: Path) -> list[Path]:
    """Return the files below a folder, and below the folders that links in it lead to.

    Hidden files and bytecode are omitted. A folder is listed once, however many links lead to it.
    """
    paths = []
    roots = [folder]
    visited = set()
    while roots:
        for parent, folders, names in os.walk(roots.pop(0)):
            if os.path.realpath(parent) in visited:
                folders.clear()
                continue
            visited.add(os.path.realpath(parent))
            folders[:] = sorted(name for name in folders if not is_hidden(name))
            roots += [Path(parent, name) for name in folders if Path(parent, name).is_symlink()]
            paths += [Path(parent, name) for name in names if not is_hidden(name)]
    return [path for path in paths if path.is_file()]


def is_hidden(name: str) -> bool:
    """Return whether a file or folder is omitted where it is found in a folder."""
    return name.startswith(".") or name == "__pycache__"


def compute_listing_digest(paths: list[Path]) -> str:
    """Return the SHA-256 of the names and sizes of files."""
    listing = "".join(f"{path}\t{path.stat().st_size}\n" for path in paths)
    return hashlib.sha256(listing.encode()).hexdigest()


def get_kind(path: Path) -> str:
    """Return the suffix of a file in lower case; that of the content if the file is compressed."""
    name = path.name.lower().removesuffix(".gz")
    return Path(name).suffix


@contextlib.contextmanager
def open_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for reading, and decompress it if it is a .gz file.

    Raises:
        NotTextError: the file is not compressed, although its name says so
        PermanentSourceError: it is damaged
    """
    if path.suffix.lower() != ".gz":
        with open(path, "rb") as file:
            yield file
        return
    try:
        with gzip.open(path) as file:
            yield file
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        error_type = NotTextError if "Not a gzipped" in str(error) else PermanentSourceError
        raise error_type(
            f"{path} is not a complete .gz file ({first_line(error)}); download it again"
        ) from error


def count_text_bytes(path: Path, column: str) -> int:
    """Return approximately how much text a file holds, uncompressed."""
    if get_kind(path) == ".parquet":
        return count_parquet_bytes(path, column)
    if path.suffix.lower() == ".gz":
        with open(path, "rb") as file:
            # the last four bytes are the uncompressed size
            file.seek(-min(4, path.stat().st_size), os.SEEK_END)
            return int.from_bytes(file.read(), "little")
    return path.stat().st_size


# ---- text ----


def read_text(path: Path, position: int, refuse_zeros: bool) -> Iterator[tuple[int, str]]:
    """Yield the first byte and the text of each piece of a text file.

    Args:
        position: the byte to begin with
        refuse_zeros: whether a zero byte counts as an error

    Raises:
        NotTextError: the file does not begin with UTF-8 text
        ValueError: there is another kind of data after the text
    """
    with open_file(path) as file:
        file.seek(position)
        rest = b""
        while data := rest + file.read(PIECE_BYTES - len(rest)):
            rest = b""
            if len(data) == PIECE_BYTES:
                # the next piece begins where this one is cut; a .gz file cannot seek back cheaply
                cut = find_cut(data)
                rest = data[cut:]
                data = data[:cut]
            try:
                text = data.decode("utf-8")
                if refuse_zeros and "\0" in text:
                    raise UnicodeDecodeError(
                        "utf-8", data, data.index(0), data.index(0) + 1, "zero"
                    )
            except UnicodeDecodeError as error:
                error_type = NotTextError if position == 0 else ValueError
                raise error_type(
                    f"{path} is not UTF-8 text at byte {position + error.start}; convert it to "
                    "UTF-8, decompress it, or remove it from the source"
                ) from error
            # the byte order mark of Windows editors is not part of the text
            yield position, text.removeprefix("\ufeff") if position == 0 else text
            position += len(data)


def find_cut(data: bytes) -> int:
    """Return where a piece of UTF-8 text ends: after its last line break or complete character."""
    after_line_break = data.rfind(b"\n") + 1
    if after_line_break:
        return after_line_break
    last = len(data) - 1
    while last and data[last] & 0xC0 == 0x80:  # a continuation byte of UTF-8
        last -= 1
    return last or len(data)


# ---- tables ----


def read_table(path: Path, column: str, first_row: int = 0) -> Iterator[tuple[int, str | None]]:
    """Yield the number and text of each row of a table; None for a row without text.

    An empty string, such as that of an empty cell in a .csv file, is no text.

    Args:
        first_row: the row to begin with

    Raises:
        NotTextError: the table has no such column, or the column holds no text
        ValueError: the file is damaged
    """
    row = None
    try:
        for row, value in READERS[get_kind(path)](path, column, first_row):
            yield row, value if isinstance(value, str) and value != "" else None
    except PermanentSourceError:
        raise
    # of json, csv and pyarrow, or text that is not UTF-8
    except (ValueError, OSError, RuntimeError, csv.Error) as error:
        error_type = NotTextError if row is None and first_row == 0 else ValueError
        raise error_type(
            f"{path} is damaged after row {row or first_row} ({first_line(error)}); repair it, or "
            "download it again"
        ) from error


def check_column(path: Path, column: str, columns: Iterable[str]) -> None:
    """Raise NotTextError if a table has no such column."""
    if column not in columns:
        raise NotTextError(
            f"{path} has no column {column}; name one of its columns with --column: "
            f"{', '.join(columns)}"
        )


def read_parquet(path: Path, column: str, first_row: int) -> Iterator[tuple[int, object]]:
    """Yield the number and value of each row of a parquet file."""
    with open_parquet(path, column) as file:
        # groups of rows before the first row are not decoded
        row = 0
        groups = list(range(file.num_row_groups))
        while groups and row + file.metadata.row_group(groups[0]).num_rows <= first_row:
            row += file.metadata.row_group(groups.pop(0)).num_rows
        for batch in file.iter_batches(ROWS, row_groups=groups, columns=[column]):
            for value in batch.column(0).to_pylist():
                if row >= first_row:
                    yield row, value
                row += 1


def open_parquet(path: Path, column: str) -> Any:
    """Return the pyarrow.parquet.ParquetFile of a file that has a column of text."""
    parquet: ModuleType = errors.import_optional("pyarrow.parquet", "reading parquet files")
    try:
        file = parquet.ParquetFile(path)
    except (ValueError, OSError) as error:  # pyarrow.ArrowInvalid is a ValueError
        raise PermanentSourceError(
            f"{path} is not a complete parquet file ({first_line(error)}); download it again"
        ) from error
    check_column(path, column, file.schema_arrow.names)
    column_type = file.schema_arrow.field(column).type
    if not any(kind in str(column_type) for kind in ("string", "null")) or column_type.num_fields:
        raise NotTextError(
            f"{path}: column {column} holds {column_type}, not text; name another column with "
            "--column"
        )
    return file


def count_parquet_bytes(path: Path, column: str) -> int:
    """Return the uncompressed size of a column of a parquet file."""
    with open_parquet(path, column) as file:
        groups = [file.metadata.row_group(number) for number in range(file.num_row_groups)]
        return sum(
            group.column(index).total_uncompressed_size
            for group in groups
            for index in range(group.num_columns)
            if group.column(index).path_in_schema == column
        )


def parse_json(content: bytes) -> object:
    """Return the value of JSON.

    Raises:
        ValueError: it is not valid JSON
        RecursionError: it is nested more deeply than Python's parser allows
    """
    try:
        return json.loads(content)
    except ValueError:
        # Python refuses integers of thousands of digits, but not as float
        return json.loads(content, parse_int=float)


def read_json(path: Path, column: str, first_row: int) -> Iterator[tuple[int, object]]:
    """Yield the number and value of each row of JSON lines, or of one array."""
    columns: set[str] = set()
    with open_file(path) as file:
        is_array = file.read(1000).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")
        file.seek(0)
        rows = enumerate(parse_json(file.read()) if is_array else file)
        for row, entry in itertools.islice(rows, first_row, None):
            if not is_array:
                if not entry.strip():
                    continue
                # valid JSON may be nested too deeply for Python's parser
                with contextlib.suppress(RecursionError):
                    entry = parse_json(entry)
            entry = entry if isinstance(entry, dict) else {}
            columns |= entry.keys()
            value = entry.get(column)
            if isinstance(value, str):
                # JSON can hold half of a surrogate pair, but UTF-8 cannot
                value = value.encode("utf-8", "replace").decode()
            yield row, value
    if columns and first_row == 0:
        check_column(path, column, sorted(columns))


def read_csv(path: Path, column: str, first_row: int) -> Iterator[tuple[int, object]]:
    """Yield the number and value of each row of a .csv or .tsv file.

    The first line names the columns.
    """
    delimiter = "\t" if get_kind(path) == ".tsv" else ","
    with open_file(path) as file:
        lines = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
        rows = csv.DictReader(lines, delimiter=delimiter)
        if rows.fieldnames:
            check_column(path, column, rows.fieldnames)
        for row, entry in itertools.islice(enumerate(rows), first_row, None):
            yield row, entry[column]


# by the suffix of the file, in lower case
READERS = {
    ".parquet": read_parquet,
    ".jsonl": read_json,
    ".ndjson": read_json,
    ".json": read_json,
    ".csv": read_csv,
    ".tsv": read_csv,
}
# tables wherever they are found; in folders, other files of a kind may be anything else
STRICT_KINDS = (".parquet", ".jsonl", ".ndjson")


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its class if it has none."""
    return str(error).strip().partition("\n")[0][:200] or type(error).__name__
