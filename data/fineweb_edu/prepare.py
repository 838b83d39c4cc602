"""Prepare FineWeb-Edu: a sample of 100B tokens, tokenized with GPT-2's tokenizer, 200 GB of shards.

    python data/fineweb_edu/prepare.py
    python data/fineweb_edu/prepare.py --sample=sample-10BT --max_tokens=1000000000
    python data/fineweb_edu/prepare.py --source='fineweb/*.parquet'         # from local files
    python data/fineweb_edu/prepare.py --pretokenized=FOLDER_OR_REPOSITORY  # use existing shards
    python data/fineweb_edu/prepare.py --packing=fit_or_cut --block_size=1024 --out=data/fineweb_edu_packed
    python data/fineweb_edu/prepare.py --verify                             # check all shards

The first 100M tokens are the validation split. Documents keep the order of the source, and an
end-of-text token precedes each of them. With --packing=fit_or_cut, a document is a beginning-of-text
token, its text and an end-of-text token, and few documents cross the border of two sequences
(data/packing.py). If the script is interrupted, run the same command again to
resume after the last complete shard.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

sys.path.insert(0, str(Path(__file__).parents[2]))

from configurator import option
from data import existing_shards, hub, preparation
from data.hub import HubOptions
from data.packing import FitOrCut
from data.preparation import PreparationOptions
from utils import errors

# the samples of the dataset and their approximate numbers of tokens
SAMPLES = {
    "sample-100BT": 100_000_000_000,
    "sample-10BT": 10_000_000_000,
    "sample-350BT": 350_000_000_000,
}


@dataclass(frozen=True)
class Options(PreparationOptions, HubOptions):
    """Options of FineWeb-Edu."""

    sample: Literal["sample-100BT", "sample-10BT", "sample-350BT"] = option(
        "sample-100BT",
        "sample of the dataset, named after its number of tokens",
    )
    repository: str = option(
        "HuggingFaceFW/fineweb-edu",
        hub.REPOSITORY_HELP,
    )
    pretokenized: str | None = option(
        None,
        "use existing shards in llm.c's formats from this folder or Hub repository; they hold "
        "GPT-2's tokens, or those of the tokenizer.json that --tokenizer names (default: tokenize "
        "the dataset)",
    )
    packing: Literal["stream", "fit_or_cut"] = option(
        "stream",
        "how documents become sequences; stream joins all documents, and training cuts them into "
        "sequences anywhere; fit_or_cut packs them into blocks, and leaves out the end of a document "
        "that would spill a few tokens into its last block",
    )
    block_size: int = option(
        1024,
        "number of tokens per block; give train.py the same block_size",
        low=1,
    )
    cut_threshold: int = option(
        100,
        "leave out the end of a document if its last block would have fewer of its tokens",
        low=2,
    )


def make_packing(args: SimpleNamespace) -> FitOrCut | None:
    """Return how the options pack documents, and round the options that count tokens to sequences.

    Raises:
        ValueError: options contradict each other
    """
    if args.packing == "stream":
        return None
    if args.pretokenized is not None:
        raise ValueError(
            "packing=fit_or_cut packs documents, not existing shards; omit --pretokenized"
        )
    if preparation.is_own_tokenizer(args.tokenizer):
        raise ValueError(
            f"packing=fit_or_cut adds a token to the vocabulary, which tokenizer={args.tokenizer} does "
            f"not allow; give one of {', '.join(preparation.BUILT_IN_TOKENIZERS)}"
        )
    packing = FitOrCut(args.block_size, args.cut_threshold)
    for key in ("shard_tokens", "val_tokens", "max_tokens"):
        setattr(args, key, packing.round_down(getattr(args, key)))
    return packing


def main() -> None:
    args = preparation.read_options(__doc__, Path(__file__).parent, Options, hub.SourceOptions)
    with errors.one_line_errors():
        packing = make_packing(args)
        if args.pretokenized:
            existing_shards.adopt(args, Options)
            return
        source = hub.choose_source(args, Options, args.sample, num_tokens=SAMPLES[args.sample])
        plan = preparation.split_one_source(source, args.val_tokens)
        preparation.prepare(args, "fineweb_edu", plan, packing=packing)


if __name__ == "__main__":
    main()
