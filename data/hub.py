"""A data set of the Hugging Face hub as a source of documents."""

import copy
import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from data.sources import ROWS, Batch, first_line


@dataclass
class Hub:
    """One split of a data set of the Hugging Face hub, or of a local clone of one, streamed by `datasets`.

    `starts(text)`, where given, tells which rows begin a document. `revision` is pinned to a commit as soon as the hub
    was asked, so that what is resumed is what was begun. ValueError: it cannot be read, with the way out.
    """

    repository: str
    name: str | None
    split: str = "train"
    column: str = "text"
    revision: str | None = None
    starts: Callable[[str], bool] | None = None
    tokens: int | None = None  # how many it has, about
    _pinned: str | None = field(default=None, init=False)

    def pin(self, commit: str | None = None) -> None:
        """Fix the revision: to `commit`, or to what the hub has now."""
        if not Path(self.repository).is_dir():
            self._pinned = commit or self._ask(self._newest_commit)

    def _newest_commit(self) -> str:
        import huggingface_hub

        return huggingface_hub.HfApi().dataset_info(self.repository, revision=self.revision).sha

    def identity(self) -> dict:
        where = {"source": self.repository, "name": self.name, "split": self.split, "column": self.column}
        where |= {"revision": self.revision, "commit": self._pinned}
        if (clone := Path(self.repository)).is_dir():  # no commit tells its states apart
            listing = [f"{file}\t{file.stat().st_size}\n" for file in sorted(clone.rglob("*")) if file.is_file()]
            where["sha256"] = hashlib.sha256("".join(listing).encode()).hexdigest()
        return where

    def text_bytes(self) -> int | None:
        return None

    def read(self, cursor: dict | None = None) -> Iterator[Batch]:
        stream = self._ask(self._open)
        if cursor:
            stream.load_state_dict(cursor)
        rows = stream.iter(batch_size=ROWS)
        while True:
            cursor = copy.deepcopy(stream.state_dict())
            batch = self._ask(lambda: next(rows, None))
            if batch is None:
                return
            texts = [text for text in batch[self.column] if text is not None]
            yield Batch(cursor, texts, [self.starts(text) for text in texts] if self.starts else None)

    def _open(self):
        try:
            import datasets
        except ImportError as error:
            raise ValueError("reading from the hub needs the datasets package: pip install datasets") from error
        stream = datasets.load_dataset(
            self.repository, self.name, split=self.split, revision=self._pinned or self.revision, streaming=True
        )
        return stream.select_columns([self.column])

    def _ask(self, action):
        """The action's result; what `datasets` and the hub raise becomes one line that says what to do."""
        try:
            return action()
        except Exception as error:  # requests, httpx, pyarrow, fsspec and datasets each raise their own kinds
            kinds = {kind.__name__ for kind in type(error).__mro__}
            where = f"{self.repository}{f' ({self.name})' if self.name else ''}"
            if "GatedRepoError" in kinds or re.search(r"\bgated\b", str(error)):
                advice = "accept its terms on its page, then `hf auth login`"
            elif kinds & {"RepositoryNotFoundError", "DatasetNotFoundError", "RevisionNotFoundError"}:
                advice = "no such data set or revision; if it is private, `hf auth login`"
            elif kinds & {"ConnectionError", "ConnectError", "TimeoutException", "Timeout", "OfflineModeIsEnabled"}:
                advice = "no connection to the hub: try again, or give local files by --source, or --repository=FOLDER"
            else:
                advice = "try again, or give local files by --source, or --repository=FOLDER"
            raise ValueError(
                f"{where} cannot be read: {advice} ({type(error).__name__}: {first_line(error)})"
            ) from error
