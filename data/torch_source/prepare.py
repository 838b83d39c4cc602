"""Prepare the Python source of PyTorch itself as a corpus, without a network.

    python data/torch_source/prepare.py

The corpus of research/track.py (research/track.md): the .py files of the installed torch, one
document per file, without generated files, and every text once. Whole subpackages are the
validation split, of which the first half (--eval_part=first) is for choosing learning rates and
the second half for reporting. Only torch 2.13.0 gives the corpus of the track.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from configurator import option
from data import documents, preparation, shards
from data.preparation import PreparationOptions, Stage
from utils import errors

# Generated files are tables and copies of a pattern. version.py differs between builds.
GENERATED_FOLDERS = {"__pycache__", "artifacts", "generated", "serialized_patterns"}
GENERATED_FILES = {"version.py", "sparse/_triton_ops_meta.py"}
# No file of these subpackages nearly repeats one of the training split.
TUNING_PACKAGES = ("_numpy", "nested", "profiler")
REPORTING_PACKAGES = ("distributions", "jit")
# Twice the tokens of the tuning packages, so that the halves are these packages and those. (The last
# 54 tokens of the tuning packages fall into the second half.)
VAL_TOKENS = 476_416


@dataclass(frozen=True)
class Options(PreparationOptions):
    """Options of the source of PyTorch."""

    tokenizer: str = option("bpe", preparation.TOKENIZER_HELP)
    vocab_size: int = option(
        2048,
        "vocabulary size of --tokenizer=bpe, including the end-of-text token",
        low=257,
        high=shards.MAX_UINT16_VOCAB,
    )


def read_sources(root: Path) -> dict[str, str]:
    """Return the text of each .py file by its path below a folder, in path order.

    Generated files, empty files and copies of earlier files are skipped.
    """
    texts: dict[str, str] = {}
    distinct_texts: set[str] = set()
    paths = {path.relative_to(root).as_posix(): path for path in root.rglob("*.py")}
    for name in sorted(paths):
        if name in GENERATED_FILES or GENERATED_FOLDERS.intersection(name.split("/")):
            continue
        text = paths[name].read_bytes().decode("utf-8")
        if text.strip() and text not in distinct_texts:
            distinct_texts.add(text)
            texts[name] = text
    return texts


def split_by_package(texts: dict[str, str]) -> dict[str, list[str]]:
    """Return the texts of the validation split, tuning packages first, and of the training split."""
    splits: dict[str, list[str]] = {"val": [], "train": []}
    for package in (*TUNING_PACKAGES, *REPORTING_PACKAGES):
        splits["val"] += [text for name, text in texts.items() if name.split("/")[0] == package]
    val_packages = {*TUNING_PACKAGES, *REPORTING_PACKAGES}
    splits["train"] = [
        text for name, text in texts.items() if name.split("/")[0] not in val_packages
    ]
    return splits


def main() -> None:
    args = preparation.read_options(
        __doc__, Path(__file__).parent, Options, fixed={"val_tokens": None}
    )
    with errors.one_line_errors():
        splits = split_by_package(read_sources(Path(torch.__file__).parent))
        name = f"torch {torch.__version__.split('+')[0]}"
        stages = [
            Stage("val", documents.from_texts(splits["val"], name), VAL_TOKENS),
            Stage("train", documents.from_texts(splits["train"], name), None),
        ]
        preparation.prepare(args, "torch", stages)


if __name__ == "__main__":
    main()
