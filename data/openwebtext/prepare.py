"""Prepare OpenWebText, the open copy of GPT-2's training text: 9B GPT-2 tokens, 18 GB of shards.

    python data/openwebtext/prepare.py
    python data/openwebtext/prepare.py --source='openwebtext/*.parquet'     # from local files

The first 5M tokens are the validation split. Everything else is as in data/fineweb_edu/prepare.py.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from configurator import option
from data import documents, preparation
from data.documents import SourceOptions
from data.preparation import PreparationOptions
from utils import errors


@dataclass(frozen=True)
class Options(PreparationOptions, SourceOptions):
    """Options of OpenWebText."""

    repository: str = option("Skylion007/openwebtext", documents.REPOSITORY_HELP)
    val_tokens: int = option(5_000_000, "number of validation tokens, the first ones", low=1)


def main() -> None:
    args = preparation.read_options(__doc__, Path(__file__).parent, Options)
    with errors.one_line_errors():
        source = documents.from_options(args, num_bytes=int(40e9))
        preparation.prepare(
            args, "openwebtext", preparation.split_one_source(source, args.val_tokens)
        )


if __name__ == "__main__":
    main()
