"""The documents of a corpus: texts in memory, local files, or a dataset of the Hugging Face Hub.

Each is an iterable of rows, which are dicts of

    text    a document, or a part of it
    starts  whether the text begins a document; without it, every text does

The library `datasets` reads the Hub, and its `IterableDataset` keeps the position at which an
interrupted preparation goes on; `Rows` does so for local sources. Local files are read here:
`datasets` gives all rows of JSON lines the types of the first ones, and so refuses files that differ
in a column that is not used, and turns a text such as 2024-01-01 into a time. Importing it takes
seconds.
"""

import csv
import functools
import glob
import hashlib
import io
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, NamedTuple

import pyarrow
from pyarrow import parquet

from configurator import option
from data import shards

if TYPE_CHECKING:
    from datasets import IterableDataset

BATCH_CHARACTERS = 1_000_000
PIECE_CHARACTERS = 8 << 20  # text files are tokenized in pieces of about this size
ROWS = 256  # of a parquet file that are read at once
COMPRESSED = (".gz", ".zst", ".bz2")  # what pyarrow decompresses

csv.field_size_limit(2**31 - 1)


class SourceError(ValueError):
    """A source that cannot be read; the message names the file or the dataset."""


class Batch(NamedTuple):
    """Consecutive texts of a dataset."""

    state: dict | None  # of the dataset, from which it yields these texts; None is its beginning
    texts: list[str]
    starts: list[bool]


class Rows:
    """Rows of several parts, one part after the other, with the position of an IterableDataset.

    Args:
        parts: functions that return the rows of a part from its beginning
    """

    def __init__(self, parts: list[Callable[[], Iterable[dict]]]):
        self.parts = parts
        self.part = 0
        self.row = 0

    def state_dict(self) -> dict:
        """Return the position after the last row."""
        return {"part": self.part, "row": self.row}

    def load_state_dict(self, state: dict) -> None:
        """Go on from a position."""
        self.part = state["part"]
        self.row = state["row"]

    def __iter__(self) -> Iterator[dict]:
        while self.part < len(self.parts):
            for row in itertools.islice(self.parts[self.part](), self.row, None):
                self.row += 1
                yield row
            self.part += 1
            self.row = 0


@dataclass(frozen=True)
class Documents:
    """The documents of one source, in order."""

    # opens the rows at their beginning
    open: Callable[[], "Rows | IterableDataset"]

    # what distinguishes these documents from others, as preparation.json stores it
    identity: dict

    # about how much text there is, in UTF-8
    num_bytes: int

    def read(self, state: dict | None = None) -> Iterator[Batch]:
        """Yield batches of about BATCH_CHARACTERS from a state on. Rows without text are skipped.

        Raises:
            SourceError: the source cannot be read
        """
        try:
            dataset = self.open()
            if state is not None:
                dataset.load_state_dict(state)
            batch = Batch(state, [], [])
            num_characters = 0
            for row in dataset:
                text = row["text"]
                if not isinstance(text, str) or not text:
                    continue
                batch.texts.append(text)
                batch.starts.append(row.get("starts", True))
                num_characters += len(text)
                if num_characters >= BATCH_CHARACTERS:
                    yield batch
                    batch = Batch(dataset.state_dict(), [], [])
                    num_characters = 0
        except SourceError:
            raise
        except Exception as error:  # of datasets, huggingface_hub, httpx, fsspec and pyarrow
            raise SourceError(
                f"{self.identity['source']} cannot be read: {error!r}"[:600]
            ) from error
        if batch.texts:
            yield batch


# ---- texts in memory ----


def from_texts(texts: list[str], name: str) -> Documents:
    """Return texts in memory as documents."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(hashlib.sha256(text.encode()).digest())
    return Documents(
        open=lambda: Rows([lambda: ({"text": text} for text in texts)]),
        identity={"source": name, "sha256": digest.hexdigest()},
        num_bytes=sum(len(text.encode()) for text in texts),
    )


# ---- the Hub ----


REPOSITORY_HELP = "dataset on the Hugging Face Hub, or folder of a local clone"


@dataclass(frozen=True)
class SourceOptions:
    """Options of a corpus that is read from the Hugging Face Hub, or from local files."""

    revision: str | None = option(
        None,
        "commit, tag or branch of the dataset (default: the latest commit, which is recorded in "
        "meta.json)",
    )
    source: tuple[str, ...] = option(
        (),
        "read these local files instead of the Hugging Face Hub: paths, glob patterns or folders "
        "(default: read from the Hub)",
    )
    column: str = option("text", "column of tables that holds the text")


def from_options(
    args: SimpleNamespace, name: str | None = None, split: str = "train", num_bytes: int = 0
) -> Documents:
    """Return the documents of local files, if the options name any, or of a dataset of the Hub.

    An interrupted preparation goes on with the commit that it began with.

    Args:
        name, split: configuration and split of the dataset
        num_bytes: about how much text the dataset has

    Raises:
        ValueError: there is a revision, but local files are read
        SourceError: there is no such dataset, or the Hub does not respond
    """
    clone = Path(args.repository)
    if args.revision is not None and (args.source or clone.is_dir()):
        local = "--source" if args.source else f"the local folder {clone}"
        raise ValueError(f"--revision={args.revision} has no effect on {local}; omit it")
    if args.source:
        return from_files(args.source, args.column)
    identity = {
        "source": args.repository,
        "name": name,
        "split": split,
        "column": args.column,
        "revision": args.revision,
    }
    if clone.is_dir():
        commit = None
        identity["sha256"] = hash_listing(sorted(list_folder(clone)))
    else:
        commit = None if args.overwrite else find_commit(args.out, identity)
        if commit is None:
            commit = find_latest_commit(args.repository, args.revision)
        identity["commit"] = commit

    def open_dataset() -> "IterableDataset":
        import datasets
        import huggingface_hub

        # both libraries would log each of their attempts
        datasets.logging.set_verbosity(datasets.logging.CRITICAL)
        huggingface_hub.logging.set_verbosity(datasets.logging.CRITICAL)
        dataset = datasets.load_dataset(
            args.repository, name, split=split, revision=commit, streaming=True
        )
        dataset = dataset.select_columns([args.column])
        return dataset if args.column == "text" else dataset.rename_column(args.column, "text")

    return Documents(open_dataset, identity, num_bytes)


def find_commit(out: Path, identity: dict) -> str | None:
    """Return the commit of the preparation in a folder, if it reads the same dataset."""
    plan = shards.read_progress(out).get("options", {}).get("plan", {})
    for earlier in plan.values():
        if identity.items() <= earlier.items():
            return earlier["commit"]
    return None


def find_latest_commit(repository: str, revision: str | None) -> str:
    """Return the commit that a revision, by default the main branch, stands for.

    Raises:
        SourceError: there is no such dataset, or the Hub does not respond
    """
    import huggingface_hub

    try:
        return huggingface_hub.dataset_info(repository, revision=revision).sha
    except Exception as error:  # of httpx and huggingface_hub
        raise SourceError(
            f"{repository} cannot be read from the Hugging Face Hub ({error!r:.300}); "
            "give local files with --source, or a local clone with --repository=FOLDER"
        ) from error


# ---- local files ----


def from_files(
    patterns: Iterable[str],
    column: str = "text",
    suffixes: Iterable[str] = (),
    shuffled: bool = False,
) -> Documents:
    """Return the documents of local files.

    Each row of a table (see READERS) is a document, and so is every other file, which is UTF-8 text.

    Args:
        patterns: files, glob patterns, and folders, of which all files are read except hidden ones
            and those that are not text or lack the column
        column: of tables
        suffixes: if given, only files with these suffixes are read from folders
        shuffled: whether files are ordered by a hash of their names instead of by name

    Raises:
        ValueError: a pattern has no files
    """
    paths = {path for pattern in patterns for path in find_files(pattern, column, suffixes)}
    paths = sorted(paths)
    if shuffled:
        paths.sort(key=lambda path: hashlib.sha256(path.as_posix().encode()).digest())
    parts = [functools.partial(read_file, path, column) for path in paths]
    return Documents(
        open=lambda: Rows(parts),
        identity={"source": " ".join(patterns), "column": column, "sha256": hash_listing(paths)},
        num_bytes=sum(path.stat().st_size for path in paths),
    )


def find_files(pattern: str, column: str, suffixes: Iterable[str]) -> list[Path]:
    """Return the files that a path or a glob pattern names, and those below its folders."""
    pattern = os.path.expanduser(pattern)
    # a path that exists is that path, whatever brackets or stars are in its name
    matches = [pattern] if os.path.lexists(pattern) else glob.glob(pattern, recursive=True)
    paths = []
    for match in map(Path, matches):
        if not match.is_dir():
            paths.append(match)
            continue
        below = list_folder(match)
        if suffixes:
            below = [path for path in below if {path.suffix, get_kind(path)} & set(suffixes)]
        readable = [path for path in below if is_readable(path, column)]
        if len(readable) < len(below):
            print(
                f"{match}: {len(below) - len(readable):,} files are skipped, because they are not "
                f"UTF-8 text or have no column {column}"
            )
        paths += readable
    if not paths:
        raise ValueError(
            f"--source={pattern}: there are no files of text; give existing files, glob patterns or "
            "folders"
        )
    return paths


def list_folder(folder: Path) -> list[Path]:
    """Return the files below a folder, hidden ones omitted; each folder once, also if it is linked."""
    paths = []
    visited = set()
    for parent, folders, names in os.walk(folder, followlinks=True):
        if os.path.realpath(parent) in visited:
            folders.clear()
            continue
        visited.add(os.path.realpath(parent))
        folders[:] = [name for name in folders if not name.startswith((".", "__pycache__"))]
        paths += [Path(parent, name) for name in names if not name.startswith(".")]
    return [path for path in paths if path.is_file()]


def hash_listing(paths: list[Path]) -> str:
    """Return the SHA-256 of the names and sizes of files."""
    listing = "".join(f"{path}\t{path.stat().st_size}\n" for path in paths)
    return hashlib.sha256(listing.encode()).hexdigest()


def get_kind(path: Path) -> str:
    """Return the suffix of a file in lower case, or of its content if it is compressed."""
    path = Path(path.name.lower())
    return Path(path.stem).suffix if path.suffix in COMPRESSED else path.suffix


def is_readable(path: Path, column: str) -> bool:
    """Return whether a file begins with text, or is a table that has the column."""
    try:
        next(read_file(path, column), None)
    except SourceError:
        return False
    return True


def read_file(path: Path, column: str) -> Iterator[dict]:
    """Yield the texts of a file, which are None where a table has none.

    Raises:
        SourceError: the file is damaged, is not text, or has no such column
    """
    try:
        if get_kind(path) not in READERS:
            yield from read_text(path)
            return
        for value in READERS[get_kind(path)](path, column):
            if isinstance(value, str):
                # JSON can hold half of a surrogate pair, but UTF-8 cannot
                value = value.encode("utf-8", "replace").decode()
            yield {"text": value}
    except KeyError as error:
        raise SourceError(f"{path} has no column {column}; name one with --column") from error
    except (ValueError, OSError, AttributeError, TypeError, RecursionError, csv.Error) as error:
        reason = str(error).partition("\n")[0][:200]
        raise SourceError(f"{path} is not text, or is damaged ({reason})") from error


def open_text(path: Path) -> io.TextIOWrapper:
    """Open a text file in UTF-8, with its line breaks as they are; decompress it if need be."""
    is_compressed = path.suffix.lower() in COMPRESSED
    file = pyarrow.input_stream(str(path)) if is_compressed else open(path, "rb")  # noqa: SIM115
    return io.TextIOWrapper(file, encoding="utf-8-sig", newline="")


def read_text(path: Path) -> Iterator[dict]:
    """Yield the pieces of a text file, which end with a line break if there is one."""
    with open_text(path) as file:
        starts = True
        while piece := file.read(PIECE_CHARACTERS):
            piece += file.readline(PIECE_CHARACTERS)
            if "\0" in piece:
                raise ValueError("it has zero bytes")
            yield {"text": piece, "starts": starts}
            starts = False


def read_parquet(path: Path, column: str) -> Iterator[object]:
    """Yield the values of a column of a parquet file."""
    with parquet.ParquetFile(path) as file:
        if column not in file.schema_arrow.names:
            raise KeyError(column)
        for batch in file.iter_batches(ROWS, columns=[column]):
            yield from batch.column(0).to_pylist()


def read_arrow(path: Path, column: str) -> Iterator[object]:
    """Yield the values of a column of an .arrow file, as `Dataset.save_to_disk` writes it."""
    import datasets

    dataset = datasets.Dataset.from_file(str(path))
    if column not in dataset.column_names:
        raise KeyError(column)
    for row in dataset.select_columns([column]):
        yield row[column]


def read_json(path: Path, column: str) -> Iterator[object]:
    """Yield the values of a key of JSON lines, or of the objects of one array; the first has the key."""
    with open_text(path) as file:
        first_line = file.readline()
        if first_line.lstrip().startswith("["):
            rows = iter(json.loads(first_line + file.read()))
        else:
            lines = itertools.chain([first_line], file)
            rows = (json.loads(line) for line in lines if line.strip())
        for first_row in rows:
            yield first_row[column]
            break
        for row in rows:
            yield row.get(column)


def read_csv(path: Path, column: str) -> Iterator[str]:
    """Yield the values of a column of a .csv or .tsv file, whose first line names the columns."""
    delimiter = "\t" if get_kind(path) == ".tsv" else ","
    with open_text(path) as file:
        for row in csv.DictReader(file, delimiter=delimiter):
            yield row[column]


# by the suffix of the file, in lower case
READERS = {
    ".parquet": read_parquet,
    ".arrow": read_arrow,
    ".jsonl": read_json,
    ".ndjson": read_json,
    ".json": read_json,
    ".csv": read_csv,
    ".tsv": read_csv,
}
