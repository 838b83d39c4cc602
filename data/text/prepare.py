"""Prepare your own text files as a corpus of token shards.

    python data/text/prepare.py --source notes.txt essays/ --out=data/mine
    python data/text/prepare.py --source ~/src --suffixes .py .c --out=data/code
    python data/text/prepare.py --source 'dump/*.jsonl' --column=body --out=data/dump
    python train.py config/demo_cpu.py --dataset=mine                       # train on the corpus

Each row of a table (.parquet, .jsonl, .ndjson, .json, .csv, .tsv) is a document, and so is every
other UTF-8 file; .gz files are decompressed. The first tokens are the validation split. Files are
shuffled by a hash of their names, so that these tokens do not come from a single folder.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from configurator import option
from data import preparation, shards
from data.preparation import PreparationOptions
from data.sources import Files
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
        source = Files(
            [str(Path(pattern).expanduser()) for pattern in args.source],
            column=args.column,
            suffixes=args.suffixes,
            shuffled=True,
        )
        if args.val_tokens is None:
            # A token of byte pairs has about four bytes of text.
            bytes_per_token = 1 if args.tokenizer == "bytes" else 4
            num_tokens = source.text_bytes() / bytes_per_token
            if args.max_tokens:
                num_tokens = min(num_tokens, args.max_tokens)
            args.val_tokens = max(int(args.val_share * num_tokens), 1)
            # a corpus that grows keeps its validation split
            old_plan = shards.read_progress(args.out).get("options", {}).get("plan", {})
            if "val" in old_plan and not args.overwrite:
                kept_tokens = old_plan["val"]["tokens"]
                if kept_tokens != args.val_tokens:
                    print(
                        f"note: the validation split keeps its {kept_tokens:,} tokens, although "
                        f"--val_share={args.val_share} now yields {args.val_tokens:,}; to change it, "
                        "start over with --overwrite"
                    )
                args.val_tokens = kept_tokens
        preparation.prepare(args, "text", preparation.split_one_source(source, args.val_tokens))


if __name__ == "__main__":
    main()
