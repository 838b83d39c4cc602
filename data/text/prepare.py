"""Prepare your own text files as a corpus of token shards.

    python data/text/prepare.py --source notes.txt essays/ --out=data/mine
    python data/text/prepare.py --source ~/src --suffixes .py .c --out=data/code
    python data/text/prepare.py --source 'dump/*.jsonl' --column=body --out=data/dump
    python train.py config/demo_cpu.py --dataset=mine --out_dir=runs/mine   # train on the corpus

Each row of a table (.parquet, .jsonl, .ndjson, .json, .csv, .tsv, .arrow, .feather) is a document,
and so is every other UTF-8 file; .gz, .zst and .bz2 files are decompressed. The first tokens are the
validation split. Files are shuffled by a hash of their names, so that these tokens do not come from a
single folder.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from configurator import option
from data import documents, preparation, shards
from data.preparation import PreparationOptions
from utils import errors


@dataclass(frozen=True)
class Options(PreparationOptions):
    """Options of your own text files."""

    tokenizer: str = option(
        "bpe",
        preparation.TOKENIZER_HELP,
    )
    val_tokens: int | None = option(
        None,
        "number of validation tokens, taken from the beginning (default: the fraction --val_share "
        "of all tokens)",
        low=1,
    )
    val_share: float = option(
        0.02,
        "approximate fraction of the tokens to use for validation; ignored if --val_tokens is given",
        above=0,
        below=1,
    )
    column: str = option(
        "text",
        "column of tables that holds the text",
    )
    source: tuple[str, ...] = option(
        (),
        "text files, glob patterns or folders, which are searched recursively (required)",
    )
    suffixes: tuple[str, ...] = option(
        (),
        "in folders, read only files with these suffixes, such as .py .c (default: all text files)",
    )


def main() -> None:
    args = preparation.read_options(__doc__, Path(__file__).parent, Options)
    with errors.one_line_errors():
        if not args.source:
            raise ValueError("--source is missing: give files, glob patterns or folders of text")
        source = documents.from_files(args.source, args.column, args.suffixes, shuffled=True)
        # a corpus that grows keeps its validation split
        stored_plan = shards.read_progress(args.out).get("options", {}).get("plan", {})
        if args.val_tokens is None and stored_plan and not args.overwrite:
            args.val_tokens = stored_plan["val"]["tokens"]
        if args.val_tokens is None:
            # a token of byte pairs has about four bytes of text
            num_tokens = source.num_bytes // (1 if args.tokenizer == "bytes" else 4)
            num_tokens = min(num_tokens, args.max_tokens or num_tokens)
            args.val_tokens = max(int(args.val_share * num_tokens), 1)
        preparation.prepare(args, "text", preparation.split_one_source(source, args.val_tokens))


if __name__ == "__main__":
    main()
