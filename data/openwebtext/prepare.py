"""Prepare OpenWebText, the open copy of GPT-2's training text: 9B GPT-2 tokens, 18 GB of shards.

    python data/openwebtext/prepare.py
    python data/openwebtext/prepare.py --source='openwebtext/*.parquet'     # from local files
    python data/openwebtext/prepare.py --verify                             # check all shards

The first 5M tokens are the validation split. If the script is interrupted, run the same command
again to resume after the last complete shard. Local files need a column named text.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from utils import errors

if __name__ == "__main__":
    errors.end_quietly_on_interrupt()  # before the slow imports

# isort: split
from data import hub, preparation


def main() -> None:
    parser = preparation.arguments(__doc__, Path(__file__).parent, val_tokens=5_000_000)
    hub.add_options(parser, "Skylion007/openwebtext")
    args = parser.parse_args()
    with errors.one_line_errors():
        source = hub.source_of(args, tokens=9_040_000_000)
        plan = preparation.one_stream(source, args.val_tokens)
        preparation.prepare(args, "openwebtext", plan)


if __name__ == "__main__":
    main()
