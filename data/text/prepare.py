"""Any local text as token shards: .parquet and .jsonl files, and every other UTF-8 file as one
document.

    python data/text/prepare.py --source notes.txt essays/ --out=data/mine
    python data/text/prepare.py --source ~/src --suffixes .py .c --out=data/code --vocab_size=16384
    python data/text/prepare.py --source 'dump/*.jsonl' --column=body --tokenizer=gpt2 --out=data/dump
    python data/text/prepare.py --out=data/mine --verify

Documents that repeat an earlier one exactly are left out. Files come in an order that is drawn by
their names, so that the validation tokens, the first of all, are of no one folder. Then train with
--dataset=FOLDER.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
import configurator
from data import preparation, shards
from data.sources import Files


def main():
    parser = preparation.arguments(__doc__, Path(__file__).parent, tokenizer="bpe", val_tokens=None)
    add = parser.add_argument
    add("--source", nargs="+", help="files, patterns, and folders with all that is below them")
    add("--suffixes", nargs="+", default=(), help="in folders, only files that end so: .py .c")
    which = "the column or key of parquet and jsonl files that holds the text"
    add("--column", default="text", help=which)
    copies = "documents that repeat an earlier one exactly"
    add("--duplicates", choices=("drop", "keep"), default="drop", help=copies)
    share = "without --val_tokens: about this share is for validation"
    add("--val_share", type=float, default=0.02, help=share)
    args = parser.parse_args()
    with configurator.one_line_errors():
        if args.verify:
            return preparation.prepare(args, "text", [])
        if not args.source:
            raise ValueError("give --source: files, patterns or folders of text")
        if not 0 < args.val_share < 1:
            raise ValueError(f"--val_share={args.val_share}: give a number between 0 and 1")
        sources = [str(Path(pattern).expanduser()) for pattern in args.source]
        unique = args.duplicates == "drop"
        source = Files(sources, args.column, tuple(args.suffixes), shuffled=True, unique=unique)
        if args.val_tokens is None:
            per_token = 1 if args.tokenizer == "bytes" else 4
            args.val_tokens = max(int(args.val_share * source.text_bytes() / per_token), 1)
        preparation.prepare(args, "text", preparation.one_stream(source, args.val_tokens))
        if source.copies:
            copies = f"{source.copies:,} documents ({shards.readable(source.copied_bytes)})"
            print(f"{copies} repeat earlier ones exactly and were left out")
        if source.not_text:
            files = f"{len(source.not_text)} files of the folders"
            print(f"{files} are no UTF-8 text and were left out")


if __name__ == "__main__":
    main()
