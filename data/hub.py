"""A data set of the Hugging Face hub as a source of documents."""

import hashlib
import io
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from data.patience import MINUTES, OutOfPatience, Patience, WrongAnswer, chain, expired, is_offline, kinds
from data.sources import Batch, Missing, first_line, parquet_texts

AHEAD = 16 << 20  # bytes that are read at once
TIMEOUT = 60  # seconds without a byte


def add_options(parser, repository: str) -> None:
    """The options of a corpus that comes from a hub."""
    add = parser.add_argument
    add("--repository", default=repository, help="the data set on the hub, or a local clone of it")
    add("--revision", help="its commit, tag or branch (default: the newest, noted in meta.json)")
    add("--retry_minutes", type=float, help=f"how long to ask a hub again that does not answer (default: {MINUTES:g})")


def refuse_options(args, given: str) -> None:
    """ValueError: an option that a hub alone has a use for."""
    for name in ("revision", "retry_minutes"):
        if getattr(args, name) is not None:
            raise ValueError(f"--{name} has no effect on {given}: leave it out")


@dataclass
class Hub:
    """One split of a data set of the Hugging Face hub, or of a local clone of one: the rows of its parquet files.

    Which files those are `datasets` knows from the data set's card. `starts(text)`, where given, tells which rows begin
    a document. `revision` is pinned to a commit as soon as the hub was asked, so that what is resumed is what was
    begun. What the hub refuses for a while is asked for again, up to `retry_minutes`. `otherwise` is what a script says
    one can do without the hub, `anew` where the pinned commit is gone.
    ValueError: it cannot be read, with the way out; Missing: nor later.
    """

    repository: str
    name: str | None
    split: str = "train"
    column: str = "text"
    revision: str | None = None
    starts: Callable[[str], bool] | None = None
    tokens: int | None = None  # how many it has, about
    retry_minutes: float | None = None  # None: as patience has it
    otherwise: str = "give local files by --source, or a local clone by --repository=FOLDER"
    anew: str = "--overwrite begins anew with the newest"
    _pinned: str | None = field(default=None, init=False)
    _listed: list[str] | None = field(default=None, init=False)

    def __post_init__(self):
        self.patience = Patience(self._where(), self.retry_minutes)

    def pin(self, commit: str | None = None) -> str | None:
        """Fix the revision: to `commit`, or to what the hub has now. A clone has no commits."""
        if not Path(self.repository).is_dir():
            self._pinned = commit or self.ask(self._newest_commit)
        return self._pinned

    def _newest_commit(self) -> str:
        import huggingface_hub

        return huggingface_hub.HfApi().dataset_info(self.repository, revision=self.revision).sha

    def files_of_commit(self) -> list:
        """The hub's entries (path, size, lfs) of the files at the top of the repository."""
        import huggingface_hub

        api = huggingface_hub.HfApi()
        found = api.list_repo_tree(self.repository, repo_type="dataset", revision=self._pinned)
        return [entry for entry in found if isinstance(entry, huggingface_hub.hf_api.RepoFile)]

    def identity(self) -> dict:
        where = {"source": self.repository, "name": self.name, "split": self.split, "column": self.column}
        where |= {"revision": self.revision, "commit": self._pinned}
        if (clone := Path(self.repository)).is_dir():  # no commit tells its states apart
            listing = [f"{file}\t{file.stat().st_size}\n" for file in sorted(clone.rglob("*")) if file.is_file()]
            where["sha256"] = hashlib.sha256("".join(listing).encode()).hexdigest()
        return where

    def read(self, cursor: dict | None = None) -> Iterator[Batch]:
        cursor = cursor or {"file": 0, "row": 0}
        if self._listed is None:
            self._listed = self.ask(self._files)
        for number in range(cursor["file"], len(self._listed)):
            file = self._listed[number]
            first = cursor["row"] if number == cursor["file"] else 0
            for row, rows in parquet_texts(self._open(file), file, self.column, first):
                texts = [text for text in rows if text is not None]
                starts = [self.starts(text) for text in texts] if self.starts else None
                yield Batch({"file": number, "row": row}, texts, starts)

    def _files(self) -> list[str]:
        """The split's files: paths, or hf://datasets/REPOSITORY@COMMIT/PATH."""
        import datasets

        revision = self._pinned or self.revision
        builder = datasets.load_dataset_builder(self.repository, self.name, revision=revision)
        splits = builder.config.data_files
        if self.split not in splits:
            raise Missing(f"{self._where()} has no split {self.split}, it has {', '.join(map(str, splits))}")
        files = list(map(str, splits[self.split]))
        if other := next((file for file in files if not file.endswith(".parquet")), None):
            raise Missing(
                f"{self._where()} is read from parquet files, {other} is none: give --revision=refs/convert/parquet, "
                f"where the hub keeps public data sets as parquet; or {self.otherwise}"
            )
        return files

    def _open(self, file: str):
        if not file.startswith("hf://"):
            return file
        commit, _, path = file.partition("@")[2].partition("/")
        return RemoteFile(self.repository, commit, path, self.ask)

    def remote(self, path: str) -> "RemoteFile":
        """A file of the commit."""
        return RemoteFile(self.repository, self._pinned, path, self.ask)

    def _where(self) -> str:
        return f"{self.repository}{f' ({self.name})' if self.name else ''}"

    def ask(self, action):
        """The action's result; what `datasets` and the hub raise becomes one line that says what to do."""
        try:
            return self.patience.ask(action)
        except Missing:
            raise
        except OutOfPatience as error:
            raise ValueError(f"{self._where()} cannot be read: {error}") from error.__cause__
        except Exception as error:  # requests, httpx, pyarrow, fsspec and datasets each raise their own kinds
            cause = f"{type(error).__name__}: {first_line(error)}"
            raise Missing(f"{self._where()} cannot be read: {self._advice(error)} ({cause})") from error

    def _advice(self, error: Exception) -> str:
        """What to do about an error that lasts."""
        found = {name for each in chain(error) for name in kinds(each)}
        if "ImportError" in found:
            return "that needs the datasets package: pip install datasets"
        if is_offline(error):
            return f"no connection to the hub, as HF_HUB_OFFLINE says: unset it, or {self.otherwise}"
        if "GatedRepoError" in found or re.search(r"\bgated dataset\b", str(error)):
            return "accept its terms on its page, then `hf auth login`"
        if "RevisionNotFoundError" in found and self._pinned:
            return (
                f"the commit {self._pinned}, which this preparation was begun with, is gone from the hub: {self.anew}"
            )
        if "RevisionNotFoundError" in found:
            return f"it has no revision {self.revision}: give another --revision"
        if found & {"RepositoryNotFoundError", "DatasetNotFoundError"}:
            return (
                "the hub knows no such data set, or hides it: check the name; if that is right it is private or "
                "gated, then `hf auth login` with an account that may read it"
            )
        if any(map(expired, chain(error))):
            return f"its storage refuses newly signed addresses too: {self.otherwise}"
        if any(getattr(getattr(each, "response", None), "status_code", None) in (401, 403) for each in chain(error)):
            return "the hub refuses: `hf auth login` with an account that may read it"
        return self.otherwise


class RemoteFile(io.RawIOBase):
    """A file of a data set at a commit, read by ranges; `ask` tries again what fails for a while.

    Each answer must be the range that was asked for. What came before a connection broke is kept.
    """

    def __init__(self, repository: str, commit: str, path: str, ask):
        import huggingface_hub

        self.hub, self.ask, self.at = huggingface_hub, ask, 0
        self.url = huggingface_hub.hf_hub_url(repository, path, repo_type="dataset", revision=commit)
        self.size = ask(lambda: huggingface_hub.get_hf_file_metadata(self.url).size)
        self.start, self.block = 0, b""  # the part that is here

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.at, io.SEEK_END: self.size}[whence]
        return self.at

    def read(self, count: int = -1) -> bytes:
        end = self.size if count < 0 else min(self.at + count, self.size)
        if self.at >= end:
            return b""  # no range is that short
        if not self.start <= self.at <= end <= self.start + len(self.block):
            self.start, self.block = self.at, self._fetch(self.at, min(max(end, self.at + AHEAD), self.size))
        part = self.block[self.at - self.start : end - self.start]
        self.at = end
        return part

    def _fetch(self, first: int, end: int) -> bytes:
        data = bytearray()
        self.ask(lambda: self._go_on(data, first, end))
        return bytes(data)

    def _go_on(self, data: bytearray, first: int, end: int) -> None:
        """Append what is missing of bytes first to end - 1."""
        begin = first + len(data)
        headers = {**self.hub.utils.build_hf_headers(), "Range": f"bytes={begin}-{end - 1}"}
        headers["Accept-Encoding"] = "identity"
        stream = self.hub.utils.get_session().stream
        with stream("GET", self.url, headers=headers, timeout=TIMEOUT, follow_redirects=True) as response:
            if response.status_code >= 400:
                response.read()
            self.hub.utils.hf_raise_for_status(response)
            if not response.headers.get("Content-Range", "").startswith(f"bytes {begin}-"):
                raise WrongAnswer(f"status {response.status_code} without the range that was asked for")
            for part in response.iter_bytes():
                data += part[: end - first - len(data)]
        if len(data) < end - first:
            raise WrongAnswer(f"{first + len(data) - begin} bytes instead of {end - begin}")
