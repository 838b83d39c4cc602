"""OpenWebText, the open copy of GPT-2's training text, as GPT-2 token shards: about 9B tokens, 18
GB.

    python data/openwebtext/prepare.py
    python data/openwebtext/prepare.py --source='openwebtext/*.parquet'   from files with a column `text`
    python data/openwebtext/prepare.py --verify                               check every shard

The first 5M tokens are for validation. Killed at any moment, the same command goes on after the
last whole shard.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
import configurator
from data import hub, preparation


def main():
    parser = preparation.arguments(__doc__, Path(__file__).parent, val_tokens=5_000_000)
    hub.add_options(parser, "Skylion007/openwebtext")
    args = parser.parse_args()
    with configurator.one_line_errors():
        source = hub.source_of(args, tokens=9_040_000_000)
        plan = preparation.one_stream(source, args.val_tokens)
        preparation.prepare(args, "openwebtext", plan)


if __name__ == "__main__":
    main()
