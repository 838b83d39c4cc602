"""Multi-query associative recall (MQAR; Arora et al., arXiv 2312.04927, section 4).

The task tests the capacity of a narrow state.

    python data/recall/prepare.py                             # 8 pairs in 48 positions
    python data/recall/prepare.py --pairs=16 --positions=96 --out=data/recall_16
    python train.py config/recall_cpu.py                      # block_size is positions

A sequence is key value key value ..., followed by each key once more as a query, at distances that
follow a power law. The label of a query is the value that followed its key. Only queries are
trained on and scored.

As in the authors' generator (HazyResearch/zoology, multiquery_ar.py), keys come from one half of
the vocabulary and values from the other, drawn without replacement for each sequence. Queries are
in slots of two positions; slot g (from 1) has weight g^(0.01 - 1), and slots are drawn without
replacement. Only queries have labels. There are three differences. The order of the queries is
random; theirs is the order of the draws, so queries of earlier keys tend to be nearer, and
positions hint at keys. Id 0 fills the positions between queries, instead of random ids (their
random_non_queries=False). The default vocabulary has 32 symbols instead of 8192.

A model that knows which values a sequence holds, but not to which keys they belong, has accuracy
1 / pairs and loss ln(pairs), which is called chance here. A model that knows nothing has accuracy
2 / symbols. The optimum is loss 0 and accuracy 1.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from data import tasks


def main() -> None:
    tasks.main(__doc__, __file__, tasks.Recall)


if __name__ == "__main__":
    main()
