"""Where the documents of a corpus come from: local files, or texts in memory.

A source yields batches of texts, each with a cursor (JSON). An interrupted preparation reopens its
source at a cursor. The texts that follow a cursor do not depend on where reading began.
data/hub.py has the source that reads datasets of the Hugging Face Hub.
"""

import glob
import hashlib
import io
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import IO, Any, NamedTuple

from utils import errors

BATCH_CHARACTERS = 1_000_000
PIECE_BYTES = 8 << 20  # text files are read in pieces of at most this size
ROWS = 256  # rows of a table that are read at once
TABLE_SUFFIXES = (".parquet", ".jsonl")  # tables have one document per row


class PermanentSourceError(ValueError):
    """An error of a source that rerunning the same command does not resolve."""


@dataclass(frozen=True)
class Batch:
    """Texts of a source, in order."""

    # where reading resumes to yield this batch again
    cursor: dict

    texts: list[str]

    # Whether each text begins a document; the others continue the document before them. None means
    # that all of them do.
    starts: list[bool] | None = None


@dataclass
class Texts:
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
    position: int  # in the file: a byte, or the row of a parquet file
    text: str
    starts_document: bool


class Files:
    """A source of local files.

    Each row of a .parquet or .jsonl file is a document, and so is every other file. Of folders, all
    files below them are read, except hidden files and files that are not text.

    Args:
        patterns: files, glob patterns and folders
        column: the column of tables that holds the text
        suffixes: if given, only files with these suffixes are read from folders
        shuffled: whether files are ordered by a hash of their names instead of by name
        unique: whether documents that repeat an earlier one exactly are dropped; this takes 0.1 GB
            of memory per million documents

    Raises:
        ValueError: there are no such files; while reading, a file is damaged or has no such column
    """

    def __init__(
        self,
        patterns: list[str],
        column: str = "text",
        suffixes: Iterable[str] = (),
        shuffled: bool = False,
        unique: bool = False,
    ):
        self.patterns = patterns
        self.column = column
        self.unique = unique
        # files that were found in folders, and are skipped if they are not text
        self.skippable: set[Path] = set()
        self.paths = self.find_files(tuple(suffixes))
        if shuffled:
            self.paths.sort(key=lambda path: hashlib.sha256(path.as_posix().encode()).digest())
        self.sizes = [path.stat().st_size for path in self.paths]
        # what the last reading skipped
        self.not_text: set[Path] = set()
        self.num_copies = 0
        self.copied_bytes = 0

    def find_files(self, suffixes: tuple[str, ...]) -> list[Path]:
        """Return the files that the patterns name, in name order."""
        matches = {
            Path(match) for pattern in self.patterns for match in glob.glob(pattern, recursive=True)
        }
        paths = []
        for match in sorted(matches):
            if not match.is_dir():
                paths.append(match)
                continue
            for path in match.rglob("*"):
                if is_wanted(path, match, suffixes):
                    paths.append(path)
                    if path.suffix not in TABLE_SUFFIXES:
                        self.skippable.add(path)
        if not paths:
            condition = f" with suffix {', '.join(suffixes)}" if suffixes else ""
            raise ValueError(
                f"--source={' '.join(self.patterns)}: there are no files{condition}; give existing "
                "files, glob patterns or folders"
            )
        # several patterns may name the same file
        return sorted(set(paths))

    def identity(self) -> dict:
        """Return what must not change between two runs: patterns, and names and sizes of files."""
        return {
            "source": " ".join(self.patterns),
            "column": self.column,
            "unique": self.unique,
            "files": len(self.paths),
            "sha256": compute_listing_digest(self.paths),
        }

    def text_bytes(self) -> int:
        """Return approximately how much text there is, uncompressed."""
        total = 0
        for path, size in zip(self.paths, self.sizes):
            if path.suffix == ".parquet":
                total += count_parquet_bytes(path, self.column)
            else:
                total += size
        return total

    def read(self, cursor: dict | None = None) -> Iterator[Batch]:
        """Yield batches from a cursor on, or from the beginning."""
        cursor = cursor or {"file": 0, "at": 0}
        pieces = self.read_unique_pieces(cursor) if self.unique else self.read_pieces(cursor)
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

    def read_unique_pieces(self, cursor: dict) -> Iterator[Piece]:
        """Yield the pieces from a cursor on, except those of documents that repeat an earlier one.

        Everything is read from the beginning, because copies of earlier documents are dropped.
        """
        digests: set[bytes] = set()
        is_copy = False
        self.num_copies = 0
        self.copied_bytes = 0
        for piece in self.read_pieces({"file": 0, "at": 0}):
            if piece.starts_document:
                digest, num_bytes = self.digest_document(piece)
                is_copy = digest in digests
                digests.add(digest)
                if is_copy:
                    self.num_copies += 1
                    self.copied_bytes += num_bytes
            is_after_cursor = (piece.file, piece.position) >= (cursor["file"], cursor["at"])
            if is_after_cursor and not is_copy:
                yield piece

    def digest_document(self, piece: Piece) -> tuple[bytes, int]:
        """Return a digest of the document that begins with this piece, and its size in bytes."""
        path = self.paths[piece.file]
        size = self.sizes[piece.file]
        if path.suffix in TABLE_SUFFIXES or size < PIECE_BYTES:
            content = piece.text.encode()
            file: IO[bytes] = io.BytesIO(content)
            size = len(content)
        else:
            # the piece is only the beginning of this file
            file = open(path, "rb")  # noqa: SIM115
        with file:
            digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).digest()
        return digest, size

    def read_pieces(self, cursor: dict) -> Iterator[Piece]:
        """Yield the pieces from a cursor on."""
        position = cursor["at"]
        for number in range(cursor["file"], len(self.paths)):
            path = self.paths[number]
            if path.suffix == ".parquet":
                pieces = read_parquet(path, self.column, position)
            elif path.suffix == ".jsonl":
                pieces = read_json_lines(path, self.column, position)
            else:
                pieces = self.read_text(path, position)
            for piece_position, text, starts_document in pieces:
                yield Piece(number, piece_position, text, starts_document)
            position = 0

    def read_text(self, path: Path, position: int) -> Iterator[tuple[int, str, bool]]:
        """Yield the position and text of each piece of a text file, and whether it is the first."""
        with open(path, "rb") as file:
            file.seek(position)
            while data := file.read(PIECE_BYTES):
                if len(data) == PIECE_BYTES:
                    # the next piece begins where this one is cut
                    data = data[: find_cut(data)]
                    file.seek(position + len(data))
                try:
                    text = self.decode(path, data)
                except UnicodeDecodeError as error:
                    if position == 0 and path in self.skippable:
                        self.not_text.add(path)
                        return
                    raise ValueError(
                        f"{path} is not UTF-8 text at byte {position + error.start}; convert it to "
                        "UTF-8, or remove it from the source"
                    ) from error
                yield position, text, position == 0
                position += len(data)

    def decode(self, path: Path, data: bytes) -> str:
        """Decode UTF-8; a zero byte in a file of a folder counts as an error."""
        text = data.decode("utf-8")
        if path in self.skippable and "\0" in text:
            position = data.index(0)
            raise UnicodeDecodeError("utf-8", data, position, position + 1, "a zero byte")
        return text


def compute_listing_digest(paths: list[Path]) -> str:
    """Return the SHA-256 of the names and sizes of files."""
    listing = "".join(f"{path}\t{path.stat().st_size}\n" for path in paths)
    return hashlib.sha256(listing.encode()).hexdigest()


def is_wanted(path: Path, root: Path, suffixes: tuple[str, ...]) -> bool:
    """Return whether a file of a folder is read: not hidden, not bytecode, with a given suffix."""
    parts = path.relative_to(root).parts
    is_hidden = any(part.startswith(".") or part == "__pycache__" for part in parts)
    has_suffix = not suffixes or path.suffix in suffixes
    return path.is_file() and not is_hidden and has_suffix


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


def open_parquet(file: str | Path | IO[bytes], name: str | Path, column: str) -> Any:
    """Open a parquet file.

    Args:
        name: the file's name in error messages

    Returns:
        a pyarrow.parquet.ParquetFile

    Raises:
        ValueError: it is not a complete parquet file
        PermanentSourceError: it has no such column
    """
    parquet: ModuleType = errors.import_optional("pyarrow.parquet", "reading parquet files")
    try:
        opened = parquet.ParquetFile(file)
    except (ValueError, OSError) as error:  # pyarrow.ArrowInvalid is a ValueError
        raise ValueError(
            f"{name} is not a complete parquet file ({first_line(error)}); download it again"
        ) from error
    if column not in opened.schema_arrow.names:
        columns = ", ".join(opened.schema_arrow.names)
        raise PermanentSourceError(
            f"{name} has no column {column}; name one of its columns with --column: {columns}"
        )
    return opened


def count_parquet_bytes(path: Path, column: str) -> int:
    """Return the uncompressed size of a column of a parquet file."""
    with open_parquet(path, path, column) as file:
        metadata = file.metadata
        # row groups count the fields of a struct, each of which is a column of its own there
        paths = [metadata.schema.column(index).path for index in range(metadata.num_columns)]
        indices = [
            index
            for index, path in enumerate(paths)
            if path == column or path.startswith(f"{column}.")
        ]
        return sum(
            metadata.row_group(group).column(index).total_uncompressed_size
            for group in range(metadata.num_row_groups)
            for index in indices
        )


def read_parquet_texts(
    file: str | Path | IO[bytes], name: str | Path, column: str, first_row: int = 0
) -> Iterator[tuple[int, list[str | None]]]:
    """Yield the texts of a column, up to ROWS at a time, each time after the number of the first row.

    Args:
        name: the file's name in error messages
        first_row: the row to begin with

    Raises:
        ValueError: the file is damaged, or the column holds no text
        PermanentSourceError: there is no such column
    """
    with open_parquet(file, name, column) as opened:
        row = 0
        # by row groups, so that those before first_row are not decoded
        for group in range(opened.num_row_groups):
            num_rows = opened.metadata.row_group(group).num_rows
            if row + num_rows <= first_row:
                row += num_rows
                continue
            batches = opened.iter_batches(ROWS, row_groups=[group], columns=[column])
            while texts := next_texts(batches, name, row):
                for text in texts:
                    if not isinstance(text, str | None):
                        raise ValueError(
                            f"{name}: column {column} holds {type(text).__name__}, not text; name "
                            "another column with --column"
                        )
                if row + len(texts) > first_row:
                    yield max(row, first_row), texts[max(first_row - row, 0) :]
                row += len(texts)


def next_texts(batches: Iterator, name: str | Path, row: int) -> list[str | None]:
    """Return the texts of the next batch of a parquet file; [] after the last batch.

    Raises:
        ValueError: the file is damaged there
    """
    try:
        batch = next(batches, None)
        return [] if batch is None else batch.column(0).to_pylist()
    except (ValueError, OSError, RuntimeError) as error:  # of pyarrow, or text that is not UTF-8
        raise ValueError(
            f"{name} is damaged near row {row} ({first_line(error)}); download it again"
        ) from error


def read_parquet(path: Path, column: str, first_row: int) -> Iterator[tuple[int, str, bool]]:
    """Yield the row and text of each document of a parquet file, and True: it begins there."""
    for first, texts in read_parquet_texts(path, path, column, first_row):
        for row, text in enumerate(texts, first):
            if text is not None:
                yield row, text, True


def read_json_lines(path: Path, column: str, position: int) -> Iterator[tuple[int, str, bool]]:
    """Yield the byte and text of each document of a .jsonl file, and True: it begins there.

    Raises:
        ValueError: a line is not JSON, or has no text under the key `column`
    """
    with open(path, "rb") as file:
        file.seek(position)
        for line in file:
            if line.strip():
                try:
                    row = json.loads(line)
                except ValueError as error:
                    raise ValueError(
                        f"{path} has a line that is not JSON at byte {position} "
                        f"({first_line(error)}); repair or remove that line"
                    ) from error
                if not isinstance(row, dict) or not isinstance(row.get(column), str):
                    raise ValueError(
                        f"{path} has no text under the key {column!r} in the line at byte "
                        f"{position}; name another key with --column"
                    )
                # JSON can hold half of a surrogate pair, but UTF-8 cannot
                yield position, row[column].encode("utf-8", "replace").decode(), True
            position += len(line)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its class if it has none."""
    return str(error).strip().partition("\n")[0][:200] or type(error).__name__
