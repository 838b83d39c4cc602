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
from data import documents, preparation
from data.preparation import PreparationOptions, Stage
from utils import errors

MAX_LINE_LENGTH = 1000
MAX_MEAN_LINE_LENGTH = 100


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


def read_modules(folder: Path) -> dict[str, str]:
    """Return the text of each .py file with short lines by its path below a folder, in path order."""
    texts = {}
    for path in sorted(folder.rglob("*.py")):
        try:
            text = path.read_bytes().decode("utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        lengths = [len(line) for line in text.splitlines()]
        if not text.strip() or max(lengths) > MAX_LINE_LENGTH:
            continue
        if sum(lengths) <= MAX_MEAN_LINE_LENGTH * len(lengths):
            texts[path.relative_to(folder).as_posix()] = text
    return texts


def split_packages(modules: dict[str, str], val_share: float) -> dict[str, list[str]]:
    """Return the distinct texts of each split; a package is a file or folder at the top."""
    texts_by_package: dict[str, list[str]] = defaultdict(list)
    earlier_texts: set[str] = set()
    for path, text in modules.items():
        if text not in earlier_texts:
            earlier_texts.add(text)
            texts_by_package[path.split("/")[0]].append(text)
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
        splits = split_packages(read_modules(Path(sysconfig.get_path("purelib"))), args.val_share)
        for split, texts in splits.items():
            if not texts:
                raise ValueError(f"--val_share={args.val_share} leaves no package for {split}")
        plan = [
            Stage(split, documents.from_texts(texts, name), None) for split, texts in splits.items()
        ]
        preparation.prepare(args, "packages", plan)


if __name__ == "__main__":
    main()
