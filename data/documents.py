"""The documents of a corpus: texts in memory, local files, or a dataset of the Hugging Face Hub.

Each is an iterable of rows, which are dicts of

    text    a document, or a part of it
    starts  whether the text begins a document; without it, every text does

The library `datasets` reads the Hub, and its `IterableDataset` keeps the position at which an
interrupted preparation goes on; `Rows` does so for local sources, of which data/readers.py reads the
files. The name of a file may be any bytes.
"""

import functools
import glob
import hashlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from configurator import option
from data import shards
from data.readers import (
    NoDocumentsError,
    SourceError,
    estimate_bytes,
    get_kind,
    has_text,
    read_file,
)
from utils import files

if TYPE_CHECKING:
    from datasets import IterableDataset

BATCH_CHARACTERS = 1_000_000
HUB_SECONDS = 30  # without an answer, after which a request has failed
HUB_TRIES = 3  # of datasets to open or read a file; in each, huggingface_hub repeats requests


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
                if not has_text(text):
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
            reason = " ".join(str(error).split())
            raise SourceError(
                f"{self.identity['source']} cannot be read ({type(error).__name__}: {reason:.400}); "
                "if the Hub did not respond, run the same command again to resume"
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

        import_hub()
        # it would log each of its attempts, 20 of which take ten minutes if the network is gone
        datasets.logging.set_verbosity(datasets.logging.CRITICAL)
        datasets.config.STREAMING_OPEN_MAX_RETRIES = HUB_TRIES
        datasets.config.STREAMING_READ_MAX_RETRIES = HUB_TRIES
        dataset = datasets.load_dataset(
            args.repository, name, split=split, revision=commit, streaming=True
        )
        dataset = dataset.select_columns([args.column])
        return dataset if args.column == "text" else dataset.rename_column(args.column, "text")

    return Documents(open_dataset, identity, num_bytes)


def import_hub() -> ModuleType:
    """Return huggingface_hub, which would wait for some answers without end, and log each attempt."""
    import huggingface_hub

    hooks = huggingface_hub.get_session().event_hooks["request"]
    if limit_wait not in hooks:
        hooks.append(limit_wait)
    huggingface_hub.logging.set_verbosity(huggingface_hub.logging.CRITICAL)
    return huggingface_hub


def limit_wait(request: Any) -> None:
    """Let a request of huggingface_hub that has no time limit fail after HUB_SECONDS."""
    limits = request.extensions.get("timeout", {})
    request.extensions["timeout"] = {name: limits[name] or HUB_SECONDS for name in limits}


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
    try:
        return import_hub().dataset_info(repository, revision=revision).sha
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
        ValueError: a pattern has no files, or a file in a folder is damaged
    """
    paths = {path for pattern in patterns for path in find_files(pattern, column, suffixes)}
    paths = sorted(paths)
    if shuffled:
        paths.sort(key=lambda path: hashlib.sha256(os.fsencode(path)).digest())
    parts = [functools.partial(read_file, path, column) for path in paths]
    return Documents(
        open=lambda: Rows(parts),
        identity={"source": " ".join(patterns), "column": column, "sha256": hash_listing(paths)},
        num_bytes=sum(estimate_bytes(path, column) for path in paths),
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
        skipped = []
        for path in below:
            if has_documents(path, column):
                paths.append(path)
            else:
                skipped.append(files.show_path(path.relative_to(match)))
        if skipped:
            names = ", ".join(skipped[:5])
            if len(skipped) > 5:
                names = f"{names}, ..."
            print(
                f"{files.show_path(match)}: {len(skipped):,} files are skipped, because they are not "
                f"UTF-8 text or have no column {column}: {names}"
            )
    if not paths:
        raise ValueError(
            f"--source={pattern}: there are no files of text; give existing files, glob patterns or "
            "folders"
        )
    return paths


def list_folder(folder: Path) -> list[Path]:
    """Return the files below a folder, hidden ones omitted; each folder once, also if it is linked.

    Raises:
        ValueError: it holds several splits of a dataset
        OSError: it cannot be searched
    """

    def fail(error: OSError) -> None:
        raise error

    paths = []
    visited = set()
    for parent, folders, names in os.walk(folder, followlinks=True, onerror=fail):
        if os.path.realpath(parent) in visited:
            folders.clear()
            continue
        visited.add(os.path.realpath(parent))
        # sorted, because of two links to a folder the first is followed
        folders[:] = sorted(name for name in folders if not name.startswith((".", "__pycache__")))
        if "dataset_dict.json" in names:
            raise ValueError(
                f"{parent} holds the splits of a DatasetDict, {', '.join(folders)}; give the "
                "folder of one of them"
            )
        if {"dataset_info.json", "state.json"} <= set(names):
            # Dataset.save_to_disk wrote the folder, which can hold caches of other data sets, too
            state = files.read_json(Path(parent, "state.json"))
            names = [file["filename"] for file in state.get("_data_files", [])] or names
        paths += [Path(parent, name) for name in names if not name.startswith(".")]
    return sorted(path for path in paths if path.is_file() or path.is_symlink())


def hash_listing(paths: list[Path]) -> str:
    """Return the SHA-256 of the names and sizes of files."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(b"%s\t%d\n" % (os.fsencode(path), path.stat().st_size))
    return digest.hexdigest()


def has_documents(path: Path, column: str) -> bool:
    """Return whether a file begins with text, or is a table that has the column."""
    try:
        next(read_file(path, column), None)
    except NoDocumentsError:
        return False
    return True
