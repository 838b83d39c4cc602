"""Prepare the source code of Python's standard library as a small corpus, without a network.

    python data/python_stdlib/prepare.py
    python data/python_stdlib/prepare.py --vocab_size=16384 --out=data/python_stdlib_16k

The corpus is the library of the Python that runs this script, with one document per file. A hash
of their paths chooses the files of the validation split, which has about 4% of the bytes.
"""

import hashlib
import os
import platform
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from configurator import option
from data import documents, preparation
from data.preparation import PreparationOptions, Stage
from utils import errors

# folders of installed packages, and those with tests, tables, demos and tools
LEFT_OUT = {
    "site-packages",
    "dist-packages",
    "__pycache__",
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "turtledemo",
    "ensurepip",
    "pydoc_data",
    "encodings",
}
VAL_FRACTION = 0.04  # of all bytes; the validation split has at least as many


def source_files(root: Path) -> dict[str, str]:
    """Return the texts of all UTF-8 .py files below a folder by relative path, in path order.

    Files in the folders LEFT_OUT, empty files and copies of earlier files are skipped.
    """
    texts: dict[str, str] = {}
    distinct_texts: set[str] = set()
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if LEFT_OUT.intersection(relative.parts):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, IsADirectoryError):
            continue
        if text.strip() and text not in distinct_texts:
            distinct_texts.add(text)
            texts[relative.as_posix()] = text
    return texts


def split_by_hash(texts: dict[str, str]) -> dict[str, dict[str, str]]:
    """Split files into validation ("val") and training ("train"), in the order of a path hash.

    The first files are the validation split, until it has VAL_FRACTION of all bytes. A file that
    is added or removed in another Python version moves few of the others to another split.
    """
    paths = sorted(texts, key=lambda path: hashlib.sha256(os.fsencode(path)).digest())
    total_bytes = sum(len(text.encode()) for text in texts.values())
    splits: dict[str, dict[str, str]] = {"val": {}, "train": {}}
    num_bytes = 0
    for path in paths:
        split = "val" if num_bytes < VAL_FRACTION * total_bytes else "train"
        splits[split][path] = texts[path]
        num_bytes += len(texts[path].encode())
    return splits


@dataclass(frozen=True)
class Options(PreparationOptions):
    """Options of the standard library."""

    tokenizer: str = option(
        "bpe",
        preparation.TOKENIZER_HELP,
    )


def main() -> None:
    args = preparation.read_options(
        __doc__,
        Path(__file__).parent,
        Options,
        fixed={"val_tokens": None},
    )
    with errors.one_line_errors():
        root = Path(sysconfig.get_path("stdlib"))
        splits = split_by_hash(source_files(root))
        if not splits["train"]:
            raise ValueError(
                f"{root} holds no standard library source; run this script with a full Python "
                "installation"
            )
        name = f"standard library of Python {platform.python_version()}"
        plan = [
            Stage(split, documents.from_texts(list(texts.values()), name), None)
            for split, texts in splits.items()
        ]
        preparation.prepare(args, "python", plan)


if __name__ == "__main__":
    main()
