"""Prepare OpenWebText, the open copy of GPT-2's training text: 9B GPT-2 tokens, 18 GB of shards.

    python data/openwebtext/prepare.py
    python data/openwebtext/prepare.py --source='openwebtext/*.parquet'     # from local files

The first 5M tokens are the validation split. If the script is interrupted, run the same command
again to resume after the last complete shard. Local files need a column named text.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from configurator import option
from data import hub, preparation
from data.hub import HubOptions
from data.preparation import PreparationOptions
from utils import errors


@dataclass(frozen=True)
class Options(PreparationOptions, HubOptions):
    """Options of OpenWebText."""

    repository: str = option(
        "Skylion007/openwebtext",
        hub.REPOSITORY_HELP,
    )
    val_tokens: int = option(
        5_000_000,
        "number of validation tokens, taken from the beginning",
        low=1,
    )


def main() -> None:
    args = preparation.read_options(__doc__, Path(__file__).parent, Options, hub.SourceOptions)
    with errors.one_line_errors():
        source = hub.choose_source(args, Options, num_tokens=9_040_000_000)
        plan = preparation.split_one_source(source, args.val_tokens)
        preparation.prepare(args, "openwebtext", plan)


if __name__ == "__main__":
    main()
