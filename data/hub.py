"""Data sets of the Hugging Face hub, file by file; what it refuses for a while is asked again.

huggingface_hub downloads a file, goes on where it was cut and checks its size.
"""

import argparse
import logging
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from data import shards
from data.sources import Batch, Files, Missing, first_line, listing_digest, parquet_texts
from utils import errors

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0  # seconds
MINUTES = 60.0
# By name: httpx, requests, aiohttp and urllib3 each have their own. With their subclasses.
PASSING = {"ConnectionError", "TimeoutError", "TransportError", "Timeout", "HTTPException"}
PASSING |= {"ClientConnectionError", "ClientPayloadError", "URLError", "ProtocolError"}


class OutOfPatience(ValueError):  # noqa: N818 (says what happened)
    """What may pass by itself did not, for the time that was given."""


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error, what it was raised from or while handling, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def kinds(error: BaseException) -> set[str]:
    """Names of the error's classes, and of those that it was raised from."""
    return {kind.__name__ for each in chain(error) for kind in type(each).__mro__}


def is_offline(error: BaseException) -> bool:
    """Whether HF_HUB_OFFLINE is why; `datasets` says so in the text alone."""
    return any("OfflineModeIsEnabled" in f"{type(each)} {each}" for each in chain(error))


def status_of(error: BaseException) -> int | None:
    """The HTTP status of the answer that an error is about."""
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", None) or getattr(error, "code", None)
    return status if isinstance(status, int) else None


def passing_cause(error: BaseException) -> str | None:
    """In words what is wrong, where it may pass by itself, else None."""
    if is_offline(error):
        return None
    # The outermost error that says something decides: libraries wrap each other's.
    for each in chain(error):
        if status := status_of(each):
            passes = status in (408, 425, 429) or status >= 500
            return f"the hub answers {status}" if passes else None
        if PASSING & {
            kind.__name__ for kind in type(each).__mro__
        } or "onsistency check failed" in str(each):
            return f"{type(each).__name__}: {first_line(each)}"
    return None


def retried(action: Callable, what: str, minutes: float | None = None):
    """The action's result, tried for up to so many minutes (60), with growing pauses.

    What does not pass by itself is raised at once, as it is; OutOfPatience: it did not pass in time.
    """
    minutes = MINUTES if minutes is None else minutes
    began, pause = time.monotonic(), FIRST_PAUSE
    for library in ("huggingface_hub", "datasets"):  # their own lines on each attempt
        logging.getLogger(library).setLevel(logging.CRITICAL)
    while True:
        try:
            return action()
        except Exception as error:  # every library raises its own kinds
            cause, left = passing_cause(error), began + 60 * minutes - time.monotonic()
            if cause is None:
                raise
            if left <= 0:
                lasting = f"{cause}, for --retry_minutes={minutes:g} by now"
                raise OutOfPatience(f"{what} cannot be read: {lasting}") from error
        tqdm.write(f"{what}: {cause}; again in {min(pause, left):.3g} s", file=sys.stderr)
        time.sleep(min(pause, left))
        pause = min(2 * pause, LONGEST_PAUSE)


def check_minutes(minutes: float | None) -> None:
    """ValueError: out of range."""
    if minutes is not None and not minutes >= 0:
        raise ValueError(f"--retry_minutes={minutes:g}: give 0 or more")


def add_options(parser: argparse.ArgumentParser, repository: str, or_files: bool = True) -> None:
    """Add the options of a corpus that is read from the Hugging Face Hub, or from files.

    Args:
        repository: name of the dataset on the Hub
        or_files: whether the script can read local files instead
    """
    if or_files:
        parser.add_argument(
            "--source",
            nargs="+",
            help="read these local .parquet or .jsonl files instead of the Hugging Face Hub: "
            "paths, glob patterns or folders (default: read from the Hub)",
        )
    parser.add_argument(
        "--repository",
        default=repository,
        help="dataset on the Hugging Face Hub, or folder of a local clone",
    )
    parser.add_argument(
        "--revision",
        help="commit, tag or branch of the dataset (default: the latest commit, which is recorded "
        "in meta.json)",
    )
    parser.add_argument(
        "--retry_minutes",
        type=float,
        help="number of minutes, 0 or more, to keep retrying while the Hub does not respond "
        f"(default: {MINUTES:g})",
    )


def refuse_options(args, given: str) -> None:
    """ValueError: an option that a hub alone has a use for."""
    for name in ("revision", "retry_minutes"):
        if getattr(args, name) is not None:
            raise ValueError(f"--{name} has no effect on {given}: leave it out")


def source_of(args, name: str | None = None, **keys) -> "Files | Hub":
    """What the options name: files, or one configuration of the data set."""
    column = getattr(args, "column", "text")
    if getattr(args, "source", None):
        refuse_options(args, "--source")
        return Files(args.source, column)
    keys |= {"revision": args.revision, "retry_minutes": args.retry_minutes}
    return Hub(args.repository, name, column=column, **keys)


@dataclass
class Hub:
    """One split of a data set of the Hugging Face hub, or of a local clone of one: parquet files,
    which `datasets` knows from the data set's card.

    ValueError: it cannot be read, with the way out; Missing: nor later.
    """

    repository: str
    name: str | None = None  # of one configuration
    split: str = "train"
    column: str = "text"
    revision: str | None = None
    starts: Callable[[str], bool] | None = None  # which rows begin a document; None: all
    tokens: int = 0  # how many it has, about
    retry_minutes: float | None = None
    otherwise: str = "give local files by --source, or a local clone by --repository=FOLDER"
    downloads: Path | None = None  # where a file is kept while it is read; None: the hub's cache
    commit: str | None = None  # fixed by `pin`, so that what is resumed is what was begun

    def __post_init__(self):
        check_minutes(self.retry_minutes)
        self.files = None
        self.where = f"{self.repository}{f' ({self.name})' if self.name else ''}"

    @property
    def api(self):
        return errors.import_optional("huggingface_hub", "the hub").HfApi()

    def pin(self, commit: str | None = None) -> str | None:
        """Fix the commit: to this one, or to what the hub has now. A clone has none."""
        if not Path(self.repository).is_dir():
            info = lambda: self.api.dataset_info(self.repository, revision=self.revision)  # noqa: E731
            # A branch may move between two runs, a commit does not.
            self.commit = commit or self.ask(info).sha
        return self.commit

    def identity(self) -> dict:
        """What tells these documents from others."""
        where = {"source": self.repository, "name": self.name, "split": self.split}
        where |= {"column": self.column, "revision": self.revision, "commit": self.commit}
        if (clone := Path(self.repository)).is_dir():  # no commit tells its states apart
            files = [file for file in sorted(clone.rglob("*")) if file.is_file()]
            where["sha256"] = listing_digest(files)
        return where

    def read(self, cursor: dict | None = None) -> Iterator[Batch]:
        """Batches of documents from a cursor on; of each file only while it is read a copy."""
        cursor = cursor or {"file": 0, "row": 0}
        if self.files is None:
            self.files = self.ask(self.list_files)
        for number in range(cursor["file"], len(self.files)):
            file = local = self.files[number]
            if "://" in file:  # hf://datasets/REPOSITORY@COMMIT/PATH
                local = self.download(file.partition("@")[2].partition("/")[2])
            first = cursor["row"] if number == cursor["file"] else 0
            for row, rows in parquet_texts(local, file, self.column, first):
                texts = [text for text in rows if text is not None]
                starts = [self.starts(text) for text in texts] if self.starts else None
                yield Batch({"file": number, "row": row}, texts, starts)
            # The room of one file is enough for a data set of any size.
            if self.downloads and local != file:
                Path(local).unlink()

    def list_files(self) -> list[str]:
        """The split's files: paths, or hf://datasets/REPOSITORY@COMMIT/PATH."""
        datasets = errors.import_optional("datasets", "a data set of the hub")
        revision = self.commit or self.revision
        builder = datasets.load_dataset_builder(self.repository, self.name, revision=revision)
        splits = builder.config.data_files
        if self.split not in splits:
            there = ", ".join(map(str, splits))
            raise Missing(f"{self.where} has no split {self.split}, it has {there}")
        files = list(map(str, splits[self.split]))
        if other := next((file for file in files if not file.endswith(".parquet")), None):
            parquet = "--revision=refs/convert/parquet, where the hub keeps public data sets so"
            what = f"{self.where} is read from parquet files, {other} is none"
            raise Missing(f"{what}: give {parquet}; or {self.otherwise}")
        return files

    def download(self, path: str) -> str:
        """The local copy of a file of the commit."""
        errors.import_optional("huggingface_hub", "the hub").utils.disable_progress_bars()
        keys = {"repo_type": "dataset", "revision": self.commit, "local_dir": self.downloads}
        return self.ask(lambda: self.api.hf_hub_download(self.repository, path, **keys))

    def ask(self, action):
        """The action's result; what the hub refuses becomes one line that says what to do."""
        try:
            return retried(action, self.where, self.retry_minutes)
        except (Missing, OutOfPatience):
            raise
        except Exception as error:  # httpx, pyarrow, fsspec and datasets each raise their own kinds
            cause = f"{type(error).__name__}: {first_line(error)}"
            line = f"{self.where} cannot be read: {self.advice(error)} ({cause})"
            raise Missing(line) from error

    def advice(self, error: Exception) -> str:
        """What to do about an error that lasts."""
        found = kinds(error)
        if is_offline(error):
            return f"HF_HUB_OFFLINE forbids it: unset it, or {self.otherwise}"
        if "GatedRepoError" in found or re.search(r"\bgated dataset\b", str(error)):
            return "accept its terms on its page, then `hf auth login`"
        if "RevisionNotFoundError" in found and self.commit:
            gone = f"it has no commit {self.commit} any more"
            return f"{gone}: --overwrite begins anew with the newest"
        if "RevisionNotFoundError" in found:
            return f"it has no revision {self.revision}: give another --revision"
        statuses = {status_of(each) for each in chain(error)}
        if found & {"RepositoryNotFoundError", "DatasetNotFoundError"} or statuses & {401, 403}:
            login = "`hf auth login` with an account that may read it"
            unknown = "the hub knows no such data set, or hides it: check the name"
            return f"{unknown}; a private or gated one needs {login}"
        return self.otherwise


def fetch_shards(repository: str, out: Path, revision: str | None, minutes: float | None) -> dict:
    """Download a data set's .bin files to `out`: {"commit": its name, "sums": {file: SHA-256}}.

    ValueError: it cannot be read, or `out` has shards of another.
    """
    keys = {"revision": revision, "retry_minutes": minutes, "downloads": out}
    hub = Hub(repository, otherwise="--pretokenized takes the folder of such shards too", **keys)
    asked = {"source": repository, "revision": revision}
    before = shards.read_json(out / "fetched.json")
    if before and {key: before.get(key) for key in asked} != asked:
        holds = f"{before.get('source')}, revision {before.get('revision')}"
        raise ValueError(f"{out} holds shards of {holds}: give another --out")
    commit = hub.pin(before.get("commit"))  # a fetch that is begun again goes on with that one
    shards.write_json(out / "fetched.json", {**asked, "commit": commit})

    # The hub keeps the SHA-256 of large files, which tells a download with flipped bits.
    keys = {"repo_type": "dataset", "revision": commit}
    tree = hub.ask(lambda: list(hub.api.list_repo_tree(repository, **keys)))
    files = [entry for entry in tree if entry.path.endswith(".bin")]
    for file in tqdm(files, unit="shard", disable=None):
        hub.download(file.path)
    shutil.rmtree(out / ".cache", ignore_errors=True)  # huggingface_hub's notes of the downloads
    return {"commit": commit, "sums": {file.path: file.lfs.sha256 for file in files if file.lfs}}
