"""WikiText-2 or -103, raw, as token shards: their own training and validation splits, an article a
document.

    python data/wikitext/prepare.py   WikiText-103, GPT-2 tokens
    python data/wikitext/prepare.py --version=2 --out=data/wikitext2 --tokenizer=bpe --vocab_size=8192
    python data/wikitext/prepare.py --val_split=test   to evaluate on the test split
    python data/wikitext/prepare.py --verify                                  check every shard

The data set has a row for every line; a line ` = Title = ` begins an article. Lines are tokenised
one by one.
"""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
import configurator
from data import hub, preparation

# One equals sign on either side: sections of an article have two or more.
TITLE = re.compile(r" = (?!= )[^\n]*(?<! =) = \n")


def main():
    parser = preparation.arguments(__doc__, Path(__file__).parent, val_tokens=None)
    add = parser.add_argument
    add("--version", choices=("2", "103"), default="103", help="which WikiText (default: 103)")
    splits, holds = ("validation", "test"), "what the validation shards hold"
    add("--val_split", choices=splits, default="validation", help=holds)
    hub.add_options(parser, "Salesforce/wikitext", or_files=False)
    args = parser.parse_args()
    with configurator.one_line_errors():
        name = f"wikitext-{args.version}-raw-v1"
        tokens = {"2": 2_500_000, "103": 119_000_000}[args.version]
        keys = {"starts": lambda line: bool(TITLE.fullmatch(line))}
        keys |= {"otherwise": "give a clone by --repository=FOLDER"}
        train = hub.source_of(args, name, split="train", tokens=tokens, **keys)
        val = hub.source_of(args, name, split=args.val_split, tokens=300_000, **keys)
        plan = [("val", val, args.val_tokens), ("train", train, None)]
        preparation.prepare(args, "wikitext", plan)


if __name__ == "__main__":
    main()
