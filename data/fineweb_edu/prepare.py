"""Prepare FineWeb-Edu: a sample of 100B tokens, tokenized by GPT-2's tokenizer, 200 GB of shards.

    python data/fineweb_edu/prepare.py
    python data/fineweb_edu/prepare.py --sample=sample-10BT --max_tokens=1000000000
    python data/fineweb_edu/prepare.py --source='fineweb/*.parquet'         # from local files
    python data/fineweb_edu/prepare.py --pretokenized=FOLDER_OR_REPOSITORY  # use existing shards
    python data/fineweb_edu/prepare.py --verify                             # check all shards

The first 100M tokens are the validation split. Documents keep the order of the source, and an
end-of-text token precedes each of them. If the script is interrupted, run the same command again to
resume after the last complete shard.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from utils import errors

if __name__ == "__main__":
    errors.end_quietly_on_interrupt()  # before the slow imports

# isort: split
from data import hub, preparation

# the samples of the dataset and their approximate numbers of tokens
SAMPLES = {"sample-100BT": 100e9, "sample-10BT": 10e9, "sample-350BT": 350e9}


def main() -> None:
    parser = preparation.arguments(__doc__, Path(__file__).parent)
    parser.add_argument(
        "--sample",
        choices=SAMPLES,
        default="sample-100BT",
        help="sample of the dataset, named after its number of tokens",
    )
    hub.add_options(parser, "HuggingFaceFW/fineweb-edu")
    parser.add_argument(
        "--column",
        default="text",
        help="name of the text column (.parquet) or key (.jsonl)",
    )
    parser.add_argument(
        "--pretokenized",
        help="use existing GPT-2 shards in llm.c's format from this folder or Hub repository "
        "(default: tokenize the dataset)",
    )
    args = parser.parse_args()
    with errors.one_line_errors():
        if args.pretokenized and not args.verify:
            return preparation.adopt(args)
        source = hub.source_of(args, args.sample, tokens=int(SAMPLES[args.sample]))
        plan = preparation.one_stream(source, args.val_tokens)
        preparation.prepare(args, "fineweb_edu", plan)


if __name__ == "__main__":
    main()
