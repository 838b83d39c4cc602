"""Where a corpus's documents come from: local files and texts; data/hub.py has the hub.

A source yields batches from a cursor on, which is JSON: an interrupted preparation opens its source
where it stood. The texts that follow a cursor are the same however it was opened.
"""

import glob
import hashlib
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from utils import errors

BATCH_CHARACTERS = 1_000_000
PIECE_BYTES = 8 << 20  # a text file is read in pieces of at most this: its size does not matter
ROWS = 256
TABLES = (".parquet", ".jsonl")  # a document a row


class Missing(ValueError):  # noqa: N818 (says what is wrong, as the message does)
    """What no waiting brings: there is no such thing, or it may not be read."""


@dataclass(frozen=True)
class Batch:
    """Texts in order. `starts`: which of them begin a document (others go on with the last one)."""

    cursor: dict
    texts: list[str]
    starts: list[bool] | None = None  # None: all


@dataclass
class Texts:
    """Texts in memory."""

    texts: list[str]
    name: str

    def identity(self) -> dict:
        digest = hashlib.sha256()
        for text in self.texts:
            digest.update(hashlib.sha256(text.encode()).digest())
        return {"source": self.name, "sha256": digest.hexdigest()}

    def text_bytes(self) -> int:
        return sum(len(text.encode()) for text in self.texts)

    def read(self, cursor: dict | None = None) -> Iterator[Batch]:
        for first in range(cursor["text"] if cursor else 0, len(self.texts), ROWS):
            yield Batch({"text": first}, self.texts[first : first + ROWS])


class Files:
    """Parquet and JSON-lines files (a document a row, in `column`); any other is one document.

    `patterns` are files, patterns and folders; in a folder (all that is below it) hidden files and
    files that are not text are left out, and `suffixes`, where given, chooses. Files come in name
    order, or `shuffled` by a hash of it. `unique`: documents that repeat an earlier one exactly are
    left out, for 0.1 GB of memory a million documents. ValueError: nothing there, no such column,
    or, while reading, a damaged file.
    """

    def __init__(
        self, patterns: list[str], column="text", suffixes=(), shuffled=False, unique=False
    ):
        self.patterns, self.column, self.unique = patterns, column, unique
        named = {Path(file) for pattern in patterns for file in glob.glob(pattern, recursive=True)}
        paths, self.optional = [], set()  # optional: files of folders, which may be no text
        for path in sorted(named):
            below = [path]
            if path.is_dir():
                below = [file for file in path.rglob("*") if wanted(file, path, suffixes)]
                self.optional |= {file for file in below if file.suffix not in TABLES}
            paths += below
        if not paths:
            which = f" with suffix {', '.join(suffixes)}" if suffixes else ""
            raise ValueError(f"--source={' '.join(patterns)}: no files{which} there")
        by_hash = (lambda p: hashlib.sha256(p.as_posix().encode()).digest()) if shuffled else None
        self.paths = sorted(dict.fromkeys(paths), key=by_hash)  # several patterns can name a file
        self.sizes = [path.stat().st_size for path in self.paths]
        self.not_text = set()  # files of folders that turned out so
        self.copies = self.copied_bytes = 0  # documents that the last reading left out as such

    def identity(self) -> dict:
        """The patterns, and a digest of names and sizes: what must not change on the way."""
        keys = {"source": " ".join(self.patterns), "column": self.column, "unique": self.unique}
        return {**keys, "files": len(self.paths), "sha256": listing_digest(self.paths)}

    def text_bytes(self) -> int:
        """About how much text there is, uncompressed."""
        tables = {path for path in self.paths if path.suffix == ".parquet"}
        sizes = (size for path, size in zip(self.paths, self.sizes) if path not in tables)
        return sum(sizes) + sum(parquet_text_bytes(path, self.column) for path in tables)

    def read(self, cursor: dict | None = None) -> Iterator[Batch]:
        cursor = cursor or {"file": 0, "at": 0}
        # A batch's cursor is the place of its first text: what follows it is read again from there.
        documents = self.unique_documents(cursor) if self.unique else self.documents(cursor)
        batch, characters = None, 0
        for file, at, text, start in documents:
            batch = batch or Batch({"file": file, "at": at}, [], [])
            batch.texts.append(text)
            batch.starts.append(start)
            characters += len(text)
            if characters >= BATCH_CHARACTERS:
                yield batch
                batch, characters = None, 0
        if batch:
            yield batch

    def unique_documents(self, cursor: dict):
        """As `documents`; all is read from the beginning, to know what came before."""
        seen, copied, short = set(), False, partial(hashlib.blake2b, digest_size=16)
        self.copies = self.copied_bytes = 0
        for document in self.documents({"file": 0, "at": 0}):
            file, at, text, start = document
            if start:
                path, size = self.paths[file], self.sizes[file]
                whole = path.suffix in TABLES or size < PIECE_BYTES  # else its first piece alone
                with io.BytesIO(text.encode()) if whole else open(path, "rb") as content:
                    digest = hashlib.file_digest(content, short).digest()
                copied = digest in seen
                seen.add(digest)
                self.copies += copied
                self.copied_bytes += copied * (len(text.encode()) if whole else size)
            if not copied and (file, at) >= (cursor["file"], cursor["at"]):
                yield document

    def documents(self, cursor: dict) -> Iterator[tuple[int, int, str, bool]]:
        """(file, position in it, text, whether a document starts there)."""
        at = cursor["at"]
        for file in range(cursor["file"], len(self.paths)):
            path = self.paths[file]
            kind = {".parquet": parquet, ".jsonl": json_lines}.get(path.suffix)
            documents = kind(path, self.column, at) if kind else self.text(path, at)
            yield from ((file, *document) for document in documents)
            at = 0

    def text(self, path: Path, at: int):
        with open(path, "rb") as file:
            file.seek(at)
            while data := file.read(PIECE_BYTES):
                if len(data) == PIECE_BYTES:
                    # The next piece begins where this one was cut.
                    data = data[: cut(data)]
                    file.seek(at + len(data))
                try:
                    text = data.decode("utf-8")
                    if "\0" in text and path in self.optional:
                        zero = data.index(0)
                        raise UnicodeDecodeError("utf-8", data, zero, zero + 1, "a zero byte")
                except UnicodeDecodeError as error:
                    if at == 0 and path in self.optional:
                        self.not_text.add(path)
                        return
                    what = f"{path} is not UTF-8 text at byte {at + error.start}"
                    raise ValueError(f"{what}: leave it out") from error
                yield at, text, at == 0
                at += len(data)


def listing_digest(paths: list[Path]) -> str:
    """SHA-256 of the names and sizes of files."""
    listing = "".join(f"{path}\t{path.stat().st_size}\n" for path in paths)
    return hashlib.sha256(listing.encode()).hexdigest()


def wanted(file: Path, root: Path, suffixes) -> bool:
    """Whether a file of a folder is read: not hidden, no bytecode, of one of the suffixes."""
    parts = file.relative_to(root).parts
    hidden = any(part.startswith(".") or part == "__pycache__" for part in parts)
    return file.is_file() and not hidden and (not suffixes or file.suffix in suffixes)


def cut(data: bytes) -> int:
    """Where to end a piece of a text: after its last line break, or before its last character."""
    if line := data.rfind(b"\n") + 1:
        return line
    last = len(data) - 1
    while last and data[last] & 0xC0 == 0x80:  # a continuation byte of UTF-8
        last -= 1
    return last or len(data)


def open_parquet(file, name, column: str):
    """The open file. ValueError: no parquet file, or no such column in it."""
    parquet = errors.import_optional("pyarrow.parquet", "reading parquet files")
    try:
        opened = parquet.ParquetFile(file)
    except (ValueError, OSError) as error:  # pyarrow.ArrowInvalid is a ValueError
        what = f"{name} is no whole parquet file ({first_line(error)})"
        raise ValueError(f"{what}: fetch it again") from error
    if column not in opened.schema_arrow.names:
        columns = ", ".join(opened.schema_arrow.names)
        raise Missing(f"{name} has no column {column}, it has {columns}: give --column")
    return opened


def parquet_text_bytes(path: Path, column: str) -> int:
    """Uncompressed bytes of a column."""
    with open_parquet(path, path, column) as file:
        about, index = file.metadata, file.schema_arrow.names.index(column)
        columns = (about.row_group(i).column(index) for i in range(about.num_row_groups))
        return sum(each.total_uncompressed_size for each in columns)


def parquet_texts(file, name, column: str, at: int = 0) -> Iterator[tuple[int, list[str | None]]]:
    """(first row, texts or None) of up to ROWS rows, from row `at` on.

    Row groups are read one by one. ValueError: damaged, no such column, or no text in it.
    """
    with open_parquet(file, name, column) as opened:
        first = 0
        # By row groups, so that those before `at` are not decoded again.
        for group in range(opened.num_row_groups):
            size = opened.metadata.row_group(group).num_rows
            if first + size <= at:
                first += size
                continue
            batches = opened.iter_batches(ROWS, row_groups=[group], columns=[column])
            while texts := next_texts(batches, name, first):
                if wrong := next((t for t in texts if not isinstance(t, str | None)), None):
                    holds = f"column {column} holds {type(wrong).__name__}, not text"
                    raise ValueError(f"{name}: {holds}: give --column")
                if first + len(texts) > at:
                    yield max(first, at), texts[max(at - first, 0) :]
                first += len(texts)


def next_texts(batches, name, row: int) -> list[str | None]:
    """Those of the next batch, [] after the last. ValueError: the file is damaged there."""
    try:
        batch = next(batches, None)
        return [] if batch is None else batch.column(0).to_pylist()
    except (ValueError, OSError, RuntimeError) as error:  # pyarrow, or text that is no UTF-8
        cause = f"{name} is damaged near row {row} ({first_line(error)})"
        raise ValueError(f"{cause}: fetch it again") from error


def parquet(path: Path, column: str, at: int):
    for first, texts in parquet_texts(path, path, column, at):
        for row, text in enumerate(texts, first):
            if text is not None:
                yield row, text, True


def json_lines(path: Path, column: str, at: int):
    with open(path, "rb") as file:
        file.seek(at)
        for line in file:
            if line.strip():
                try:
                    row = json.loads(line)
                except ValueError as error:
                    cause = f"{path} holds no JSON at byte {at} ({first_line(error)})"
                    raise ValueError(f"{cause}: repair it") from error
                if not isinstance(row, dict) or not isinstance(row.get(column), str):
                    lack = f"{path} has no text under {column!r} in the line at byte {at}"
                    raise ValueError(f"{lack}: give --column")
                # JSON can hold half a surrogate pair.
                yield at, row[column].encode("utf-8", "replace").decode(), True
            at += len(line)


def first_line(error: BaseException) -> str:
    """The first line of what an error says."""
    return str(error).strip().partition("\n")[0][:200] or type(error).__name__
