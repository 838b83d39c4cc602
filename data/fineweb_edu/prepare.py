"""Prepare FineWeb-Edu: a sample of 100B tokens, tokenized with GPT-2's tokenizer, 200 GB of shards.

    python data/fineweb_edu/prepare.py
    python data/fineweb_edu/prepare.py --sample=sample-10BT --max_tokens=1000000000
    python data/fineweb_edu/prepare.py --source='fineweb/*.parquet'         # from local files

The first 100M tokens are the validation split. Documents keep the order of the source, and an
end-of-text token precedes each of them. If the script is interrupted, run the same command again to
resume after the last complete shard.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).parents[2]))

from configurator import option
from data import documents, preparation
from data.documents import SourceOptions
from data.preparation import PreparationOptions
from utils import errors

# about how many bytes of text the samples of the dataset have
SAMPLES = {"sample-10BT": 40e9, "sample-100BT": 400e9, "sample-350BT": 1400e9}


@dataclass(frozen=True)
class Options(PreparationOptions, SourceOptions):
    """Options of FineWeb-Edu."""

    sample: Literal["sample-100BT", "sample-10BT", "sample-350BT"] = option(
        "sample-100BT",
        "sample of the dataset, named after its number of tokens",
    )
    repository: str = option(
        "HuggingFaceFW/fineweb-edu",
        documents.REPOSITORY_HELP,
    )


def main() -> None:
    args = preparation.read_options(__doc__, Path(__file__).parent, Options)
    with errors.one_line_errors():
        source = documents.from_options(args, args.sample, num_bytes=int(SAMPLES[args.sample]))
        plan = preparation.split_one_source(source, args.val_tokens)
        preparation.prepare(args, "fineweb_edu", plan)


if __name__ == "__main__":
    main()
