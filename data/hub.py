"""Datasets, shards and tokenizers of the Hugging Face Hub, downloaded file by file.

huggingface_hub resumes interrupted downloads and checks their sizes. It repeats most requests for
20 seconds, and those of a file's content not at all if the Hub responds with an error. So whatever
may be temporary is retried here, for up to --retry_minutes. By default this does not hold for a Hub
that cannot be reached at all: then only the local cache is read.
"""

import contextlib
import functools
import http.client
import logging
import os
import re
import sys
import time
import urllib.error
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TypeVar

from tqdm import tqdm

from configurator import option
from data.sources import (
    READERS,
    Batch,
    Files,
    PermanentSourceError,
    Piece,
    Source,
    batch_pieces,
    compute_listing_digest,
    first_line,
    get_kind,
    list_folder,
    read_table,
)
from utils import errors, units

FIRST_PAUSE = 1.0  # seconds
MAX_PAUSE = 60.0  # seconds
RETRY_MINUTES = 60.0

Result = TypeVar("Result")


# ---- retries ----


class RetriesExhausted(ValueError):  # noqa: N818 (says what happened)
    """An error that may be temporary lasted longer than --retry_minutes."""


class HubUnreachable(ValueError):  # noqa: N818 (says what happened)
    """The Hub does not respond to the first request, and the local cache does not suffice."""


def import_hub(module: str = "") -> ModuleType:
    """Import huggingface_hub, or a module of it; raise ValueError if it is not installed."""
    name = f"huggingface_hub.{module}" if module else "huggingface_hub"
    return errors.import_optional(name, "reading from the Hugging Face Hub")


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, the error that it was raised from, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def is_connection_error(error: BaseException) -> bool:
    """Return whether an error says that a connection failed, was cut, or timed out."""
    # the httpx that huggingface_hub uses; some tasks of lm-evaluation-harness use requests
    httpx = import_hub("utils").httpx
    error_types = (httpx.TransportError, ConnectionError, TimeoutError, http.client.HTTPException)
    return (
        isinstance(error, (*error_types, urllib.error.URLError))
        or type(error).__module__ == "requests.exceptions"
        # huggingface_hub raises a plain OSError if a download is incomplete
        or "Consistency check failed" in str(error)
        # hf_xet raises a plain RuntimeError if its content-addressed store (CAS) fails
        or re.search("CAS (client|service) error", str(error), re.IGNORECASE) is not None
    )


def describe_transient(error: BaseException) -> str | None:
    """Return a description of an error that may be temporary; None for any other error."""
    if import_hub().is_offline_mode() or os.environ.get("HF_DATASETS_OFFLINE"):
        return None
    # Libraries wrap each other's errors: the outermost one that is about a connection decides.
    for cause in causes(error):
        status = getattr(getattr(cause, "response", cause), "status_code", None)
        status = getattr(cause, "code", status)  # of urllib
        if isinstance(status, int):
            is_temporary = status in (408, 425, 429) or status >= 500
            return f"the Hub responds with status {status}" if is_temporary else None
        if is_connection_error(cause):
            return f"{type(cause).__name__}: {first_line(cause)}"
    return None


@functools.cache
def find_connection_problem() -> str | None:
    """Return a message if the Hub cannot be reached, None if it responds or must not be asked.

    The answer holds for the whole process. If packets are lost, huggingface_hub itself needs minutes
    to find out, and again for every file.
    """
    if import_hub().is_offline_mode():
        return None
    utils = import_hub("utils")
    endpoint = import_hub("constants").ENDPOINT
    try:
        # connecting is tried for each of the host's addresses
        utils.get_session().head(endpoint, timeout=utils.httpx.Timeout(10, connect=5))
    except Exception as error:  # other errors than of the connection are left to the real requests
        if is_connection_error(error):
            return f"{endpoint} cannot be reached ({type(error).__name__}: {first_line(error)})"
    return None


@contextlib.contextmanager
def without_requests() -> Iterator[None]:
    """Let huggingface_hub refuse all requests meanwhile, as with HF_HUB_OFFLINE=1."""
    constants = import_hub("constants")
    was_offline = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = was_offline


def retry(
    action: Callable[[], Result],
    subject: str,
    retry_minutes: float | None = None,
    default_minutes: float = RETRY_MINUTES,
) -> Result:
    """Return the result of an action, which is retried with growing pauses while it fails.

    Args:
        subject: what is read, for messages
        retry_minutes: how long to retry (default: default_minutes, or not at all if the Hub cannot
            be reached)

    Raises:
        HubUnreachable: the Hub cannot be reached, and retry_minutes is None or 0
        RetriesExhausted: the error lasted longer
        Exception: any error of the action that is not temporary
    """
    problem = None if retry_minutes else find_connection_problem()
    if retry_minutes is None:
        retry_minutes = default_minutes
    # these libraries log each attempt of their own
    for library in ("huggingface_hub", "datasets"):
        logging.getLogger(library).setLevel(logging.CRITICAL)
    deadline = time.monotonic() + 60 * retry_minutes
    pause = FIRST_PAUSE
    while True:
        try:
            with without_requests() if problem else contextlib.nullcontext():
                return action()
        except Exception as error:  # each library has its own exceptions
            description = describe_transient(error)
            seconds_left = deadline - time.monotonic()
            if description is None:
                raise
            if problem is not None:
                raise HubUnreachable(problem) from error
            if seconds_left <= 0:
                raise RetriesExhausted(
                    f"{subject} cannot be read ({description}); gave up after "
                    f"--retry_minutes={retry_minutes:g}"
                ) from error
        pause = min(pause, seconds_left)
        tqdm.write(
            f"{subject}: {description}; retrying in {pause:.3g} s "
            f"({units.format_duration(seconds_left)} left)",
            file=sys.stderr,
        )
        time.sleep(pause)
        pause = min(2 * pause, MAX_PAUSE)


# ---- options ----


REPOSITORY_HELP = "dataset on the Hugging Face Hub, or folder of a local clone"


@dataclass(frozen=True)
class HubOptions:
    """Options of a corpus that is read from the Hugging Face Hub."""

    revision: str | None = option(
        None,
        "commit, tag or branch of the dataset (default: the latest commit, which is recorded in "
        "meta.json)",
    )
    column: str = option(
        "text",
        "column of tables that holds the text",
    )


@dataclass(frozen=True)
class SourceOptions:
    """Options of a corpus that can also be read from local files."""

    source: tuple[str, ...] = option(
        (),
        "read these local files instead of the Hugging Face Hub: paths, glob patterns or folders "
        "(default: read from the Hub)",
    )


# options that only a source on the Hub has a use for, where a script has them
HUB_ONLY = ("sample", "repository", "revision", "retry_minutes")


def check_unused(
    args: SimpleNamespace, options: type, source: str, names: tuple[str, ...] = HUB_ONLY
) -> None:
    """Raise ValueError if an option is given that has no effect on a source.

    Args:
        options: the dataclass of the script's options, which has their defaults
        source: what is read, for the message
        names: the options without effect
    """
    for name in names:
        if name == "retry_minutes" and "/" in args.tokenizer:
            continue  # the tokenizer may be read from the Hub
        default = getattr(options, name, ())
        if getattr(args, name, default) != default:
            raise ValueError(f"--{name} has no effect on {source}; omit it")


def choose_source(
    args: SimpleNamespace, options: type, name: str | None = None, **dataset_fields: object
) -> "Files | HubDataset":
    """Return the source that the options name: local files, or a dataset.

    Args:
        options: the dataclass of the script's options
        name: configuration of the dataset
        dataset_fields: further fields of HubDataset
    """
    if getattr(args, "source", None):
        check_unused(args, options, "--source")
        return Files(list(args.source), args.column)
    if args.revision is not None and Path(args.repository).is_dir():
        raise ValueError(
            f"--revision={args.revision} has no effect on the local folder {args.repository}; check "
            "the revision out there, and omit --revision"
        )
    return HubDataset(
        args.repository,
        name,
        column=args.column,
        revision=args.revision,
        retry_minutes=args.retry_minutes,
        **dataset_fields,
    )


# ---- datasets ----


@dataclass
class HubDataset(Source):
    """A source that reads one split of a dataset of the Hugging Face Hub, or of a local clone.

    The package `datasets` finds its parquet files in the dataset card.

    Raises:
        ValueError: the dataset cannot be read; the message says what to do
        PermanentSourceError: the same, and rerunning the command does not help
    """

    repository: str

    # configuration of the dataset; None if it has only one
    name: str | None = None

    split: str = "train"
    column: str = "text"
    revision: str | None = None

    # tells whether a row begins a document; None means that every row does
    starts: Callable[[str], bool] | None = None

    # approximate number of GPT-2 tokens
    num_tokens: int = 0

    retry_minutes: float | None = None

    # what to do if the dataset cannot be read, for messages
    alternative: str = "give local files with --source, or a local clone with --repository=FOLDER"

    # folder for the file that is being read, which is deleted afterwards; None keeps files in the
    # cache of huggingface_hub
    download_folder: Path | None = None

    # set by `pin`
    commit: str | None = None

    def __post_init__(self):
        self.files: list[str] | None = None
        self.description = f"{self.repository} ({self.name})" if self.name else self.repository

    def pin(self, commit: str | None = None) -> str | None:
        """Read from this commit, or from the latest one; a branch may move between two runs.

        Returns:
            The commit; None for a local clone.
        """
        if commit is None and not Path(self.repository).is_dir():
            info = self.ask(import_hub().dataset_info, self.repository, revision=self.revision)
            commit = info.sha
        self.commit = commit
        return commit

    def identity(self) -> dict:
        """Return what distinguishes these documents from others."""
        identity = {
            "source": self.repository,
            "name": self.name,
            "split": self.split,
            "column": self.column,
            "revision": self.revision,
            "commit": self.commit,
        }
        clone = Path(self.repository)
        if clone.is_dir():
            # a clone has no commit that would distinguish its states
            identity["sha256"] = compute_listing_digest(sorted(list_folder(clone)))
        return identity

    def read(self, cursor: dict | None = None) -> Iterator[Batch]:
        """Yield batches from a cursor on, or from the beginning."""
        cursor = cursor or {"file": 0, "at": 0}
        if self.files is None:
            self.files = self.ask(self.list_files)
        first_row = cursor["at"]
        for number in range(cursor["file"], len(self.files)):
            # file by file, because a batch of two files would need both to be downloaded again
            yield from batch_pieces(self.read_file(number, first_row))
            first_row = 0

    def read_file(self, number: int, first_row: int) -> Iterator[Piece]:
        """Yield the documents of a file, from a row on."""
        file = self.files[number]
        local = file
        if "://" in file:
            # hf://datasets/REPOSITORY@COMMIT/PATH
            local = self.download(file.partition("@")[2].partition("/")[2])
        for row, text in read_table(Path(local), self.column, first_row):
            if text is not None:
                starts_document = self.starts is None or self.starts(text)
                yield Piece(number, row, text, starts_document)
        # so that a dataset of any size needs the disk space of only one of its files
        if self.download_folder and local != file:
            Path(local).unlink()

    def list_files(self) -> list[str]:
        """Return the files of the split: local paths, or hf://datasets/REPOSITORY@COMMIT/PATH."""
        datasets = errors.import_optional("datasets", "reading a dataset of the Hugging Face Hub")
        builder = datasets.load_dataset_builder(
            self.repository, self.name, revision=self.commit or self.revision
        )
        splits = builder.config.data_files
        if self.split not in splits:
            raise PermanentSourceError(
                f"{self.description} has no split {self.split}; its splits are "
                f"{', '.join(map(str, splits))}"
            )
        file_names = [str(file) for file in splits[self.split]]
        for file in file_names:
            if get_kind(Path(file)) not in READERS:
                raise PermanentSourceError(
                    f"{self.description} cannot be read, because {file} is not a file of the kinds "
                    f"{', '.join(READERS)}; give --revision=refs/convert/parquet, where the Hub "
                    f"keeps parquet files of public datasets, or {self.alternative}"
                )
        return file_names

    def download(self, path: str) -> str:
        """Download a file of the commit, and return its local path."""
        import_hub("utils").disable_progress_bars()
        return self.ask(
            import_hub().hf_hub_download,
            self.repository,
            path,
            repo_type="dataset",
            revision=self.commit,
            local_dir=self.download_folder,
        )

    def ask(self, action: Callable[..., Result], *args: object, **kwargs: object) -> Result:
        """Return the result of a request to the Hub, which is retried while the Hub is down.

        Raises:
            RetriesExhausted: the Hub was down for too long
            PermanentSourceError: any other error, in the words of the library
        """
        try:
            request = functools.partial(action, *args, **kwargs)
            return retry(request, self.description, self.retry_minutes)
        except HubUnreachable as error:
            raise HubUnreachable(
                f"{self.description} cannot be read: {error}; {self.alternative}, or give "
                f"--retry_minutes={RETRY_MINUTES:g} to keep trying"
            ) from error
        except (PermanentSourceError, RetriesExhausted):
            raise
        except Exception as error:  # httpx, pyarrow, fsspec and datasets have their own exceptions
            # what the Hub answered says more than what `datasets` makes of it
            answers = [cause for cause in causes(error) if hasattr(cause, "response")]
            cause = answers[0] if answers else error
            words = " ".join(f"{type(cause).__name__}: {cause}".split())
            advice = "correct what it says"
            if isinstance(cause, import_hub("errors").GatedRepoError):
                advice = "accept its terms on its web page and run `hf auth login`"
            raise PermanentSourceError(
                f"{self.description} cannot be read ({words[:500]}); {advice}, or "
                f"{self.alternative}"
            ) from error


# ---- tokenizers ----


def fetch_model_file(repository: str, path: str, retry_minutes: float | None = None) -> Path | None:
    """Download a file of a model repository to the cache, and return its path.

    Returns:
        None if the repository has no such file.

    Raises:
        ValueError: the repository cannot be read
    """
    hub = import_hub()
    import_hub("utils").disable_progress_bars()
    try:
        return Path(retry(lambda: hub.hf_hub_download(repository, path), repository, retry_minutes))
    except HubUnreachable as error:
        raise HubUnreachable(
            f"{path} of {repository} cannot be downloaded: {error}; give a folder that holds the "
            f"file, or give --retry_minutes={RETRY_MINUTES:g} to keep trying"
        ) from error
    except RetriesExhausted:
        raise
    except Exception as error:  # each library has its own exceptions
        if isinstance(error, import_hub("errors").RemoteEntryNotFoundError):
            return None
        raise ValueError(
            f"{path} of {repository} cannot be downloaded from the Hugging Face Hub "
            f"({type(error).__name__}: {first_line(error)}); check the name, run `hf auth login` "
            "if the repository is private or gated, or give a folder that holds the file"
        ) from error
