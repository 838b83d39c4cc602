"""Prepare WikiText-103 or WikiText-2 (raw) with the dataset's own validation split.

    python data/wikitext/prepare.py                      # WikiText-103, GPT-2's tokenizer
    python data/wikitext/prepare.py --version=2 --tokenizer=bpe --out=data/wikitext2
    python data/wikitext/prepare.py --val_split=test     # validate on the test split

A document is an article, whose first line is ` = Title = `. The dataset has one row for each line
of text, and each line is tokenized separately.
"""

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).parents[2]))

from configurator import option
from data import hub, preparation
from data.hub import HubOptions
from data.preparation import PreparationOptions, Stage
from utils import errors

# A title has one equals sign on each side, the heading of a section two or more.
TITLE = re.compile(r" = (?!= )[^\n]*(?<! =) = \n")

# approximate numbers of GPT-2 tokens, by version
TRAIN_TOKENS = {"2": 2_500_000, "103": 119_000_000}
VAL_TOKENS = 300_000


def is_title(line: str) -> bool:
    """Return whether a line is the title of an article, and so begins a document."""
    return TITLE.fullmatch(line) is not None


@dataclass(frozen=True)
class Options(PreparationOptions, HubOptions):
    """Options of WikiText."""

    version: Literal["2", "103"] = option(
        "103",
        "WikiText-2, with 2.5M GPT-2 tokens, or WikiText-103, with 119M",
    )
    val_split: Literal["validation", "test"] = option(
        "validation",
        "split of the dataset to validate on",
    )
    val_tokens: int | None = option(
        None,
        "number of validation tokens, taken from the beginning of the split (default: all tokens "
        "of the split)",
        low=1,
    )
    repository: str = option(
        "Salesforce/wikitext",
        hub.REPOSITORY_HELP,
    )


def main() -> None:
    args = preparation.read_options(__doc__, Path(__file__).parent, Options)
    with errors.one_line_errors():
        name = f"wikitext-{args.version}-raw-v1"
        advice = "give a local clone with --repository=FOLDER"
        train = hub.choose_source(
            args,
            Options,
            name,
            split="train",
            num_tokens=TRAIN_TOKENS[args.version],
            starts=is_title,
            alternative=advice,
        )
        val = hub.choose_source(
            args,
            Options,
            name,
            split=args.val_split,
            num_tokens=VAL_TOKENS,
            starts=is_title,
            alternative=advice,
        )
        plan = [Stage("val", val, args.val_tokens), Stage("train", train, None)]
        preparation.prepare(args, "wikitext", plan)


if __name__ == "__main__":
    main()
