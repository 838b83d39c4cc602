"""FineWeb-Edu as GPT-2 token shards: the first 100M tokens for validation, the others for training.

    python data/fineweb_edu/prepare.py   the 100B-token sample, 200 GB of shards
    python data/fineweb_edu/prepare.py --sample=sample-10BT --max_tokens=1000000000
    python data/fineweb_edu/prepare.py --source='fineweb/*.parquet'   from files with a column `text`
    python data/fineweb_edu/prepare.py --pretokenized=FOLDER_OR_REPOSITORY   GPT-2 shards that others have made
    python data/fineweb_edu/prepare.py --verify                               check every shard

Documents come in the order of the source, each after an end-of-text token. Killed at any moment,
the same command goes on after the last whole shard.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
import configurator
from data import hub, preparation

SAMPLES = {"sample-100BT": 100e9, "sample-10BT": 10e9, "sample-350BT": 350e9}  # tokens, about


def main():
    parser = preparation.arguments(__doc__, Path(__file__).parent)
    add = parser.add_argument
    which = "which sample of the data set (default: 100BT)"
    add("--sample", choices=SAMPLES, default="sample-100BT", help=which)
    hub.add_options(parser, "HuggingFaceFW/fineweb-edu")
    add("--column", default="text", help="the column or key that holds the text")
    add("--pretokenized", help="folder or hub repository of GPT-2 shards in llm.c's format")
    args = parser.parse_args()
    with configurator.one_line_errors():
        if args.pretokenized and not args.verify:
            return preparation.adopt(args)
        source = hub.source_of(args, args.sample, tokens=int(SAMPLES[args.sample]))
        plan = preparation.one_stream(source, args.val_tokens)
        preparation.prepare(args, "fineweb_edu", plan)


if __name__ == "__main__":
    main()
