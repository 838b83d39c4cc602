"""Prepare all Python source of the standard library, with its tests, without a network.

    python data/python_library/prepare.py

The corpus depends only on the version and the build of Python (a generated file of the library names
the folders of the build), and needs no network. It leaves out files that are
not UTF-8, files whose lines have more than 100 characters on average or more than 1,000 at most
(the rule by which Codex, arXiv 2107.03374, leaves out generated code), and files that nearly repeat
an earlier one (near_duplicates.py). Generated files with shorter lines stay: the help texts of
pydoc_data/topics.py, English prose, are a quarter of the validation split, and the tables of
encodings/ are in it as well. A hash of their paths chooses the files of the validation split, at
least --val_share of the bytes. A training file that nearly repeats a validation file is dropped.
Text that is copied in part, or changed beyond the threshold, stays in both splits.
"""

import hashlib
import platform
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tqdm import tqdm

from configurator import option
from data import preparation
from data.preparation import PreparationOptions, Stage
from data.python_library.near_duplicates import NearDuplicates
from data.sources import Texts
from utils import errors, units

SOURCE = f"Python=={platform.python_version()}"
MAX_LINE_LENGTH = 1000
MAX_MEAN_LINE_LENGTH = 100


@dataclass(frozen=True)
class Document:
    """A file of the library."""

    path: str  # in the library
    text: str

    @property
    def num_bytes(self) -> int:
        return len(self.text.encode())


@dataclass(frozen=True)
class Options(PreparationOptions):
    """Options of the standard library with its tests."""

    tokenizer: str = option("bpe", preparation.TOKENIZER_HELP)
    val_share: float = option(
        0.08,
        "smallest fraction of the bytes to use for validation",
        above=0,
        below=1,
    )


def read_documents(library: Path) -> list[Document]:
    """Return the Python files of a library that have short lines, in the order of their paths.

    Packages that are installed in a folder of the library are not part of it.
    """
    documents = []
    for path in sorted(library.rglob("*.py")):
        path_in_library = path.relative_to(library)
        if {"site-packages", "dist-packages"}.intersection(path_in_library.parts):
            continue
        try:
            text = path.read_bytes().decode("utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        if text.strip() and has_short_lines(text):
            documents.append(Document(path_in_library.as_posix(), text))
    return documents


def has_short_lines(text: str) -> bool:
    """Return whether the lines of a text are as short as a person writes them."""
    lengths = [len(line) for line in text.splitlines()]
    mean_length = sum(lengths) / len(lengths)
    return max(lengths) <= MAX_LINE_LENGTH and mean_length <= MAX_MEAN_LINE_LENGTH


def hash_path(document: Document) -> bytes:
    return hashlib.sha256(document.path.encode()).digest()


def split_documents(documents: list[Document], val_share: float) -> dict[str, list[Document]]:
    """Return the documents of each split, without those that nearly repeat an earlier one.

    Documents are taken in the order of a hash of their paths. The first are for validation, until
    it has `val_share` of all bytes.
    """
    splits: dict[str, list[Document]] = {"val": [], "train": []}
    num_val_bytes = val_share * sum(document.num_bytes for document in documents)
    num_bytes = 0
    earlier_documents = NearDuplicates()
    progress_bar = tqdm(
        sorted(documents, key=hash_path),
        "looking for duplicates",
        unit="file",
        disable=None,
        dynamic_ncols=True,
    )
    for document in progress_bar:
        if earlier_documents.repeats(document.text):
            continue
        split = "val" if num_bytes < num_val_bytes else "train"
        splits[split].append(document)
        num_bytes += document.num_bytes
    return splits


def main() -> None:
    args = preparation.read_options(
        __doc__,
        Path(__file__).parent,
        Options,
        fixed={"val_tokens": None, "tokenizer_bytes": 30_000_000, "max_tokens": None},
    )
    with errors.one_line_errors():
        library = Path(sysconfig.get_path("stdlib"))
        documents = read_documents(library)
        splits = split_documents(documents, args.val_share)
        for split, documents_of_split in splits.items():
            if not documents_of_split:
                raise ValueError(
                    f"--val_share={args.val_share} leaves no file of {library} for {split}; give "
                    "another share, or run this script with a full Python installation"
                )
        num_left_out = len(documents) - len(splits["val"]) - len(splits["train"])
        num_bytes = sum(document.num_bytes for document in documents)
        print(
            f"{len(documents):,} files, {units.format_bytes(num_bytes)}; {num_left_out} of them "
            "nearly repeat others and are dropped",
            flush=True,
        )
        stages = [
            Stage(
                split=split,
                source=Texts(
                    [document.text for document in splits[split]],
                    f"{SOURCE} with its tests",
                ),
                num_tokens=None,
            )
            for split in ("val", "train")
        ]
        about = {"source": SOURCE, "near_duplicates": num_left_out}
        preparation.prepare(args, "python_library", stages, about)


if __name__ == "__main__":
    main()
