"""Prepare the Python source of all installed packages, a corpus that needs no network (research/gpu.py).

    python -m research.benchmarks.packages --vocab_size=16384     # data/packages

A document is a file. Copies of earlier files and files with long lines, which are mostly generated, are left
out. Packages are taken in the order of a hash of their names. The first ones are for validation, as far as
they have no more than --val_share of all bytes, so that no package is in both splits.
"""

import hashlib
import platform
import sysconfig
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from configurator import option
from data import preparation
from data.preparation import PreparationOptions, Stage
from data.python_library.prepare import Document, read_documents
from data.sources import Texts
from utils import errors


@dataclass(frozen=True)
class Options(PreparationOptions):
    """Options of the installed packages."""

    tokenizer: str = option("bpe", preparation.TOKENIZER_HELP)
    out: str | None = option(
        None,
        "output folder for the token shards and meta.json (default: data/packages)",
    )
    val_share: float = option(
        0.02,
        "largest fraction of the bytes to use for validation",
        above=0,
        below=1,
    )


def split_packages(documents: list[Document], val_share: float) -> dict[str, list[str]]:
    """Return the distinct texts of each split; a package is a file or folder at the top."""
    texts_by_package: dict[str, list[str]] = defaultdict(list)
    earlier_texts: set[str] = set()
    for document in documents:
        if document.text not in earlier_texts:
            earlier_texts.add(document.text)
            package = document.path.split("/")[0]
            texts_by_package[package].append(document.text)
    num_bytes = {
        package: sum(len(text.encode()) for text in texts)
        for package, texts in texts_by_package.items()
    }
    num_bytes_left = val_share * sum(num_bytes.values())
    splits: dict[str, list[str]] = {"val": [], "train": []}
    for package in sorted(num_bytes, key=lambda name: hashlib.sha256(name.encode()).digest()):
        split = "train"
        if num_bytes[package] <= num_bytes_left:
            split = "val"
            num_bytes_left -= num_bytes[package]
        splits[split] += texts_by_package[package]
    return splits


def main() -> None:
    folder = Path(__file__).parents[2] / "data" / "packages"
    args = preparation.read_options(__doc__, folder, Options, fixed={"val_tokens": None})
    with errors.one_line_errors():
        name = f"packages of Python {platform.python_version()}"
        splits = split_packages(read_documents(Path(sysconfig.get_path("purelib"))), args.val_share)
        for split, texts in splits.items():
            if not texts:
                raise ValueError(f"--val_share={args.val_share} leaves no package for {split}")
        plan = [Stage(split, Texts(texts, name), None) for split, texts in splits.items()]
        preparation.prepare(args, "packages", plan)


if __name__ == "__main__":
    main()
