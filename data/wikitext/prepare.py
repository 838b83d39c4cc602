"""Prepare WikiText-103 or WikiText-2 (raw) with the dataset's own validation split.

    python data/wikitext/prepare.py                      # WikiText-103, GPT-2's tokenizer
    python data/wikitext/prepare.py --version=2 --tokenizer=bpe --out=data/wikitext2

A document is an article, whose first line is ` = Title = `. The dataset has one row for each line
of text, and each line is tokenized separately.
"""

import dataclasses
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).parents[2]))

from configurator import option
from data import documents, preparation
from data.documents import Documents, SourceOptions
from data.preparation import PreparationOptions, Stage
from utils import errors

# A title has one equals sign on each side, the heading of a section two or more.
TITLE = re.compile(r" = (?!= )[^\n]*(?<! =) = \n")
# about how many bytes of text the training split has, by version
NUM_BYTES = {"2": 11_000_000, "103": 540_000_000}


@dataclass(frozen=True)
class Options(PreparationOptions, SourceOptions):
    """Options of WikiText."""

    version: Literal["2", "103"] = option(
        "103",
        "WikiText-2, with 2.5M GPT-2 tokens, or WikiText-103, with 119M",
    )
    repository: str = option("Salesforce/wikitext", documents.REPOSITORY_HELP)


def join_articles(lines: Documents) -> Documents:
    """Return documents whose rows are lines, of which only titles begin a document."""

    def mark_title(row: dict) -> dict:
        return {"starts": TITLE.fullmatch(row["text"]) is not None}

    return dataclasses.replace(lines, open=lambda: lines.open().map(mark_title))


def main() -> None:
    args = preparation.read_options(
        __doc__, Path(__file__).parent, Options, fixed={"val_tokens": None, "source": ()}
    )
    with errors.one_line_errors():
        name = f"wikitext-{args.version}-raw-v1"
        val = documents.from_options(args, name, "validation")
        train = documents.from_options(args, name, num_bytes=NUM_BYTES[args.version])
        plan = [
            Stage("val", join_articles(val), None),
            Stage("train", join_articles(train), None),
        ]
        preparation.prepare(args, "wikitext", plan)


if __name__ == "__main__":
    main()
