"""Where a corpus's documents come from: local files here, texts in memory; data/hub.py has the Hugging Face hub.

A source yields batches from a cursor on. Cursors are JSON, so that an interrupted preparation opens its source where it
stood; the texts that follow a cursor are the same however the source was opened.
"""

import glob
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

BATCH_CHARACTERS = 1_000_000
PIECE_BYTES = 8 << 20  # a text file is read in pieces of at most this, so that its size does not matter
ROWS = 256


class Missing(ValueError):  # noqa: N818 (says what is wrong, as the message does)
    """What no waiting brings: there is no such thing, or it may not be read."""


@dataclass(frozen=True)
class Batch:
    """Texts in order. `starts`: which of them begin a document (others continue the one before), None: all."""

    cursor: dict
    texts: list[str]
    starts: list[bool] | None = None


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
    """Parquet and JSON-lines files (one document a row, in `column`), and any other file as one UTF-8 document.

    `patterns` are files, patterns and folders; in a folder (all that is below it) hidden files and files that are not
    text are left out, and `suffixes`, where given, chooses. Files come in name order, or `shuffled` by a hash of it.
    `unique`: every document that repeats an earlier one exactly is left out; 16 bytes of each are remembered, 0.1 GB of
    memory a million documents.
    ValueError: nothing there, no such column, or, while reading, a damaged file.
    """

    def __init__(
        self, patterns: list[str], column: str = "text", suffixes: tuple[str, ...] = (), shuffled=False, unique=False
    ):
        self.patterns, self.column, self.unique = patterns, column, unique
        named = {Path(file) for pattern in patterns for file in glob.glob(pattern, recursive=True)}
        self.paths, self.optional = [], set()
        for path in sorted(named):
            if path.is_dir():
                found = [file for file in path.rglob("*") if self._wanted(file, path, suffixes)]
                self.paths += found
                self.optional |= {file for file in found if file.suffix not in (".parquet", ".jsonl")}
            else:
                self.paths.append(path)
        if not self.paths:
            which = f" with suffix {', '.join(suffixes)}" if suffixes else ""
            raise ValueError(f"--source={' '.join(patterns)}: no files{which} there")
        self.paths = list(dict.fromkeys(self.paths))  # several patterns can name a file
        self.paths.sort(key=(lambda p: hashlib.sha256(p.as_posix().encode()).digest()) if shuffled else None)
        self.sizes = [path.stat().st_size for path in self.paths]
        self.not_text = set()  # files of folders that turned out so
        self.copies = self.copied_bytes = 0  # documents that the last reading left out as such

    @staticmethod
    def _wanted(file: Path, root: Path, suffixes) -> bool:
        hidden = any(part.startswith(".") or part == "__pycache__" for part in file.relative_to(root).parts)
        return file.is_file() and not hidden and (not suffixes or file.suffix in suffixes)

    def identity(self) -> dict:
        """The patterns, and a digest of names and sizes: what must not change while a preparation goes on."""
        listing = "".join(f"{path}\t{size}\n" for path, size in zip(self.paths, self.sizes))
        digest = hashlib.sha256(listing.encode()).hexdigest()
        keys = {"source": " ".join(self.patterns), "column": self.column, "unique": self.unique}
        return {**keys, "files": len(self.paths), "sha256": digest}

    def text_bytes(self) -> int:
        """About how much text there is, uncompressed."""
        return sum(
            _parquet_text_bytes(path, self.column) if path.suffix == ".parquet" else size
            for path, size in zip(self.paths, self.sizes)
        )

    def read(self, cursor: dict | None = None) -> Iterator[Batch]:
        cursor = cursor or {"file": 0, "at": 0}
        documents = self._unique_documents(cursor) if self.unique else self._documents(cursor)
        texts, starts, characters, begin = [], [], 0, None
        for file, at, text, start in documents:
            begin = begin or {"file": file, "at": at}
            texts.append(text)
            starts.append(start)
            characters += len(text)
            if characters >= BATCH_CHARACTERS:
                yield Batch(begin, texts, starts)
                texts, starts, characters, begin = [], [], 0, None
        if texts:
            yield Batch(begin, texts, starts)

    def _unique_documents(self, cursor: dict):
        """All is read from the beginning, to know what came before the cursor; what follows it is yielded."""
        seen, copied = set(), False
        self.copies = self.copied_bytes = 0
        for document in self._documents({"file": 0, "at": 0}):
            file, at, text, start = document
            if start:
                whole = self.paths[file].suffix in (".parquet", ".jsonl") or self.sizes[file] < PIECE_BYTES
                digest = _digest(text) if whole else _digest_file(self.paths[file])
                copied = digest in seen
                seen.add(digest)
                if copied:
                    self.copies += 1
                    self.copied_bytes += len(text.encode()) if whole else self.sizes[file]
            if not copied and (file, at) >= (cursor["file"], cursor["at"]):
                yield document

    def _documents(self, cursor: dict) -> Iterator[tuple[int, int, str, bool]]:
        """(file, position in it, text, whether a document starts there)."""
        at = cursor["at"]
        for file in range(cursor["file"], len(self.paths)):
            path = self.paths[file]
            if path.suffix == ".parquet":
                documents = _parquet(path, self.column, at)
            elif path.suffix == ".jsonl":
                documents = _json_lines(path, self.column, at)
            else:
                documents = self._text(path, at)
            for position, text, start in documents:
                yield file, position, text, start
            at = 0

    def _text(self, path: Path, at: int):
        with open(path, "rb") as file:
            file.seek(at)
            while data := file.read(PIECE_BYTES):
                if len(data) == PIECE_BYTES:
                    data = data[: _cut(data)]
                    file.seek(at + len(data))
                try:
                    text = data.decode("utf-8")
                    if "\0" in text and path in self.optional:
                        raise UnicodeDecodeError("utf-8", data, data.index(0), data.index(0) + 1, "a zero byte")
                except UnicodeDecodeError as error:
                    if at == 0 and path in self.optional:
                        self.not_text.add(path)
                        return
                    raise ValueError(f"{path} is not UTF-8 text at byte {at + error.start}: leave it out") from error
                yield at, text, at == 0
                at += len(data)


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _digest_file(path: Path) -> bytes:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).digest()


def _cut(data: bytes) -> int:
    """Where to end a piece of a text: after its last line break, or else before its last character."""
    if line := data.rfind(b"\n") + 1:
        return line
    last = len(data) - 1
    while last and data[last] & 0xC0 == 0x80:  # a continuation byte of UTF-8
        last -= 1
    return last or len(data)


def _import_parquet():
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError("parquet files need the pyarrow package: pip install pyarrow") from error
    return pyarrow


def _open_parquet(file, name, column: str):
    pyarrow = _import_parquet()
    try:
        opened = pyarrow.parquet.ParquetFile(file)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{name} is no whole parquet file ({first_line(error)}): fetch it again") from error
    if column not in opened.schema_arrow.names:
        columns = ", ".join(opened.schema_arrow.names)
        raise Missing(f"{name} has no column {column}, it has {columns}: give --column")
    return pyarrow, opened


def _parquet_text_bytes(path: Path, column: str) -> int:
    _, file = _open_parquet(path, path, column)
    with file:
        index, groups = file.schema_arrow.names.index(column), range(file.metadata.num_row_groups)
        return sum(file.metadata.row_group(g).column(index).total_uncompressed_size for g in groups)


def parquet_texts(file, name, column: str, at: int = 0) -> Iterator[tuple[int, list[str | None]]]:
    """(first row, texts or None) of up to ROWS rows, from those that hold row `at` on.

    `file` is a path or an open file; of that only the end and the row groups from `at` on are read, one by one.
    ValueError: damaged, no such column, or no text in it.
    """
    pyarrow, opened = _open_parquet(file, name, column)
    with opened:
        first = 0
        for group in range(opened.metadata.num_row_groups):
            size = opened.metadata.row_group(group).num_rows
            if first + size <= at:
                first += size
                continue
            batches = opened.iter_batches(ROWS, row_groups=[group], columns=[column])
            while True:
                try:
                    batch = next(batches, None)
                    texts = batch.column(0).to_pylist() if batch is not None else None
                except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
                    cause = f"{name} is damaged near row {first} ({first_line(error)})"
                    raise ValueError(f"{cause}: fetch it again") from error
                if texts is None:
                    break
                if wrong := next((text for text in texts if not isinstance(text, str | None)), None):
                    raise ValueError(f"{name}: column {column} holds {type(wrong).__name__}, not text: give --column")
                if first + len(texts) > at:
                    yield first, texts
                first += len(texts)


def _parquet(path: Path, column: str, at: int):
    for first, texts in parquet_texts(path, path, column, at):
        for row, text in enumerate(texts, first):
            if row >= at and text is not None:
                yield row, text, True


def _json_lines(path: Path, column: str, at: int):
    with open(path, "rb") as file:
        file.seek(at)
        for line in file:
            if line.strip():
                try:
                    row = json.loads(line)
                except ValueError as error:
                    raise ValueError(f"{path} holds no JSON at byte {at} ({first_line(error)}): repair it") from error
                if not isinstance(row, dict) or not isinstance(row.get(column), str):
                    raise ValueError(f"{path} has no text under {column!r} in the line at byte {at}: give --column")
                yield at, row[column].encode("utf-8", "replace").decode(), True  # JSON can hold half a surrogate pair
            at += len(line)


def first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:200] or type(error).__name__
