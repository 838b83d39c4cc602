"""OpenWebText, the open copy of GPT-2's training text, as GPT-2 token shards: about 9B tokens, 18 GB.

    python data/openwebtext/prepare.py
    python data/openwebtext/prepare.py --source='openwebtext/*.parquet'       from files with a column `text`
    python data/openwebtext/prepare.py --verify                               check every shard

The first 5M tokens are for validation. Killed at any moment, the same command goes on after the last whole shard.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from data import interruption

if __name__ == "__main__":  # before the imports that take long
    interruption.end_in_one_line()

import configurator
from data import preparation
from data.hub import Hub, refuse_options
from data.patience import MINUTES
from data.sources import Files


def main():
    parser = preparation.arguments(__doc__, Path(__file__).parent, val_tokens=5_000_000)
    add = parser.add_argument
    add("--repository", default="Skylion007/openwebtext", help="the data set on the hub, or a local clone of it")
    add("--revision", help="its commit, tag or branch (default: the newest, noted in meta.json)")
    add("--retry_minutes", type=float, help=f"how long to ask a hub again that does not answer (default: {MINUTES:g})")
    add("--source", nargs="+", help="parquet or jsonl files instead: paths, patterns or folders")
    args = parser.parse_args()
    with configurator.one_line_errors():
        if args.source:
            refuse_options(args, "--source")
            source = Files(args.source)
        else:
            keys = {"revision": args.revision, "retry_minutes": args.retry_minutes}
            source = Hub(args.repository, None, tokens=9_040_000_000, **keys)
        preparation.prepare(args, "openwebtext", [("val", source, args.val_tokens), ("train", source, None)])


if __name__ == "__main__":
    main()
